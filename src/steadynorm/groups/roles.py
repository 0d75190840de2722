"""The role of a parameter in its model, decided by the caller, the module that holds it, its name and its shape."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from steadynorm.groups.role_table import (
    BIAS_NAME,
    EXPERT_NAME,
    HEADS,
    NORM_CLASS,
    ROLES,
    TABLE_NAME,
    check_choice,
)
from steadynorm.suggestions import suggest

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_PARAMETRIZED_NAME = re.compile(r"(^|\.)parametrizations\.(\w+)\.original\d*$")
_HOOKED_NAME = re.compile(r"(\w+)_(g|v|orig)$")  # of the old weight_norm, and of the old spectral_norm and pruning
_EXPERT_CLASS = re.compile(r"experts?$", re.I)


@dataclass(frozen=True, eq=False)
class ParamSite:
    """A parameter and every place in the model that holds it."""

    parameter: nn.Parameter
    names: tuple[str, ...]  # at each place: the first one identifies it, the others are ties
    owners: tuple[nn.Module, ...]  # the module that holds it at each place; of a parametrized weight the layer
    parents: tuple[nn.Module | None, ...]  # the module around each of those, None around the model

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The name of the weight at each place, which the owner may make of this parameter and others."""
        return tuple(map(_weight_name, self.names, self.owners))

    @property
    def plain_name(self) -> str:
        return self.plain_names[0]

    def is_owned_by(self, *kinds: type[nn.Module]) -> bool:
        return any(isinstance(owner, kinds) for owner in self.owners)

    def first_match(self, patterns: Iterable[str]) -> str | None:
        return first_match((*self.names, *self.plain_names), patterns)


