"""Simple ViT as the paper trains it (S/16 on ImageNet-1k), at any size and in both variants."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from steadynorm.lab.models.parts import Conv2d, Linear, check_sizes

CUT_STD = 0.87962566103423978  # standard deviation of a standard normal truncated at -2 and 2


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a Simple ViT and its variant; the defaults are S/16."""

    image: int = 224  # pixels per side
    patch: int = 16  # pixels per side
    width: int = 384
    depth: int = 12
    heads: int = 6
    mlp: int = 1536
    classes: int = 1000
    variant: Literal["adam", "scion"] = "adam"

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit each other.

        >>> ViTConfig(image=32, patch=5)
        Traceback (most recent call last):
        ValueError: ViTConfig: patch=5 does not divide image=32; use image=30 or image=35
        """
        check_sizes(self)
        if self.variant not in ("adam", "scion"):
            raise ValueError(f"ViTConfig: variant={self.variant!r} is unknown; choose from adam, scion")
        if self.image % self.patch:
            below = self.image - self.image % self.patch
            sizes = " or ".join(f"image={size}" for size in (below, below + self.patch) if size)
            raise ValueError(f"ViTConfig: patch={self.patch} does not divide image={self.image}; use {sizes}")
        if self.width % 4 or self.width < 8:
            raise ValueError(
                f"ViTConfig: width={self.width} cannot hold sine and cosine of x and y; use a multiple of 4 from 8 up"
            )


class SimpleViT(nn.Module):
    """Vision transformer: patches, a fixed position table, pre-norm blocks, mean over tokens, a head with tanh.

        x = patches + table;   x += attention(norm x);   x += W_2 act(W_1 norm x)
        logits = head(tanh(pre_logits(mean of norm x)))

                 norm                          act             q, k, v              init
        adam     LayerNorm                     GELU            with bias            big_vision's
        scion    RMSNorm without parameters    sqrt(2) GELU    three row blocks     orthogonal sqrt(d_out / d_in),
                                                               without bias         biases 0

    eps is 1e-6. All other layers have a bias. GELU is exact, as in the paper author's code (big_vision uses the tanh
    approximation). Weights are drawn at construction from torch's global generator. For a model on the meta device, call
    `to_empty(device=...)`, then `init_weights()`, which also fills the position table.

    >>> model = SimpleViT(ViTConfig(image=8, patch=4, width=8, depth=1, heads=2, mlp=16, classes=10, variant="scion"))
    >>> model(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    position: Tensor  # (tokens, width)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        side = config.image // config.patch
        self.patch = Conv2d(3, config.width, config.patch, stride=config.patch)
        self.register_buffer("position", torch.empty(side * side, config.width, dtype=torch.float32), persistent=False)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.depth)])
        self.norm = _norm(config)
        self.pre_logits = Linear(config.width, config.width)
        self.head = Linear(config.width, config.classes)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Initialize every parameter as in the variant, and the position table."""
        for name, parameter in self.named_parameters():
            layer, kind = name.split(".")[-2:]
            if self.config.variant == "adam" and layer in ("up", "down") and kind == "bias":
                parameter.normal_(std=1e-6, generator=generator)
            elif layer == "head" or kind == "bias":
                parameter.zero_()
            elif parameter.ndim == 1:  # LayerNorm's weight
                parameter.fill_(1.0)
            elif self.config.variant == "scion":
                _orthogonal(parameter, 3 if layer == "qkv" else 1, generator)
            elif layer in ("qkv", "out", "up", "down"):  # Xavier, for each of q, k, v
                bound = math.sqrt(3 / self.config.width if layer == "qkv" else 6 / sum(parameter.shape))
                parameter.uniform_(-bound, bound, generator=generator)
            else:
                std = 1 / math.sqrt(parameter[0].numel()) / CUT_STD
                nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)
        side = self.config.image // self.config.patch
        self.position.copy_(position_table(side, side, self.config.width))

    def get_classifier(self) -> nn.Module:
        """Return the output layer, for `param_groups`."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """Return fp32 logits (batch, classes) of images (batch, 3, image, image)."""
        wanted = (3, self.config.image, self.config.image)
        if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
            raise ValueError(
                f"images {tuple(images.shape)}: pass (batch, {', '.join(map(str, wanted))}); "
                "resize them, or build the model for their size"
            )
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position  # (batch, tokens, width)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).mean(dim=1)
        return self.head(torch.tanh(self.pre_logits(x))).float()


class Block(nn.Module):
    """Compute x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Compute softmax(q k^T / sqrt(head size)) v; the rows of `qkv` are q, k, v, one block each."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width, bias=config.variant == "adam")
        self.out = Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, size)
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Compute W_2 act(W_1 x) with act = GELU or, to keep the variance, sqrt(2) GELU."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.scaled = config.variant == "scion"
        self.up = Linear(config.width, config.mlp)
        self.down = Linear(config.mlp, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.up(x))
        return self.down(math.sqrt(2) * x if self.scaled else x)


def position_table(rows: int, columns: int, width: int) -> Tensor:
    """Return [sin x w, cos x w, sin y w, cos y w] at each grid point, row by row: (rows columns, width), fp64.

        w_i = 10000^(-i / (width/4 - 1)),   i = 0 .. width/4 - 1

    >>> position_table(1, 2, 8)[1]  # x = 1, y = 0
    tensor([8.4147e-01, 1.0000e-04, 5.4030e-01, 1.0000e+00, 0.0000e+00, 0.0000e+00,
            1.0000e+00, 1.0000e+00], dtype=torch.float64)
    """
    y, x, i = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (rows, columns, width // 4))
    frequency = 10000.0 ** (-i / (width // 4 - 1))
    x, y = torch.outer(x.repeat(rows), frequency), torch.outer(y.repeat_interleave(columns), frequency)
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)


def _norm(config: ViTConfig) -> nn.Module:
    if config.variant == "adam":
        return nn.LayerNorm(config.width, eps=1e-6)
    return nn.RMSNorm(config.width, eps=1e-6, elementwise_affine=False)


def _orthogonal(weight: Tensor, blocks: int, generator: torch.Generator | None) -> None:
    """Make each row block (semi-)orthogonal times sqrt(d_out / d_in), so that its spectral lmo norm is 1."""
    for block in weight.view(len(weight), -1).chunk(blocks):
        nn.init.orthogonal_(block, math.sqrt(block.shape[0] / block.shape[1]), generator)
