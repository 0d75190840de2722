"""The arithmetic of Scion: momentum, then the update of its lmo."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadynorm import lmo as lmos
from steadynorm import machine
from steadynorm.decay.rule import Group
from steadynorm.optim import buckets
from steadynorm.optim.batch import Batch, Encoding, Scalars, SplitRule
from steadynorm.optim.idle import Slices
from steadynorm.polar import Polar
from steadynorm.views import BlockLayout


@dataclass(frozen=True)
class ScionSettings:
    """What does not change from step to step."""

    lmo: lmos.Lmo
    blocks: BlockLayout
    nesterov: bool
    polar: Polar

    def length_share(self, shape: Sequence[int]) -> float:
        """Return |u|^2 over that of an exact lmo, which Newton-Schulz falls short of; for Gaussian momentum."""
        return self.lmo.numbers.length_share(shape, self.blocks, self.polar.method, self.polar.steps)

    def polar_scale(self, d_out: int, d_in: int) -> float:
        """Return by what the polar factor of a matrix is multiplied."""
        return math.sqrt(d_out / d_in)

    def slices(self, shape: Sequence[int], *, own_time: bool) -> Slices:
        """Return which parts of a parameter of this shape wait or fade while their gradient is zero."""
        slice_ndim, blocks = self.lmo.waiting_ndim(shape), self.blocks
        waiting = slice_ndim if own_time else 0
        if slice_ndim == 2 and len(shape) == 3 and blocks.count == 1:  # a stack: its matrices fade if they do not wait
            return Slices(waiting, shape[0], 0)
        return Slices(waiting, blocks.count, self.lmo.view.block_dims[blocks.side], blocks.sizes)


def _accumulate(batch: Batch, scalars: Scalars, settings: ScionSettings) -> Tensor:
    """m_t = (1-a) m + a g;  x = m_t, Nesterov (1-a) m_t + a g."""
    alpha, m = scalars["alpha"] * batch.active, batch.state["momentum_buffer"]
    grad = batch.grad()
    if m.dtype != grad.dtype:
        return _from_kept(m, grad, alpha, settings.nesterov)
    m.lerp_(grad, alpha)
    return grad.lerp_(m, 1 - alpha) if settings.nesterov else m


def _from_kept(m: Tensor, grad: Tensor, alpha: Tensor, nesterov: bool) -> Tensor:
    """Do the same with momentum kept in another dtype. On a CPU x replaces grad row by row, so that m is never copied whole."""
    along = min(1, grad.ndim - 1)  # a stack of 0-d parameters has no rows
    is_whole = machine.is_accelerator(grad.device) or torch.compiler.is_compiling()
    most = grad.numel() if is_whole else buckets.MAX_ELEMENTS_CPU
    rows = max(1, most * grad.shape[along] // max(1, grad.numel()))
    alphas = alpha.expand(*alpha.shape[:along], grad.shape[along], *alpha.shape[along + 1 :]).split(rows, along)
    for kept, x, a in zip(m.split(rows, along), grad.split(rows, along), alphas, strict=True):
        wide = kept.to(x.dtype).lerp_(x, a)
        torch._foreach_copy_([kept, x], [wide, torch.lerp(x, wide, 1 - a) if nesterov else wide])
    return grad


def _normalize(x: Tensor, settings: ScionSettings, out: Tensor | None) -> Tensor:
    """theta_t = (1-eta) theta + gamma lmo(x)."""
    return settings.lmo.update(x, blocks=settings.blocks, polar=settings.polar, batch_ndim=1, out=out)


def _cost(shape: tuple[int, ...], settings: ScionSettings) -> float:
    return settings.lmo.operations(shape, blocks=settings.blocks, steps=settings.polar.steps)


def encode(shape: tuple[int, ...], settings: ScionSettings, dtype: torch.dtype, device: torch.device) -> Encoding:
    """Return how x and u are transferred, so that nothing is lost but what the lmo rounds away itself.

    The sign of x and a bf16 iteration need no more than bf16, which takes half the bytes. An fp16 iteration scales x before it
    rounds it, so that x travels as it is; its factors are in fp16.
    """
    lmo, runs = settings.lmo, settings.lmo.view.runs(shape, settings.blocks)
    if not lmo.numbers.is_polar:
        if lmo.entry_size is None:
            return Encoding(dtype, dtype)
        return Encoding(torch.bfloat16, torch.bfloat16, lmo.entry_size(runs[0].d_out, runs[0].d_in))
    dtypes = {settings.polar.working_dtype(dtype, device, (run.d_out, run.d_in)) for run in runs}
    scales = {settings.polar_scale(run.d_out, run.d_in) / run.divisor for run in runs}
    working, scale = dtypes.pop(), scales.pop()
    if dtypes or scales or working not in (torch.bfloat16, torch.float16):  # blocks of other sizes have other scales
        return Encoding(dtype, dtype)
    return Encoding(working if working == torch.bfloat16 else dtype, working, scale)


def polar_of(group: Group) -> Polar:
    """Return how polar factors of a group are found."""
    dtype = group.get("polar_dtype", "auto")
    return Polar(group["polar"], group["polar_steps"], dtype=dtype, keeps_dtype=False)


def settings_of(group: Group, shape: Sequence[int]) -> ScionSettings:
    """Return what a group says of a parameter of this shape."""
    lmo = lmos.get(group["lmo"], shape)
    lmo.check(shape, group["blocks"])
    blocks = BlockLayout.of(1 if lmo.row_separable else group["blocks"])  # rows do not see each other
    return ScionSettings(lmo, blocks, bool(group["nesterov"]), polar_of(group))


SCION_RULE = SplitRule(_accumulate, _normalize, _cost, encode)
