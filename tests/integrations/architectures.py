"""Real architectures at tiny sizes, built from configuration: structure, names and ties are those of the real thing."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
GPT2: dict[str, Any] = {
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "add_cross_attention": True,
}
IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Architecture:
    """make: a new model. options: arguments that `param_groups` needs. output: names of the output weights it finds."""

    make: Callable[[], nn.Module]
    output: tuple[str, ...]
    library: str = "transformers"
    options: dict[str, Any] = field(default_factory=dict)


def hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


def timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from timm import create_model

        return create_model(name, num_classes=10, **settings)

    return make


class Attention(nn.Module):
    """Attend over the pixels, as diffusion U-Nets do at their lowest resolution."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1, bias=False)
        self.to_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(2).mT for part in self.to_qkv(self.norm(x)).chunk(3, 1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(mixed.mT.view_as(x))


class UNet(nn.Module):
    """A small diffusion U-Net: time embedding, down, attention, transposed convolution up with a skip, noise out."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.middle = Attention(2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.skip_scale = nn.Parameter(torch.ones(width, 1, 1))
        self.conv_out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        top = self.conv_in(x)
        low = self.norm(self.down(top)) + self.time_embed(time)[..., None, None]
        return self.conv_out(torch.cat([self.up(self.middle(low)), top * self.skip_scale], 1))


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2),
        ("transformer.wte.weight",),
    ),
    "llama": Architecture(hugging_face("LlamaForCausalLM", "LlamaConfig", **GROUPED), ("lm_head.weight",)),
    "mistral": Architecture(hugging_face("MistralForCausalLM", "MistralConfig", **GROUPED), ("lm_head.weight",)),
    "qwen2": Architecture(hugging_face("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), ("lm_head.weight",)),
    "qwen3-tied": Architecture(
        hugging_face("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, tie_word_embeddings=True),
        ("model.embed_tokens.weight",),
    ),
    "phi3": Architecture(hugging_face("Phi3ForCausalLM", "Phi3Config", **GROUPED), ("lm_head.weight",)),
    "llama-heads": Architecture(
        hugging_face("LlamaForCausalLM", "LlamaConfig", **GROUPED), ("lm_head.weight",), options={"heads": True}
    ),
    "mistral-heads": Architecture(
        hugging_face("MistralForCausalLM", "MistralConfig", **GROUPED), ("lm_head.weight",), options={"heads": True}
    ),
    "qwen2-heads": Architecture(
        hugging_face("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), ("lm_head.weight",), options={"heads": True}
    ),
    "qwen3-heads": Architecture(  # heads wider than the model: 4 of 8 from a width of 16
        hugging_face("Qwen3ForCausalLM", "Qwen3Config", **{**GROUPED, "head_dim": 8}),
        ("lm_head.weight",),
        options={"heads": True},
    ),
    "phi3-heads": Architecture(
        hugging_face("Phi3ForCausalLM", "Phi3Config", **GROUPED), ("lm_head.weight",), options={"heads": True}
    ),
    "gpt2-heads": Architecture(
        hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2), ("transformer.wte.weight",), options={"heads": True}
    ),
    "gpt-neox-heads": Architecture(
        hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT), ("lm_head.weight",), options={"heads": True}
    ),
    "gpt-neox": Architecture(hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT), ("lm_head.weight",)),
    "bert-masked": Architecture(
        hugging_face("BertForMaskedLM", "BertConfig", **TEXT, max_position_embeddings=8),
        ("bert.embeddings.word_embeddings.weight",),
    ),
    "bert-classifier": Architecture(
        hugging_face("BertForSequenceClassification", "BertConfig", **TEXT, max_position_embeddings=8),
        ("classifier.weight",),
    ),
    "t5": Architecture(
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=32,
            d_model=16,
            d_kv=4,
            d_ff=40,
            num_layers=1,
            num_heads=4,
        ),
        ("shared.weight",),
    ),
    "vit": Architecture(
        hugging_face("ViTForImageClassification", "ViTConfig", **IMAGE, num_labels=10), ("classifier.weight",)
    ),
    "clip": Architecture(
        hugging_face(
            "CLIPModel",
            "CLIPConfig",
            text_config={**TEXT, "max_position_embeddings": 8},
            vision_config=IMAGE,
            projection_dim=12,
        ),
        (),
        options={"output": False},  # contrastive: two projections, no layer of classes
    ),
    "mixtral": Architecture(
        hugging_face("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4), ("lm_head.weight",)
    ),
    "gpt-oss": Architecture(
        hugging_face("GptOssForCausalLM", "GptOssConfig", **GROUPED, num_local_experts=4), ("lm_head.weight",)
    ),
    "llama4": Architecture(
        hugging_face("Llama4ForCausalLM", "Llama4TextConfig", **GROUPED, num_local_experts=4, intermediate_size_mlp=40),
        ("lm_head.weight",),
    ),
    "resnet": Architecture(
        hugging_face(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_labels=10,
        ),
        ("classifier.1.weight",),
    ),
    "convnext": Architecture(
        hugging_face(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
            num_labels=10,
        ),
        ("classifier.weight",),
    ),
    "timm-resnet": Architecture(
        timm("resnet18", layers=(1, 1, 1, 1), channels=(8, 16, 16, 32)), ("fc.weight",), "timm"
    ),
    "timm-convnext": Architecture(
        timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 16, 16)), ("head.fc.weight",), "timm"
    ),
    "timm-vit-heads": Architecture(
        timm("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=4),
        ("head.weight",),
        "timm",
        {"heads": True},
    ),
    "timm-vit": Architecture(
        timm("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=4), ("head.weight",), "timm"
    ),
    "unet": Architecture(UNet, (), "torch", {"output": False}),  # regression: no layer of classes
}
