"""Run an experiment: train what is missing, keep slim records, judge the claims, write the summary and the page."""

import json
import platform
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import steadynorm
from steadynorm import progress, records
from steadynorm.files import lock, make_folder, read_json, write_json
from steadynorm.lab import origin
from steadynorm.lab.data import datasets
from steadynorm.lab.paper import pool, slim_records
from steadynorm.lab.paper.experiment import Context, Experiment, Outcome, TrainedExperiment
from steadynorm.lab.paper.runs import NOT_RUN, Key, RunPlan, Runs, address, recorded_part, slug
from steadynorm.lab.paper.statistics import CONFIDENCE
from steadynorm.report import page

SCHEMA, VERSION = "steadynorm-experiment", 1
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Resources:
    """What the runs are trained with."""

    pool: Path = Path("runs/paper/pool")  # the folder of the runs, which experiments share
    jobs: int = 2  # runs to train at a time
    data: Path | None = None  # at paper scale: ImageNet or token shards
    processes: int = 8  # at paper scale: of each run


@dataclass(frozen=True)
class Finished:
    """A finished experiment: the outcome, its page, and the last words of runs that failed, by folder."""

    outcome: Outcome
    page: Path
    failed: Mapping[Path, str]


def run_experiment(
    experiment: Experiment | TrainedExperiment,
    context: Context,
    resources: Resources | None = None,
    command: str = "",
) -> Finished:
    """Run and judge an experiment, write summary.json and the page.

    Finished runs are used again. Failed runs leave the claims that need them untestable.
    """
    resources = resources or Resources()
    make_folder(context.folder)
    busy = f"another command is writing {context.folder}; wait for it, or choose another --out"
    with lock(context.folder, busy=busy):
        before = check_folder(context.folder, experiment.name)
        failed: Mapping[Path, str] = {}
        if isinstance(experiment, TrainedExperiment):
            plan = experiment.plan(context)
            failed = _train(plan, resources)
            _keep_records(experiment, context, plan, resources.pool)
        elif not before and not context.quick:
            progress.announce(experiment.name, experiment.seconds[context.scale])
        outcome, facts = judge(experiment, context)
        facts["seconds"] = max(facts["seconds"], before.get("seconds", 0.0))  # earlier calls may have simulated more
        return Finished(outcome, _write(experiment, context, command, facts, outcome), failed)


def judge(experiment: Experiment | TrainedExperiment, context: Context) -> tuple[Outcome, dict[str, Any]]:
    """Return the outcome by what the folder holds (simulations run what it lacks), and the facts about its runs."""
    if isinstance(experiment, Experiment):
        began = time.perf_counter()
        outcome = experiment.run(context)
        return outcome, {"runs": 0, "seconds": round(time.perf_counter() - began, 1), "missing": []}
    runs = read(experiment, context)
    plan = runs.plan
    facts: dict[str, Any] = {
        "runs": len(plan.configs),
        "seconds": round(sum(float(run.columns["seconds"][-1]) for run in runs.finished.values()), 1),
        "seeds": list(plan.seeds),
        "budgets": {str(budget): plan.baseline.steps(budget) for budget in plan.budgets},
        "missing": [slug(key) for key in runs.missing],
        "machine": next(map(machine_of, runs.finished.values()), None),
        "run_commits": sorted({str(run.origin.get("commit")) for run in runs.finished.values()}),
    }
    return experiment.judge(runs), facts


def read(experiment: TrainedExperiment, context: Context) -> Runs:
    """Return the runs whose slim records are in the folder and have the configurations declared today."""
    plan, finished, missing = experiment.plan(context), {}, {}
    for key, config in plan.configs.items():
        try:
            run = records.read(context.records / slug(key))
        except records.RecordError:
            missing[key] = NOT_RUN
            continue
        if dict(run.config) != recorded_part(config):
            missing[key] = "the kept records are of another configuration"
        elif not len(run.steps) or run.steps[-1] != config.steps:
            missing[key] = f"the kept records end at step {max(run.steps, default=0)} of {config.steps}"
        else:
            finished[key] = run
    counts = Counter(map(machine_of, finished.values()))
    kinds = sorted(counts, key=lambda kind: (-counts[kind], kind))
    for key in [key for key, run in finished.items() if machine_of(run) != kinds[0]]:
        kind = machine_of(finished.pop(key))
        missing[key] = (
            f"trained on another kind of machine ({kind}) than the others ({kinds[0]}), and not mixed with them"
        )
    return Runs(plan, finished, missing)


def machine_of(run: records.Run) -> str:
    """Return the kind of machine that trained a run, as its records say."""
    return str(run.origin.get("machine", "unknown"))


def not_run(experiment: Experiment | TrainedExperiment, context: Context) -> list[str]:
    """Return the arms, seeds and panels that the experiment declares at this scale and the folder does not hold yet."""
    if isinstance(experiment, Experiment):
        return [part for part in experiment.parts.get(context.scale, ()) if not context.wants(part)]
    runs = read(experiment, replace(context, seeds=None, only=()))
    missing = {(arm, seed) for (arm, _, seed), why in runs.missing.items() if why == NOT_RUN}
    lacking = {arm: [seed for seed in runs.plan.seeds if (arm, seed) in missing] for arm in runs.plan.arms}
    everywhere = next(iter(lacking.values()))
    if everywhere and all(seeds == everywhere for seeds in lacking.values()):
        return [f"seeds {', '.join(map(str, everywhere))} of {len(runs.plan.seeds)}"]
    return [
        arm if len(seeds) == len(runs.plan.seeds) else f"{arm} (seeds {', '.join(map(str, seeds))})"
        for arm, seeds in lacking.items()
        if seeds
    ]


