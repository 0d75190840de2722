"""Which weights of a model are several matrices: fused projections, heads, groups of a convolution, gates of an LSTM.

The caller's `blocks` come first. Then the module that holds the layer decides: an attention says how many heads it has for
queries and for keys and values, itself or in its configuration (Hugging Face), and so how its fused projection is cut.
Names and shapes decide the rest; where they leave a doubt, the weight stays one matrix.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from steadynorm.groups.role_table import FUSED_NAME, ROLES, fused_blocks
from steadynorm.groups.roles import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, ParamSite
from steadynorm.views import INPUTS, OUTPUTS, BlockLayout, Blocks

_IN_ORDER_NAME = re.compile(r"(^|\.)(qkv_proj|Wqkv|c_attn)(\.weight)?$")  # all queries, all keys, all values
_ATTENTION_CLASS = re.compile(r"attention|attn", re.I)
_TO_HEADS_NAME = re.compile(r"(^|\.)(q|k|v|query|key|value)(_proj|_attn)?(_weight|\.weight)?$", re.I)
_FROM_HEADS_NAME = re.compile(r"(^|\.)(o|o_proj|out|out_proj|c_proj|proj|dense)\.weight$", re.I)
_TO_GATES_NAME = re.compile(r"(^|\.)weight_(ih|hh)(_l\d+(_reverse)?)?$")
_GATES = {(nn.LSTM, nn.LSTMCell): 4, (nn.GRU, nn.GRUCell): 3}
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")


class Attention(NamedTuple):
    """How many heads an attention has, and their size."""

    heads: int
    key_heads: int  # of keys, and of values
    head_size: int


class _Matrix(NamedTuple):
    """The sides of a weight that may be several matrices, and what an output and an input are as it is stored."""

    d_out: int
    d_in: int
    output: str
    input: str | None  # None where inputs have no blocks


def find_blocks(
    site: ParamSite, role: str, blocks: Mapping[str, Blocks], *, heads: bool = False
) -> tuple[BlockLayout, str]:
    """Return which blocks of a parameter are separate matrices, and a note that says why; see `param_groups`."""
    matrix = _matrix(site, role)
    if (pattern := site.first_match(blocks)) is not None:
        return _chosen(site, matrix, pattern, blocks[pattern])
    attention = _attention_of(site, matrix)
    if heads and attention is not None and (by_head := _by_head(site, matrix, attention)) is not None:
        return by_head
    groups = getattr(site.owners[0], "groups", 1) if site.is_owned_by(*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS) else 1
    if groups > 1:
        return BlockLayout(groups), f"; {groups} groups of channels, one matrix each"
    if gates := _gates(site):
        return BlockLayout(gates), f"; {gates} gates, a block of rows each"
    if attention is not None and (fused := _fused_by_heads(site, matrix, attention)) is not None:
        return fused
    halves = getattr(site.owners[0], "is_concatenated", True) is not False
    count, note = fused_blocks(site.plain_name, matrix.d_out, matrix.d_in, matrix.output, halves=halves)
    return BlockLayout(count), note


def _gates(site: ParamSite) -> int:
    """Return how many gates a weight of torch's LSTM or GRU computes from inputs or hidden states; 0 if it is none."""
    if not _TO_GATES_NAME.search(site.plain_name):
        return 0
    return next((count for kinds, count in _GATES.items() if site.is_owned_by(*kinds)), 0)


def has_heads(site: ParamSite, role: str) -> bool:
    """Return whether this is a projection to or from the heads of an attention that says how many they are."""
    matrix = _matrix(site, role)
    attention = _attention_of(site, matrix)
    return attention is not None and _by_head(site, matrix, attention) is not None


def _matrix(site: ParamSite, role: str) -> _Matrix:
    shape = site.parameter.shape
    if role == "conv":
        return _Matrix(shape[0], shape[1:].numel(), "row", None)
    if ROLES[role][0] == "spectral-transposed":
        return _Matrix(shape[-1], shape[-2], "column", "row")
    return _Matrix(shape[-2], shape[-1], "row", "column")


