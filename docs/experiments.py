"""Write the pages of the paper's experiments, docs/paper/*.md and their pictures, and who won, from results/. No number is typed.

Run from the repository's root: .venv/bin/python docs/experiments.py   (`make docs` does it as well). It also fills the boxes
"what you gain" in docs/, between <!-- gain --> and <!-- /gain -->.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from statistics import fmean
from typing import Any

from steadynorm.files import read_json
from steadynorm.lab import paper
from steadynorm.lab.paper import runner
from steadynorm.lab.paper.experiment import Outcome
from steadynorm.lab.paper.provenance import describe, shorten, trace
from steadynorm.lab.paper.statistics import CONFIDENCE, LEAST, VERDICTS, Finding, holm
from steadynorm.lab.paper.winners import COMPARISONS, Comparison, Pair, pairs
from steadynorm.report import page

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ and docs/ are not installed
from benchmarks.pages import fill  # noqa: E402
from docs.experiment_answers import answers, list_open, list_refuted  # noqa: E402
from docs.experiment_pictures import Picture, pictures_of  # noqa: E402

MOST_PLOTS = 9
MANY_SEEDS = 8  # we run no more
AFTER = "of these after Holm"
BOXES = (Path("docs/index.md"), Path("docs/correct.md"))  # pages with what you gain, between markers
GAINS = {  # what you change -> folder, arm, and what was trained
    "AdamW → corrected": ("fig-adamc", "AdamC", "ViT, accuracy in %"),
    "torch's Muon → corrected": ("fig-muon", "Muon, corrected", "GPT, validation loss"),
    "Scion → ScionC": ("fig-nanogpt", "ScionC", "GPT, validation loss"),
}


def results(root: Path) -> Iterator[Path]:
    """Yield the folders of finished experiments, in the order of `paper list`."""
    order = list(paper.EXPERIMENTS)
    finished = filter(runner.is_kept, (root / "results").iterdir())
    yield from sorted(finished, key=lambda folder: (order.index(_summary(folder)["experiment"]), folder.name))


def _summary(folder: Path) -> dict[str, Any]:
    return read_json(folder / runner.SUMMARY)


def write(root: Path, out: Path) -> None:
    """Write all pages and pictures again."""
    pages = overviews(root)
    for folder in results(root):
        name, context = runner.context_of(folder)
        outcome, _ = runner.judge(paper.get(name), context)
        text, pictures = of_experiment(folder, outcome)
        pages |= {f"{folder.name}.md": text} | {path: picture.svg() for path, picture in pictures.items()}
    shutil.rmtree(out, ignore_errors=True)
    (out / "img").mkdir(parents=True)
    for path, text in pages.items():
        (out / path).write_text(text, encoding="utf-8")


def of_experiment(folder: Path, outcome: Outcome) -> tuple[str, dict[str, Picture]]:
    """Return the page of an experiment, and its pictures by the paths they go to."""
    plots = [block for block in outcome.blocks if isinstance(block, page.Plot | page.HeatMap)]
    drawn = pictures_of(plots[:MOST_PLOTS])
    pictures = {f"img/{folder.name}-{number}.svg": picture for number, picture in enumerate(drawn, 1)}
    shown = "\n".join(f"![{picture.alt}]({path})" for path, picture in pictures.items())
    return _page(folder, outcome, _certain(results(folder.parent.parent)), shown), pictures


def overviews(root: Path) -> dict[str, str]:
    """Return the pages about all experiments, by the paths they go to."""
    return {
        "index.md": _index(root, list(results(root)), _certain(results(root))),
        "calibration.md": _calibration(**read_json(root / "results" / "calibration.json")),
    }


Certain = dict[tuple[str, str], bool]  # folder and claim: does the verdict stay after Holm's correction?


def _certain(folders: Iterable[Path]) -> Certain:
    """Return which verdicts stay if the chance of even one wrong among all claims of all folders is to be small."""
    claims = {(folder.name, claim["text"]): claim["p"] for folder in folders for claim in _summary(folder)["claims"]}
    return dict(zip(claims, holm(list(claims.values())), strict=True))


# Pages


def _not_run(folder: Path) -> str:
    """Return which of its declared runs a folder does not hold."""
    name, context = runner.context_of(folder)
    return _cell("; ".join(runner.not_run(paper.get(name), context)))


def _page(folder: Path, outcome: Outcome, certain: Certain, pictures: str) -> str:
    held, not_run = _summary(folder), _not_run(folder)
    experiment = paper.get(held["experiment"])
    origin = f"{_run_count(held)} runs, {held['seconds'] / 60:.0f} minutes of one core"
    if not held["runs"]:  # simulated points are kept, and used again
        origin = (
            f"simulated; the last call, which reused what earlier ones had kept, took {held['seconds']:.0f} seconds"
        )
    finding = experiment.paper_finding
    tables = [_table(block) for block in outcome.blocks if isinstance(block, page.Table) and not block.folded]
    budgets = ", ".join(f"{budget} ({steps} steps)" for budget, steps in held.get("budgets", {}).items())
    facts = [("Command", f"`{held['command']}`"), ("Scale", held["scale"] + (", quick" if held["quick"] else "")),
             ("Runs", origin), ("Seeds", ", ".join(map(str, held.get("seeds", [])))), ("Budgets", budgets),
             ("Commit", f"`{held['commit']}`"), ("Machine", held.get("machine") or ""),
             ("Versions", ", ".join(f"{k} {v}" for k, v in held["versions"].items())),
             ("Missing", ", ".join(held["missing"]))]  # fmt: skip
    parts = [
        f"# {experiment.title}",
        "<!-- written by docs/experiments.py from results/: do not edit -->",
        f"**{folder.name}**. " + (f"O{finding[1:]}" if finding.startswith("ours") else f"The paper: {finding}"),
        pictures,
        *([f"**Not run yet** at this scale: {not_run}."] if not_run else []),
        "## Claims",
        *(
            f'<a id="claim-{number}"></a>{_verdict(found, certain[folder.name, claim], len(certain))}: {claim}.\n{_cell(found.figure)}'
            for number, (claim, found) in enumerate(outcome.claims.items(), 1)
        ),
        f"A verdict is given where the whole {100 * CONFIDENCE:g} % confidence interval is on one side of the bound; p is the chance of a "
        "verdict as clear as this if the truth were at the bound. [How claims are judged](../experiments.md#how-claims-are-judged).",
        *(["## Numbers", *tables] if tables else []),
        "## How it was made",
        _rows(("", ""), [fact for fact in facts if fact[1]]),
        f"Records and summary are in `results/{folder.name}`. `{held['command']}` makes them again in `runs/paper`, or in the folder that `--out` "
        "names, with an interactive page.",
    ]
    return "\n\n".join(parts) + "\n"


def _run_count(held: dict[str, Any]) -> str:
    """Return how many of the runs are there."""
    missing = len(held["missing"])
    return f"{held['runs'] - missing} of {held['runs']}" if missing else str(held["runs"])


def _verdict(finding: Finding, certain: bool, claims: int) -> str:
    """Format the verdict, its chance, and whether it stays after Holm's correction."""
    p = finding.chance
    tested = "" if p == 1 else f", p = {p:.2g}" if p > LEAST else f", p < {LEAST:g}"
    return f"**{finding.verdict}**{tested}" + (f", also corrected for all {claims} claims" if certain else "")


