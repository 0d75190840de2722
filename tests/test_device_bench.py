"""`steadynorm bench --device`, on a CPU with tiny matrices; no time is asserted, and CUDA's part runs on stand-ins."""

import json
import os
import re
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from steadynorm.cli import main
from steadynorm.lab import bench, device_bench, device_report
from steadynorm.lab.device_bench import GRAPH, KERNELS, MUON, OURS, Result
from steadynorm.lab.launch_counter import LAUNCH_SECONDS, Counts
from steadynorm.optim import ScionC
from steadynorm.polar import symmetric_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PHASES = ["momentum", "polar factors", "decay and weights", "gradients, checks and the rest", "whole step"]
RESULT = Result(
    "H100", True, "2.13", "gpt-124m", 85_000_000, 10, {MUON: Counts(1104), OURS: Counts(160)},
    {MUON: 8.0, OURS: 4.0, KERNELS: 2.0, GRAPH: 5.0}, {}, {"whole step": 4.0}, {"float16": {"gaussian": 0.08}},
)  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(device_bench.MODELS, "vit-s16", ((16, 16), (16, 32), (16, 16)))


def test_the_command_prints_launches_phases_switches_and_a_verdict(tiny, capsys):
    assert main(["bench", "--device", "cpu", "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    for part in ("kernels (views left out)", *PHASES, MUON, "not available", "### Verdict", "says nothing about GPUs"):
        assert part in printed, part
    assert printed.count("1.00x") >= 1


def test_json_has_what_the_report_has(tiny, capsys):
    assert main(["bench", "--device", "cpu", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["step_ms"]) == {MUON, "ScionC, 4 steps", OURS}
    assert set(found["not_available"]) == {KERNELS, GRAPH}
    assert list(found["phases_ms"]) == PHASES
    assert found["parameters"] == 16 * 64 and found["launches"][OURS]["kernels"] > 0
    assert set(found["errors"]) == {"float32"} and found["verdict"].startswith("vit-s16 (0 M parameters")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "device 'tpu' is unknown; choose cpu, cuda"),
        (["--device", "cpu:1"], "device 'cpu:1' is unknown"),
        (["--device", "cuda:x"], "device 'cuda:x' is unknown"),
        (["--device", "cpu", "--model", "huge"], "model 'huge' is unknown; choose one of gpt-124m"),
        (["--json"], "--json needs --device"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_gpu_is_refused_with_the_remedy(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (["bench"], ["train", "gpt", "--out", str(tmp_path / "run")]):
        assert main([*command, "--device", "cuda"]) == 2
        assert "sees no GPU; install torch with CUDA" in capsys.readouterr().err
        assert main([*command, "--device", "gpu"]) == 2
        assert "device 'gpu' is unknown; choose cpu, cuda" in capsys.readouterr().err
    assert main(["train", "gpt", "--out", str(tmp_path / "run"), "--device", "hpu"]) == 2
    assert re.search(
        "device 'hpu' is not available: torch .* without it, or finds none; choose", capsys.readouterr().err
    )
    assert main(["train", "gpt", "--out", str(tmp_path / "run"), "--device", "meta"]) == 2
    assert "device 'meta' holds no values" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_bench.find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="torch sees 2; choose cuda:0 to cuda:1"):
        device_bench.find_device("cuda:2")


class Ticks:
    """A clock that advances by one second whenever it is read."""

    def __init__(self):
        self.reads = 0

    def now(self) -> float:
        self.reads += 1
        return float(self.reads)

    def between(self, start: float, end: float) -> float:
        return end - start


def test_phases_are_summed_over_chunks_and_add_up_to_the_step(monkeypatch):
    """Two shapes are two chunks. Each phase takes one tick, and between any two moments there is another one."""
    monkeypatch.setattr(device_bench, "Clock", lambda device: Ticks())
    phases = device_bench.time_phases(CPU, [(8, 8), (8, 16)], rounds=3)
    assert list(phases) == PHASES
    assert {name: phases[name] for name in PHASES[:3]} == dict.fromkeys(PHASES[:3], 2000)
    assert phases["whole step"] == 13_000
    assert phases["gradients, checks and the rest"] == 13_000 - 3 * 2000


def test_the_timed_optimizer_takes_the_steps_of_scionc():
    params, timed = bench.parameters([(8, 8), (8, 16)]), bench.parameters([(8, 8), (8, 16)])
    ScionC(params, lmo="spectral").step()
    device_bench.PhaseTimer(Ticks()).optimizer(timed).step()
    assert all(torch.equal(p, q) for p, q in zip(params, timed, strict=True))


def test_kernels_are_switched_on_only_for_their_step(monkeypatch):
    seen = []
    for before in (None, "0"):
        monkeypatch.delenv(symmetric_kernels.VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(symmetric_kernels.VARIABLE, before)
        device_bench.with_kernels(lambda: seen.append(os.environ[symmetric_kernels.VARIABLE]))
        assert os.environ.get(symmetric_kernels.VARIABLE) == before
    assert seen == ["1", "1"]


def test_kernels_that_cannot_run_are_reported_with_the_reason(monkeypatch):
    assert device_bench.kernels_problem(CPU) == "Triton kernels need a CUDA device"
    monkeypatch.setattr(symmetric_kernels, "_missing", lambda device: "triton cannot be imported")
    assert "triton cannot be imported" in device_bench.kernels_problem(CUDA)
    monkeypatch.setattr(symmetric_kernels, "_missing", lambda device: "")
    assert device_bench.kernels_problem(CUDA) == ""


def test_a_captured_step_is_filled_before_every_replay(monkeypatch):
    """Stand-ins take the place of CUDA's stream and graph; the optimizer is our own."""
    events = []

    class Graph:
        def replay(self):
            events.append("replay")

    class Stream:
        def wait_stream(self, other):
            events.append("wait")

    @contextmanager
    def capture(graph):
        events.append("capture")
        yield
        events.append("captured")

    for name, stand_in in {
        "CUDAGraph": Graph, "Stream": Stream, "current_stream": Stream, "graph": capture, "stream": nullcontext,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(device_bench.ScionC, "fill_scalars", lambda self: events.append("fill"))
    monkeypatch.setattr(device_bench.ScionC, "step", lambda self: events.append("step"))
    replay = device_bench.captured_step(bench.parameters([(8, 8)]))
    replay()
    replay()
    assert events == ["wait", *["step"] * 3, "wait", "capture", "step", "captured", *["fill", "replay"] * 2]


def test_cuda_events_are_waited_for_and_read_in_seconds(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.calls = []

        def record(self):
            self.calls.append("record")

        def synchronize(self):
            self.calls.append("synchronize")

        def elapsed_time(self, other):
            return 2500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = device_bench.Clock(CUDA)
    start, end = clock.now(), clock.now()
    assert clock.between(start, end) == 2.5
    assert start.calls == ["record"] and end.calls == ["record", "synchronize"]


def test_the_verdict_says_what_is_faster_and_what_bounds_the_step():
    said = device_report.verdict(RESULT)
    assert "ScionC, 5 steps: 4.00 ms per step; torch's Muon: 8.00 ms. That is 2.00 times as fast." in said
    host = 1e3 * LAUNCH_SECONDS * 160
    assert f"160 kernels at 4.5 us take the host {host:.2f} ms, 18 % of the step: launches do not bound it." in said
    assert "Triton kernels: 2.00 ms. That is 2.00 times as fast." in said
    assert "CUDA graph: 5.00 ms. That is 1.25 times as slow." in said
    assert "says nothing about GPUs" not in said
    bound = replace(
        RESULT,
        launches={**RESULT.launches, OURS: Counts(600)},
        not_available={GRAPH: "none"},
        step_ms={MUON: 4.0, OURS: 4.0, KERNELS: 4.0},
    )
    said = device_report.verdict(bound)
    assert "68 % of the step: launches take most of it." in said
    assert "That is about the same." in said and "CUDA graph: not available (none)." in said


def test_the_error_of_an_exact_enough_dtype_is_that_of_the_polynomials():
    errors = device_bench.polar_errors(CPU, ("float32",), [(24, 24)])["float32"]
    assert errors["hard"] < 0.2 and set(errors) == {"gaussian", "hard", "low rank + noise"}
