"""Judge the experiments kept here again by today's claims and all seeds they have: rewrite their summaries, train nothing.

.venv/bin/python results/judge.py            then docs/experiments.py, which writes the pages from them
"""

from dataclasses import replace
from pathlib import Path

from steadynorm.files import read_json, write_json
from steadynorm.lab import paper
from steadynorm.lab.paper import runner
from steadynorm.lab.paper.experiment import Context, TrainedExperiment
from steadynorm.lab.paper.runs import slug

HERE = Path(__file__).parent


def judge(folder: Path) -> None:
    """Rewrite claims, numbers and the list of runs; commit and versions stay those of the runs."""
    name, context = runner.context_of(folder)
    experiment, summary = paper.get(name), read_json(folder / runner.SUMMARY)
    if isinstance(experiment, TrainedExperiment) and (seeds := added_seeds(experiment, context)):
        context = replace(context, seeds=seeds, only=())
        command = f"steadynorm paper run {name} --scale {context.scale} --seeds {seeds}"
        summary |= {"seeds_asked": seeds, "only": [], "command": command}
    outcome, facts = runner.judge(experiment, context)
    if not facts["runs"]:
        del facts["seconds"]  # simulations are kept: reading them takes no time
    write_json(folder / runner.SUMMARY, summary | facts | outcome.plain())


def added_seeds(experiment: TrainedExperiment, context: Context) -> int:
    """Return how many seeds all arms have, if records of more were copied into the folder than the summary knows; else 0."""
    known, seeds = len(experiment.plan(context).seeds), 0
    while all(
        (context.records / slug(key)).exists()
        for key in experiment.plan(replace(context, seed=seeds, seeds=1, only=())).configs
    ):
        seeds += 1
    return seeds if context.seed == 0 and (seeds > known or (context.only and seeds >= known)) else 0


if __name__ == "__main__":
    for folder in sorted(filter(runner.is_kept, HERE.iterdir())):
        judge(folder)
