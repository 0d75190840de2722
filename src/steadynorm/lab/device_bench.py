"""Measure a step of ScionC beside torch's Muon on one device (`steadynorm bench --device`).

A GPU is timed with CUDA events, from an idle device, so that a step that waits for its launches shows it. A CPU is timed with the host's
clock, and there the switches that need CUDA are reported as not available.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadynorm import machine
from steadynorm.lab import bench
from steadynorm.lab.bench import Shape
from steadynorm.lab.launch_counter import CONTENDERS, Counts, count_step
from steadynorm.optim import ScionC
from steadynorm.optim.batch import Batch, Scalars
from steadynorm.optim.scion_rule import SCION_ARITHMETIC, SCION_RULE, ScionSettings
from steadynorm.polar import Polar, symmetric_kernels
from steadynorm.progress import Say

GPT_124M: tuple[Shape, ...] = ((2304, 768), (768, 768), (3072, 768), (768, 3072)) * 12
MODELS: dict[str, tuple[Shape, ...]] = {"gpt-124m": GPT_124M, **bench.MODELS}
MUON, OURS = "torch.optim.Muon", "ScionC, 5 steps"
KERNELS, GRAPH = f"{OURS}, Triton kernels", f"{OURS}, CUDA graph"
_WARM_UP_STEPS = 3  # before a step is captured


class Clock:
    """Moments of a device, and the seconds between two of them: CUDA events, or the host's clock."""

    def __init__(self, device: torch.device):
        self._is_gpu = device.type == "cuda"

    def now(self) -> Any:
        """Return this moment of the host, or an event recorded in the current stream."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two moments, once both have happened."""
        if not self._is_gpu:
            return end - start
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)


@dataclass(frozen=True)
class Result:
    """What was counted and measured of one model on one device; times are medians in milliseconds."""

    device: str
    is_gpu: bool
    torch: str  # its version
    model: str
    parameters: int  # of its hidden matrices
    rounds: int
    launches: dict[str, Counts]  # what a step asks of a GPU, counted on fake tensors
    step_ms: dict[str, float]  # by variant
    not_available: dict[str, str]  # why variants were not run
    phases_ms: dict[str, float]  # of a step of ScionC
    errors: dict[str, dict[str, float]]  # polar error by working dtype and kind of spectrum


def find_device(name: str) -> torch.device:
    """Return the device of this name, "cpu" or "cuda" or "cuda:1"; raise ValueError if this machine does not have it."""
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ValueError(f"device {name!r} is unknown; choose cpu, cuda, or a GPU by its number such as cuda:1")
    return machine.find_device(name)


def measure(device: torch.device, model: str, rounds: int, say: Say = lambda line: None) -> Result:
    """Count and time steps of ScionC and torch's Muon on the hidden matrices of a model."""
    if model not in MODELS:
        raise ValueError(f"model {model!r} is unknown; choose one of {', '.join(MODELS)}")
    shapes, is_gpu = MODELS[model], device.type == "cuda"
    with torch.cuda.device(device) if is_gpu else nullcontext():
        say("counting launches on fake CUDA tensors")
        launches = {name: count_step(make, shapes).counts for name, make in CONTENDERS.items()}
        say("timing steps")
        step_ms, not_available = time_steps(device, shapes, rounds, say)
        say("timing phases")
        phases = time_phases(device, shapes, rounds)
        dtypes = ("float16", "bfloat16", "float32") if is_gpu else ("float32",)
        errors = polar_errors(device, dtypes, ((384, 1536),) if is_gpu else ((96, 384),))
    name = torch.cuda.get_device_name(device) if is_gpu else machine.describe()
    return Result(
        device=name, is_gpu=is_gpu, torch=torch.__version__, model=model, rounds=rounds,
        parameters=sum(math.prod(shape) for shape in shapes), launches=launches, step_ms=step_ms,
        not_available=not_available, phases_ms=phases, errors=errors,
    )  # fmt: skip


