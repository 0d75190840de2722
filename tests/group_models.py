"""Models that the tests of `param_groups` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PLAIN = (float, int, str, bool, type(None))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)


class Transformer(nn.Module):
    """A small transformer, optionally tied; the output layer is `lm_head`."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.block = Block()
        self.gamma = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(8, 10)

    def get_classifier(self) -> nn.Module:
        return self.head


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 32))
        self.down_proj = nn.Parameter(torch.zeros(4, 8, 16))


class Holding(nn.Module):
    """Hold the given parameters directly."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))


def by_group(groups: Any) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def group_of(groups: Any, name: str) -> dict[str, Any]:
    (group,) = [group for group in groups if name in dict(group["params"])]
    return group


MODELS = {
    "mlp": (mlp, {"output": "4"}),
    "tied": (lambda: Transformer(tied=True), {}),
    "untied": (lambda: Transformer(tied=False), {"output": "lm_head"}),
    "vit": (VisionTransformer, {}),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16), {"output": False}),
    "experts": (Experts, {"output": False}),
    "convnet": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)), {"output": "2"}),
}
