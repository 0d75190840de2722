"""Our own optimizers in random settings, each with its slow fp64 twin (tests/twins_optim.py)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import twins_optim as twins
from contract import LR, REGISTRY, Entry
from hypothesis import strategies as st
from strategies import log_floats
from torch import Tensor

from steadynorm import lmo as lmos
from steadynorm import theory
from steadynorm.theory.updates import UPDATES

RESCALED = ("AdamC balance", "AdamC fixed")  # hooks hold these: their twins are in test_hold_foreign.py
MUON = ("MuonC", "MuonC balance", "MuonC rest")  # takes matrices only, or groups of its own: test_muon.py has its twins
OWN = {entry.name: entry for entry in REGISTRY if entry.own and entry.name not in (*RESCALED, *MUON)}
NORMALISED = [name for name, entry in OWN.items() if entry.normalised]

alphas = log_floats(0.05, 1.0)
betas = st.tuples(st.floats(0.01, 0.98), st.floats(0.5, 0.999))
decays = st.floats(0.0, 2.0)
targets = log_floats(0.8, 4.0)  # of the mean square; reachable at the lrs that are drawn


@dataclass(frozen=True)
class Recipe:
    """An entry of the contract's registry with its own settings; it prints as what it is."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> Entry:
        return OWN[self.name]

    def __call__(self, params: Any, **overrides: Any) -> Any:
        """Return the optimizer. A list of groups is kept; anything else is grouped by the lmo and blocks that fit."""
        settings = {"lr": LR} | self.settings | overrides
        if settings.pop("tensor_lr", False):
            settings["lr"] = torch.tensor(settings["lr"], dtype=torch.float64)
        own = {key: settings.pop(key) for key in ("lmo", "blocks", "corrected") if key in settings}
        params = list(params.values()) if isinstance(params, dict) else list(params)
        groups = [group for each in params for group in self._groups(each, own)]
        merged: list[dict[str, Any]] = []
        for group in groups if not isinstance(params[0], dict) else ():
            same = [g for g in merged if all(g.get(key) == group.get(key) for key in own)]
            if same:
                same[0]["params"] += group["params"]
            else:
                merged.append(group)
        return self.entry(merged or groups, **settings)

    def _groups(self, given: Any, own: dict[str, Any]) -> list[dict[str, Any]]:
        group = given if isinstance(given, dict) else {"params": [given]}
        return [{**group, "params": [p], **self._fitting(p, own)} for p in group["params"]]

    def _fitting(self, p: Tensor, own: dict[str, Any]) -> dict[str, Any]:
        if "lmo" not in own:
            return own
        return {**own, **dict(zip(("lmo", "blocks"), fitting(tuple(p.shape), own["lmo"], own["blocks"]), strict=True))}

    def twin(
        self, theta: Tensor, g: Callable[[int, Tensor], Tensor], lrs: list[float], momenta: list[Any]
    ) -> list[Tensor]:
        """Return [theta_1, ...] in fp64; `momenta` holds alpha or betas of every step."""
        s, name = self.settings, self.name.split()[0]
        sign = -1.0 if s.get("maximize") else 1.0
        args = (theta, lambda t, at: sign * g(t, at), lrs)
        if name in ("Scion", "ScionC"):
            lmo, blocks = fitting(tuple(theta.shape), s["lmo"], s["blocks"])
            return twins.scion(
                *args,
                momenta,
                lmo=lmo,
                blocks=blocks,
                decay=s["weight_decay"] if name == "Scion" else None,
                C2=[s.get("steady_norm_sq", 0.0)] * len(lrs),
                nesterov=s["nesterov"],
                exact=self.name == "ScionC exact",
                hold=self.name.split()[1] if self.entry.held else "decay",
                cautious=self.name == "ScionC cautious",
                keep=torch.float64 if s["momentum_dtype"] is None else torch.bfloat16,
            )
        if name == "RenormalizedAdamW":
            return twins.renormalized_adamw(*args, s["weight_decay"], s["betas"], s["eps"])
        peak, decay, target = s["lr"], s["weight_decay"], s.get("steady_norm_sq")
        constant = [decay] * len(lrs) if not s["corrected"] else []
        if name == "AdamC":
            absolute = [lr / (2 * target) for lr in lrs] if target is not None and decay else []
            how = {"decays": constant or absolute, "amsgrad": s["amsgrad"]}
            return twins.adamc(*args, peak, decay, s["betas"], s["eps"], **how)
        if name == "LionC":
            absolute = [
                theory.lion_weight_decay_for(target, lr, *b)
                for lr, b in zip(lrs, momenta, strict=True)
                if target is not None and decay
            ]
            return twins.lionc(*args, momenta, peak, decay, s["betas"], decays=constant or absolute)
        how = {"nesterov": self.name.endswith("nesterov"), "trace": self.name.endswith("trace")}
        return twins.sgdc(*args, momenta, peak, decay, start=s["alpha"], decays=constant, **how)


