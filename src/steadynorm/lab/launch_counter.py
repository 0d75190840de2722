"""Count what a GPU would be asked to do in one optimizer step: kernels, floating-point operations, bytes, temporaries.

No GPU is needed. Parameters are fake CUDA tensors, which have shapes and no memory, and a dispatch mode sees every
operation. Nothing here is a time. What is counted, and how:

    kernels     operations on the device that are not views. A `_foreach_` or `_fused_` operation counts as many launches
                as torch's multi-tensor kernels need (65,536 elements per block, 320 blocks and 30 to 110 tensors per
                launch), or one per tensor where dtypes or shapes keep torch from using them
    TFLOP       of matrix products
    GB          every operand read once and every result written once per kernel; caches are ignored
    temporaries the most memory that was alive at one time beyond parameters, gradients and state
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from steadynorm.optim import ScionC

Shape = tuple[int, ...]
Make = Callable[[list[nn.Parameter]], Sequence[Optimizer]]
BLOCK_ELEMENTS, BLOCKS_PER_LAUNCH = 65_536, 320
TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # by how many lists of tensors the operation takes
LAUNCH_SECONDS = 4.5e-6  # of the host per kernel; 4 to 5 microseconds are usual in PyTorch
MAX_HIDDEN_ROWS = 1 << 14  # a matrix with more rows is a table of tokens
_MAKES_NO_KERNEL = (
    "prim::",
    "aten::empty",
    "aten::new_empty",
    "aten::detach",
    "aten::lift_fresh",
    "aten::_unsafe_view",
)
_OVERWRITES = ("aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::zero_", "aten::_foreach_zero_")


@dataclass
class Counts:
    """What one step asks of the device."""

    kernels: int = 0
    tflop: float = 0.0
    gigabytes: float = 0.0
    temporary_mebibytes: float = 0.0


class Work(NamedTuple):
    """What one operation asks of the device."""

    name: str
    launches: int
    tflop: float
    gigabytes: float


class LaunchCounter(TorchDispatchMode):
    """Count the kernels of all operations on accelerator tensors, fake ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.work = list[Work]()  # of each operation, in order
        self.by_name = Counter[str]()  # launches of each operation
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        outputs = _tensors(results)
        if any(map(_on_accelerator, [*outputs, *_tensors((args, kwargs))])):
            self._count(func, args, kwargs, results, outputs)
        return results

    def _count(self, func: Any, args: Any, kwargs: Any, results: Any, outputs: list[Tensor]) -> None:
        name = func._schema.name
        self._watch(outputs)
        if func.is_view or name.startswith(_MAKES_NO_KERNEL):
            return
        launches = _multi_tensor_launches(args) if "::_foreach_" in name or "::_fused_" in name else 1
        touched = sum(map(_bytes, _read(func, args, kwargs)))
        touched += sum(map(_bytes, outputs or _written(func, args)))
        packet = func._overloadpacket
        flop = flop_registry[packet](*args, **kwargs, out_val=results) if packet in flop_registry else 0
        work = Work(name, launches, 1e-12 * flop, 1e-9 * touched)
        self.work.append(work)
        self.by_name[name] += launches
        self.counts.kernels += launches
        self.counts.tflop += work.tflop
        self.counts.gigabytes += work.gigabytes

    def _watch(self, outputs: Iterable[Tensor]) -> None:
        """Note which memory is alive now that was not there before the count."""
        for x in outputs:
            storage = x.untyped_storage()
            if _on_accelerator(x) and storage._cdata not in self._alive:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        mebibytes = sum(size for _, size in self._alive.values()) / 2**20
        self.counts.temporary_mebibytes = max(self.counts.temporary_mebibytes, mebibytes)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave the memory of these tensors out of the temporaries."""
        self._alive |= {x.untyped_storage()._cdata: (StorageWeakRef(x.untyped_storage()), 0) for x in tensors}


def _read(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the operands that a kernel reads: not `out`, nor what it overwrites without looking."""
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    args = args[1:] if func._schema.name in _OVERWRITES else args
    return [x for x in _tensors((args, kwargs)) if _on_accelerator(x)]