def _table(table: page.Table) -> str:
    rows = [[cell if isinstance(cell, str) else page.shown(cell) for cell in row] for row in table.rows]
    return "\n\n".join(filter(None, (f"### {table.title}", _rows(table.header, rows), table.caption)))


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


# Who won


def gain(root: Path) -> str:
    """Return the box of the pages: what correcting brings, and what not."""
    by_arm = {(comparison.folder, pair.arm): pair for comparison, compared in _compared(root) for pair in compared}
    rows, seeds, lengths = [], set(), set()
    for change, (folder, arm, task) in GAINS.items():
        pair = by_arm[folder, arm]
        seeds.add(len(pair.values))
        lengths.add(pair.steps)
        assert pair.drifts is not None
        ends = " → ".join(Pair.spread(pair.score, values) for values in (pair.base_values, pair.values))
        moved = " → ".join(f"{drift:.1f} %" for drift in pair.drifts)
        rows.append([change, f"{task}: {ends}", pair.verdict, moved])
    count, [steps] = " to ".join(map(str, sorted({min(seeds), max(seeds)}))), lengths
    scion, scionc = by_arm["table-vit", "Scion"], by_arm["table-vit", "ScionC (cosine)"]
    means = [f"{fmean(values):.1f} %" for values in (scion.base_values, scion.values, scionc.values)]
    header = ("you change", "at the end of the run", "difference", "drift of the hidden norm, middle to end")
    parts = [
        _rows(header, rows),
        f"{count} seeds, {steps} steps, mean ± standard deviation; a ViT of 3 layers of width 64 on CIFAR-10 and a GPT of 2 layers "
        "of width 64 on text, on CPUs. AdamC, corrected AdamW, begins with 1.5 times the decay; in the other rows both arms have the same decay at the peak. What "
        "did raise the accuracy is Scion's recipe (its update together with the paper's variant of the ViT): "
        f"AdamW {means[0]}, Scion {means[1]}, ScionC {means[2]}.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def _compared(root: Path) -> list[tuple[Comparison, list[Pair]]]:
    """Return every comparison with its pairs, without those of which nothing was run."""
    compared = [
        (comparison, pairs(comparison, _summary(root / "results" / comparison.folder)))
        for comparison in COMPARISONS
        if runner.is_kept(root / "results" / comparison.folder)
    ]
    return [(comparison, arms) for comparison, arms in compared if arms]


def _winners(root: Path) -> str:
    """Return who won: the box, then every comparison with its arms and the verdict."""
    compared = _compared(root)
    # Runs that two experiments share count once.
    distinct = {(pair.values, pair.base_values): pair for _, arms in compared for pair in arms}
    won = [pair for pair in distinct.values() if pair.winner is not None]
    stay = sum(holm([pair.p for pair in distinct.values()]))
    parts = [
        "## What you gain",
        gain(root),
        "## Every comparison",
        "Arms share their seeds and are compared seed by seed at the end of the longest run. An arm wins where the whole "
        f"{100 * CONFIDENCE:g} % confidence interval of the difference is on its side of zero. Where the whole interval is within 1 point of accuracy, "
        f"or 0.02 nats of loss, we call the arms equal. Of {len(distinct)} pairs, {len(won)} have a winner, and {stay} still "
        f"{'has' if stay == 1 else 'have'} one after Holm's correction for all pairs. Read a single line with care; a pattern over several lines "
        "counts for more.",
        *starmap(_comparison, compared),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _comparison(comparison: Comparison, compared: Sequence[Pair]) -> str:
    moved = any(pair.drifts is not None for pair in compared)
    rows = []
    for pair in compared:
        row = [pair.arm, Pair.spread(pair.score, pair.values), pair.base, Pair.spread(pair.score, pair.base_values)]
        row += [pair.interval, pair.verdict]
        if moved:
            row.append(" → ".join(f"{drift:.1f}" for drift in pair.drifts) if pair.drifts else "")
        rows.append(row)
    name = compared[0].score.name
    header = ["arm", name, "against", name, "difference", "verdict"]
    header += ["drift of the hidden norm, %: against → arm"] * moved
    seeds = (
        f"{len(compared[0].values)} seeds, {compared[0].steps} steps: [{comparison.folder}]({comparison.folder}.md)."
    )
    return "\n\n".join([f"### {comparison.question}", _rows(header, rows), f"{seeds} {comparison.note}".strip()])


def _undecided(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the open claims, and why they are open: too few seeds so far, or a difference too close to its bound."""
    open_claims = list_open(summaries)
    waiting = [name for name, held in summaries.items() if len(held.get("seeds", [])) < MANY_SEEDS and _is_open(held)]
    parts = [
        f"**What stays open.** We run at most {MANY_SEEDS} seeds. Where a claim is open with all of them, the true value is close to its "
        "bound, or runs differ too much. The number of seeds that would settle a claim assumes that means and spreads stay as they are.",
        f"Not at {MANY_SEEDS} seeds yet: {', '.join(f'[{name}]({name}.md)' for name in waiting)}." if waiting else "",
        open_claims,
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) if open_claims else "No claim is open."


def _is_open(held: Mapping[str, Any]) -> bool:
    return any(claim["verdict"] == VERDICTS[2] for claim in held["claims"])


def _index(root: Path, folders: Sequence[Path], certain: Certain) -> str:
    summaries = {folder.name: _summary(folder) for folder in folders}
    rows, total, counts = [], 0.0, Counter[str]()
    for name, held in summaries.items():
        verdicts = Counter(claim["verdict"] for claim in held["claims"])
        counts += verdicts
        stay = sum(certain[name, claim["text"]] for claim in held["claims"])
        cells = [str(count or "") for count in (*(verdicts[verdict] for verdict in VERDICTS), stay)]
        title = paper.get(held["experiment"]).title + (", at the paper's sizes" if held["scale"] == "paper" else "")
        took = ["", ""]
        if held["runs"]:  # simulated points are kept and used again: no time to tell
            took = [_run_count(held), f"{held['seconds'] / 60:.0f}"]
            total += held["seconds"]
        rows.append([f"[{name}]({name}.md)", title, *cells, *took])
    finished = {held["experiment"] for held in summaries.values()}
    waiting = [name for name in paper.EXPERIMENTS if name not in finished]
    for folder in folders:
        if parts := _not_run(folder):
            waiting.append(f"of [{folder.name}]({folder.name}.md): {parts}")
    held_up, refuted, undecided = sums = [counts[verdict] for verdict in VERDICTS]
    summed = ["**all**", "", *map(str, (*sums, sum(certain.values()))), "", f"{total / 60:.0f}"]
    parts = [
        "# Results: who won, and which claims hold",
        "<!-- written by docs/experiments.py from results/: do not edit -->",
        "We ran the figures and tables of *Correction of Decoupled Weight Decay*, and a few of our own, on two CPU cores with real data: a "
        "small ViT on CIFAR-10 and a small GPT on the State of the Union addresses. No model here was trained on a GPU or at the paper's "
        "scale. [Run the paper's experiments](../experiments.md) shows how to run them, and [calibration](calibration.md) how learning rates and "
        "decays were chosen.",
        "## In short",
        answers(summaries),
        _winners(root),
        "## Every claim",
        f"A claim holds, or does not, where the whole {100 * CONFIDENCE:g} % confidence interval of a number (Student's t over seeds, arms "
        "compared seed by seed) is on one side of a stated bound; in between it is open, and the page says how "
        "many seeds would settle it. One seed gets no verdict. [How claims are judged](../experiments.md#how-claims-are-judged) has the rest.",
        f"Of {len(certain)} claims, {held_up} hold, {refuted} do not, and {undecided} are open. Each of these "
        f"verdicts is made at {100 * CONFIDENCE:g} % by itself, so some may be wrong by chance; {sum(certain.values())} stay if the chance of even "
        f"one wrong verdict on this page is to be at most {100 - 100 * CONFIDENCE:g} % (Holm's correction for {len(certain)} claims, the column "
        f"*{AFTER}*).",
        _rows(("experiment", "shows", *VERDICTS, AFTER, "runs", "core minutes"), [*rows, summed]),
        "Runs that several experiments ask for are trained once, and counted in each.",
        "\n".join(["Not run yet:", "", *(f"- {name}" for name in waiting)]) if waiting else "",
        list_refuted(summaries),
        _undecided(summaries),
        "## Which code made them",
        describe(map(trace, folders)),
    ]  # fmt: skip
    return "\n\n".join(filter(None, parts)) + "\n"


def _calibration(commit: str, machine: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the page of the sweeps behind the baselines, the best of each task, optimizer and length in bold."""
    keys = list(dict.fromkeys(key for row in runs for key in row))
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in runs:
        kinds.setdefault((row["task"], row["optimizer"], row["steps"]), []).append(row)
    best = [min(alike, key=lambda row: row["val_loss"]) for alike in kinds.values()]
    lines = [
        [f"**{row[key]}**" if row in best and key == "val_loss" else str(row.get(key, "")) for key in keys]
        for row in runs
    ]
    parts = [
        "# How the baselines were chosen",
        "<!-- written by docs/experiments.py from results/: do not edit -->",
        "These are short sweeps with one seed (`results/calibrate.py`). eta is lr times the first decay; ln 2 / eta steps are a half-life. "
        f"The lowest validation loss of its kind is bold. Commit `{shorten(commit)}`, machine {machine}.",
        _rows(keys, lines),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write(ROOT, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "paper")
    if len(sys.argv) == 1:
        for path in BOXES:
            fill(ROOT / path, "gain", gain(ROOT))
        fill(ROOT / "results" / "README.md", "commits", describe(map(trace, results(ROOT))))
