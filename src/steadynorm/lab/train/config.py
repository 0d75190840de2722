"""Configuration of a run, parsed by the command line and saved with the run."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from steadynorm.decay.hold import BALANCE_STEPS
from steadynorm.lab.models import GPTConfig, ViTConfig
from steadynorm.prediction import LrPlan

OptimizerName = Literal[
    "scionc", "scion", "muonc", "adamc", "adamw", "renormalized-adamw", "lionc", "sgdc", "muon", "muon-corrected"
]
ScheduleName = Literal["cosine", "linear", "constant"]
MomentumName = Literal["constant", "linear", "matched", "matched-gamma-prime"]


@dataclass(frozen=True)
class Optim:
    """Optimizer and its settings; by default Scion's. The command line refuses what an optimizer never reads.

    `recipes.with_optimizer` has the settings of the other families; the command line starts from them.
    """

    name: OptimizerName = "scionc"
    """Optimizer, which sets the defaults of its options; muon: torch's Muon for hidden matrices, AdamW for the rest."""
    lr: float = 0.01
    """Peak learning rate."""
    output_lr: float | None = None
    """Peak lr of the output layer, for muonc and muon of everything but hidden matrices; default: 20 lr (Scion family), lr / 20
    (muonc), else lr."""
    weight_decay: float | None = None
    """Constant (scion, adamw) or peak decay; default: for scion the one that reaches steady_norm_sq at the peak, else 0.1."""
    output_weight_decay: float | None = None
    """Constant decay of the output layer; default: the same half-life as the hidden layers (Scion family)."""
    steady_norm_sq: float = 1.1875
    """Target C^2 of scionc."""
    overlap: Literal["linear", "exact"] = "linear"
    """scionc: the paper's formula (linear), or the kernel of each parameter's lmo and shape (exact)."""
    output_bias: Literal["corrected", "constant"] = "corrected"
    """Decay of the output layer's bias (Scion family)."""
    correct_output: bool = False
    """Correct the output layer as well, against the paper's advice."""
    alpha: float = 0.1
    """Weight of the new gradient: scion, sgd; 1 - beta1 for lion; 1 - momentum for muonc and muon."""
    output_alpha: float | None = None
    """Alpha of the output layer, constant even if alpha is scheduled (Scion family); default: alpha."""
    nesterov: bool = False
    """Nesterov momentum (Scion family, muonc, muon)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of the Adam family, also beside muonc and muon; LionC uses the second."""
    eps: float = 1e-8
    """Epsilon of the Adam family."""
    polar: Literal["express", "newton-schulz", "svd"] = "express"
    """How polar factors are computed (Scion family, muonc)."""
    polar_steps: int = 5
    """Steps of the polar iteration (Scion family, muonc)."""
    own_time: bool = True
    """Let embedding rows without a gradient wait for their next one (Scion family)."""
    hold: Literal["decay", "balance", "fixed"] = "decay"
    """How the weight norm is held: by decay, by decay that follows measured updates, or fixed (not adamw,
    renormalized-adamw, muon). The Scion family's output layer keeps its constant decay unless correct_output is set."""
    balance_steps: float = BALANCE_STEPS
    """Steps over which hold=balance returns a norm that is off."""
    cautious: bool = False
    """Decay only weights that agree with their update in sign (not adamw, renormalized-adamw, muon)."""


@dataclass(frozen=True)
class Schedule:
    """Schedules of lr, alpha and the target."""

    lr: ScheduleName = "cosine"
    """Schedule after the warmup; with matched momentum, that of the effective lr."""
    warmup: int = 0
    """Steps of linear warmup."""
    final: float = 0.0
    """Last lr as a fraction of the peak."""
    momentum: MomentumName = "constant"
    """Schedule of alpha: constant, linear to alpha_end, or raised so that the effective lr follows the lr schedule."""
    alpha_end: float = 1.0
    """Last alpha (linear), or its limit, from which lr takes over (matched)."""
    decay_by_lr_alone: bool = False
    """scionc with a scheduled alpha: keep the momentum factor out of the decay (the paper's third arm)."""
    steady_norm_sq_end: float | None = None
    """Final target, approached along the lr schedule."""

    def plan(self, steps: int) -> LrPlan:
        """Return the plan of lr / peak over a run of this many steps."""
        return LrPlan(steps, self.warmup, self.lr, self.final)


@dataclass(frozen=True)
class Gpt:
    """NanoGPT on token shards."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: Path | None = None
    """Folder of .bin shards; default: the embedded State of the Union texts."""
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    """Tokens of the embedded texts: bytes, or GPT-2's (steadynorm data get gpt2-bpe)."""
    length: int = 1024
    """Tokens per sequence."""
    shuffle: bool = False
    """Take sequences in random order instead of the order on disk."""
    eval_tokens: int | None = None
    """Validation tokens, in whole batches of micro_batch x processes; default: all."""