def _written(func: Any, args: Any) -> list[Tensor]:
    """Return the operands that an operation without results writes: those that its schema marks, but not gradients.

    Fused optimizers write gradients only to unscale them.
    """
    slots = zip(func._schema.arguments, args, strict=False)
    marked = [value for slot, value in slots if slot.alias_info and slot.alias_info.is_write and slot.name != "grads"]
    return [x for x in _tensors(marked) if _on_accelerator(x)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _on_accelerator(x: Tensor) -> bool:
    return x.device.type not in ("cpu", "meta")


def _bytes(x: Tensor) -> int:
    """Return the bytes behind a tensor; dimensions along which it is expanded are read once."""
    return x.element_size() * math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def _multi_tensor_launches(args: Sequence[Any]) -> int:
    """Return the launches of an operation on lists of tensors; step counts of fused optimizers are no list of theirs."""
    lists = [argument for argument in args if isinstance(argument, list | tuple) and argument]
    lists = [tensors for tensors in lists if isinstance(tensors[0], Tensor)]
    first, *others = [tensors for tensors in lists if len(lists) < 4 or any(x.ndim for x in tensors)]
    is_uniform = all(
        x.shape == y.shape and x.dtype == y.dtype and x.stride() == y.stride()
        for tensors in others
        for x, y in zip(first, tensors, strict=True)
    )
    if not is_uniform or len({x.dtype for x in first}) > 1:
        return len(first)
    return _chunked_launches([x.numel() for x in first], TENSORS_PER_LAUNCH[1 + len(others)])


def _chunked_launches(sizes: Sequence[int], most_tensors: int) -> int:
    """Return how often torch's `multi_tensor_apply` launches: whenever it has enough blocks, or enough whole tensors.

    >>> _chunked_launches([10] * 111, 110), _chunked_launches([65_536 * 321], 110)
    (2, 2)
    """
    launches = tensors = blocks = 0
    for size in sizes:
        left = math.ceil(size / BLOCK_ELEMENTS)
        tensors += left > 0
        while left:
            taken = min(left, BLOCKS_PER_LAUNCH - blocks)
            left, blocks = left - taken, blocks + taken
            if blocks == BLOCKS_PER_LAUNCH or (not left and tensors == most_tensors):
                launches, blocks, tensors = launches + 1, 0, int(left > 0)
    return launches + (blocks > 0)


def count_step(make: Make, shapes: Sequence[Shape]) -> LaunchCounter:
    """Return the counts of the third step on fake fp32 CUDA parameters of these shapes: nothing is made for the first time."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        optimizers = make(params)
        counter = LaunchCounter()
        for step in range(3):
            for p in params:
                p.grad = torch.empty_like(p)
            is_counted = step == 2
            if is_counted:
                state = [list(optimizer.state.values()) for optimizer in optimizers]
                counter.ignore(_tensors([params, [p.grad for p in params], state]))
            with counter if is_counted else nullcontext():
                for optimizer in optimizers:
                    optimizer.step()
    return counter


def make_scionc(steps: int, **settings: Any) -> Make:
    """Return a factory of ScionC for matrices (spectral), tables with many rows (sign) and vectors (bias)."""

    def make(params: list[nn.Parameter]) -> list[Optimizer]:
        tables = [p for p in params if _is_table(p)]
        hidden = [p for p in params if p.ndim == 2 and not _is_table(p)]
        groups = [
            {"params": hidden, "lmo": "spectral"},
            {"params": tables, "lmo": "sign", "weight_decay": 0.004, "steady_norm_sq": None},
            {"params": [p for p in params if p.ndim == 1], "lmo": "bias"},
        ]
        return [ScionC([group for group in groups if group["params"]], polar_steps=steps, **settings)]

    return make


def make_torch_muon(params: list[nn.Parameter]) -> list[Optimizer]:
    """Return torch's Muon for hidden matrices, and fused AdamW for the rest, if there is any."""
    rest = [p for p in params if p.ndim != 2 or _is_table(p)]
    muon = torch.optim.Muon([p for p in params if p.ndim == 2 and not _is_table(p)], lr=1e-3)
    return [muon, torch.optim.AdamW(rest, lr=1e-3, fused=True)] if rest else [muon]


def _is_table(p: Tensor) -> bool:
    return p.ndim == 2 and p.shape[0] > MAX_HIDDEN_ROWS


CONTENDERS: dict[str, Make] = {
    "torch.optim.Muon": make_torch_muon,
    "ScionC, 4 steps": make_scionc(4),
    "ScionC, 5 steps": make_scionc(5),
}


def table(counts: dict[str, Counts]) -> str:
    """Return the counts as a Markdown table."""
    lines = [
        "| | kernels (views left out) | TFLOP | GB read and written | temporaries, MiB |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, count in counts.items():
        numbers = f"{count.kernels:,} | {count.tflop:.2f} | {count.gigabytes:.1f} | {count.temporary_mebibytes:.0f}"
        lines.append(f"| {name} | {numbers} |")
    return "\n".join(lines)
