"""The mutation check itself: every mutant still applies, and killed is told from survived."""

import ast
import json
from functools import cache
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS
from mutation import Mutant, module_path, mutate

from benchmarks import trust

ROOT = Path(__file__).parents[1]
QUICK = ("test_schedule.py::test_the_cosine_is_the_papers_at_every_update",)
FORMULA = "(1 + math.cos(math.pi * x)) / 2"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.place}: {mutant.breaks}")
def test_every_mutant_applies_once_and_changes_its_module(mutant: Mutant):
    assert mutate(mutant) != unparsed(module_path(mutant))


@cache
def unparsed(path: Path) -> str:
    return ast.unparse(ast.parse(path.read_text(encoding="utf-8"))) + "\n"


def test_the_tests_of_every_mutant_exist():
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("[")[0].partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, f"{mutant.breaks}: {test}"


def test_mutants_are_unique():
    assert len({(mutant.place, mutant.breaks) for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutants.digest(mutant) for mutant in MUTANTS}) == len(MUTANTS)


def test_errors_say_what_was_searched_where():
    with pytest.raises(ValueError, match=r"'b' of nowhere:f: there is no module nowhere in .*steadynorm"):
        mutate(Mutant("nowhere:f", "b", "x", "", QUICK))
    with pytest.raises(
        ValueError, match=r"'b' of schedule:Ratio\.nothing: schedule\.py defines no function or variable Ratio\.nothing"
    ):
        mutate(Mutant("schedule:Ratio.nothing", "b", "x", "", QUICK))
    with pytest.raises(ValueError, match=r"must occur once in Ratio\.__call__ but occurs 0 times: 'not_there'"):
        mutate(Mutant("schedule:Ratio.__call__", "b", "not_there", "1", QUICK))
    with pytest.raises(ValueError, match=r"occurs [2-9] times: 'self\.warmup'"):
        mutate(Mutant("schedule:Ratio.__call__", "b", "self.warmup", "1", QUICK))


SOURCE = """
TABLE = {"a": 1.5, "b": 2}
class C:
    rate: float = 0.1
    def f(self, x):
        \'\'\'Docstring.\'\'\'
        y = (x  # a comment
             + 1)
        call(x, flag=True)
        return  (y)
    def g(self):
        call()
"""


@pytest.mark.parametrize(
    ("place", "old", "new", "mutated"),
    [
        ("m:C.f", "x+1", "x - 1", "y = x - 1"),
        ("m:C.f", "y = x + 1; call(x, flag=True)", "y = 2", "y = 2\n        return y"),
        ("m:C.f", "call(x, flag=True)", "", "y = x + 1\n        return y"),
        ("m:C.f", "flag=True", "flag=False", "call(x, flag=False)"),
        ("m:C.g", "call()", "", "def g(self):\n        pass"),
        ("m:C.rate", "0.1", "0.2", "rate: float = 0.2"),
        ("m:TABLE", "1.5", "1", "TABLE = {'a': 1, 'b': 2}"),
    ],
)
def test_code_is_found_by_its_syntax_tree(place, old, new, mutated, tmp_path):
    (tmp_path / "m.py").write_text(SOURCE, encoding="utf-8")
    assert mutated in mutate(Mutant(place, "", old, new, ()), tmp_path)


@pytest.mark.slow
def test_a_broken_formula_is_killed_and_a_harmless_change_survives(capsys, monkeypatch, tmp_path):
    """This also shows that the copy is tested, although the package is installed."""
    harmless = Mutant("schedule:_SHAPES", "nothing", FORMULA, f"0.5 * {FORMULA[:-4]}", QUICK)
    harmful = Mutant("schedule:_SHAPES", "cosine is a line", FORMULA, "1 - x", QUICK)
    monkeypatch.setattr(mutants, "MUTANTS", (harmless, harmful))
    before = (ROOT / "src" / "steadynorm" / "schedule.py").read_text(encoding="utf-8")
    assert mutants.main(["--jobs", "2", "--out", str(tmp_path / "out.json")]) == 1
    assert (ROOT / "src" / "steadynorm" / "schedule.py").read_text(encoding="utf-8") == before
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [each["outcome"] for each in found["outcomes"]] == ["survived", "killed"]
    assert found["outcomes"][1]["by"].partition("::")[0] == "test_schedule.py"
    said = capsys.readouterr().out
    assert "SURVIVED: schedule:_SHAPES: nothing" in said and "1 of 2 mutants killed" in said
    monkeypatch.setattr(mutants, "MUTANTS", (harmful,))  # known to be killed: nothing is left to do
    assert mutants.main(["--new", "--out", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out == "1 of 1 mutants killed\n"


@pytest.mark.slow
def test_selections_must_pass_on_the_unbroken_copy(monkeypatch, tmp_path):
    """Failing or missing tests are reported before any mutant is tried."""
    nowhere = Mutant("schedule:_SHAPES", "cosine is a line", FORMULA, "1 - x", ("test_schedule.py::test_not_there",))
    with pytest.raises(RuntimeError, match="must pass on the unbroken copy: did not run"):
        mutants.check([nowhere], jobs=1, limit=600, report=lambda text: None)


def test_the_pages_show_the_recorded_outcomes(tmp_path):
    pages = ROOT / "docs" / "trust.md", ROOT / "README.md"
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    trust.write(*copies)
    for page, copy in zip(pages, copies, strict=True):
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), "run python -m benchmarks.trust"


def test_the_recorded_outcomes_belong_to_these_mutants_and_none_survived():
    found = json.loads(mutants.RESULTS.read_text(encoding="utf-8"))
    assert [each["digest"] for each in found["outcomes"]] == [mutants.digest(each) for each in MUTANTS], (
        "run python tests/mutants.py --new && python -m benchmarks.trust"
    )
    assert found["killed"] == found["mutants"] == len(MUTANTS)
    for mutant, each in zip(MUTANTS, found["outcomes"], strict=True):
        tests = [test.partition("[")[0] for test in mutant.tests]
        assert any(each["by"] == test or each["by"].startswith(f"{test}::") for test in tests), mutant.breaks
