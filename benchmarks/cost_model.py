"""What a step of ScionC costs each process, worked out from shapes alone: bytes sent, operations, memory.

Who owns which matrix is decided by the library's own plan, on tensors without memory. `python -m benchmarks.distributed`
checks the bytes against what processes really send.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from steadynorm import lmo as lmos
from steadynorm.lab.bench import markdown_table
from steadynorm.optim.buckets import Bucket
from steadynorm.optim.scion_rule import SCION_ARITHMETIC, SCION_RULE, ScionSettings
from steadynorm.optim.sharding.layout import Box, Layout
from steadynorm.optim.sharding.ownership import layout_in, plan_exchange
from steadynorm.optim.sharding.strategy import takes_two_hops
from steadynorm.polar import Polar
from steadynorm.views import BlockLayout

Shape = tuple[int, ...]
WIRE = 2  # bytes of an element between processes: bf16, where the polar iteration rounds to it
EXACT = 4


@dataclass(frozen=True)
class Model:
    """Hidden matrices (spectral), tables (sign), and the tokens of a step it is trained on."""

    name: str
    hidden: tuple[Shape, ...]
    tables: tuple[Shape, ...]
    tokens: float

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in (*self.hidden, *self.tables))


def transformer(
    name: str, layers: int, width: int, mlp: int, vocabulary: int, tokens: float, *, kv: int = 0, gated: bool = True
) -> Model:
    """kv: width of keys and values where it is not the model's; gated: the MLP has three matrices; else tied tables."""
    kv = kv or width
    layer = [(width, width), (kv, width), (kv, width), (width, width)]
    layer += [(mlp, width)] * (2 if gated else 1) + [(width, mlp)]
    return Model(name, tuple(layer * layers), ((vocabulary, width),) * (2 if gated else 1), tokens)


MODELS = (
    transformer("124M", 12, 768, 3072, 50304, 2**18, gated=False),
    transformer("7B", 32, 4096, 11008, 32000, 2**22),
    transformer("70B", 80, 8192, 28672, 128256, 2**24, kv=1024),
)


class Cost(NamedTuple):
    """Of one process in one step; of the busiest one where they differ."""

    sent: float  # bytes, for the optimizer alone
    operations: float  # of the polar iteration
    momentum: float  # bytes kept
    balance: float  # mean over busiest process's operations: 1 is perfect


def cost(model: Model, ranks: int, *, replicated: bool, steps: int = 5, wire: int = WIRE) -> Cost:
    """replicated: DDP with mesh=; else FSDP2 (rows sharded)."""
    loads, sent = [0.0] * ranks, [0.0] * ranks
    settings = ScionSettings(lmos.get("spectral"), BlockLayout(), False, Polar("express", steps))
    for bucket in plan_exchange(_buckets(model.hidden, ranks, replicated, settings)):
        layout, operations = layout_in(bucket), SCION_RULE.cost(bucket.shape, settings)
        for which, counts in bucket.plan:
            count = which.stop - which.start
            twice = takes_two_hops(layout, counts)
            for rank, own in enumerate(counts):
                loads[rank] += own * operations
                mine, whole = layout.boxes[rank].numel, layout.whole.numel
                back = own * whole * (ranks - 1) if replicated and not twice else own * (whole - mine)
                gathered = count * mine * (ranks - 1) if twice else 0
                sent[rank] += wire * ((count - own) * mine + back + gathered)
    if replicated:  # each process makes its rows of the sign updates and sends them to all
        for shape in model.tables:
            for rank, box in enumerate(_boxes(shape, ranks)):
                sent[rank] += WIRE * box.numel * (ranks - 1)
    momentum = sum(_boxes(shape, ranks)[0].numel for shape in (*model.hidden, *model.tables))  # the first has most
    return Cost(max(sent), max(loads), EXACT * momentum, sum(loads) / ranks / max(loads))


def alone(model: Model, steps: int = 5) -> float:
    """Operations of a process that does all matrices itself."""
    spectral = lmos.get("spectral")
    return sum(spectral.operations(shape, steps=steps) for shape in model.hidden)


def training(model: Model, ranks: int) -> float:
    """A process's share of forward and backward: 6 operations for each parameter and token."""
    return 6 * model.parameters * model.tokens / ranks


def _buckets(shapes: tuple[Shape, ...], ranks: int, replicated: bool, settings: ScionSettings) -> list[Bucket]:
    found: dict[Shape, Bucket] = {}
    for shape in shapes:
        whole = Box((0,) * len(shape), shape)
        layout = Layout("model", 0, tuple(_boxes(shape, ranks)), whole, replicated)
        bucket = found.setdefault(shape, Bucket(0, shape, SCION_ARITHMETIC, False, settings, [], shard=layout))
        bucket.params.append(torch.empty(shape, device="meta"))
    return list(found.values())


@functools.cache
def _boxes(shape: Shape, ranks: int) -> list[Box]:
    """Rows in chunks, as DTensor cuts them."""
    chunk, rest = -(-shape[0] // ranks), shape[1:]
    starts = [min(shape[0], chunk * rank) for rank in range(ranks)]
    return [Box((low, *[0] * len(rest)), (min(chunk, shape[0] - low), *rest)) for low in starts]


def table() -> str:
    """Markdown: every model on 8 to 1024 processes."""
    columns = ["model", "processes", "DDP with `mesh=`: sent", "its momentum", "FSDP2: sent", "its momentum"]
    columns += ["polar iteration", "balance", "of training", "if each did all"]
    rows = []
    for model in MODELS:
        for ranks in (8, 64, 256, 1024):
            ddp, fsdp = (cost(model, ranks, replicated=replicated) for replicated in (True, False))
            share, everything = (x / training(model, ranks) for x in (fsdp.operations, alone(model)))
            moved = map(in_bytes, (ddp.sent, ddp.momentum, fsdp.sent, fsdp.momentum))
            work = f"{fsdp.operations / 1e12:.3g} TFLOP", f"{fsdp.balance:.2f}", f"{share:.2%}", f"{everything:.1%}"
            rows.append([model.name, ranks, *moved, *work])
    return markdown_table(columns, rows)


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(1.5e9)
    '1.5 GB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
