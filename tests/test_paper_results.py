"""What is committed under results/ and docs/paper/ is current, small and consistent."""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from alike import difference, svg_difference, text_difference

from benchmarks.pages import filled
from steadynorm.lab import paper
from steadynorm.lab.paper import runner
from steadynorm.lab.paper.experiment import Context

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "paper"
FOLDERS = sorted(filter(runner.is_kept, ROOT.glob("results/*")))

LONG = {
    "fig-nanogpt",
    "fig-output-layer",
    "fig-scionc",
    "fig-scionc-constant",
    "fig-steady-state-paper",
}  # seconds each: forecasts of very many steps


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    pytest.importorskip("matplotlib")
    return load("docs/experiments.py")


def folders(is_slow: Callable[[str], bool]):
    """Run a test on every folder; those whose name is slow only in `make test-all`."""
    cases = [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if is_slow(each.name) else []) for each in FOLDERS
    ]
    return pytest.mark.parametrize("folder", cases)


@folders(lambda name: name in LONG)
def test_a_committed_folder_is_current_and_small(folder: Path, generator: ModuleType):
    """Judged again from its records by today's declarations, it says what its summary and page say."""
    name, context = runner.context_of(folder)
    outcome, facts = runner.judge(paper.get(name), context)
    summary = json.loads((folder / runner.SUMMARY).read_text(encoding="utf-8"))
    assert not difference(outcome.plain()["claims"], summary["claims"]), "run results/judge.py"
    assert facts["missing"] == summary["missing"]
    assert not difference(json.loads(json.dumps(outcome.numbers)), summary["numbers"])
    kept = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    assert sum(path.stat().st_size for path in kept) < max(600_000, 100_000 * facts["runs"])
    text, pictures = generator.of_experiment(folder, outcome)
    on_page = (PAGES / f"{folder.name}.md").read_text(encoding="utf-8")
    assert not text_difference(text, on_page), "run docs/experiments.py"
    assert all((PAGES / path).exists() for path in pictures), "run docs/experiments.py"


@folders(lambda name: name not in ("fig-alignment", "fig-lr-eff", "table-vit"))  # a map, points and lines
def test_the_pictures_of_a_committed_folder_show_its_records(folder: Path, generator: ModuleType):
    name, context = runner.context_of(folder)
    outcome, _ = runner.judge(paper.get(name), context)
    for path, picture in generator.of_experiment(folder, outcome)[1].items():
        shown = (PAGES / path).read_text(encoding="utf-8")
        assert not svg_difference(picture.svg(), shown), f"{path}: run docs/experiments.py"


def test_seeds_that_every_arm_has_are_judged_and_others_wait(tmp_path: Path):
    experiment, context = paper.get("fig-nanogpt"), Context(tmp_path)
    count = load("results/judge.py").added_seeds
    for arm in ("scion", "scionc"):
        for seed in range(5 if arm == "scion" else 4):
            (context.records / f"{arm}-{experiment.budgets[-1]}-s{seed}").mkdir(parents=True)
    assert count(experiment, context) == 4
    assert count(experiment, replace(context, seeds=4)) == 0
    assert count(experiment, replace(context, seeds=4, only=("Scion",))) == 4


def test_the_overviews_are_up_to_date_and_no_page_is_left_over(generator: ModuleType):
    overviews = generator.overviews(ROOT)
    for path, text in overviews.items():
        assert not text_difference(text, (PAGES / path).read_text(encoding="utf-8")), f"{path}: run docs/experiments.py"
    experiments = {f"{each.name}.md" for each in FOLDERS}
    pictures = {
        name
        for page in experiments
        for name in re.findall(r"\]\((img/.+?)\)", (PAGES / page).read_text(encoding="utf-8"))
    }
    there = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*") if path.is_file()}
    assert there == experiments | pictures | overviews.keys(), "run docs/experiments.py"


def test_a_picture_is_as_wide_as_a_phone():
    """At most 360 of a phone's 390 pixels, so that it is not shrunk until nobody can read it."""
    for path in (PAGES / "img").glob("*.svg"):
        [width] = re.findall(r'<svg [^>]*?width="([\d.]+)pt"', path.read_text(encoding="utf-8"), re.S)
        assert float(width) * 96 / 72 <= 360, path.name


def test_the_boxes_on_the_pages_say_what_the_results_say(generator: ModuleType):
    for path in (ROOT / each for each in generator.BOXES):
        text = path.read_text(encoding="utf-8")
        assert not text_difference(text, filled(text, "gain", generator.gain(ROOT))), "run docs/experiments.py"
    assert filled("a <!-- x --> old <!-- /x --> b", "x", "new") == "a <!-- x -->\nnew\n<!-- /x --> b"


def test_the_results_page_says_who_won_every_comparison(generator: ModuleType):
    text = generator.overviews(ROOT)["index.md"]
    for each, _ in generator._compared(ROOT):
        section = text.split(f"### {each.question}\n")[1].split("\n### ")[0]
        found = generator.pairs(each, generator._summary(ROOT / "results" / each.folder))
        for pair in found:
            row = next(line for line in section.splitlines() if line.startswith(f"| {pair.arm} |"))
            assert pair.verdict in row and pair.interval in row and f"| {pair.base} |" in row
        assert " seeds, " in section


def test_last_digits_are_not_a_difference_and_anything_else_is():
    assert not difference({"a": [1.0, "0.123 of 4"]}, {"a": [1.0 + 1e-12, "0.124 of 4"]})
    for other in ({"a": [1.001, "0.123 of 4"]}, {"a": [1.0, "0.125 of 4"]}, {"a": [1.0, "0.123 of 5"]}, {"b": []}):
        assert difference({"a": [1.0, "0.123 of 4"]}, other)
    assert difference({"a": True}, {"a": 1}) and difference([1.0], [1.0, 2.0]) and difference("holds", "does not hold")


def test_a_picture_differs_by_a_point_moved_or_missing_and_not_by_rounding_or_its_ids():
    def picture(x: str, name: str = "m0123456789") -> str:
        return f'<svg><path id="{name}" d="M 0 {x}"/><use href="#{name}" x="{x}"/></svg>'

    assert not svg_difference(picture("12.3"), picture("12.4", "mabcdef0123"))
    assert svg_difference(picture("12.3"), picture("12.8"))
    assert svg_difference(picture("12.3"), '<svg><path d="M 0 12.3"/></svg>')


def test_every_kind_of_block_is_drawn(generator: ModuleType):
    from steadynorm.report import page

    series = [
        page.Series("s", [1, 2, 3], [1.0, 2.0, 3.0], error=[0.1] * 3, style=style, toggle=style)
        for style in page.blocks.STYLES
    ]
    plots = [
        page.Plot("log", "x", "y", series, log_x=True, log_y=True),
        page.HeatMap("map", "x", "y", [1, 2], ["a", "b"], [[0, 1], [1, 0]]),
    ]
    pictures = generator.pictures_of(plots)
    assert [each.alt for each in pictures] == ["Legend: line, dash, points", "log", "map"]
    for picture in pictures:
        assert picture.svg().startswith("<?xml") and picture.svg() == picture.svg()