def _chosen(site: ParamSite, matrix: _Matrix, pattern: str, blocks: Blocks) -> tuple[BlockLayout, str]:
    where = f"blocks[{pattern!r}]"
    layout = BlockLayout.of(blocks, where)
    length, side = (matrix.d_out, matrix.output) if layout.side == OUTPUTS else (matrix.d_in, matrix.input)
    if side is None:
        raise ValueError(f"{where}={layout.plain!r}: {site.name} is a convolution, which has blocks of outputs only")
    if problem := layout.mismatch(length):
        remedy = "; pass the sizes of all blocks" if layout.sizes else ""
        raise ValueError(f"{where}={layout.plain!r} {problem} the {length} {side}s of {site.name}{remedy}")
    return layout, f"; {where}"


def _fused_by_heads(site: ParamSite, matrix: _Matrix, attention: Attention) -> tuple[BlockLayout, str] | None:
    """Return the blocks of a projection that computes queries, keys and values; None if the attention decides nothing.

    It comes before names and shapes, which grouped queries can match by coincidence.
    """
    d_out, d_in, side, _ = matrix
    sizes = tuple(heads * attention.head_size for heads in (attention.heads, attention.key_heads, attention.key_heads))
    is_plain = len(set(sizes)) == 1 and d_out == 3 * d_in
    if FUSED_NAME.search(site.plain_name) is None or sum(sizes) != d_out or is_plain:
        return None
    heads = f"{attention.heads} and {attention.key_heads} heads"
    if not _IN_ORDER_NAME.search(site.plain_name):
        note = f"; fused q, k, v, {heads}, whose order is unknown: one matrix unless blocks= says more"
        return BlockLayout(), note
    layout = BlockLayout(sizes if len(set(sizes)) > 1 else 3)
    return layout, f"; fused q, k, v, {heads}: {side} {layout.label}"


def _by_head(site: ParamSite, matrix: _Matrix, attention: Attention) -> tuple[BlockLayout, str] | None:
    """Return one block per head; None if this is not a projection to or from all heads.

    A fused projection has whole heads next to each other, whatever their order.
    """
    size = attention.head_size
    if _FROM_HEADS_NAME.search(site.plain_name) and matrix.input and matrix.d_in == attention.heads * size:
        return BlockLayout(attention.heads, INPUTS), f"; {attention.heads} heads, a block of {matrix.input}s each"
    counts: dict[int, str] = {}
    if FUSED_NAME.search(site.plain_name):
        counts = {2 * attention.key_heads: "fused k, v: ", attention.heads + 2 * attention.key_heads: "fused q, k, v: "}
    elif _TO_HEADS_NAME.search(site.plain_name):
        counts = dict.fromkeys((attention.heads, attention.key_heads), "")
    count = matrix.d_out // size
    if count * size != matrix.d_out or count not in counts:
        return None
    return BlockLayout(count), f"; {counts[count]}{count} heads, a block of {matrix.output}s each"


def _attention_of(site: ParamSite, matrix: _Matrix) -> Attention | None:
    """Return what the attention that holds this layer says of its heads; None if there is none, or it does not say."""
    holders = (*site.owners[:1], *site.parents[:1])  # a bare parameter is held by the attention itself
    for module in holders:
        if module is None or not _ATTENTION_CLASS.search(type(module).__name__):
            continue
        if heads := _number(module, _HEAD_COUNTS):
            size = _number(module, _HEAD_SIZES) or matrix.d_in // heads
            return Attention(heads, _number(module, _KEY_HEAD_COUNTS) or heads, size)
    return None


def _number(module: nn.Module, names: tuple[str, ...]) -> int:
    """Return the first of these that a module, or else its configuration, has as a positive int; 0 if there is none."""
    places: list[Any] = [module, getattr(module, "config", None)]
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