def first_match(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """Return the first name or glob that matches one of the names; they may be plain ones (see `plain_name`)."""
    names = {*names, *map(plain_name, names)}
    return next((p for p in patterns if p in names or any(fnmatchcase(name, p) for name in names)), None)


def plain_name(name: str) -> str:
    """Return the name that a parameter or module has without torch.compile and parametrizations (weight_norm, ...).

    >>> plain_name("_orig_mod.head.weight"), plain_name("blocks.0._orig_mod")
    ('head.weight', 'blocks.0')
    >>> plain_name("conv.parametrizations.weight.original1")
    'conv.weight'
    """
    return _PARAMETRIZED_NAME.sub(r"\1\2", name.replace("_orig_mod.", "").removesuffix("._orig_mod"))


def _weight_name(name: str, owner: nn.Module) -> str:
    """Return the plain name of the weight that a module makes of a parameter, also by the hooks of older torch."""
    prefix, _, last = plain_name(name).rpartition(".")
    if (match := _HOOKED_NAME.fullmatch(last)) is None:
        return plain_name(name)
    stem, part = match.groups()
    beside = {"g": f"{stem}_v", "v": f"{stem}_g", "orig": stem}[part]
    is_hooked = hasattr(owner, beside) and hasattr(owner, stem) and stem not in owner._parameters
    return f"{prefix}.{stem}".lstrip(".") if is_hooked else plain_name(name)


def param_sites(model: nn.Module) -> list[ParamSite]:
    """Return every parameter once, in model order, with all its names and owners."""
    held: dict[nn.Parameter, list[tuple[str, nn.Module, nn.Module | None]]] = {}  # tensors hash by identity
    modules = dict(model.named_modules(remove_duplicate=False))
    for prefix, module in modules.items():
        place = prefix
        if isinstance(module, ParametrizationList):  # <layer>.parametrizations.<its parameter>
            place = prefix.rpartition("parametrizations.")[0].removesuffix(".")
        parent = modules[place.rpartition(".")[0]] if place else None
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            held.setdefault(parameter, []).append((name, modules[place], parent))
    return [ParamSite(parameter, *zip(*holders, strict=True)) for parameter, holders in held.items()]


def role_of(site: ParamSite, roles: Mapping[str, str], outputs: dict[int, str], *, strict: bool) -> tuple[str, str]:
    """Return the role of a parameter and the reason for it: the caller's `roles`, then the output layer, then the rest.

    Raise ValueError if the role is ambiguous or does not fit the shape, unless `strict` is False: Adam only needs to tell
    matrices from vectors.
    """
    shape = tuple(site.parameter.shape)
    role, reason = "", f"{len(shape)} dimensions"
    if (pattern := site.first_match(roles)) is not None:
        role, reason = roles[pattern], f"roles[{pattern!r}]"
        check_choice(reason, role, tuple(ROLES))
    elif id(site.parameter) in outputs:
        role, reason = "output", outputs[id(site.parameter)]
    elif guess := _role_by_module(site) or _role_by_name(site):
        role, reason = guess
    if role == "output" and len(shape) <= 1:
        role = "output-bias"
    if role == "output" and strict and is_conv1d(site):
        raise ValueError(
            f"{site.name} {shape} in Conv1D is stored d_in x d_out, which the output's sign lmo does not know; "
            "make the output layer an nn.Linear"
        )
    if not strict:
        return role or "hidden", reason
    _, least, most = ROLES.get(role, ("", 0, math.inf))
    if role and least <= len(shape) <= most:
        return role, reason
    problem = f"{role!r} ({reason}) takes {least} to {most} dimensions" if role else "its role is ambiguous"
    remedy = f'pass roles={{"{site.name}": <role>}}, one of {", ".join(ROLES)}'
    raise ValueError(f"{site.name} {shape} in {type(site.owners[0]).__name__}: {problem}; {remedy}")


def _role_by_module(site: ParamSite) -> tuple[str, str] | None:
    owner = type(site.owners[0]).__name__
    reason = f"{site.name.rsplit('.', 1)[-1]} of {owner}"
    if site.parameter.ndim <= 1 or NORM_CLASS.search(owner):
        return "vector", reason
    if _is_parametrized(site) and _is_vector(site):  # the lengths in weight_norm
        return None
    if site.is_owned_by(*CONVOLUTIONS):
        return "conv", reason
    if site.is_owned_by(*TRANSPOSED_CONVOLUTIONS):
        return "conv", f"{reason}: input channels come first, so it is flattened to d_in x rest"
    if site.is_owned_by(*_EMBEDDINGS):
        return "embedding", f"{reason}: one-hot input"
    if is_conv1d(site):
        return "hidden-transposed", f"{reason}: stored d_in x d_out"
    return ("hidden", reason) if site.is_owned_by(nn.Linear, *_RECURRENT) else None


def _is_parametrized(site: ParamSite) -> bool:
    """Return whether a weight is made from this and other parameters."""
    return site.plain_name != site.name.replace("_orig_mod.", "")


def is_conv1d(site: ParamSite) -> bool:
    """Return whether this is the weight of Hugging Face's Conv1D (GPT-2), a Linear stored d_in x d_out."""
    return site.parameter.ndim == 2 and any(type(owner).__name__ == "Conv1D" for owner in site.owners)


def _role_by_name(site: ParamSite) -> tuple[str, str] | None:
    """Decide for a bare nn.Parameter of at least two dimensions."""
    if _is_vector(site):
        return "vector", "only one dimension above 1"
    if sum(size > 1 for size in site.parameter.shape) == 2 and TABLE_NAME.search(site.plain_name):
        return "embedding", "bare parameter named like a table whose rows are looked up"
    if BIAS_NAME.search(site.plain_name):
        return "vector", "bare parameter named like a bias"
    if site.parameter.ndim == 2:
        return "hidden", "bare two-dimensional parameter"
    owner = site.owners[0]
    if site.parameter.ndim == 3 and (EXPERT_NAME.search(site.plain_name) or _EXPERT_CLASS.search(type(owner).__name__)):
        if _stored_transposed(owner):
            return "stacked-transposed", "experts, one matrix each, stored d_in x d_out"
        return "stacked", "experts, one matrix each"
    return None


def _is_vector(site: ParamSite) -> bool:
    return sum(size > 1 for size in site.parameter.shape) <= 1


def _stored_transposed(experts: nn.Module) -> bool:
    """Return whether expert weights are (experts, d_in, d_out), by the flag of Hugging Face's modules or by shape."""
    flag = getattr(experts, "is_transposed", None)
    if isinstance(flag, bool):
        return flag
    up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not (isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor)):
        return False
    return tuple(up.shape[-2:]) == (down.shape[-1], 2 * down.shape[-2])


def find_outputs(model: nn.Module, sites: list[ParamSite], output: Any, roles: Mapping[str, str]) -> dict[int, str]:
    """Return {id of each parameter of the output layer: how it was found}; raise ValueError if it cannot be found."""
    if output is False or (output is None and "output" in roles.values()):
        return {}
    layers, source = _find_output(model, sites) if output is None else (output, "output=")
    layers = layers if isinstance(layers, list | tuple) else [layers]
    weights = {id(_output_weight(layer, source, model, sites)) for layer in layers}
    owners = {owner for site in sites if id(site.parameter) in weights for owner in site.owners}
    biases = {id(getattr(owner, "bias", None)) for owner in owners}
    return dict.fromkeys(weights | biases, f"output layer, by {source}")