def check_folder(folder: Path, name: str) -> dict[str, Any]:
    """Return the summary in a folder, if any; raise ValueError if the folder holds something else."""
    path = folder / SUMMARY
    if not path.exists():
        return {}
    try:
        held = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; remove it: finished runs are kept, and the same command writes it again") from None
    schema, version, other = held.get("schema"), held.get("version"), held.get("experiment")
    if schema != SCHEMA or version != VERSION:
        raise ValueError(
            f"{path}: written by another version of steadynorm ({schema or 'no schema'}, version {version}; this one "
            f"writes {SCHEMA} {VERSION}); remove the folder, or choose another --out"
        )
    if other != name:
        raise ValueError(f"{folder} holds {other}, not {name}; choose another --out")
    return held


# Training


def jobs(plan: RunPlan, resources: Resources) -> dict[Key, pool.Job]:
    """Return every run with its command."""
    processes = resources.processes if plan.baseline.scale == "paper" else 0
    return {
        key: pool.Job(config, pool.train_command(config, plan.baseline.recipe, processes))
        for key, config in plan.in_pool(resources.pool, resources.data).items()
    }


def dry_run(plan: RunPlan, resources: Resources) -> list[str]:
    """Return one complete command per run, finished or not."""
    if plan.baseline.scale == "paper" and resources.data is None:
        resources = replace(resources, data=Path("DATA"))  # to be filled in
    return [shlex.join(job.command) for job in jobs(plan, resources).values()]


def _train(plan: RunPlan, resources: Resources) -> dict[Path, str]:
    every_job = list(jobs(plan, resources).values())
    todo = [job.config for job in every_job if not pool.finished(job.config)]
    if todo:
        check_data(plan, resources)
        seconds = sum(plan.baseline.seconds(config.steps) for config in todo)
        progress.announce(f"{len(todo)} runs to train", seconds / min(resources.jobs, len(todo)))
    return pool.train_all(every_job, resources.jobs, one_thread=plan.baseline.scale == "desk")


def check_data(plan: RunPlan, resources: Resources) -> None:
    """Raise ValueError if the data that the runs need is missing."""
    name = plan.baseline.data
    if name and resources.data is None and not datasets.is_cached(name):
        raise ValueError(f"the data set {name} is missing; get it with: steadynorm data get {name}")
    if plan.baseline.scale == "paper" and resources.data is None:
        wanted = {
            "vit": "ImageNet: a folder with train/ and val/",
            "gpt": "a folder of token shards (steadynorm data tokenize)",
        }
        raise ValueError(f"--scale paper needs --data, {wanted[plan.baseline.recipe[:3]]}")
    if resources.data is not None and not resources.data.is_dir():
        raise ValueError(f"--data {resources.data}: no such folder")


def _keep_records(experiment: TrainedExperiment, context: Context, plan: RunPlan, folder: Path) -> None:
    """Keep slim records of every finished run; earlier ones stay where the pool has none."""
    for key, config in plan.in_pool(folder).items():
        if pool.finished(config):
            path = context.records / slug(key) / records.FILE
            slim_records.keep(records.read(config.out), path, slug(key), experiment.columns, experiment.layers)


# Summary and page


def _write(
    experiment: Experiment | TrainedExperiment,
    context: Context,
    command: str,
    facts: Mapping[str, Any],
    outcome: Outcome,
) -> Path:
    """Write the summary and the page; return the page's path."""
    summary = {
        "schema": SCHEMA,
        "version": VERSION,
        "experiment": experiment.name,
        "command": command,
        "scale": context.scale,
        "quick": context.quick,
        "seed": context.seed,
        "seeds_asked": context.seeds,
        "only": list(context.only),
        **origin.describe(),
        "versions": {
            "steadynorm": steadynorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **facts,
        **outcome.plain(),
    }
    write_json(context.folder / SUMMARY, summary)
    subtitle = f"{experiment.name} · {context.scale} scale · the paper: {experiment.paper_finding}"
    downloads = {f"{experiment.name}.json": json.dumps(summary, indent=1)}
    whole = page.Page(experiment.title, subtitle, [verdicts(outcome), *outcome.blocks], downloads)
    return page.write(whole, context.folder / "report.html")


def verdicts(outcome: Outcome) -> page.Table:
    """Return the claims as a table."""
    rows = [
        (text, finding.verdict, f"{finding.chance:.2g}", finding.figure) for text, finding in outcome.claims.items()
    ]
    caption = (
        f"A verdict is given where the whole {100 * CONFIDENCE:g} % confidence interval (Student's t over seeds) is on one side of the "
        "bound. p: the chance of one as clear as this if the truth were at the bound; 1: not tested."
    )
    return page.Table("Claims", ("claim", "verdict", "p", "figure"), rows, caption)


def is_kept(folder: Path) -> bool:
    """Return whether a folder holds a finished experiment, not something else with a summary."""
    return (folder / SUMMARY).exists() and read_json(folder / SUMMARY).get("schema") == SCHEMA


def context_of(folder: Path) -> tuple[str, Context]:
    """Return the experiment's name, and the context in which to judge a finished folder again without running anything."""
    held = read_json(folder / SUMMARY)
    context = Context(
        folder, held["quick"], held["seeds_asked"], held["seed"], tuple(held["only"]), held["scale"], kept_only=True
    )
    return held["experiment"], context


def estimate(plans: Sequence[RunPlan]) -> tuple[int, float]:
    """Return how many different runs these plans ask for, and about how many seconds of one core they take."""
    seconds = {address(c): plan.baseline.seconds(c.steps) for plan in plans for c in plan.configs.values()}
    return len(seconds), sum(seconds.values())