def fitting(shape: tuple[int, ...], name: str, blocks: Any) -> tuple[str, Any]:
    """Return the lmo and blocks for a shape: those requested if they fit, else the lmo by shape, else one block."""
    lmo = lmos.get("by-shape" if name not in UPDATES or len(shape) < UPDATES[name].view.least_ndim else name, shape)
    if blocks == "unequal":  # the first third of the outputs, then what is left
        length = shape[lmo.view.block_dims["outputs"]] if shape else 1
        blocks = (length // 3, length - length // 3) if length > 2 else 1
    try:
        lmo.check(shape, blocks)
    except ValueError:
        blocks = 1
    return lmo.name, blocks if 0 not in shape else 1


@st.composite
def recipes(
    draw: Any, names: Any = tuple(OWN), *, polar: tuple[str, ...] = ("express", "newton-schulz", "svd")
) -> Recipe:
    """Draw one of our optimizers, and settings that it takes for any shape."""
    name = draw(st.sampled_from(list(names)))
    lrs = log_floats(1e-3, 0.02 if "cautious" in name else 0.2)  # masked decay cannot balance large steps
    s: dict[str, Any] = {"lr": draw(lrs), "maximize": draw(st.booleans())}
    if OWN[name].tensor_lr:
        s["tensor_lr"] = draw(st.booleans())
    if name.startswith("Scion"):
        wanted = st.sampled_from(["by-shape", "by-shape", *sorted(lmos.LMOS)])
        s |= {
            "alpha": draw(alphas),
            "lmo": draw(wanted),
            "blocks": draw(st.sampled_from([1, 1, 2, 3, "unequal", ("inputs", 2)])),
        }
        known = [
            method for method in polar if name != "ScionC exact" or method != "newton-schulz"
        ]  # the twin's U^2 is exact
        s |= {"momentum_dtype": draw(st.sampled_from([None, None, "bfloat16"])), "polar": draw(st.sampled_from(known))}
        s["nesterov"] = name == "ScionC nesterov" or draw(st.booleans())
        s |= {"weight_decay": draw(decays)} if name == "Scion" else {"steady_norm_sq": draw(targets)}
        return Recipe(name, s)
    s["weight_decay"] = draw(
        decays if name != "SGDC trace" else st.floats(0.0, 0.01)
    )  # goes with alpha^-2: below 1 a step
    if name != "RenormalizedAdamW":
        s["corrected"] = draw(st.sampled_from([True, True, False]))
    if name.startswith("SGDC"):
        return Recipe(name, s | {"alpha": draw(alphas)})
    s["betas"] = draw(betas)
    if name != "LionC":
        s["eps"] = draw(log_floats(1e-10, 1e-3))
    if name != "RenormalizedAdamW":  # a target without any decay is refused
        s["steady_norm_sq"] = draw(st.one_of(st.none(), st.none(), targets)) if s["weight_decay"] else None
    if name.startswith("AdamC"):
        s["amsgrad"] = draw(st.booleans())
    return Recipe(name, s)


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the lr as a scheduler does: a tensor in place."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
