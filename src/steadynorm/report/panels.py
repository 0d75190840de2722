"""The plots of a report: one per quantity and group, in sections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from steadynorm import records
from steadynorm.records import QUANTITIES, Quantity, Run
from steadynorm.report import page


@dataclass(frozen=True)
class _Panel:
    """One plot: `key` as a solid line, called measured, and the keys of `dashed` as dashed ones, called by their values."""

    key: str
    dashed: Mapping[str, str] = field(default_factory=dict)
    zero: bool = False
    log: bool = False  # at first


@dataclass(frozen=True)
class _Section:
    title: str
    text: str
    panels: tuple[_Panel, ...]


SECTIONS = (
    _Section("Loss", "", (_Panel("loss"), _Panel("val_loss"), _Panel("val_accuracy"))),
    _Section(
        "Norms",
        "Corrected decay holds the weight norm; constant decay lets it follow the learning rate. The forecast is the norm "
        "that updates independent of the weights would give: compare it with the hidden matrices. A second forecast knows "
        "how long updates turned out to be, so that what is left between it and the measured norm is alignment. The "
        "gradient of an output layer pushes its weights outward, so that its norm lies above.",
        (
            _Panel(
                "weight_norm",
                {"forecast_norm": "forecast", "forecast_norm_measured": "forecast, updates measured"},
            ),
            _Panel("grad_norm", log=True),  # the first steps would hide the rest
            _Panel("spectral_norm"),
            _Panel("sign_norm"),
            _Panel("bias_norm"),
            _Panel("embedding_norm"),
        ),
    ),
    _Section(
        "Alignment",
        "The cosine between weights and update. Momentum alone makes it negative, as expected below; what exceeds that says "
        "whether a layer's gradient pushes its weights outward.",
        (_Panel("alignment", {"expected_alignment": "expected"}), _Panel("excess_alignment")),
    ),
    _Section(
        "Updates",
        "How long updates are beside their nominal length, and how far one step moves and turns the weights.",
        (_Panel("update_norm"), _Panel("relative_update"), _Panel("angle")),
    ),
    _Section(
        "Schedules",
        "",
        tuple(
            _Panel(key, zero=True)
            for key in ("lr", "alpha", "effective_lr", "weight_decay", "target_norm", "steady_norm_sq")
        ),
    ),
)


def plot_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return the sections of known quantities."""
    blocks: list[page.Block] = []
    for section in SECTIONS:
        plots = [plot for panel in section.panels for plot in _plots(runs, panel)]
        if plots:
            blocks += [page.Text(section.title, [section.text] if section.text else []), *plots]
    return blocks


def _plots(runs: Sequence[Run], panel: _Panel) -> list[page.Plot]:
    """Return the panel's plot, and one per group it was recorded for ("lr/head")."""
    groups = dict.fromkeys(
        key.removeprefix(panel.key)
        for run in runs
        for key in run.columns
        if key == panel.key or _base(key) == panel.key
    )
    order = [f"/{role}" for role in records.ROLE_LABELS] if panel.key in records.SPLIT else []
    ordered = sorted(groups, key=lambda group: (order.index(group) if group in order else len(order), group))
    plots = [_plot(runs, panel, group) for group in ordered]
    return [plot for plot in plots if plot.series]


def _plot(runs: Sequence[Run], panel: _Panel, group: str = "") -> page.Plot:
    quantity, series = _quantity(panel.key + group), []
    for run in runs:
        for key, name in {panel.key: "measured", **panel.dashed}.items():
            steps, values = run.finite(key + group)
            if len(values):
                style = "line" if key == panel.key else "dash"
                series.append(page.Series(name, steps, values, style=style, toggle=run.name))
    return page.Plot(
        quantity.label, "step", quantity.unit, series, quantity.description, log_y=panel.log, zero=panel.zero
    )


def other_plot_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return plots of what no section shows."""
    drawn = {key for section in SECTIONS for panel in section.panels for key in (panel.key, *panel.dashed)}
    others = dict.fromkeys(key for run in runs for key in run.columns if key not in drawn and _base(key) not in drawn)
    plots = [plot for plot in (_plot(runs, _Panel(key)) for key in others) if plot.series]
    return [page.Text("More"), *plots] if plots else []


def _base(key: str) -> str:
    """Return the known quantity that a group's key belongs to: "lr" of "lr/head"."""
    base = key.partition("/")[0]
    return base if base in QUANTITIES else key


def _quantity(key: str) -> Quantity:
    known, group = QUANTITIES.get(_base(key)), key.partition("/")[2]
    if known is None:
        return Quantity(key, "", "")
    if group and _base(key) in records.SPLIT:
        name = records.ROLE_LABELS.get(group, group)
        return replace(known, label=f"{known.label} · {name}", description=f"Norm of the {name}.")
    return replace(known, label=f"{known.label} · {group}") if group else known