def time_steps(
    device: torch.device, shapes: Sequence[Shape], rounds: int, say: Say = lambda line: None
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median milliseconds of each variant's step, and why the others were not run."""

    def parameters() -> list[nn.Parameter]:
        return bench.parameters(shapes, device=str(device))

    clock, not_available = Clock(device), dict[str, str]()
    actions = {name: plain_step(make(parameters())) for name, make in CONTENDERS.items()}
    if problem := kernels_problem(device):
        not_available[KERNELS] = problem
    else:
        ours = plain_step(CONTENDERS[OURS](parameters()))
        actions[KERNELS] = lambda: with_kernels(ours)
    if device.type == "cuda":
        actions[GRAPH] = captured_step(parameters())
    else:
        not_available[GRAPH] = "CUDA graphs need a CUDA device"

    def seconds_of(action: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = clock.now()
        action()
        return clock.between(start, clock.now())

    seconds = bench.interleaved(actions, rounds, say, seconds_of)
    return {name: 1e3 * value for name, value in seconds.items()}, not_available


def plain_step(optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return a step with all of them."""

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def kernels_problem(device: torch.device) -> str:
    """Return why the Triton kernels cannot run on this device, or an empty string."""
    if device.type != "cuda":
        return "Triton kernels need a CUDA device"
    try:
        with_kernels(lambda: symmetric_kernels.is_enabled(device, torch.float16))
    except RuntimeError as error:
        return str(error)
    return ""


def with_kernels(action: Callable[[], object]) -> None:
    """Run an action with the Triton kernels switched on."""
    before = os.environ.get(symmetric_kernels.VARIABLE)
    os.environ[symmetric_kernels.VARIABLE] = "1"
    try:
        action()
    finally:
        if before is None:
            del os.environ[symmetric_kernels.VARIABLE]
        else:
            os.environ[symmetric_kernels.VARIABLE] = before


def captured_step(params: list[nn.Parameter]) -> Callable[[], None]:
    """Return a step of ScionC that was captured in a CUDA graph: it fills this step's numbers and replays the graph."""
    optimizer = ScionC(params, lmo="spectral", capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_STEPS):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()

    def replay() -> None:
        optimizer.fill_scalars()
        graph.replay()

    return replay


class PhaseTimer:
    """Time phases of a step, which may come several times, once per chunk."""

    def __init__(self, clock: Clock):
        self.clock, self.spans = clock, list[tuple[str, Any, Any]]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        start = self.clock.now()
        yield
        self.spans.append((name, start, self.clock.now()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase, and start over."""
        sums: dict[str, float] = {}
        for name, start, end in self.spans:
            sums[name] = sums.get(name, 0.0) + self.clock.between(start, end)
        self.spans.clear()
        return sums

    def optimizer(self, params: list[nn.Parameter]) -> ScionC:
        """Return a ScionC whose phases are timed."""

        def rule(batch: Batch, scalars: Scalars, settings: ScionSettings) -> None:
            with self.phase("momentum"):
                x = SCION_RULE.accumulate(batch, scalars, settings)
            with self.phase("polar factors"):
                u = SCION_RULE.normalize(x, settings, batch.scratch)
            with self.phase("decay and weights"):
                batch.descend(u, scalars)

        timed = type("TimedScionC", (ScionC,), {"arithmetic": SCION_ARITHMETIC._replace(rule=rule, split_rule=None)})
        return timed(params, lmo="spectral")


def time_phases(device: torch.device, shapes: Sequence[Shape], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each phase of a step; a CPU takes chunks one after the other, on one thread."""
    timer, whole, rest = PhaseTimer(Clock(device)), "whole step", "gradients, checks and the rest"
    optimizer, threads = timer.optimizer(bench.parameters(shapes, device=str(device))), torch.get_num_threads()
    samples: dict[str, list[float]] = {}
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        for round_number in range(rounds + 1):
            with timer.phase(whole):
                optimizer.step()
            seconds = timer.take()
            seconds[rest] = 2 * seconds[whole] - sum(seconds.values())
            if round_number:  # the first warms up
                for name, value in seconds.items():
                    samples.setdefault(name, []).append(1e3 * value)
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(samples[name]) for name in sorted(samples, key=whole.__eq__)}


def polar_errors(device: torch.device, dtypes: Sequence[str], shapes: Sequence[Shape]) -> dict[str, dict[str, float]]:
    """Return the polar error by working dtype and kind of spectrum, as this device computes it."""
    return {
        dtype: bench.polar_errors(lambda x, dtype=dtype: Polar(dtype=dtype)(x.to(device)).cpu(), shapes)
        for dtype in dtypes
    }
