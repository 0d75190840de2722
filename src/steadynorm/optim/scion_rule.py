"""The arithmetic of Scion: momentum, then the update of its lmo."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steadynorm import machine
from steadynorm.decay.rule import Group
from steadynorm.lmo import Lmo
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Batch, Encoding, Scalars, SplitRule, pieces
from steadynorm.optim.idle import Slices
from steadynorm.polar import Polar
from steadynorm.polar.coefficients import DEFAULT_STEPS
from steadynorm.views import BlockLayout, BlockRun


@dataclass(frozen=True)
class ScionSettings:
    """What does not change from step to step."""

    lmo: Lmo
    blocks: BlockLayout
    nesterov: bool
    polar: Polar

    def scale_of(self, run: BlockRun) -> float:
        """Return what the polar factors of a run of blocks are multiplied by."""
        assert self.lmo.polar_scale is not None
        return self.lmo.polar_scale(run.d_out, run.d_in) / run.divisor

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
    grad = batch.take_grad()
    if m.dtype != grad.dtype:
        return _from_kept(m, grad, alpha, settings.nesterov)
    m.lerp_(grad, alpha)
    return grad.lerp_(m, 1 - alpha) if settings.nesterov else m


def _from_kept(m: Tensor, grad: Tensor, alpha: Tensor, nesterov: bool) -> Tensor:
    """Do the same with momentum kept in another dtype. On a CPU x replaces grad piece by piece, so that m is never copied whole."""
    for x, kept, a in pieces(grad, m, alpha):
        wide = kept.to(x.dtype).lerp_(x, a)
        torch._foreach_copy_([kept, x], [wide, torch.lerp(x, wide, 1 - a) if nesterov else wide])
    return grad


def _normalize(x: Tensor, settings: ScionSettings, out: Tensor | None) -> Tensor:
    """Return u = -lmo(x), with which theta_t = (1-eta) theta - gamma u."""
    if settings.lmo.numbers.is_polar and machine.is_accelerator(x.device):
        return _normalize_all([x], [settings])[0]
    return settings.lmo.checked_update(x, settings.blocks, settings.polar, 1, out)


class Kind(NamedTuple):
    """The properties that matrices must share to go through one polar iteration."""

    polar: Polar
    sides: tuple[int, int]  # as they are stored
    scale: float


def _kind(run: BlockRun, settings: ScionSettings) -> Kind:
    """Return the kind of matrices that a run of blocks consists of."""
    sides = (run.d_in, run.d_out) if settings.lmo.view.is_transposed else (run.d_out, run.d_in)
    return Kind(settings.polar, sides, settings.scale_of(run))


def _kinds(shape: tuple[int, ...], settings: ScionSettings) -> frozenset[Kind]:
    """Return the kinds of matrices in a parameter; none where there is no polar factor."""
    if not settings.lmo.numbers.is_polar:
        return frozenset()
    return frozenset(_kind(run, settings) for run in settings.lmo.view.runs(shape, settings.blocks))


def _normalize_all(xs: Sequence[Tensor], settings: Sequence[ScionSettings]) -> list[Tensor]:
    """Return the updates of several stacks; matrices of one kind, whole or blocks, share a polar iteration."""
    alike: dict[Kind, list[tuple[int, BlockRun, Tensor]]] = {}
    for k, (x, own) in enumerate(zip(xs, settings, strict=True)):
        for run in own.lmo.view.runs(x.shape[1:], own.blocks):
            part = x.narrow(_block_dim(x, own), run.start, run.length)
            matrices = own.lmo.view.to_matrices(part, run.blocks, own.blocks.side, batch_ndim=1)
            alike.setdefault(_kind(run, own), []).append((k, run, matrices))
    updates: list[dict[int, Tensor]] = [{} for _ in xs]  # of each stack, by where a run starts
    for kind, members in alike.items():
        factors = kind.polar.find_all([matrices for _, _, matrices in members], scale=kind.scale)
        for (k, run, _), factor in zip(members, factors, strict=True):
            own, shape = settings[k], list(xs[k].shape)
            shape[_block_dim(xs[k], own)] = run.length
            updates[k][run.start] = own.lmo.view.from_matrices(factor, shape, own.blocks.side, batch_ndim=1)
    return [
        u[0] if len(u) == 1 else torch.cat([u[start] for start in sorted(u)], _block_dim(x, own))
        for x, u, own in zip(xs, updates, settings, strict=True)
    ]


def _block_dim(x: Tensor, settings: ScionSettings) -> int:
    """Return the dimension of a stack along which blocks lie."""
    return settings.lmo.view.block_dims[settings.blocks.side] % (x.ndim - 1) + 1


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
    scales = {settings.scale_of(run) for run in runs}
    working, scale = dtypes.pop(), scales.pop()
    if dtypes or scales or working not in (torch.bfloat16, torch.float16):  # blocks of other sizes have other scales
        return Encoding(dtype, dtype)
    return Encoding(working if working == torch.bfloat16 else dtype, working, scale)


def with_polar_steps(group: Group, defaults: Group) -> Group:
    """Return a group that says how many polar steps it takes: by default as many as its method needs."""
    if not isinstance(group, dict) or {**defaults, **group}["polar_steps"] is not None:
        return group
    return {**group, "polar_steps": DEFAULT_STEPS.get(group.get("polar", defaults["polar"]))}


def settings_of(group: Group, shape: Sequence[int], lmo: Lmo) -> ScionSettings:
    """Return the settings of a group for parameters of this shape; raise ValueError if the lmo does not fit them."""
    lmo.check(shape, group["blocks"])
    blocks = BlockLayout.of(1 if lmo.row_separable else group["blocks"])  # rows do not see each other
    dtype = group.get("polar_dtype", "auto")
    polar = Polar(group["polar"], group["polar_steps"], dtype=dtype, keeps_dtype=False)
    return ScionSettings(lmo, blocks, bool(group["nesterov"]), polar)


SCION_RULE = SplitRule(_accumulate, _normalize, _cost, encode, _kinds, _normalize_all)
SCION_ARITHMETIC = Arithmetic(SCION_RULE.rule, ("momentum_buffer",), SCION_RULE, normalizes=True)
