"""Write the pages of the paper's experiments, docs/paper/*.md and their pictures, and who won, from results/. No number is typed.

Run from the repository's root: .venv/bin/python docs/experiments.py   (`make docs` does it as well). It also fills the boxes
"what you gain" in docs/, between <!-- gain --> and <!-- /gain -->.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from steadynorm.lab import paper
from steadynorm.lab.paper import runner
from steadynorm.lab.paper.claims import LEAST, VERDICTS, JudgedClaim
from steadynorm.lab.paper.comparison import COMPARISONS, Comparison, Pair, pairs
from steadynorm.lab.paper.experiment import Outcome
from steadynorm.lab.paper.statistics import CONFIDENCE, holm
from steadynorm.report import page

ROOT = Path(__file__).parent.parent
COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#b91c1c", "#a16207", "#475569")
MOST_PLOTS = 9
AFTER = "of these after Holm"
BOXES = (Path("docs/index.md"), Path("docs/correct.md"))  # pages with what you gain, between markers
GAINS = {  # what you change -> folder, arm, and what was trained
    "AdamW → corrected": ("fig-adamc", "AdamC", "ViT, accuracy in %"),
    "torch's Muon → corrected": ("fig-muon", "Muon, corrected", "GPT, validation loss"),
    "Scion → ScionC": ("fig-nanogpt", "ScionC", "GPT, validation loss"),
}
STYLE = {"svg.hashsalt": "steadynorm", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False,
         "axes.spines.right": False, "figure.facecolor": "white", "lines.linewidth": 1.2}  # fmt: skip


def results(root: Path) -> Iterator[Path]:
    """The folders of finished experiments, in the order of `paper list`."""
    order = list(paper.EXPERIMENTS)
    found = filter(runner.is_kept, (root / "results").iterdir())
    yield from sorted(found, key=lambda each: (order.index(_summary(each)["experiment"]), each.name))


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / runner.SUMMARY).read_text(encoding="utf-8"))


def write(root: Path, out: Path) -> None:
    """Write all pages and pictures again."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "img").mkdir(parents=True)
    for folder in results(root):
        name, context = runner.context_of(folder)
        outcome, _ = runner.judge(paper.get(name), context)
        for path, text in of_experiment(folder, outcome).items():
            (out / path).write_text(text, encoding="utf-8")
    for path, text in overviews(root).items():
        (out / path).write_text(text, encoding="utf-8")


def of_experiment(folder: Path, outcome: Outcome) -> dict[str, str]:
    """Return the page and the picture of an experiment, by the paths they go to."""
    name, context = runner.context_of(folder)
    certain = _certain(results(folder.parent.parent))
    text = _page(folder, outcome, runner.not_run(paper.get(name), context), certain)
    plots = [each for each in outcome.blocks if isinstance(each, page.Plot | page.HeatMap)]
    return {f"{folder.name}.md": text, f"img/{folder.name}.svg": draw(plots[:MOST_PLOTS])}


def overviews(root: Path) -> dict[str, str]:
    """Return the pages about all experiments, by the paths they go to."""
    calibration = json.loads((root / "results" / "calibration.json").read_text(encoding="utf-8"))
    return {
        "index.md": _index(root, list(results(root)), _certain(results(root))),
        "calibration.md": _calibration(calibration),
    }


Certain = dict[tuple[str, str], bool]  # folder and claim: does the verdict stay after Holm's correction?


def _certain(folders: Iterable[Path]) -> Certain:
    """Which verdicts stay if the chance of even one wrong among all claims of all folders is to be small."""
    claims = {(folder.name, each["text"]): each["p"] for folder in folders for each in _summary(folder)["claims"]}
    return dict(zip(claims, holm(list(claims.values())), strict=True))


# Pages


