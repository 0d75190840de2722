"""What is committed under results/ and docs/paper/: current, small, and saying the same."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from steadynorm import paper
from steadynorm.paper import carrying

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(filter(carrying.is_kept, ROOT.glob("results/*")))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("docs_experiments", ROOT / "docs" / "experiments.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda each: each.name)
def test_a_committed_folder_is_current_and_small(folder: Path):
    """Judged again from its records, by today's declarations, it says what its summary says."""
    name, context = carrying.context_of(folder)
    outcome, facts = carrying.judge(paper.get(name), context)
    summary = json.loads((folder / carrying.SUMMARY).read_text())
    assert [each.plain() for each in outcome.claims] == summary["claims"], "run results/judge.py"
    assert len({each.text for each in outcome.claims}) == len(outcome.claims)
    assert facts["missing"] == summary["missing"]
    assert json.loads(json.dumps(outcome.summary)) == summary["numbers"]
    kept = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"]
    assert sum(path.stat().st_size for path in kept) < 600_000


def test_the_pages_are_up_to_date(generator: ModuleType, tmp_path: Path):
    generator.write(ROOT, tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    there = {
        path.relative_to(ROOT / "docs/paper"): path.read_bytes()
        for path in ROOT.glob("docs/paper/**/*")
        if path.is_file()
    }
    assert made.keys() == there.keys(), "run docs/experiments.py"
    stale = [str(name) for name in made if made[name] != there[name]]
    assert not stale, "run docs/experiments.py"


def test_every_kind_of_block_is_drawn(generator: ModuleType):
    from steadynorm import page

    series = [
        page.Series("s", [1, 2, 3], [1.0, 2.0, 3.0], error=[0.1] * 3, style=style, toggle=style)
        for style in page.blocks.STYLES
    ]
    plots = [
        page.Plot("log", "x", "y", series, log_x=True, log_y=True),
        page.HeatMap("map", "x", "y", [1, 2], ["a", "b"], [[0, 1], [1, 0]]),
    ]
    picture = generator.draw(plots)
    assert picture == generator.draw(plots)
    assert picture.startswith("<?xml")
