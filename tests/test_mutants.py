"""The mutation check itself: every mutant still applies and can be imported, and the check tells killed from survived."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS
from mutants_table import Mutant

from benchmarks import trust

ROOT = Path(__file__).parents[1]
QUICK = ("test_schedule.py::test_cosine_is_the_papers_at_every_update",)
FORMULA = "(1 + math.cos(math.pi * done)) / 2"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: f"{each.file}: {each.breaks}")
def test_every_mutant_applies_once_and_its_module_can_be_imported(mutant: Mutant, tmp_path, monkeypatch):
    path = tmp_path / "mutant.py"
    path.write_text(mutants.mutated(mutant), encoding="utf-8")
    package = "steadynorm." + mutant.file.replace("/", ".").rpartition(".")[0].rpartition(".")[0]
    name = f"{package.rstrip('.')}.mutant"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)


def test_every_mutants_tests_are_there():
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("[")[0].partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, f"{mutant.breaks}: {test}"


def test_no_mutant_is_there_twice():
    assert len({(each.file, each.breaks) for each in MUTANTS}) == len({each[:3] for each in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_not_there_or_there_twice_is_an_error():
    with pytest.raises(ValueError, match=r"schedule\.py: nothing: its text occurs 0 times"):
        mutants.mutated(Mutant("schedule.py", "not in there", "", "nothing", QUICK))
    with pytest.raises(ValueError, match="not once"):
        mutants.mutated(Mutant("schedule.py", "return", "", "much", QUICK))


def test_a_broken_formula_is_killed_and_a_harmless_change_survives(capsys, monkeypatch, tmp_path):
    """Which also shows that the copy is what is tested, though the package is installed."""
    harmless = Mutant("schedule.py", FORMULA, f"0.5 * {FORMULA[:-4]}", "nothing", QUICK)
    harmful = Mutant("schedule.py", FORMULA, "1 - done", "cosine is a line", QUICK)
    monkeypatch.setattr(mutants, "MUTANTS", (harmless, harmful))
    before = (ROOT / "src" / "steadynorm" / "schedule.py").read_text(encoding="utf-8")
    assert mutants.main(["--jobs", "2", "--out", str(tmp_path / "out.json")]) == 1
    assert (ROOT / "src" / "steadynorm" / "schedule.py").read_text(encoding="utf-8") == before
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [each["outcome"] for each in found["outcomes"]] == ["survived", "killed"]
    assert found["outcomes"][1]["by"].partition("::")[0] == "test_schedule.py"
    said = capsys.readouterr().out
    assert "SURVIVED: schedule.py: nothing" in said and "1 of 2 mutants killed" in said
    monkeypatch.setattr(mutants, "MUTANTS", (harmful,))  # known to be killed: nothing is left to do
    assert mutants.main(["--new", "--out", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out == "1 of 1 mutants killed\n"


@pytest.mark.slow
def test_tests_that_fail_anyway_prove_nothing(monkeypatch, tmp_path):
    """They, and tests that are not there, are told before any mutant is tried."""
    nowhere = Mutant("schedule.py", FORMULA, "1 - done", "cosine is a line", ("test_schedule.py::test_not_there",))
    with pytest.raises(RuntimeError, match="must pass on the unbroken copy: did not run"):
        mutants.check([nowhere], jobs=1, limit=600, report=lambda text: None)


def test_the_pages_show_what_was_found(tmp_path):
    pages = ROOT / "docs" / "trust.md", ROOT / "README.md"
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    trust.write(*copies)
    for page, copy in zip(pages, copies, strict=True):
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), "run python -m benchmarks.trust"


def test_the_results_are_of_these_mutants_and_none_survived():
    found = json.loads(mutants.RESULTS.read_text(encoding="utf-8"))
    assert [each["digest"] for each in found["outcomes"]] == [mutants.digest(each) for each in MUTANTS], (
        "run python tests/mutants.py --new && python -m benchmarks.trust"
    )
    assert found["killed"] == found["mutants"] == len(MUTANTS)
    for mutant, each in zip(MUTANTS, found["outcomes"], strict=True):
        tests = [test.partition("[")[0] for test in mutant.tests]
        assert any(each["by"] == test or each["by"].startswith(f"{test}::") for test in tests), mutant.breaks
