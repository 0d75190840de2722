"""Numbers in hand-written pages follow from results/: each sentence is given once more here, with its numbers worked out."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import held_biases, hold
from benchmarks.pages import filled
from steadynorm.files import read_json
from steadynorm.lab.paper.statistics import Estimate, difference

ROOT = Path(__file__).parent.parent
DRIFT = "drift of hidden_norm, %"
MISS = "100 ln(measured / forecast norm) at the end, matrices"


def values(folder: str, quantity: str, arm: str) -> list[float]:
    """Return a quantity of an arm for every seed, at its longest budget."""
    by_budget = read_json(ROOT / "results" / folder / "summary.json")["numbers"][quantity][arm]
    return by_budget[max(by_budget, key=int)]["values"]


def mean(folder: str, quantity: str, arm: str) -> float:
    """Return the mean over seeds of a quantity of an arm."""
    per_seed = values(folder, quantity, arm)
    return sum(per_seed) / len(per_seed)


def lead(folder: str, quantity: str, ahead: str, behind: str) -> float:
    """Return by how much one arm's mean is above another's."""
    return mean(folder, quantity, ahead) - mean(folder, quantity, behind)


def sweep_cost(arm: str) -> float:
    """Return what half and twice the lr cost an arm of fig-hold, on average."""
    return sum(lead("fig-hold", "validation loss", f"{arm}, lr x {ratio}", arm) for ratio in ("0.5", "2")) / 2


def behind_adamw() -> Estimate:
    """Return by how many points AdamC is behind AdamW over all budgets, as the claim of table-vit has it."""
    accuracy = read_json(ROOT / "results" / "table-vit" / "summary.json")["numbers"]["accuracy"]
    adamw, adamc = (
        [sum(seed) / len(seed) for seed in zip(*(budget["values"] for budget in accuracy[arm].values()), strict=True)]
        for arm in ("AdamW", "AdamC")
    )
    return difference(adamw, adamc)


def misses() -> tuple[float, float]:
    """Return how far the six optimizers of fig-forecast end below and above their forecasts, in percent."""
    arms = read_json(ROOT / "results" / "fig-forecast" / "summary.json")["numbers"][MISS]
    percents = [100 * math.expm1(mean("fig-forecast", MISS, arm) / 100) for arm in arms]
    return -min(percents), max(percents)


def vit_costs() -> list[float]:
    """Return what balance (both T) and a fixed norm cost the ViT, in points."""
    ways = ("balanced decay, T = 20", "balanced decay, T = 200", "fixed norm")
    return [lead("fig-hold-vit", "accuracy", "corrected decay", way) for way in ways]


def costs_of_held_matrices() -> tuple[float, float]:
    """Return what a fixed norm and balance cost the ViT where biases are not held, in points."""
    accuracy = read_json(held_biases.OUT)["accuracy"]
    fixed, balance = (f"{way}, but not of biases" for way in ("fixed", "balance, T = 20"))
    return tuple(difference(accuracy["decay"], accuracy[arm]).value for arm in (fixed, balance))


def span(*numbers: float) -> str:
    """Return the least and the largest of some numbers, once if they look the same."""
    ends = dict.fromkeys(f"{end:.1f}" for end in (min(numbers), max(numbers)))
    return " to ".join(ends)


def squares() -> dict[tuple[str, float], tuple[float, float]]:
    """Return the paper's and the exact prediction over the simulated norm, for squares of the paper's size."""
    points = read_json(ROOT / "results" / "fig-steady-state-paper" / "summary.json")["numbers"]["points"]
    return {
        (point["momentum"], point["alpha"]): (point["paper"] / point["simulated"], point["exact"] / point["simulated"])
        for point in points
        if point["kind"].startswith("square")
    }


def demo_rows() -> list[str]:
    """Return the rows of the table in docs/monitor.md, from what is kept of `make demo`."""
    runs = read_json(ROOT / "results" / "demo" / "summary.json")["runs"].values()

    def row(name: str, key: str, digits: str) -> str:
        cells = [f"{run[key + ', middle']:{digits}} → {run[key + ', end']:{digits}}" for run in runs]
        return f"| {name} | {' | '.join(cells)} |"

    ratios = [run["weight_norm/hidden, end"] / run["forecast_norm/hidden, end"] for run in runs]
    losses = [f"{run['val_loss']:.4f}" for run in runs]
    return [
        f"| validation loss | {' | '.join(losses)} |",
        row("weight norm of hidden layers, middle → end", "weight_norm/hidden", ".1f"),
        row("gradient norm, middle → end", "grad_norm", ".3f"),
        f"(1 means as forecast) | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |",
        row("excess alignment of the output layer, middle → end", "excess_alignment/output", "+.2f"),
    ]


def sentences() -> list[tuple[str, str]]:
    """Return every sentence with numbers from results/, and the file that it must stand in."""
    muonc, muon = (mean("fig-muon", DRIFT, arm) for arm in ("MuonC", "Muon"))
    scion, scionc = (mean("fig-nanogpt", DRIFT, arm) for arm in ("Scion", "ScionC"))
    below, above = misses()
    *balanced, fixed = vit_costs()
    halved = lead("fig-hold-vit", "accuracy", "corrected decay, lr x 0.5", "balanced decay, T = 200, lr x 0.5")
    held_matrices = costs_of_held_matrices()
    targets = ("corrected decay", "balanced decay, T = 20", "balanced decay, T = 200", "fixed norm", "cautious decay")
    costs = [sweep_cost(arm) for arm in targets]
    behind, longest = behind_adamw(), lead("table-vit", "accuracy", "AdamW", "AdamC")
    interval = f"({behind.value - behind.reach:.2f} to {behind.value + behind.reach:.2f})"
    chance = ", which may be chance" if behind.value < behind.reach else ""
    wide = lead("fig-nanogpt-wide", "validation loss", "ScionC", "MuonC")
    ratios = {key: f"{paper:.3f} / {exact:.3f}" for key, (paper, exact) in squares().items()}
    rows = [[ratios[momentum, alpha] for alpha in (0.05, 0.1, 0.5)] for momentum in ("plain", "nesterov")]
    error = max(abs(exact - 1) for _, exact in squares().values())
    return [
        *(("docs/monitor.md", row) for row in demo_rows()),
        ("README.md", f"agrees with simulation to {math.ceil(1000 * error) / 10} % at the paper's own size"),
        ("docs/predict.md", f"| plain: paper / exact kernel | {' | '.join(rows[0])} |"),
        ("docs/predict.md", f"| Nesterov: paper / exact kernel | {' | '.join(rows[1])} |"),
        ("README.md", f"drifts by {muonc:.1f} %, with torch's Muon by {muon:.1f} %"),
        ("README.md", f"they cost {span(*balanced, fixed)} points of accuracy, and {span(*held_matrices)} if [biases are left out]"),
        ("README.md", f"ended between {below:.0f} % below and {above:.0f} % above"),
        ("README.md", f"from {scion:.1f} % to {scionc:.1f} %"),
        ("README.md", f"AdamC's accuracy on the small ViT is {behind.value:.1f} points below AdamW's in the mean over five budgets{chance}"
                      f"{',' * bool(chance)} and {longest:.1f} points at the longest"),
        ("docs/index.md", f"a small ViT is {behind.value:.2f} points {interval} below AdamW's in the mean over five budgets{chance}."),
        ("docs/which.md", f"ended between {below:.0f} % below and {above:.0f} % above"),
        ("docs/which.md", f"MuonC ended [{wide:.2f} nats below ScionC]"),
        ("docs/hold-the-norm.md", f"ended up to {max(below, above):.0f} % away"),
        ("docs/hold-the-norm.md", f"balanced decay ends {span(*balanced)} points of accuracy below"),
        ("docs/hold-the-norm.md", f"a fixed norm {fixed:.1f} points. With half the lr, balance with T = 200 ends {halved:.1f} points below"),
        ("docs/hold-the-norm.md", f"What is left, {' and '.join(f'{cost:.1f}' for cost in held_matrices)} points, is"),
        ("docs/hold-the-norm.md", f"target loses {min(costs):.3f} to {max(costs):.3f} nats and constant decay {sweep_cost('constant decay'):.3f}"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(sentences())))
def test_a_number_in_prose_is_that_of_the_results(number: int):
    path, sentence = sentences()[number]
    assert sentence in " ".join((ROOT / path).read_text(encoding="utf-8").split()), f"{path} should say: {sentence}"


@pytest.mark.parametrize(("marker", "benchmark"), [("measured", hold), ("held biases", held_biases)])
def test_a_table_on_the_page_about_holds_is_that_of_its_benchmark(marker: str, benchmark: Any):
    page = hold.PAGE.read_text(encoding="utf-8")
    assert page == filled(page, marker, benchmark.table(read_json(benchmark.OUT)))
