"""Judge the experiments kept here again by today's claims: rewrite verdicts and numbers in their summaries, train nothing.

.venv/bin/python results/judge.py            then docs/experiments.py, which writes the pages from them
"""

from pathlib import Path

from steadynorm.files import read_json, write_json
from steadynorm.lab import paper
from steadynorm.lab.paper import runner

HERE = Path(__file__).parent


def judge(folder: Path) -> None:
    """Rewrite claims, numbers, planned and missing runs; command, commit and versions stay those of the runs."""
    name, context = runner.context_of(folder)
    outcome, facts = runner.judge(paper.get(name), context)
    new = {"runs": facts["runs"], "missing": facts["missing"], **outcome.plain()}
    write_json(folder / runner.SUMMARY, read_json(folder / runner.SUMMARY) | new)


if __name__ == "__main__":
    for folder in sorted(filter(runner.is_kept, HERE.iterdir())):
        judge(folder)
