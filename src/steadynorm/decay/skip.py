"""`correct(skip=...)`: which parameters are meant, and a step that gives them another decay than their group has.

A group lists the positions of its skipped parameters under `uncorrected`. Its step is taken by a stand-in that shares
everything with the optimizer except `param_groups`: there, such a group is two, with the decay lambda_t and with the
constant one. So the optimizer applies each decay itself, whatever its implementation, and its own groups, schedulers
and checkpoints stay as they are. A group whose weights are rescaled after the step (see `rescale`) has a stand-in
without decay likewise.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from steadynorm.decay.hold import HOLD_STATE, is_rescaled, keys_of_correct
from steadynorm.decay.rule import UNCORRECTED, Group, is_live
from steadynorm.groups.roles import find_outputs, first_match, param_sites
from steadynorm.suggestions import suggest

_OF_A_PART = ("params", "param_names", "weight_decay")  # what the two parts of a group do not share


# ---------------------------------------------------------------- the step


class StandIn:
    """Takes an optimizer's steps for it where parameters of a group need another decay than the group shows."""

    def __init__(self) -> None:
        self.optimizer: Optimizer | None = None  # the one that steps, with the groups in parts; empty between steps
        self.groups: list[Group] = []
        self.parts: list[tuple[Group, Group, Group]] = []  # a group, a part of it, that part before the step

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        """Prepare the next step and return who is to take it: the optimizer itself if no group has to be in parts."""
        parts = [(group, part) for group in optimizer.param_groups for part in _parts(group)]
        if all(part is group for group, part in parts):
            return optimizer
        self.groups = [part for _, part in parts]
        self.parts = [(group, part, dict(part)) for group, part in parts if part is not group]
        if self.optimizer is None:  # one for all steps: torch.compile knows it by its id
            cls = type(optimizer)
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            shadow = type(cls.__name__, (cls,), {**names, "param_groups": property(lambda _: self.groups)})
            self.optimizer = object.__new__(shadow)
        self.optimizer.__dict__ = optimizer.__dict__  # shared: state, defaults, hooks, what a step writes
        return self.optimizer

    def take_back(self) -> None:
        """Write what the step changed in a part, such as a step counter, into its group."""
        for group, part, before in self.parts:
            changed = {key for key, value in part.items() if key not in before or before[key] is not value}
            group.update({key: part[key] for key in changed if key not in _OF_A_PART})
        self.groups, self.parts = [], []
        if self.optimizer is not None:
            self.optimizer.__dict__ = {}  # or the optimizer would be part of a cycle, and its memory freed late


def uncorrected_positions(group: Group) -> set[int]:
    """Return the positions of parameters that keep constant decay in a group that is corrected otherwise."""
    return set(group.get(UNCORRECTED) or ()) if group.get("corrected") else set()


def keep_constant(optimizer: Optimizer, group: Group) -> None:
    """Keep the decay of a whole group at its base, and hold no norm in it; a checkpoint has the decay of one moment."""
    if group["corrected"]:
        group.update(corrected=False, weight_decay=group["base_weight_decay"])
    drop_hold(optimizer, group)


def drop_hold(optimizer: Optimizer, group: Group) -> None:
    """Take back what `correct` or its checkpoint wrote to hold the norms of a group."""
    for key in (keys := keys_of_correct(optimizer)):
        group.pop(key, None)
    for state in (optimizer.state.get(p, {}) for p in group["params"]) if "hold" in keys else ():
        for key in HOLD_STATE.values():
            state.pop(key, None)


def _is_decayed_elsewhere(group: Group) -> bool:
    """Return whether the step itself must not decay a group: it is rescaled after it, or decayed before it (see `live`)."""
    return is_rescaled(group) or is_live(group)


def _parts(group: Group) -> Iterator[Group]:
    """Yield a group itself; or its corrected part, without decay if it is rescaled, and the uncorrected one, if any."""
    uncorrected, elsewhere = uncorrected_positions(group), _is_decayed_elsewhere(group)
    if not uncorrected and not elsewhere:
        yield group
        return
    decays = [0.0 if elsewhere else group["weight_decay"]]
    decays += [group["base_weight_decay"]] if uncorrected else []
    for chosen, decay in zip((False, True), decays, strict=False):
        part = {**group, "weight_decay": decay, "corrected": False}  # our own Scion would derive it again
        for key in ("params", "param_names"):
            if key in group:
                part[key] = [value for k, value in enumerate(group[key]) if (k in uncorrected) is chosen]
        yield part


# ---------------------------------------------------------------- checkpoints in which a group was split