@dataclass(frozen=True)
class Vit:
    """Simple ViT on images."""

    model: ViTConfig = field(default_factory=ViTConfig)
    data: Path | None = None
    """ImageNet: folder with train/ and val/ of class folders. CIFAR-10: folder of its binary files (default: download)."""
    dataset: Literal["cifar10", "folder"] = "folder"
    """Content of the data folder."""
    crop_scale: tuple[float, float] = (0.05, 1.0)
    """Range of the random crop's area."""
    randaugment: int = 2
    """Operations of RandAugment per image."""
    magnitude: float = 10.0
    """Strength of RandAugment, 0 to 10."""
    mixup: float = 0.2
    """Parameter p of Mixup's Beta(p, p); 0: no Mixup."""
    workers: int = 8
    """Processes that load images."""
    eval_images: int | None = None
    """Validation images; default: all."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    task: Gpt | Vit
    out: Path
    """Folder of the run; an interrupted run resumes."""
    steps: int
    """Number of updates."""
    batch: int
    """Sequences or images per step, over all processes."""
    micro_batch: int | None = None
    """Sequences or images per forward pass of a process; default: all."""
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    clip: float | None = None
    """Largest global gradient norm; default: no clipping."""
    seed: int = 0
    bf16: bool | Literal["auto"] = "auto"
    """bf16 autocast with fp32 parameters; auto: if the hardware has bf16. Also --no-bf16."""
    compile: bool = False
    """torch.compile the model."""
    eval_every: int = 125
    """Steps between evaluations; there is one more at the end."""
    save_every: int = 250
    """Steps between checkpoints."""
    keep: int = 2
    """Number of checkpoints to keep."""
    monitor_every: int = 1
    """Steps between measurements of norms and alignment."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: replicate weights (Scion, ScionC, MuonC and LionC shard their state), or shard them by FSDP2."""
    device: str = "auto"
    """cpu, cuda; auto: cuda if available."""
    tensorboard: bool = True
    """Write TensorBoard files as well."""
    name: str = ""
    """Name in reports; default: the folder's name."""

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        for key in ("steps", "batch", "eval_every", "save_every", "keep", "monitor_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least 1")
        if self.micro_batch is not None and (self.micro_batch < 1 or self.batch % self.micro_batch):
            raise ValueError(f"micro_batch={self.micro_batch} does not divide batch={self.batch}")
        key = "eval_tokens" if isinstance(self.task, Gpt) else "eval_images"
        if (amount := getattr(self.task, key)) is not None and amount < 1:
            raise ValueError(f"task.{key}={amount}: must be at least 1; leave it out to use all")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip={self.clip}: must be above 0; leave it out for no clipping")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: must be 0 or more and less than 2^63")
        end = self.schedule.steady_norm_sq_end
        is_target = end is None or (math.isfinite(end) and end >= 0)
        if not is_target:  # or only the step that falls below 0 would say so
            raise ValueError(f"schedule.steady_norm_sq_end={end}: must be finite and not negative")
        if not 0 <= self.schedule.warmup < self.steps:
            raise ValueError(
                f"schedule.warmup={self.schedule.warmup} must be 0 or more and less than steps={self.steps}"
            )


_NOT_TRAINING = (
    "out", "name", "device", "tensorboard", "keep", "save_every", "task.workers", "task.data", "parallel", "micro_batch",
)  # fmt: skip


# Settings that came later, with the value that runs before them had: left out at it, so that old runs stay what they are.
_LATER = {
    "optim.hold": "decay", "optim.balance_steps": BALANCE_STEPS, "optim.cautious": False,
    "optim.polar": "express", "optim.own_time": True, "task.tokenizer": "bytes", "task.model.tied": True,
}  # fmt: skip


def plain(config: Config) -> dict[str, Any]:
    """Return the configuration as JSON holds it."""
    values = json.loads(json.dumps(asdict(config), default=os.fspath))
    return values | {"task": {"kind": type(config.task).__name__.lower(), **values["task"]}}


def training_part(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the part of a configuration that decides the weights, without where a run is stored, shown or read from.

    >>> training_part({"steps": 3, "out": "a", "task": {"workers": 2, "length": 8}, "optim": {"name": "scion"}})
    {'steps': 3, 'task': {'length': 8}, 'optim': {'name': 'scion'}}
    """
    return {
        key: training_part(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in config.items()
        if prefix + key not in _NOT_TRAINING and (prefix + key, value) not in _LATER.items()
    }
