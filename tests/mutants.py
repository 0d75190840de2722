"""`make mutants`: break each formula on purpose, in a copy of src/, and see that the tests notice.

python tests/mutants.py [--jobs 2] [--limit 300] [--only TEXT] [--new] [--out docs/out/mutants.json]

Every selection of tests must pass on an unbroken copy first. Ends with 1 if a mutant survives, or a test takes too long.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mutants_recipes
import mutants_table
from mutation import Mutant, module_path, mutate

MUTANTS = mutants_table.MUTANTS + mutants_recipes.MUTANTS
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "out" / "mutants.json"

# The package is also installed in the environment: make sure that the copy is what gets tested.
RUN = """
import os, sys
import steadynorm
if not os.path.realpath(steadynorm.__file__).startswith(os.path.realpath(os.environ["STEADYNORM_COPY"]) + os.sep):
    print("imported from", steadynorm.__file__)
    sys.exit(70)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
KILLED, SURVIVED, SLOW, BROKEN = "killed", "survived", "timed out", "did not run"
_PASSED, _FAILED, _UNCOLLECTED = 0, 1, 2  # pytest's exit codes; the last: a test module failed while it was imported


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutant, or of the unbroken copy."""

    place: str
    breaks: str
    outcome: str
    by: str  # the test that noticed
    seconds: float
    digest: str = ""


def digest(mutant: Mutant) -> str:
    """Identify a mutant by its place, code and replacement, so that an outcome counts for no other."""
    return hashlib.sha256(repr((mutant.place, mutant.old, mutant.new)).encode()).hexdigest()[:12]


def attempt(mutant: Mutant | None, tests: Sequence[str], limit: float, root: Path = ROOT) -> Outcome:
    """Run tests on a copy of src/, with this mutant in it or without any."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(root / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        if mutant is not None:
            path = module_path(mutant, copy / "steadynorm")
            path.write_text(mutate(mutant, copy / "steadynorm"), encoding="utf-8")
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no", "--no-header"]
        environment = os.environ | {
            "PYTHONPATH": str(copy), "STEADYNORM_COPY": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder) / "hypothesis"),
        }  # fmt: skip
        command = [sys.executable, "-c", RUN, *options, *(str(root / "tests" / each) for each in tests)]
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, timeout=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                encoding="utf-8", check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            outcome, by = SLOW, ""
        else:
            outcome = {_PASSED: SURVIVED, _FAILED: KILLED, _UNCOLLECTED: KILLED}.get(done.returncode, BROKEN)
            found = re.search(r"^(?:FAILED|ERROR) tests/([^\s\[]+)", done.stdout, re.M)
            by = found[1] if found else done.stdout[-500:] if outcome != SURVIVED else ""
    seconds = round(time.monotonic() - started, 1)
    what = ("", "nothing") if mutant is None else (mutant.place, mutant.breaks)
    return Outcome(*what, outcome, by, seconds, "" if mutant is None else digest(mutant))


def selections(mutants: Iterable[Mutant]) -> list[str]:
    """Return every test file or id that is needed, without the ids of files that are needed whole."""
    wanted = {test for mutant in mutants for test in mutant.tests}
    return sorted(test for test in wanted if "::" not in test or test.split("::")[0] not in wanted)


def check(mutants: Sequence[Mutant], *, jobs: int, limit: float, report: Callable[[str], object]) -> list[Outcome]:
    """Test the unbroken copy first, then every mutant in the order of the table."""
    by_file: dict[str, list[str]] = {}
    for test in selections(mutants):
        by_file.setdefault(test.split("::")[0], []).append(test)
    with ThreadPoolExecutor(jobs) as pool:
        for file, outcome in _all(pool, {f: (None, tests, 4 * limit) for f, tests in by_file.items()}):
            report(
                f"unbroken: {file} {'passed' if outcome.outcome == SURVIVED else outcome.outcome}, {outcome.seconds} s"
            )
            if outcome.outcome != SURVIVED:
                raise RuntimeError(f"{file} must pass on the unbroken copy: {outcome.outcome}, {outcome.by}")
        found: dict[Mutant, Outcome] = {}
        for mutant, outcome in _all(pool, {each: (each, each.tests, limit) for each in mutants}):
            found[mutant] = outcome
            report(f"{len(found):>3} of {len(mutants)}: {outcome.outcome}: {mutant.place}: {mutant.breaks} ({outcome.seconds} s) {outcome.by}")  # fmt: skip
    return [found[each] for each in mutants]


def _all(pool: ThreadPoolExecutor, jobs: dict) -> Iterable[tuple]:
    waiting = {pool.submit(attempt, *arguments): key for key, arguments in jobs.items()}
    try:
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        for each in waiting:
            each.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 if all mutants are killed."""
    parser = argparse.ArgumentParser(prog="python tests/mutants.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tests run at the same time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one mutant")
    parser.add_argument("--only", default="", help="mutants whose place or description contains this")
    parser.add_argument("--new", action="store_true", help="only those that are not yet in the results as killed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    before = _known(given.out)
    mutants = [each for each in MUTANTS if given.only in f"{each.place}: {each.breaks}"]
    if given.new:
        mutants = [each for each in mutants if before.get(digest(each), {}).get("outcome") != KILLED]
    outcomes = check(mutants, jobs=given.jobs, limit=given.limit, report=lambda text: print(text, flush=True))
    known = before | {each.digest: asdict(each) for each in outcomes}
    everything = [known[digest(each)] for each in MUTANTS if digest(each) in known]
    for each in everything:
        if each["outcome"] != KILLED:
            print(f"{each['outcome'].upper()}: {each['place']}: {each['breaks']}")
    if missing := len(MUTANTS) - len(everything):
        print(f"{missing} not tried yet")
    killed = sum(each["outcome"] == KILLED for each in everything)
    print(f"{killed} of {len(MUTANTS)} mutants killed")
    summary = {
        "killed": killed,
        "mutants": len(MUTANTS),
        "seconds": round(sum(each["seconds"] for each in everything)),
        "python": platform.python_version(),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({**summary, "outcomes": everything}, indent=1) + "\n", encoding="utf-8")
    return 0 if killed == len(MUTANTS) else 1


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """Return the recorded outcomes by digest."""
    return (
        {each["digest"]: each for each in json.loads(path.read_text(encoding="utf-8"))["outcomes"]}
        if path.exists()
        else {}
    )


if __name__ == "__main__":
    sys.exit(main())
