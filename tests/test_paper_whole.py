"""Every experiment from end to end in miniature: trained in this process, kept, judged, written, judged again."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steadynorm.lab import paper
from steadynorm.lab.data import datasets as get
from steadynorm.lab.models import GPTConfig, ViTConfig
from steadynorm.lab.paper import baselines, pool, runner
from steadynorm.lab.paper.experiment import Context, TrainedExperiment
from steadynorm.lab.train.config import Gpt, Vit
from steadynorm.lab.train.loop import train
from steadynorm.report import page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not get.is_cached("cifar10"), reason="steadynorm data get cifar10"),
]
TRAINED = [each for each in paper.EXPERIMENTS.values() if isinstance(each, TrainedExperiment)]


def miniature(baseline: baselines.Baseline) -> baselines.Baseline:
    task = baseline.base.task
    if isinstance(task, Gpt):
        model = GPTConfig(layers=1, width=16, heads=2, vocab=257, context=16)
        task = replace(task, model=model, tokenizer="bytes", length=16, eval_tokens=64)
    else:
        assert isinstance(task, Vit)
        model = ViTConfig(image=32, patch=16, width=16, depth=1, heads=2, mlp=32, classes=10, variant="scion")
        task = replace(task, model=model, eval_images=64)
    return replace(baseline, base=replace(baseline.base, task=task, batch=4), steps_per_unit=0.2, warmup=2, data="")


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("pool")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("experiment", TRAINED, ids=lambda each: each.name)
def test_every_experiment_runs_in_miniature(
    experiment: TrainedExperiment, shared_pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def here(jobs: list[pool.Job], count: int, one_thread: bool) -> dict[Path, str]:
        for job in jobs:
            if not pool.finished(job.config):
                train(job.config, quiet=True)
        return {}

    monkeypatch.setattr(pool, "train_all", here)
    small = replace(experiment, baselines={name: miniature(each) for name, each in experiment.baselines.items()})
    done = paper.run_experiment(small, Context(tmp_path, seeds=2), paper.Resources(shared_pool))
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["missing"] == []
    assert done.outcome.claims
    figures = [finding.figure for finding in done.outcome.claims.values()]
    assert not [figure for figure in figures if "missing" in figure or "nan" in figure]
    drawn = [each for each in done.outcome.blocks if isinstance(each, page.Plot | page.HeatMap)]
    assert drawn
    assert all(each.series for each in drawn if isinstance(each, page.Plot))
    again, _ = runner.judge(small, replace(Context(tmp_path, seeds=2), kept_only=True))
    assert again.claims == done.outcome.claims
    assert sum(path.stat().st_size for path in (tmp_path / "records").rglob("*")) < 500_000
