"""What `steadynorm predict --optimizer adamw|lion|muon` shows: that optimizer's forecast, and ScionC's settings beside it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from steadynorm import prediction as predict
from steadynorm.conversion import equivalents, translation
from steadynorm.conversion.translation import Tuned

SCIONC = "scionc"
OPTIMIZERS = (SCIONC, *translation.TUNED)
_TITLES = {"adamw": "AdamW", "lion": "Lion", "muon": "torch's Muon"}

_NOTES = {
    "adamw": (
        "`sn.correct(optimizer)` keeps these norms while the lr changes. In place of the decay it takes the target above.",
        "ScionC: the same effective lr and the same half-life, so the same RMS by the paper's formula. Start tuning from there: "
        "which lr is best for the loss is not part of the theory.",
    ),
    "lion": (
        "`sn.LionC`, or `sn.correct(lion)`, keeps these norms with lr, decay and betas as they are. In place of the decay it takes "
        "the target above.",
        "ScionC: the same effective lr and the same half-life. Lion's two betas have no alpha, so alpha is ScionC's default. No run "
        "of ours has tried this translation: tune the lr from there.",
    ),
    "muon": (
        "`sn.correct(muon)` keeps these norms while lr and momentum change. In place of the decay it takes the target above.",
        "ScionC: the same effective lr and the same half-life. With polar=\"newton-schulz\" it takes Muon's own steps; its default "
        "polar factors are more exact and longer, so that norms end higher.",
    ),
}  # fmt: skip
_OUTPUT_NOTE = (
    "The output layer keeps constant decay: ask for its shape with --lmo sign, and use the decay instead of the target."
)


@dataclass(frozen=True)
class Row:
    """One shape: where it settles, and ScionC's setting for it; or why there is none."""

    shape: tuple[int, ...]
    refusal: str
    steady: translation.Steady | None = None
    prediction: predict.Prediction | None = None  # of ScionC's setting

    @property
    def decay(self) -> float | None:
        """The decay at this lr that ScionC's target means."""
        return None if self.prediction is None else self.prediction.paper.weight_decay


def tuned_of(name: str, lr: float, weight_decay: float | None, **words: Any) -> Tuned:
    """The settings of an optimizer; ValueError if one of them is missing or belongs to another."""
    if name not in translation.TUNED:
        raise ValueError(f"optimizer {name!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    if weight_decay is None:
        raise ValueError(f"--optimizer {name}: give the --weight-decay you tuned; --steady-norm-sq is ScionC's")
    kind = translation.TUNED[name]
    given = {key: value for key, value in words.items() if value is not None}
    if foreign := sorted(given.keys() - kind.__dataclass_fields__.keys()):
        raise ValueError(f"--optimizer {name} has no {', '.join(foreign)}")
    return kind(lr, weight_decay, **given)


def rows(tuned: Tuned, shapes: Sequence[tuple[int, ...]], lmo: str, blocks: int, alpha: float | None) -> list[Row]:
    """One row per shape; ValueError if the optimizer trains none of them."""
    out = []
    for shape in shapes:
        if refusal := tuned.refusal(shape):
            out.append(Row(shape, refusal))
            continue
        setting = translation.to_scionc(tuned, shape, lmo, blocks=blocks, alpha=alpha)
        out.append(Row(shape, "", translation.steady(tuned, shape), predict.predict(setting)))
    if all(row.refusal for row in out):
        raise ValueError(f"--shape {'x'.join(map(str, out[0].shape))}: {out[0].refusal}")
    return out


def plain(tuned: Tuned, row: Row) -> dict[str, Any]:
    """One row as JSON holds it."""
    found: dict[str, Any] = {"optimizer": tuned.name, **asdict(tuned), "shape": row.shape}
    if row.steady is None or row.prediction is None:
        return found | {"refusal": row.refusal}
    setting, level = row.prediction.setting, row.prediction.paper
    scionc = {
        "lmo": setting.entry.name, "lr": setting.lr, "alpha": setting.alpha, "nesterov": setting.nesterov,
        "steady_norm_sq": setting.steady_norm_sq, "weight_decay": row.decay, "rms": level.rms,
    }  # fmt: skip
    return found | {"steady": asdict(row.steady), "scionc": scionc, "equivalents": equivalents.equivalents(setting)}


def table(name: str, tuned: Tuned, names: Sequence[str], found: Sequence[Row], per_step: dict[str, float]) -> Table:
    """The forecast and ScionC's settings, one column per shape; per_step: other units of the half-life."""
    words = ", ".join(f"{key} {_shown(value)}" for key, value in asdict(tuned).items())
    out = Table(title=f"{_TITLES[name]}: {words}", title_justify="left")
    for title in ("", *names):
        out.add_column(title, justify="right" if title else "left")

    def add(label: str, *values: Any) -> None:
        out.add_row(label, *("" if value is None else _shown(value) for value in values))

    steady = [row.steady for row in found]
    add("eta = lr * decay", *(s and s.eta for s in steady))
    for unit, factor in {"steps": 1.0, **per_step}.items():
        add(f"half-life, {unit}", *(s and s.half_life * factor for s in steady))
    add("effective lr", *(s and s.effective_lr for s in steady))
    add("weight norm |θ|", *(s and s.weight_norm for s in steady))
    add("RMS per element", *(s and s.rms for s in steady))
    add("correct(steady_norm_sq=...)", *(s and s.target for s in steady))
    out.add_section()
    ours = [row.prediction for row in found]
    add("the same in ScionC: lmo", *(p and p.setting.entry.name for p in ours))
    add("  lr", *(p and p.setting.lr for p in ours))
    add("  alpha", *(p and p.setting.alpha for p in ours))
    add("  nesterov", *(p and p.setting.nesterov for p in ours))
    add("  steady_norm_sq (C²)", *(p and p.setting.steady_norm_sq for p in ours))
    add("  decay it means at this lr", *(row.decay for row in found))
    add("  RMS per element, exact kernel", *(p and p.paper.rms for p in ours))
    return out


def notes(name: str, found: Sequence[Row]) -> list[str]:
    """What to know of the table, in sentences."""
    refused = dict.fromkeys(f"{'x'.join(map(str, row.shape))}: {row.refusal}." for row in found if row.refusal)
    return [*refused, *_NOTES[name], *([] if name == "muon" else [_OUTPUT_NOTE])]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(_shown, value))
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.5g}" if math.isfinite(value) else str(value)
