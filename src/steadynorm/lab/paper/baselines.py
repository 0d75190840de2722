"""The baselines of both recipes, at the paper's scale and at desk scale, under one set of names.

An experiment is written once, in ratios to a baseline: lr, output_lr and decay of Scion (the paper's 0.01, 0.2, 0.08), lr and
decay of AdamW. A short calibration (docs/experiments.md) chose those of the desk: eta is larger, so that a run of minutes has
several half-lives.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steadynorm import theory
from steadynorm.lab.models import GPTConfig, ViTConfig
from steadynorm.lab.train.config import Config, Gpt, Optim, OptimizerName, Schedule, Vit
from steadynorm.lab.train.recipes import GPT_124M, GPT_DESK, VIT_DESK, VIT_S16, with_optimizer

ALPHA = 0.1
_SCHEDULE = frozenset(Schedule.__dataclass_fields__) - {"lr"}  # lr is the optimizer's, a number


@dataclass(frozen=True)
class Baseline:
    """A recipe at one scale: the numbers that arms are ratios of, and the length of a run."""

    scale: str
    recipe: str  # of `steadynorm train`
    base: Config
    unit: str  # what budgets count
    steps_per_unit: float
    lr: float
    output_lr: float
    decay: float  # lambda_l of Scion, and the first of ScionC
    adam_lr: float = math.nan
    adam_decay: float = math.nan
    adamc_decay: float = math.nan  # AdamC's in units of AdamW's
    muon_lr: float = math.nan
    muon_output_lr: float = math.nan  # of the AdamW beside it
    norm_decay: float = 1.0  # figures of norms: decay in units of the baseline's, so that a run has ten half-lives
    warmup: int = 0  # of the Adam family
    data: str = ""  # its name for `steadynorm data get`; "" if it has a path or is part of the package
    seconds_per_step: float = math.nan  # on one thread of the machine that made the desk runs
    seconds_to_start: float = math.nan

    def steps(self, budget: int) -> int:
        """Return the number of updates in a run of this budget."""
        return round(budget * self.steps_per_unit)

    def seconds(self, steps: int) -> float:
        """Return about how long a run takes on one core; nan at paper scale."""
        return self.seconds_to_start + steps * self.seconds_per_step

    def configure(self, config: Config, budget: int, seed: int) -> Config:
        """Return the configuration at this budget and seed; at the desk with about 60 records and 2 to 6 evaluations."""
        steps = self.steps(budget)
        if self.scale == "desk":
            every = {"monitor_every": steps // 60, "eval_every": min(250, steps // 2), "save_every": steps // 3}
            config = replace(config, **{key: max(1, value) for key, value in every.items()})
        return replace(config, steps=steps, seed=seed)

    def scion(self, *, decay: float = 1.0) -> Config:
        """Return Scion with constant decay, in units of the baseline's."""
        return replace(self.base, optim=self._optim("scion", decay))

    def scionc(self, *, decay: float = 1.0, end: float | None = None, **more: Any) -> Config:
        """Return ScionC with a target by its first decay, in units of the baseline's, and fields of Optim and Schedule.

        The target falls to this part of itself at the end.
        """
        schedule = {key: more.pop(key) for key in _SCHEDULE & more.keys()}
        optim = replace(self._optim("scionc", decay), **more)
        if end is not None:
            schedule["steady_norm_sq_end"] = short(end * optim.steady_norm_sq)
        return replace(self.base, optim=optim, schedule=Schedule(**schedule))

    def target(self, decay: float = 1.0) -> float:
        """Return the C^2 for which ScionC starts at this multiple of the baseline's decay: the paper's 9.5 gamma / lambda_0."""
        return short(theory.steady_norm_sq(self.lr, decay * self.decay, ALPHA, limit=True))

    def adam(self, name: OptimizerName = "adamw", *, decay: float = 1.0, **more: Any) -> Config:
        """Return AdamW, a relative or Lion: the recipe's AdamW arm with this baseline's lr, decay and warmup."""
        arm, task = with_optimizer(self.recipe, "adamw"), self.base.task
        if isinstance(task, Vit) and isinstance(arm.task, Vit):
            task = replace(task, model=replace(task.model, variant=arm.task.model.variant))
        fields: dict[str, Any] = {"lr": self.adam_lr, "weight_decay": decay * self.adam_decay, **more}
        optim = replace(arm.optim, name=name, **fields)
        return replace(self.base, task=task, optim=optim, schedule=Schedule(warmup=self.warmup), clip=arm.clip)

    def adamc(self, **more: Any) -> Config:
        """Return AdamC, which starts at a larger decay because the correction lowers it."""
        return self.adam("adamc", decay=self.adamc_decay, **more)

    def nesterov(self) -> Config:
        """Return ScionC with Nesterov's momentum and the baseline's decay at the start."""
        target = theory.steady_norm_sq(self.lr, self.decay, ALPHA, nesterov=True, limit=True)
        return self.scionc(nesterov=True, steady_norm_sq=short(target))

    def muon(self, name: OptimizerName = "muon") -> Config:
        """Return torch's Muon for hidden matrices, with ScionC's half-life and momentum, and AdamW without decay for the rest."""
        decay = short(self.lr * self.decay / self.muon_lr)
        optim = Optim(
            name, lr=self.muon_lr, output_lr=self.muon_output_lr, weight_decay=decay, alpha=ALPHA, nesterov=True
        )
        return replace(self.base, optim=optim)

    def muonc(self) -> Config:
        """Return MuonC with the numbers of `muon`: the output layer without decay, as Muon's AdamW leaves it."""
        muon = self.muon("muonc")
        return replace(muon, optim=replace(muon.optim, output_weight_decay=0.0))

    def _optim(self, name: Any, decay: float) -> Optim:
        """Give the output layer the same half-life: lambda_L = gamma lambda_l / gamma_L (the paper's 0.05 lambda_l)."""
        first = decay * self.decay
        return Optim(
            name,
            lr=self.lr,
            output_lr=self.output_lr,
            weight_decay=first if name == "scion" else None,
            output_weight_decay=short(self.lr * first / self.output_lr),
            steady_norm_sq=self.target(decay),
            alpha=ALPHA,
        )