def _page(folder: Path, outcome: Outcome, not_run: Sequence[str], certain: "Certain") -> str:
    held = _summary(folder)
    experiment = paper.get(held["experiment"])
    made = f"{_made(held)} runs, {held['seconds'] / 60:.0f} minutes of one core"
    if not held["runs"]:  # simulated points are kept, and used again
        made = f"simulated; the last call, with what earlier ones had kept, took {held['seconds']:.0f} seconds"
    found = experiment.paper_finding
    tables = [_table(each) for each in outcome.blocks if isinstance(each, page.Table) and not each.folded]
    budgets = ", ".join(f"{budget} ({steps} steps)" for budget, steps in held.get("budgets", {}).items())
    facts = [("Command", f"`{held['command']}`"), ("Scale", held["scale"] + (", quick" if held["quick"] else "")),
             ("Runs", made), ("Seeds", ", ".join(map(str, held.get("seeds", [])))), ("Budgets", budgets),
             ("Commit", f"`{held['commit']}`"), ("Versions", ", ".join(f"{k} {v}" for k, v in held["versions"].items())),
             ("Missing", ", ".join(held["missing"]))]  # fmt: skip
    parts = [
        f"# {experiment.title}",
        "<!-- written by docs/experiments.py from results/: do not edit -->",
        f"**{folder.name}**. " + (f"O{found[1:]}" if found.startswith("ours") else f"The paper: {found}"),
        f"![{experiment.title}](img/{folder.name}.svg)",
        *([f"**Not run yet** at this scale: {_cell('; '.join(not_run))}."] if not_run else []),
        "## Claims",
        *(
            f"{_verdict(c, certain[folder.name, c.text], len(certain))}: {c.text}.\n{_cell(c.figure)}"
            for c in outcome.claims
        ),
        f"A verdict is given where the whole {100 * CONFIDENCE:g} % confidence interval is on one side of the bound; p: the chance of one as "
        "clear as this if the truth were at the bound. [How claims are judged](../experiments.md#how-claims-are-judged).",
        *(["## Numbers", *tables] if tables else []),
        "## How it was made",
        _rows(("", ""), [each for each in facts if each[1]]),
        f"Records and summary: `results/{folder.name}`. `{held['command']}` makes them again, in `runs/paper` (`--out` for elsewhere), with an interactive page.",
    ]
    return "\n\n".join(parts) + "\n"


def _made(held: dict[str, Any]) -> str:
    """How many of the runs there are."""
    missing = len(held["missing"])
    return f"{held['runs'] - missing} of {held['runs']}" if missing else str(held["runs"])


def _verdict(claim: JudgedClaim, certain: bool, claims: int) -> str:
    """The verdict, its chance, and whether it stays after Holm's correction."""
    tested = "" if claim.p == 1 else f", p = {claim.p:.2g}" if claim.p > LEAST else f", p < {LEAST:g}"
    return f"**{claim.verdict}**{tested}" + (f", also corrected for all {claims} claims" if certain else "")


def _table(table: page.Table) -> str:
    rows = [[each if isinstance(each, str) else page.shown(each) for each in row] for row in table.rows]
    return "\n\n".join(each for each in (f"### {table.title}", _rows(table.header, rows), table.caption) if each)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# Who won


