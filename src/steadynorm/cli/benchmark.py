"""Define `steadynorm bench`."""

import json
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Bench:
    """Step time of these optimizers and torch's, side by side."""

    model: str | None = None
    """gpt-124m (the default with --device cuda; only with --device), vit-s16 (the default elsewhere) or gpt-124m (3 layers)."""
    rounds: int = 10
    """Number of rounds, of which the median counts; slow contenders get fewer."""
    device: str | None = None
    """cuda, cuda:1 or cpu: measure ScionC beside torch's Muon there: launches, phases, kernels, graph, and a verdict."""
    json: bool = False
    """With --device: print JSON."""

    def __call__(self) -> None:
        """Time the contenders and print a table."""
        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds}: at least 1 is needed")
        if self.device is not None:
            return self._measure_device(self.device)
        if self.json:
            raise ValueError("--json needs --device cuda or --device cpu")
        from steadynorm import machine
        from steadynorm.lab import bench

        model = self.model or "vit-s16"
        if model not in bench.MODELS:
            known = ", ".join(map(repr, bench.MODELS))
            raise ValueError(f"--model {model}: choose one of {known}, or pass --device with 'gpt-124m'")
        contenders, rounds = bench.make_contenders(), self.rounds
        print(f"{machine.describe()}\n{model}, hidden matrices, median of {rounds} interleaved rounds", flush=True)
        times = bench.step_times(contenders, bench.MODELS[model], rounds, lambda line: print(line, flush=True))
        errors = {entry.name: bench.polar_errors(entry.polar) for entry in contenders if entry.polar is not None}
        print(f"\n{bench.table(times, errors)}")
        return None

    def _measure_device(self, name: str) -> None:
        """Measure one device and print a report, or JSON."""
        from steadynorm.lab import device_bench, device_report

        device = device_bench.find_device(name)
        model = self.model or ("gpt-124m" if device.type == "cuda" else "vit-s16")
        result = device_bench.measure(device, model, self.rounds, lambda line: print(line, file=sys.stderr, flush=True))
        print(json.dumps(device_report.to_json(result), indent=1) if self.json else device_report.report(result))
