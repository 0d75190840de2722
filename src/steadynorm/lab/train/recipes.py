"""Named configurations: the paper's two tasks, at full size and small enough for a desktop CPU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from steadynorm.lab.models import GPTConfig, ViTConfig
from steadynorm.lab.train.config import Config, Gpt, Optim, OptimizerName, Schedule, Vit

# NanoGPT, 124M, 100B tokens of FineWeb-Edu: one node of 8 GPUs.
#   torchrun --nproc-per-node 8 -m steadynorm.cli train gpt-124m-fineweb-edu --task.data SHARDS
GPT_124M = Config(
    task=Gpt(
        model=GPTConfig(layers=12, width=768, heads=6, vocab=50304, context=1024),
        length=1024,
        eval_tokens=10_485_760,  # 40 batches of 256 x 1024, as published; the whole shard would double the run
    ),
    out=Path("runs/gpt-124m-fineweb-edu"),
    steps=381_469,  # 100B tokens of 256 x 1024 per step
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

# The same for two CPU cores: eta is raised to 6e-3, so that 1150 steps are ten half-lives.
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


# Published settings of the other families, for recipes without their own arm for the optimizer.
_ADAM = Optim("adamw", lr=1e-3, weight_decay=0.1)
_MUON = Optim("muon", lr=0.02, output_lr=1e-3, weight_decay=0.1, alpha=0.05, nesterov=True)
OPTIMIZERS: Mapping[OptimizerName, Optim] = {
    **{name: replace(_ADAM, name=name) for name in ("adamw", "adamc", "renormalized-adamw")},
    "lionc": Optim("lionc", lr=1e-4, weight_decay=1.0, betas=(0.9, 0.99)),
    "sgdc": Optim("sgdc", lr=0.1, weight_decay=0.01),
    **{name: replace(_MUON, name=name) for name in ("muonc", "muon", "muon-corrected")},
}
_SCION = ("scion", "scionc")


def _adam_arms(config: Config, warmup: int) -> dict[OptimizerName, Config]:
    """Return the arms of AdamW and its relatives: Beyer et al.'s ViT, linear warmup, gradients clipped at 1.

    The paper tried lambda = 0.1 and 0.2 for AdamW and AdamC. It does not say which its table uses, but finds that
    corrected decay needs the larger one.
    """
    assert isinstance(config.task, Vit)
    task = replace(config.task, model=replace(config.task.model, variant="adam"))
    arm = replace(config, task=task, schedule=Schedule(warmup=warmup), clip=1.0)
    decays: dict[OptimizerName, float] = {"adamw": 0.1, "adamc": 0.2, "renormalized-adamw": 0.1}
    return {name: replace(arm, optim=replace(_ADAM, name=name, weight_decay=decays[name])) for name in decays}


# Arms in which more than the optimizer changes. The small recipe's warmup is the paper's share of the run.
ARMS: Mapping[str, Mapping[OptimizerName, Config]] = {
    "vit": _adam_arms(VIT_DESK, warmup=102),
    "vit-s16-imagenet": _adam_arms(VIT_S16, warmup=10_000),
}


def with_optimizer(recipe: str, name: OptimizerName) -> Config:
    """Return a recipe with another optimizer and everything that belongs to it.

    Scion and ScionC share the recipe's numbers. AdamW and its relatives take the paper's arm where there is one: another
    variant of the ViT, warmup and clipping. Any other optimizer starts from the published numbers of its own family.

    >>> arm = with_optimizer("vit-s16-imagenet", "adamw")
    >>> arm.optim.lr, arm.schedule.warmup, arm.clip, arm.task.model.variant
    (0.001, 10000, 1.0, 'adam')
    >>> with_optimizer("gpt", "scion").optim.output_lr, with_optimizer("gpt", "muon").optim.output_lr
    (0.3, 0.001)
    """
    config = RECIPES[recipe]
    if name in _SCION:
        return replace(config, optim=replace(config.optim, name=name))
    return ARMS.get(recipe, {}).get(name) or replace(config, optim=OPTIMIZERS[name])