def _find_output(model: nn.Module, sites: list[ParamSite]) -> tuple[list[Any], str]:
    for method in ("get_output_embeddings", "get_classifier"):
        for holder in (model, getattr(model, "module", None)):  # .module: inside DistributedDataParallel
            layers = getattr(holder, method)() if hasattr(holder, method) else None
            layers = layers if isinstance(layers, list | tuple) else [layers]
            if layers := [layer for layer in layers if isinstance(layer, nn.Module) and list(layer.parameters())]:
                return layers, f"{method}()"
    tied = [site.parameter for site in sites if site.is_owned_by(nn.Embedding) and site.is_owned_by(nn.Linear)]
    if tied:
        return tied, "a weight tied to an embedding"
    if hasattr(model, "get_output_embeddings"):  # a Hugging Face model whose head is not a vocabulary
        for name in HEADS:
            head = getattr(model, name, None)
            if isinstance(head, nn.Module) and [p.ndim for p in head.parameters() if p.ndim > 1] == [2]:
                return [head], f"the name {name}"
    linear = [name or "(the model)" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    raise ValueError(
        f"{type(model).__name__}: cannot tell which layer is the output; pass output=<name>, or False if there is none. "
        f"Linear layers, last first: {', '.join(linear[:-9:-1]) or 'none'}"
    )


def _output_weight(item: Any, source: str, model: nn.Module, sites: list[ParamSite]) -> nn.Parameter:
    """Return the parameter meant by a parameter, a module with one matrix, or the name of either."""
    where = f"{source}{item!r}" if isinstance(item, str) else f"{source}<{type(item).__name__}>"
    if isinstance(item, str):
        modules = dict(model.named_modules(remove_duplicate=False))
        named: dict[str, Any] = {plain_name(name): module for name, module in modules.items()} | modules
        named |= {name: site.parameter for site in sites for name in (*site.plain_names, *site.names)}
        if item not in named:
            raise ValueError(f"{where} is not in {type(model).__name__}; {suggest(item, map(plain_name, named))}")
        item = named[item]
    if isinstance(item, nn.Module):
        matrices = {name: parameter for name, parameter in item.named_parameters() if parameter.ndim >= 2}
        if len(matrices) != 1:
            raise ValueError(f"{where} should hold one matrix, not {len(matrices)}; name one of {', '.join(matrices)}")
        (item,) = matrices.values()
    if not any(item is site.parameter for site in sites):
        raise ValueError(f"{where} is not in {type(model).__name__}; pass a module or parameter of it, or its name")
    if item.ndim < 2:
        raise ValueError(f"{where} is a vector; name the output layer's weight, its bias follows")
    return item


def check_patterns(
    option: str, patterns: Mapping[str, Any], candidates: list[ParamSite], what: str, values: str
) -> None:
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{option}={patterns!r}: pass a dict from parameter names or globs to {values}")
    for pattern in patterns:
        if not any(site.first_match([pattern]) for site in candidates):
            names = (plain_name(name) for site in candidates for name in site.names)
            remedy = suggest(pattern, names) or "there is none; leave it out"
            raise ValueError(f"{option}[{pattern!r}] matches no {what}; {remedy}")


def check_supported(site: ParamSite) -> None:
    parameter = site.parameter
    if is_lazy(parameter):
        raise ValueError(f"{site.name} has no shape yet; run the model once before grouping")
    if parameter.is_complex():
        raise ValueError(f"{site.name} is complex; make its real and imaginary parts two parameters")
    if not (parameter.is_floating_point() and parameter.element_size() >= 2):
        raise ValueError(
            f"{site.name} has dtype {parameter.dtype}; freeze it (requires_grad=False) or train a wider copy"
        )
    if parameter.layout != torch.strided or any(getattr(owner, "sparse", False) is True for owner in site.owners):
        raise ValueError(f"{site.name} or its gradient is sparse; make it dense (nn.Embedding: sparse=False)")
    if parameter.ndim < 2 and site.name.split(".")[-1] == "weight" and site.is_owned_by(nn.Linear, *_EMBEDDINGS):
        raise ValueError(f"{site.name} is a flattened matrix; shard with fully_shard, which keeps shapes")
