"""Lay out what `steadynorm predict` shows: tables, notes, JSON rows and the forecast's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from steadynorm.cli.text import format_value
from steadynorm.conversion.equivalents import find_equivalents
from steadynorm.conversion.translation import Translation, Tuned
from steadynorm.prediction import Level, Match, NormForecast, Prediction

HalfLives = Callable[[float], dict[str, float]]  # steps -> a half-life by unit

_TITLES = {"AdamW": "AdamW", "Lion": "Lion", "Muon": "torch's Muon"}
_NOTES = {
    "AdamW": (
        "`sn.correct(optimizer)` keeps these norms while the lr changes. In place of the decay it takes the target above.",
        "ScionC: the same effective lr and the same half-life, so the same RMS by the paper's formula. Start tuning from there: "
        "which lr is best for the loss is not part of the theory.",
    ),
    "Lion": (
        "`sn.LionC`, or `sn.correct(lion)`, keeps these norms with lr, decay and betas as they are. In place of the decay it takes "
        "the target above.",
        "ScionC: the same effective lr and the same half-life. Lion's two betas have no alpha, so alpha is ScionC's default. No run "
        "of ours has tried this translation: tune the lr from there.",
    ),
    "Muon": (
        "`sn.correct(muon)` keeps these norms while lr and momentum change. In place of the decay it takes the target above.",
        "ScionC: the same effective lr and the same half-life. With polar=\"newton-schulz\" it takes Muon's own steps; its default "
        "polar factors are more exact and longer, so that norms end higher.",
    ),
}  # fmt: skip
_OUTPUT_NOTE = (
    "The output layer keeps constant decay: ask for its shape with --lmo sign, and use the decay instead of the target."
)


def _new_table(title: str, columns: Sequence[str], *, justify: Any = "right") -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify=justify if column else "left")
    return table


def _add_rows(table: Table, rows: Mapping[str, Sequence[Any]]) -> None:
    for label, values in rows.items():
        table.add_row(label, *map(format_value, values))


def prediction_table(names: Sequence[str], predictions: Sequence[Prediction], half_lives: HalfLives) -> Table:
    """Return the steady states of one setting, one column per shape."""
    setting = predictions[0].setting
    has_target = setting.steady_norm_sq is not None
    wish = (
        f"target C² {format_value(setting.steady_norm_sq)}"
        if has_target
        else f"decay {format_value(setting.weight_decay)}"
    )
    title = f"lr {format_value(setting.lr)}, alpha {format_value(setting.alpha)}, {wish}"
    table = _new_table(title, ["", *names])
    _add_rows(table, {"effective lr": [row.effective_lr for row in predictions]})
    levels = {"decay, paper's" if has_target else "decay": [row.paper for row in predictions]}
    if has_target:
        levels["decay, exact"] = [row.exact for row in predictions]
    for label, columns in levels.items():
        table.add_section()
        _add_rows(table, _level_rows(label, columns, half_lives))
    return table


def _level_rows(label: str, levels: Sequence[Level], half_lives: HalfLives) -> dict[str, list[float]]:
    fields = {
        label: "weight_decay",
        "  eta = lr * decay": "eta",
        "  C² by that formula": "formula_norm_sq",
        "  C², exact": "steady_norm_sq",
        "  weight norm |θ|": "weight_norm",
        "  RMS per element": "rms",
    }
    by_unit = [half_lives(level.half_life) for level in levels]
    return {name: [getattr(level, field) for level in levels] for name, field in fields.items()} | {
        f"  half-life, {unit}": [half_life[unit] for half_life in by_unit] for unit in by_unit[0]
    }


def matching_table(names: Sequence[str], matches: Sequence[Sequence[Match]]) -> Table:
    """Return the decays that keep C² at other alphas and learning rates."""
    table = _new_table("Decay that keeps C² (paper's formula / exact)", ["lr", "alpha", "effective lr", *names])
    for row in zip(*matches, strict=True):
        decays = [f"{format_value(match.paper_decay)} / {format_value(match.exact_decay)}" for match in row]
        table.add_row(*map(format_value, (row[0].lr, row[0].alpha, row[0].effective_lr)), *decays)
    return table


def equivalents_table(names: Sequence[str], same: Sequence[dict[str, dict[str, Any]]]) -> Table:
    """Return the same training in the conventions of other optimizers, one column per shape."""
    table = _new_table("The same in other words", ["", *names], justify="left")
    for optimizer in dict.fromkeys(key for settings in same for key in settings):
        cells = (settings.get(optimizer, {}) for settings in same)
        table.add_row(optimizer, *(", ".join(f"{k} {format_value(v)}" for k, v in cell.items()) for cell in cells))
    return table


def translation_table(tuned: Tuned, names: Sequence[str], rows: Sequence[Translation], half_lives: HalfLives) -> Table:
    """Return the steady state of the tuned settings and ScionC's settings, one column per shape."""
    settings = ", ".join(f"{key} {format_value(value)}" for key, value in asdict(tuned).items())
    table = _new_table(f"{_TITLES[tuned.name]}: {settings}", ["", *names])
    steady = [row.steady for row in rows]
    by_unit = [half_lives(state.half_life) if state else {} for state in steady]
    units = next(filter(None, by_unit))

    def collect(records: Sequence[Any], field: str) -> list[Any]:
        return [record and getattr(record, field) for record in records]

    _add_rows(
        table,
        {
            "eta = lr * decay": collect(steady, "eta"),
            **{f"half-life, {unit}": [half_life.get(unit) for half_life in by_unit] for unit in units},
            "effective lr": collect(steady, "effective_lr"),
            "weight norm |θ|": collect(steady, "weight_norm"),
            "RMS per element": collect(steady, "rms"),
            "correct(steady_norm_sq=...)": collect(steady, "target"),
        },
    )
    table.add_section()
    ours = [row.prediction and row.prediction.setting for row in rows]
    _add_rows(
        table,
        {
            "the same in ScionC: lmo": [setting and setting.entry.name for setting in ours],
            "  lr": collect(ours, "lr"),
            "  alpha": collect(ours, "alpha"),
            "  nesterov": collect(ours, "nesterov"),
            "  steady_norm_sq (C²)": collect(ours, "steady_norm_sq"),
            "  decay it means at this lr": [row.decay for row in rows],
            "  RMS per element, exact kernel": [row.prediction and row.prediction.paper.rms for row in rows],
        },
    )
    return table


