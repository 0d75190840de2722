"""Lay out what `steadynorm predict` shows: tables, notes, JSON rows and the forecast's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from steadynorm.cli.text import format_value, new_table
from steadynorm.conversion.equivalents import find_equivalents
from steadynorm.conversion.knobs import Knob
from steadynorm.conversion.translation import Translation, Tuned
from steadynorm.prediction import Match, NormForecast, ParamSetting, Prediction

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
_LEVEL_FIELDS = {
    "  eta = lr * decay": "eta",
    "  C² by that formula": "formula_norm_sq",
    "  C², exact": "steady_norm_sq",
    "  weight norm |θ|": "weight_norm",
    "  RMS per element": "rms",
}
_STEADY_FIELDS = {
    "effective lr": "effective_lr",
    "weight norm |θ|": "weight_norm",
    "RMS per element": "rms",
    "correct(steady_norm_sq=...)": "target",
}
_SCIONC_FIELDS = {
    "the same in ScionC: lmo": "prediction.setting.entry.name",
    "  lr": "prediction.setting.lr",
    "  alpha": "prediction.setting.alpha",
    "  nesterov": "prediction.setting.nesterov",
    "  steady_norm_sq (C²)": "prediction.setting.steady_norm_sq",
    "  decay it means at this lr": "prediction.paper.weight_decay",
    "  RMS per element, exact kernel": "prediction.paper.rms",
}
_WISHES = {
    "half-life": "a half-life of {} steps",
    "RMS": "an RMS of {}",
    "relative update": "a relative update of {}",
}
_OUTPUT_NOTE = (
    "The output layer keeps constant decay: ask for its shape with --lmo sign, and use the decay instead of the target."
)


def _add_fields(table: Table, rows: Sequence[Any], fields: Mapping[str, str]) -> None:
    """Add a line per field, by its label; a row that is None has an empty cell."""
    for label, field in fields.items():
        table.add_row(label, *("" if row is None else format_value(attrgetter(field)(row)) for row in rows))


def _add_half_lives(table: Table, rows: Sequence[Any], half_lives: HalfLives, indent: str = "") -> None:
    by_unit = [None if row is None else half_lives(row.half_life) for row in rows]
    for unit in next(filter(None, by_unit)):
        table.add_row(
            f"{indent}half-life, {unit}", *("" if life is None else format_value(life[unit]) for life in by_unit)
        )


def prediction_table(names: Sequence[str], predictions: Sequence[Prediction], half_lives: HalfLives) -> Table:
    """Return the steady states of one setting, one column per shape."""
    setting = predictions[0].setting
    has_target = setting.steady_norm_sq is not None
    wish = (
        f"target C² {format_value(setting.steady_norm_sq)}"
        if has_target
        else f"decay {format_value(setting.weight_decay)}"
    )
    depends_on_shape = len({row.setting.lr for row in predictions}) > 1  # translated from a fixed norm
    title = f"lr {format_value(setting.lr)}, alpha {format_value(setting.alpha)}, {wish}"
    title = f"ScionC's settings, alpha {format_value(setting.alpha)}" if depends_on_shape else title
    table = new_table(title, ["", *names], right=names)
    if depends_on_shape:
        _add_fields(table, predictions, {"lr": "setting.lr", "steady_norm_sq (C²)": "setting.steady_norm_sq"})
    _add_fields(table, predictions, {"effective lr": "effective_lr"})
    levels = {"decay, paper's" if has_target else "decay": [row.paper for row in predictions]}
    if has_target:
        levels["decay, exact"] = [row.exact for row in predictions]
    for label, columns in levels.items():
        table.add_section()
        _add_fields(table, columns, {label: "weight_decay", **_LEVEL_FIELDS})
        _add_half_lives(table, columns, half_lives, "  ")
    return table


def matching_table(names: Sequence[str], matches: Sequence[Sequence[Match]]) -> Table:
    """Return the decays that keep C² at other alphas and learning rates; the cell of a shape that has none is empty."""
    columns = ["lr", "alpha", "effective lr", *names]
    table = new_table("Decay that keeps C² (paper's formula / exact)", columns, right=columns)
    by_row = [{(match.lr, match.alpha, match.effective_lr): match for match in column} for column in matches]
    for row in dict.fromkeys(row for column in by_row for row in column):
        row_matches = [column.get(row) for column in by_row]
        decays = (
            match and f"{format_value(match.paper_decay)} / {format_value(match.exact_decay)}" for match in row_matches
        )
        table.add_row(*map(format_value, row), *decays)
    return table


def equivalents_table(names: Sequence[str], same: Sequence[dict[str, dict[str, Any]]]) -> Table:
    """Return the same training in the conventions of other optimizers, one column per shape."""
    table = new_table("The same in other words", ["", *names])
    for optimizer in dict.fromkeys(key for settings in same for key in settings):
        cells = (settings.get(optimizer, {}) for settings in same)
        table.add_row(optimizer, *(", ".join(f"{k} {format_value(v)}" for k, v in cell.items()) for cell in cells))
    return table


def knob_lines(name: str, setting: ParamSetting, now: Knob, knobs: Sequence[Knob]) -> list[str]:
    """Return sentences that say which knob to turn for each wish, and what else would change."""
    targeted = setting.steady_norm_sq is not None
    dials = {"lr": "lr", **({"target C²": "steady_norm_sq"} if targeted else {"decay": "weight_decay"})}
    outcomes = {"half-life": "half_life", "RMS": "rms", "relative update": "relative_update"}

    def moves(knob: Knob, field: str) -> bool:
        before, after = getattr(now, field), getattr(knob, field)
        return abs(after - before) > 1e-6 * before

    lines = [f"\nWhich knob to turn for {name} (computed with the exact kernel; --json has every shape)"]
    for knob in knobs:
        field = outcomes[knob.wish]
        turned = [
            f"{dial} {format_value(getattr(knob, key))} (now {format_value(getattr(now, key))})"
            for dial, key in dials.items()
            if moves(knob, key)
        ]
        others = [
            f"{outcome} {'becomes' if moves(knob, key) else 'stays'} {format_value(getattr(knob, key))}"
            for outcome, key in outcomes.items()
            if outcome != knob.wish
        ]
        wish = _WISHES[knob.wish].format(format_value(getattr(knob, field)))
        lines.append(
            f"  For {wish} (now {format_value(getattr(now, field))}): set {' and '.join(turned) or 'nothing'}; {', '.join(others)}."
        )
    return lines


def translation_table(tuned: Tuned, names: Sequence[str], rows: Sequence[Translation], half_lives: HalfLives) -> Table:
    """Return the steady state of the tuned settings and ScionC's settings, one column per shape."""
    settings = ", ".join(f"{key} {format_value(value)}" for key, value in asdict(tuned).items())
    table = new_table(f"{_TITLES[tuned.name]}: {settings}", ["", *names], right=names)
    steady = [row.steady for row in rows]
    _add_fields(table, steady, {"eta = lr * decay": "eta"})
    _add_half_lives(table, steady, half_lives)
    _add_fields(table, steady, _STEADY_FIELDS)
    table.add_section()
    _add_fields(table, [row if row.prediction else None for row in rows], _SCIONC_FIELDS)
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
        "steady_norm_sq": setting.steady_norm_sq, "weight_decay": level.weight_decay, "rms": level.rms,
    }  # fmt: skip
    return values | {"steady": asdict(row.steady), "scionc": scionc, "equivalents": find_equivalents(setting)}


def write_page(path: Path, title: str, forecasts: Mapping[str, NormForecast]) -> Path:
    """Write an HTML page with the forecast of each shape and the learning rate, and return its path."""
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
    return page.write(page.Page(title, about, blocks, {}), path)