def gain(root: Path) -> str:
    """Return the box of the pages: what correcting brings, and what not."""
    found = {(pair.folder, pair.arm): pair for pair in _pairs(root)}
    rows, seeds = [], set()
    for change, (folder, arm, task) in GAINS.items():
        pair = found[folder, arm]
        seeds.add((len(pair.values), pair.steps))
        assert pair.drifts is not None
        ends = " → ".join(Pair.spread(pair.score, each) for each in (pair.base_values, pair.values))
        moved = " → ".join(f"{each:.1f} %" for each in pair.drifts)
        rows.append([change, f"{task}: {ends}", pair.verdict, moved])
    [(count, steps)] = seeds
    vit = {pair.arm: pair for pair in _pairs(root) if pair.folder == "table-vit"}
    means = [
        f"{fmean(each):.1f} %"
        for each in (vit["Scion"].base_values, vit["Scion"].values, vit["ScionC (cosine)"].values)
    ]
    header = ("you change", "at the end of the run", "who won", "hidden weight norm moves, middle to end")
    parts = [
        _rows(header, rows),
        f"{count} seeds, {steps} steps, mean ± standard deviation; a ViT of 3 layers x 64 on CIFAR-10 and a GPT of 2 layers x 64 on text, "
        "on CPUs. AdamC, corrected AdamW, begins with 1.5 times the decay; the others have equal decays at the peak. What did raise "
        f"accuracy is Scion's update, with or without the correction: AdamW {means[0]}, Scion {means[1]}, ScionC {means[2]}.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def filled(text: str, marker: str, body: str) -> str:
    """Return a page with this between <!-- marker --> and <!-- /marker -->."""
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    return text[: text.index(start) + len(start)] + f"\n{body}\n" + text[text.index(end) :]


def fill_boxes(root: Path) -> None:
    """Write what you gain into the pages."""
    for path in (root / each for each in BOXES):
        path.write_text(filled(path.read_text(encoding="utf-8"), "gain", gain(root)), encoding="utf-8")


def _pairs(root: Path) -> list[Pair]:
    return [pair for each in COMPARISONS for pair in pairs(each, _summary(root / "results" / each.folder))]


def _winners(root: Path) -> str:
    """Who won: the box, then every comparison with its arms and the verdict."""
    every = _pairs(root)
    distinct = {(pair.values, pair.base_values): pair for pair in every}  # runs that two experiments share count once
    won = [pair for pair in distinct.values() if pair.winner is not None]
    stay = sum(holm([pair.p for pair in distinct.values()]))
    parts = [
        "## In short",
        gain(root),
        "## Every comparison",
        "Arms share their seeds and are compared seed by seed at the end of the longest run. An arm wins where the whole "
        f"{100 * CONFIDENCE:g} % confidence interval of the difference is on its side of zero. Differences of less than 1 point of accuracy, or "
        f"0.02 nats of loss, are called equal. Of {len(distinct)} pairs {len(won)} have a winner; after Holm's correction for all of them {stay} "
        f"{'has' if stay == 1 else 'have'}. So take a single line with care, and a pattern over several more seriously.",
        *(_comparison(each, pairs(each, _summary(root / "results" / each.folder))) for each in COMPARISONS),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _comparison(comparison: Comparison, found: Sequence[Pair]) -> str:
    moved = any(pair.drifts is not None for pair in found)
    rows = []
    for pair in found:
        row = [pair.arm, Pair.spread(pair.score, pair.values), pair.base, Pair.spread(pair.score, pair.base_values)]
        row += [pair.interval, pair.verdict]
        if moved:
            row.append(" → ".join(f"{each:.1f}" for each in pair.drifts) if pair.drifts else "")
        rows.append(row)
    name = found[0].score.name
    header = [
        "arm",
        name,
        "against",
        name,
        "difference",
        "verdict",
        *(["drift of the hidden norm, %: against → arm"] * moved),
    ]
    seeds = f"{len(found[0].values)} seeds, {found[0].steps} steps: [{comparison.folder}]({comparison.folder}.md)."
    return "\n\n".join([f"### {comparison.question}", _rows(header, rows), f"{seeds} {comparison.note}".strip()])


def _index(root: Path, folders: Sequence[Path], certain: Certain) -> str:
    rows, total, counts = [], 0.0, dict.fromkeys(VERDICTS, 0)
    for folder in folders:
        held = _summary(folder)
        verdicts = [each["verdict"] for each in held["claims"]]
        for each in verdicts:
            counts[each] += 1
        total += held["seconds"] if held["runs"] else 0  # simulated points are kept and used again: no time to tell
        stay = sum(certain[folder.name, each["text"]] for each in held["claims"])
        cells = [str(count or "") for count in (*map(verdicts.count, VERDICTS), stay)]
        name = f"[{folder.name}]({folder.name}.md)"
        title = paper.get(held["experiment"]).title + (", at the paper's sizes" if held["scale"] == "paper" else "")
        minutes = f"{held['seconds'] / 60:.0f}" if held["runs"] else ""
        rows.append([name, title, *cells, _made(held) if held["runs"] else "", minutes])
    done = {_summary(folder)["experiment"] for folder in folders}
    waiting = [name for name in paper.EXPERIMENTS if name not in done]
    for folder in folders:
        name, context = runner.context_of(folder)
        if parts := runner.not_run(paper.get(name), context):
            waiting.append(f"of [{folder.name}]({folder.name}.md): {_cell('; '.join(parts))}")
    summed = [
        "**all**",
        "",
        *(str(counts[each]) for each in VERDICTS),
        str(sum(certain.values())),
        "",
        f"{total / 60:.0f}",
    ]
    parts = [
        "# Results: who won, and which claims hold",
        "<!-- written by docs/experiments.py from results/: do not edit -->",
        "The figures and tables of *Correction of Decoupled Weight Decay*, and a few of our own, run on two CPU cores with real "
        "data: a small ViT on CIFAR-10, a small GPT on the State of the Union addresses. No model here was trained on a GPU or at the paper's "
        "scale. How to run them: [the experiments](../experiments.md); how learning rates and decays were chosen: "
        "[calibration](calibration.md).",
        _winners(root),
        "## Every claim",
        f"A claim holds, or does not, where the whole {100 * CONFIDENCE:g} % confidence interval of a number (Student's t over seeds, arms "
        "compared seed by seed) is on one side of a stated bound; in between it is not testable at this scale, and the page says how "
        "many seeds would settle it. One seed gets no verdict. [How claims are judged](../experiments.md#how-claims-are-judged) has the rest.",
        f"Of {len(certain)} claims {counts[VERDICTS[0]]} hold, {counts[VERDICTS[1]]} do not, and {counts[VERDICTS[2]]} are open. Each of these "
        f"verdicts is made at {100 * CONFIDENCE:g} % by itself, so some may be wrong by chance; {sum(certain.values())} stay if the chance of even "
        f"one wrong verdict on this page is to be at most {100 - 100 * CONFIDENCE:g} % (Holm's correction for {len(certain)} claims, the column "
        f"*{AFTER}*).",
        _rows(("experiment", "shows", *VERDICTS, AFTER, "runs", "core minutes"), [*rows, summed]),
        "Runs that several experiments ask for are trained once, and counted in each.",
        "\n".join(["Not run yet:", "", *(f"- {each}" for each in waiting)]) if waiting else "",
    ]  # fmt: skip
    return "\n\n".join(each for each in parts if each) + "\n"


def _calibration(rows: Sequence[dict[str, Any]]) -> str:
    """The sweeps behind the baselines, the best of each task, optimizer and length in bold."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    alike = {tuple(row[k] for k in ("task", "optimizer", "steps")) for row in rows}
    best = [
        min((r for r in rows if (r["task"], r["optimizer"], r["steps"]) == each), key=lambda r: r["val_loss"])
        for each in alike
    ]
    lines = [
        [f"**{row[key]}**" if row in best and key == "val_loss" else str(row.get(key, "")) for key in keys]
        for row in rows
    ]
    parts = [
        "# How the baselines were chosen",
        "<!-- written by docs/experiments.py from results/: do not edit -->",
        "Short sweeps with one seed (`results/calibrate.py`). eta = lr times the first decay; ln 2 / eta steps are a half-life. "
        "Bold: the lowest validation loss of its kind.",
        _rows(keys, lines),
    ]
    return "\n\n".join(parts) + "\n"


# Pictures


def draw(plots: Sequence[page.Plot | page.HeatMap]) -> str:
    """All plots in one SVG, three in a row."""
    columns = min(3, max(1, len(plots)))
    rows = max(1, -(-len(plots) // columns))
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.0 * columns, 2.7 * rows), squeeze=False, layout="constrained"
        )
        colours = _colours(plots)
        for axis, plot in zip(axes.flat, plots, strict=False):
            _lines(axis, plot, colours) if isinstance(plot, page.Plot) else _map(axis, plot)
            axis.set_title(plot.title, fontsize=9, loc="left")
            axis.set_xlabel(plot.x_label)
        for axis in axes.flat[len(plots) :]:
            axis.set_axis_off()
        handles = [plt.Line2D([], [], color=colour, label=name) for name, colour in colours.items() if name]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
        text = BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return _shorter(text.getvalue().decode())


def _colours(plots: Sequence[page.Plot | page.HeatMap]) -> dict[str, str]:
    names = dict.fromkeys(s.toggle for plot in plots if isinstance(plot, page.Plot) for s in plot.series)
    return dict(zip(names, cycle(COLOURS), strict=False))


def _lines(axis: Axes, plot: page.Plot, colours: dict[str, str]) -> None:
    for series in plot.series:
        x, y, colour = np.asarray(series.x, float), np.asarray(series.y, float), colours[series.toggle]
        form = {"line": "-", "dash": "--", "points": "o"}[series.style]
        axis.plot(x, y, form, color=colour, ms=3, alpha=0.7 if series.style == "dash" else 1.0)
        if series.error is not None and series.style == "points":
            axis.errorbar(x, y, np.asarray(series.error, float), fmt="none", ecolor=colour, lw=0.8)
        elif series.error is not None:
            error = np.asarray(series.error, float)
            axis.fill_between(x, y - error, y + error, color=colour, alpha=0.15, lw=0)
    axis.set_ylabel(plot.y_label)
    if plot.log_x:
        axis.set_xscale("log")
    if plot.log_y:
        axis.set_yscale("log")
        if _decades(plot) < 1:  # powers of ten would leave it without numbers
            axis.yaxis.set_major_locator(MaxNLocator(5))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_locator(NullLocator())
    elif plot.zero:
        axis.set_ylim(bottom=0)


def _decades(plot: page.Plot) -> float:
    seen = np.concatenate([np.asarray(each.y, float) for each in plot.series] or [np.ones(1)])
    seen = seen[seen > 0]
    return float(np.log10(seen.max() / seen.min())) if len(seen) else 0.0


def _map(axis: Axes, plot: page.HeatMap) -> None:
    z = np.asarray(plot.z, float)
    reach = max(abs((plot.high if plot.high is not None else np.nanmax(z)) - plot.middle), 1e-9)
    shown = axis.pcolormesh(
        np.asarray(plot.x, float), range(len(plot.y)), z, cmap="RdBu_r", vmin=plot.middle - reach, vmax=plot.middle + reach,
        shading="nearest", rasterized=True,
    )  # fmt: skip
    axis.set_yticks(range(len(plot.y)), plot.y, fontsize=5)
    axis.invert_yaxis()
    axis.figure.colorbar(shown, ax=axis)


def _shorter(svg: str) -> str:
    """One digit after the point is enough for a path."""

    def path(match: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", match[0])

    return re.sub(r' d="[^"]*"', path, svg)


if __name__ == "__main__":
    write(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "paper")
    if len(sys.argv) == 1:
        fill_boxes(ROOT)
