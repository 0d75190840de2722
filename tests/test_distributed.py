"""Many processes give what one gives, on gloo, with as few starts of processes as possible.

Errors are relative, in the 2-norm of each weight and state tensor, after 4 steps (30 in the slow tests) on the same full gradients, among
them infinities in one element (skipped alike on all ranks) and gradients missing on all ranks.
"""

import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_jobs as jobs
import distributed_worker as worker
import pytest
import torch

import steadynorm as sn

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")


class Reports(dict[str, list[Any]]):
    """Run a job when its report is first requested, and keep what every rank reports: {job: [rank 0's, ...]}.

    Checkpoints go from each job to the next, so the jobs before it also run.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self.jobs: dict[str, Callable[[], list[Any]]] = {
            "single": lambda: [{"saved": alone(lambda: jobs.save(folder, ("single",)))}],
            "four": lambda: worker.run(4, "four", folder),
            "two": lambda: worker.run(2, "two", folder),
            "one": lambda: [{"loaded": alone(lambda: jobs.load(folder, SAVED, ("single",)))}],
            "four_again": lambda: worker.run(4, "four_again", folder),
        }

    def __missing__(self, job: str) -> list[Any]:
        for name, run in self.jobs.items():
            if name not in self:
                self[name] = run()
            if name == job:
                break
        return self[job]

    def of(self, key: str, *names: str) -> dict[tuple[str, str, int], Any]:
        """Return the entries under a key of these jobs, by job, name and rank."""
        return {
            (job, name, rank): value
            for job in names
            for rank, report in enumerate(self[job])
            for name, value in report[key].items()
        }


SAVED = ("4 ddp", "4 fsdp", "2 ddp", "2 fsdp", "1 single")


def alone(action: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():  # torch warns that this is a single process
        warnings.simplefilter("ignore")
        return action()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    jobs.take_steps_alone()
    return Reports(tmp_path_factory.mktemp("processes"))


def assert_follows(errors, exact=1e-10):
    for (job, name, rank), error in errors.items():
        assert error < (exact if name.startswith("fp64") else 1e-3), (job, name, rank, error)


@pytest.mark.parametrize(("job", "cases"), [("four", 10 * 4), ("two", 25 * 2)], ids=["four", "two"])
def test_every_layout_takes_the_steps_of_a_single_process(job, cases, reports):
    errors = reports.of("layouts", job)
    assert len(errors) == cases
    assert_follows(errors)


def test_the_monitor_measures_shards_as_it_does_whole_weights(reports):
    found = reports.of("monitored", "two", "four")
    assert len(found) == 4 * 2 + 2 * 4
    assert not any(found.values()), {key: value for key, value in found.items() if value}


def test_momentum_takes_its_share_of_memory(reports):
    for job, world in (("two", 2), ("four", 4)):
        for report in reports[job]:
            assert report["bytes"] <= 1.1 / world


def test_checkpoints_go_between_world_sizes_and_layouts(reports):
    """Checkpoints are saved after 3 steps with one skipped; one more step after loading equals the unbroken run.

    Weights are zeroed first.
    """
    errors = reports.of("loaded", "two", "one")
    assert {name for _, name, _ in errors} >= {"2 fsdp -> ddp", "4 ddp -> fsdp", "2 ddp -> single", "1 single -> fsdp"}
    assert len({(job, name) for job, name, _ in errors}) == 10 + 5
    assert all(error < 1e-10 for error in errors.values()), errors


def test_checkpoints_of_muonc_go_from_four_processes_to_two(reports):
    """Both kinds of state, and Adam's counts, also where a rank has no row of a parameter."""
    errors = reports.of("loaded muonc", "two")
    assert len(errors) == 4 * 2
    assert all(error < 1e-10 for error in errors.values()), errors


@pytest.mark.slow
def test_checkpoints_of_two_processes_go_to_four(reports):
    errors = reports.of("loaded", "four_again")
    assert len({name for _, name, _ in errors}) == 6
    assert all(error < 1e-10 for error in errors.values()), errors


def test_state_dicts_go_between_layouts_unchanged(reports):
    errors = reports.of("moved", "two")
    assert len(errors) == 10 * 2
    assert all(error < 1e-10 for error in errors.values()), errors


def test_own_gradients_lead_to_the_loss_of_a_single_process(reports):
    for report in reports["two"]:
        losses = report["losses"]
        assert losses["single"] < 0.5
        for kind in ("ddp", "fsdp"):
            assert abs(losses[kind] / losses["single"] - 1) < 1e-2, losses


def test_bad_input_raises_the_same_clear_error_on_all_ranks(reports):
    first, second = (report["errors"] for report in reports["two"])
    assert first == second
    for kind in ("ddp", "fsdp"):
        for maker in ("ScionC", "LionC"):
            case = f"{maker}, {kind}"
            assert "'tall' has a gradient on some ranks and none on others" in first[f"missing gradient, {case}"]
            assert first[f"missing gradient, {case}: untouched"] == "True"
            assert "the gradient of 'tall' is not finite" in first[f"not finite, {case}"]
            assert "'a' of shape (12, 12)" in first[f"order, {case}"] and "same order" in first[f"order, {case}"]
    assert "momentum_buffer of shape (3, 5) for 'a', which takes (12, 12)" in first["another model"]
    assert "'a' is a DTensor already" in first["mesh with DTensors"]
    assert "'a' is on meta, but mesh= is on cpu" in first["mesh of another device"]
    assert "2 dimensions" in first["mesh of two dimensions"]
    assert "must be a DeviceMesh or a ProcessGroup" in first["no mesh"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_optimizer_works_in_every_layout(world, tmp_path):
    for rank, report in enumerate(worker.run(world, "every_layout", tmp_path, seconds=600)):
        errors = {("every_layout", name, rank): error for name, error in report["layouts"].items()}
        assert_follows(errors, exact=1e-9)  # 30 steps enlarge what rounding does in 4


def test_a_job_that_hangs_is_ended_and_leaves_no_process(tmp_path):
    with pytest.raises(RuntimeError, match="took more than"):
        worker.run(2, "sleeper", tmp_path, seconds=1)
    assert multiprocessing.active_children() == []


def test_the_mesh_is_not_part_of_a_checkpoint():
    p = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = sn.ScionC([p], lmo="spectral")
    assert "mesh" not in optimizer.state_dict()["param_groups"][0]