def translation_notes(tuned: Tuned, rows: Sequence[Translation]) -> list[str]:
    """Return sentences that explain the translation: shapes left out, what keeps the norms, the output layer."""
    refused = dict.fromkeys(f"{'x'.join(map(str, row.shape))}: {row.refusal}." for row in rows if row.refusal)
    return [*refused, *_NOTES[tuned.name], *([] if tuned.name == "Muon" else [_OUTPUT_NOTE])]


def translation_json(tuned: Tuned, row: Translation) -> dict[str, Any]:
    """Return one translation as JSON holds it."""
    values: dict[str, Any] = {"optimizer": tuned.name, **asdict(tuned), "shape": row.shape}
    if row.steady is None or row.prediction is None:
        return values | {"refusal": row.refusal}
    setting, level = row.prediction.setting, row.prediction.paper
    scionc = {
        "lmo": setting.entry.name, "lr": setting.lr, "alpha": setting.alpha, "nesterov": setting.nesterov,
        "steady_norm_sq": setting.steady_norm_sq, "weight_decay": row.decay, "rms": level.rms,
    }  # fmt: skip
    return values | {"steady": asdict(row.steady), "scionc": scionc, "equivalents": find_equivalents(setting)}


def write_page(path: Path, title: str, forecasts: Mapping[str, NormForecast]) -> None:
    """Write an HTML page with the forecast of each shape and the learning rate."""
    from steadynorm.report import page

    lr = next(iter(forecasts.values())).lr
    steps = list(range(1, len(lr) + 1, max(1, len(lr) // 1000)))  # about a thousand points per line
    blocks: list[page.Block] = []
    for shape, forecast in forecasts.items():
        series = [
            page.Series(label, steps, [norms[step - 1] for step in steps], toggle=label)
            for label, norms in (("constant decay", forecast.constant), ("corrected decay", forecast.corrected))
        ]
        blocks.append(page.Plot(f"{shape}: weight norm", "step", "|theta|", series, zero=True))
    lr_series = page.Series("lr", steps, [lr[step - 1] for step in steps])
    blocks.append(page.Plot("Learning rate", "step", "lr", [lr_series]))
    about = "Expected weight norm if updates were independent of the weights."
    page.write(page.Page(title, about, blocks, {}), path)
