"""The paper's two models at any size: NanoGPT and Simple ViT, in plain PyTorch."""

from steadynorm.models.gpt import GPT, GPTConfig
from steadynorm.models.vit import SimpleViT, ViTConfig

__all__ = ["GPT", "GPTConfig", "SimpleViT", "ViTConfig"]
