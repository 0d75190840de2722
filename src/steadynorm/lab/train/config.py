"""A run's configuration: frozen dataclasses, parsed by the command line and saved with the run."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from steadynorm.lab.models import GPTConfig, ViTConfig

OptimizerName = Literal[
    "scionc", "scion", "adamc", "adamw", "renormalized-adamw", "lionc", "sgdc", "muon", "muon-corrected"
]
ScheduleName = Literal["cosine", "linear", "constant"]
MomentumName = Literal["constant", "linear", "matched", "matched-gamma-prime"]


@dataclass(frozen=True)
class Optim:
    """Which optimizer, and its numbers: Scion's, unless they are given. What an optimizer does not have is not used.

    `recipes.with_optimizer` has the numbers of the other families; the command line starts from them.
    """

    name: OptimizerName = "scionc"
    """The optimizer; muon: torch's Muon for hidden matrices, AdamW for the rest. It sets the defaults of all that belongs to it."""
    lr: float = 0.01
    """Peak learning rate."""
    output_lr: float | None = None
    """Of the output layer; default: 20 lr for the Scion family, else lr."""
    weight_decay: float | None = None
    """Constant (scion, adamw) or peak decay; default: for scion what reaches steady_norm_sq at the peak, else 0.1."""
    output_weight_decay: float | None = None
    """Constant decay of the output layer; default: the same half-life as the hidden layers (Scion family)."""
    steady_norm_sq: float = 1.1875
    """Target C^2 of scionc."""
    overlap: Literal["linear", "exact"] = "linear"
    """scionc: the paper's formula, or the kernel of each parameter's lmo and shape."""
    output_bias: Literal["corrected", "constant"] = "corrected"
    """Decay of the output layer's bias (Scion family)."""
    correct_output: bool = False
    """Correct the output layer too, against the paper's advice."""
    alpha: float = 0.1
    """Weight of the new gradient (scion, lion's beta1, sgd, muon: 1 - momentum)."""
    output_alpha: float | None = None
    """Of the output layer, which keeps it when alpha moves (Scion family); default: alpha."""
    nesterov: bool = False
    """Nesterov momentum (Scion family, muon)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of the Adam family; LionC takes its second."""
    eps: float = 1e-8
    """Of the Adam family."""
    polar_steps: int = 5
    """Steps of the polar iteration (Scion family)."""


@dataclass(frozen=True)
class Schedule:
    """How lr, alpha and the target go over the run."""

    lr: ScheduleName = "cosine"
    """After the warmup; with matched momentum: what the effective lr follows."""
    warmup: int = 0
    """Steps of linear warmup."""
    final: float = 0.0
    """The last lr as a fraction of the peak."""
    momentum: MomentumName = "constant"
    """alpha over the run: constant, linear to alpha_end, or raised so that the effective lr follows the schedule."""
    alpha_end: float = 1.0
    """Where alpha ends (linear), or its limit (matched; from there lr takes over)."""
    decay_by_lr_alone: bool = False
    """scionc with a moving alpha: keep the momentum factor out of the decay (the paper's third arm)."""
    steady_norm_sq_end: float | None = None
    """The target moves to this along the lr schedule's ratio."""


@dataclass(frozen=True)
class Gpt:
    """NanoGPT on token shards."""

    model: GPTConfig = field(default_factory=GPTConfig)
    data: Path | None = None
    """Folder of .bin shards; default: the embedded State of the Union texts, as bytes."""
    length: int = 1024
    """Tokens a sequence."""
    shuffle: bool = False
    """Sequences in random order instead of as they are stored."""
    eval_tokens: int | None = None
    """Validation tokens; default: all. In whole batches of micro_batch x processes: what is left over is left out."""


@dataclass(frozen=True)
class Vit:
    """Simple ViT on images."""

    model: ViTConfig = field(default_factory=ViTConfig)
    data: Path | None = None
    """ImageNet: folder with train/ and val/ of class folders. CIFAR-10: folder of its binary files (default: got)."""
    dataset: Literal["cifar10", "folder"] = "folder"
    """What the data folder holds."""
    crop_scale: tuple[float, float] = (0.05, 1.0)
    """Area of the random crop."""
    randaugment: int = 2
    """Operations of RandAugment on an image."""
    magnitude: float = 10.0
    """Their strength, 0 to 10."""
    mixup: float = 0.2
    """Beta(p, p) of Mixup; 0: none."""
    workers: int = 8
    """Processes that read images."""
    eval_images: int | None = None
    """Validation images; default: all."""


@dataclass(frozen=True)
class Config:
    """One training run."""

    task: Gpt | Vit
    out: Path
    """The run's folder; an interrupted run goes on."""
    steps: int
    """Updates."""
    batch: int
    """Sequences or images a step, over all processes."""
    micro_batch: int | None = None
    """How many go through the model at once in a process; default: all."""
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    clip: float | None = None
    """Largest global gradient norm."""
    seed: int = 0
    bf16: bool | Literal["auto"] = "auto"
    """bf16 autocast, parameters stay fp32; auto: where the hardware has bf16. Also --no-bf16."""
    compile: bool = False
    """torch.compile the model."""
    eval_every: int = 125
    """Steps between evaluations; one more at the end."""
    save_every: int = 250
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    monitor_every: int = 1
    """Steps between measurements of norms and alignment."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With torchrun: weights on every process (Scion, ScionC and LionC shard their state), or sharded by FSDP2."""
    device: str = "auto"
    """cpu, cuda; auto: cuda where there is one."""
    tensorboard: bool = True
    """Write TensorBoard files, too."""
    name: str = ""
    """What the report calls it; default: the folder's name."""

    def check(self) -> None:
        """Raise ValueError for what cannot be; called before anything is done."""
        for key in ("steps", "batch", "eval_every", "save_every", "keep", "monitor_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least 1")
        if self.micro_batch is not None and (self.micro_batch < 1 or self.batch % self.micro_batch):
            raise ValueError(f"micro_batch={self.micro_batch} does not divide batch={self.batch}")
        key, amount = (
            ("eval_tokens", self.task.eval_tokens)
            if isinstance(self.task, Gpt)
            else ("eval_images", self.task.eval_images)
        )
        if amount is not None and amount < 1:
            raise ValueError(f"task.{key}={amount}: must be at least 1; leave it out for all")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip={self.clip}: must be above 0; leave it out for none")
        if not 0 <= self.schedule.warmup < self.steps:
            raise ValueError(f"schedule.warmup={self.schedule.warmup} must be less than steps={self.steps}")


_NOT_TRAINING = (
    "out",
    "name",
    "device",
    "tensorboard",
    "keep",
    "save_every",
    "task.workers",
    "task.data",
    "parallel",
    "micro_batch",
)


def plain(config: Config) -> dict[str, Any]:
    """As JSON has it."""

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [convert(each) for each in value]
        return str(value) if isinstance(value, Path) else value

    kind = "gpt" if isinstance(config.task, Gpt) else "vit"
    found = convert(asdict(config))
    return {**found, "task": {"kind": kind, **found["task"]}}


def training_part(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What decides the weights: where a run is stored, shown or read from may change between its parts.

    >>> training_part({"steps": 3, "out": "a", "task": {"workers": 2, "length": 8}, "optim": {"name": "scion"}})
    {'steps': 3, 'task': {'length': 8}, 'optim': {'name': 'scion'}}
    """
    return {
        key: training_part(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in config.items()
        if prefix + key not in _NOT_TRAINING
    }