def unsplit(groups: Sequence[Group], state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return a state_dict with the layout of `groups`, if it is one of ours from when `skip` split them; else None.

    There, the skipped parameters of each group are in a group of their own after all others.
    """
    saved, split = state_dict["param_groups"], [k for k, group in enumerate(groups) if group.get(UNCORRECTED)]
    if not split or len(saved) != len(groups) + len(split):
        return None
    whole = [{key: value for key, value in group.items() if key != "param_names"} for group in saved[: len(groups)]]
    for k, part in zip(split, saved[len(groups) :], strict=True):
        uncorrected, ids = set(groups[k][UNCORRECTED]), (iter(whole[k]["params"]), iter(part["params"]))
        sizes = (len(groups[k]["params"]) - len(uncorrected), len(uncorrected))
        if part.get("corrected") is not False or sizes != (len(whole[k]["params"]), len(part["params"])):
            return None
        whole[k]["params"] = [next(ids[position in uncorrected]) for position in range(sum(sizes))]
        whole[k][UNCORRECTED] = list(groups[k][UNCORRECTED])
    return {**state_dict, "param_groups": whole}


# ---------------------------------------------------------------- which parameters


def find_uncorrected(groups: Sequence[Group], skip: Any, model: nn.Module | None = None) -> dict[int, list[int]]:
    """Return group index -> positions of skipped parameters in it, none for the whole group. Writes nothing."""
    entries = [skip] if isinstance(skip, str | int | Tensor | nn.Module) else list(skip)
    if any(isinstance(entry, bool) for entry in entries):  # to Python, False is the index of the first group
        raise TypeError("correct: skip takes what to leave out, not True or False; pass skip=() to leave nothing out")
    indices = {entry for entry in entries if isinstance(entry, int)}
    if bad := [index for index in indices if not -len(groups) <= index < len(groups)]:
        raise ValueError(f"correct: skip names group {bad[0]}, but there are {len(groups)} groups")
    names = _names(groups, model)
    wanted: set[Tensor] = set()  # tensors hash by identity
    for entry in entries:
        if not isinstance(entry, int):
            wanted |= _meant(entry, names)
    positions: dict[int, list[int]] = {index % len(groups): [] for index in indices}
    for index, group in enumerate(groups):
        hits = [k for k, p in enumerate(group["params"]) if p in wanted]
        if hits and index not in positions:
            positions[index] = [] if len(hits) == len(group["params"]) else hits
    return positions


def output_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of a model's output layer, found as `param_groups` finds it."""
    sites = param_sites(model)
    try:
        outputs = find_outputs(model, sites, None, {})
    except ValueError as error:
        raise ValueError(
            f"correct: cannot tell which layer of {type(model).__name__} is the output; pass skip=<its name>, or skip=() "
            f"if none is ({error})"
        ) from None
    return [site.parameter for site in sites if id(site.parameter) in outputs and site.parameter.ndim > 1]


def _names(groups: Sequence[Group], model: nn.Module | None) -> dict[Tensor, list[str]]:
    """Return every parameter of the optimizer with the names that its group and the model have for it."""
    names: dict[Tensor, list[str]] = {}
    for group in groups:
        for p, name in zip(group["params"], group.get("param_names") or [None] * len(group["params"]), strict=True):
            names[p] = [] if name is None else [name]
    for site in param_sites(model) if model is not None else ():
        if site.parameter in names:
            names[site.parameter] += [*site.names, *site.plain_names]
    return names


def _meant(entry: Any, names: Mapping[Tensor, list[str]]) -> set[Tensor]:
    """Return the parameters that one entry of `skip` means; ValueError if there is none."""
    if isinstance(entry, str):
        return _named(entry, names)
    if not isinstance(entry, Tensor | nn.Module):
        raise TypeError(f"correct: skip takes parameters, modules, names, globs and group indices, got {entry!r}")
    meant = {p for p in (entry.parameters() if isinstance(entry, nn.Module) else [entry]) if p in names}
    if not meant:
        if isinstance(entry, Tensor):
            raise ValueError("correct: skip holds a parameter that this optimizer does not have")
        raise ValueError(f"correct: skip holds {type(entry).__name__}, of which this optimizer has no parameter")
    return meant


def _named(pattern: str, names: Mapping[Tensor, list[str]]) -> set[Tensor]:
    """Return the parameters that a name or glob means, of theirs or of a module's."""
    matches = {p for p, its in names.items() if first_match(its, (pattern, f"{pattern}.*"))}
    if not matches:
        known = {name for its in names.values() for name in its}
        known |= {name.rpartition(".")[0] for name in known}
        remedy = suggest(pattern, known) or "give the optimizer model.named_parameters(), or correct() the model"
        raise ValueError(f"correct: skip names {pattern!r}, which no group has; {remedy}")
    return matches