def short(value: float) -> float:
    """Drop the last digits, which are noise, before commands and hashes are made of the number."""
    return float(f"{value:.12g}")


def _desk(config: Config, task: Gpt | Vit, batch: int) -> Config:
    return replace(
        config, task=task, batch=batch, out=Path("run"), bf16=False, tensorboard=False, save_every=10**6, keep=1
    )


_VIT_TASK = Vit(
    model=ViTConfig(image=32, patch=8, width=64, depth=3, heads=2, mlp=256, classes=10, variant="scion"),
    dataset="cifar10",
    crop_scale=(0.3, 1.0),
    randaugment=0,
    mixup=0.0,
    workers=0,
)
_GPT_TASK = Gpt(
    model=GPTConfig(layers=2, width=64, heads=2, vocab=257, context=64), length=64, shuffle=True, eval_tokens=65_536
)

VIT = {
    "desk": Baseline(
        "desk",
        "vit",
        _desk(VIT_DESK, _VIT_TASK, 64),
        unit="ep",  # the paper's epochs: 5 steps stand for one
        steps_per_unit=5,
        lr=0.01,
        output_lr=0.3,
        decay=0.25,  # eta = 2.5e-3: a half-life of 277 steps
        adam_lr=2e-3,
        adam_decay=0.5,
        adamc_decay=1.5,
        norm_decay=2.5,  # eta = 6.25e-3
        warmup=40,
        data="cifar10",
        seconds_per_step=0.048,
        seconds_to_start=9.0,
    ),
    "paper": Baseline(
        "paper",
        "vit-s16-imagenet",
        VIT_S16,
        unit="ep",
        steps_per_unit=1281167 / 1024,
        lr=0.01,
        output_lr=0.2,
        decay=0.08,
        adam_lr=1e-3,
        adam_decay=0.1,
        adamc_decay=2.0,  # of 0.1 and 0.2 the paper found AdamC to want the larger
        warmup=10_000,
    ),
}
GPT = {
    "desk": Baseline(
        "desk",
        "gpt",
        _desk(GPT_DESK, _GPT_TASK, 16),
        unit="B tokens",
        steps_per_unit=15,
        lr=0.02,
        output_lr=0.3,
        decay=0.2,  # eta = 4e-3: a half-life of 173 steps
        muon_lr=0.03,
        muon_output_lr=0.02,
        seconds_per_step=0.03,
        seconds_to_start=6.0,
    ),
    "paper": Baseline(
        "paper",
        "gpt-124m-fineweb-edu",
        GPT_124M,
        unit="B tokens",
        steps_per_unit=3814.69,  # of 256 x 1024 tokens
        lr=2**-12 * 50,
        output_lr=2**-12 * 3000,
        decay=1 / 50,
        muon_lr=0.02,  # Keller Jordan's; not tried at this scale
        muon_output_lr=1e-3,
    ),
}
# One size up: a run is some thirty times the arithmetic of the small GPT's.
_WIDE_TASK = replace(
    _GPT_TASK,
    model=GPTConfig(layers=6, width=256, heads=4, vocab=50304, context=128),
    tokenizer="gpt2",
    length=128,
    eval_tokens=32_768,
)
GPT_WIDE = {
    "desk": replace(
        GPT["desk"],
        base=_desk(GPT_DESK, _WIDE_TASK, 4),
        steps_per_unit=6,
        muon_output_lr=GPT["desk"].muon_output_lr * _GPT_TASK.model.width / _WIDE_TASK.model.width,
        data="gpt2-bpe",
        seconds_per_step=1.3,
        seconds_to_start=30.0,
    ),
    "paper": GPT["paper"],
}
