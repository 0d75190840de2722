"""The paper's two models, NanoGPT and Simple ViT, at any size in plain PyTorch."""

from steadynorm.lab.models.gpt import GPT, GPTConfig
from steadynorm.lab.models.vit import SimpleViT, ViTConfig

__all__ = ["GPT", "GPTConfig", "SimpleViT", "ViTConfig"]
