"""Named configurations: the paper's two recipes at full size, and at the size of a desk."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from steadynorm.models import GPTConfig, ViTConfig
from steadynorm.train.config import Config, Gpt, Optim, Schedule, Vit

# NanoGPT, 124M, 100B tokens of FineWeb-Edu: one node of 8 GPUs.
#   torchrun --nproc-per-node 8 -m steadynorm.cli train gpt-124m-fineweb-edu --task.data SHARDS
GPT_124M = Config(
    task=Gpt(model=GPTConfig(layers=12, width=768, heads=6, vocab=50304, context=1024), length=1024),
    out=Path("runs/gpt-124m-fineweb-edu"),
    steps=381_469,  # 100B tokens of 256 x 1024 a step
    batch=256,
    micro_batch=32,
    optim=Optim(
        "scionc",
        lr=2**-12 * 50,
        output_lr=2**-12 * 3000,
        output_weight_decay=1 / 3000,
        steady_norm_sq=9.5 * 2**-12 * 50**2,
        alpha=0.1,
    ),
    compile=True,
    eval_every=125,
    save_every=1000,
)

# Simple ViT-S/16, ImageNet-1k, 90 epochs: one node of 8 GPUs.
#   torchrun --nproc-per-node 8 -m steadynorm.cli train vit-s16-imagenet --task.data IMAGENET
VIT_S16 = Config(
    task=Vit(model=ViTConfig(variant="scion"), dataset="folder"),
    out=Path("runs/vit-s16-imagenet"),
    steps=112_603,  # round(1281167 * 90 / 1024)
    batch=1024,
    micro_batch=128,
    optim=Optim("scionc", lr=0.01, output_lr=0.2, output_weight_decay=0.004, steady_norm_sq=1.1875, alpha=0.1),
    compile=True,
    eval_every=1251,
    save_every=1251,
    monitor_every=100,
)

# The same on two CPU cores: eta is raised to 6e-3, so that a run of 1150 steps has ten half-lives.
GPT_DESK = Config(
    task=Gpt(
        model=GPTConfig(layers=4, width=128, heads=4, vocab=257, context=128),
        length=128,
        shuffle=True,
        eval_tokens=65_536,
    ),
    out=Path("runs/gpt"),
    steps=1150,
    batch=12,
    optim=Optim("scionc", lr=0.02, output_lr=0.3, steady_norm_sq=9.5 * 0.02**2 / 6e-3),
    eval_every=115,
    save_every=230,
)
VIT_DESK = Config(
    task=Vit(
        model=ViTConfig(image=32, patch=4, width=128, depth=4, heads=4, mlp=512, classes=10, variant="scion"),
        dataset="cifar10",
        crop_scale=(0.3, 1.0),
        randaugment=0,
        mixup=0.0,
        workers=0,
        eval_images=2048,
    ),
    out=Path("runs/vit"),
    steps=1150,
    batch=64,
    optim=Optim("scionc", lr=0.02, output_lr=0.3, steady_norm_sq=9.5 * 0.02**2 / 6e-3),
    bf16=False,
    eval_every=230,
    save_every=230,
)

RECIPES: Mapping[str, Config] = {
    "gpt": GPT_DESK,
    "vit": VIT_DESK,
    "gpt-124m-fineweb-edu": GPT_124M,
    "vit-s16-imagenet": VIT_S16,
}


def vit_adam(
    config: Config, *, lr: float = 1e-3, weight_decay: float = 0.1, name: str = "adamw", warmup: int = 10_000
) -> Config:
    """The AdamW / AdamC side of the ViT recipe: the other variant of the model, warmup, clipping at 1."""
    assert isinstance(config.task, Vit)
    task = replace(config.task, model=replace(config.task.model, variant="adam"))
    optim = Optim(name, lr=lr, weight_decay=weight_decay)  # pyright: ignore[reportArgumentType]
    return replace(config, task=task, optim=optim, schedule=Schedule(warmup=warmup), clip=1.0)
