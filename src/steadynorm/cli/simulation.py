"""Define `steadynorm simulate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from steadynorm.cli.text import format_value, parse_shape
from steadynorm.prediction import ParamSetting


def command(_: str, argv: Sequence[str]) -> Any:
    """Return `simulate` in the form that the parser takes."""
    return Simulate


@dataclass(frozen=True)
class Simulate:
    """A parameter under random gradients (the paper's appendix B) against prediction."""

    shape: str = "64x64"
    """Parameter shape."""
    lmo: str = "by-shape"
    """spectral, sign, embedding, bias, row, column, conv; by-shape: spectral for matrices, bias for vectors."""
    lr: float = 0.05
    """Learning rate gamma."""
    weight_decay: float = 0.1
    """Decay lambda."""
    alpha: tuple[float, ...] = (0.05, 0.1, 0.5)
    """One or more alphas, simulated as one batch."""
    momentum: str = "plain"
    """plain, nesterov or trace."""
    seeds: int = 8
    """Independent copies."""
    half_lives: float = 16.0
    """Length of the run; its second half is averaged."""
    seed: int = 0
    """Seed of the random numbers."""
    response: bool = False
    """Also measure how far one gradient moves the weights in total, to compare with the effective lr."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> None:
        """Simulate all alphas as one batch and print the measurements beside the predictions."""
        from steadynorm.lab import agreement
        from steadynorm.lab.simulate import half_life_steps

        shape, nesterov = parse_shape(self.shape), self.momentum == "nesterov"
        settings = [ParamSetting(self.lr, alpha, shape, self.lmo, nesterov, self.weight_decay) for alpha in self.alpha]
        steps = half_life_steps(self.half_lives, self.lr, self.weight_decay)
        norms = agreement.compare(settings, self.momentum, steps, seeds=self.seeds, seed=self.seed)
        responses = agreement.measure_responses(settings, self.momentum) if self.response else [None] * len(norms)
        rows = list(zip(norms, responses, strict=True))
        if self.json:
            values = [asdict(norm) | (asdict(response) if response else {}) for norm, response in rows]
            print(json.dumps(values, indent=1))
            return
        title = (
            f"{self.shape} ({settings[0].entry.name}), {self.momentum}, lr {format_value(self.lr)}, decay "
            f"{format_value(self.weight_decay)}: {steps} steps, {self.seeds} seeds"
        )
        table = Table(title=title, title_justify="left")
        columns = ["alpha", "|θ|/|u|", "exact/sim.", "paper/sim."]
        for column in columns + (["response", "expected", "effective lr"] if self.response else []):
            table.add_column(column, justify="right")
        for norm, response in rows:
            cells = [format_value(norm.alpha), f"{norm.simulated:.4f} ± {norm.error:.4f}"]
            cells += [f"{norm.exact_ratio:.4f}", f"{norm.paper_ratio:.4f}"]
            if response is not None:
                cells.append(f"{response.response:.4f} ± {response.response_error:.4f}")
                cells += [format_value(response.expected_response), format_value(response.effective_lr)]
            table.add_row(*cells)
        Console().print(table)
