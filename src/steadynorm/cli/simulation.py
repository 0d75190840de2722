"""Define `steadynorm simulate`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from steadynorm.cli.text import Output, format_value, new_table, parse_shape, refuse_options
from steadynorm.prediction import LrPlan, ParamSetting


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
    hold: tuple[str, ...] = ()
    """Simulate ways to hold the norm that lr and decay lead to, side by side: decay, balance, fixed, cautious."""
    balance_steps: float = 20.0
    """T of --hold balance, in steps."""
    pull: float = 0.0
    """With --hold, RMS of an outward part of the gradient along the weights, over that of the noise; below 0: inward."""
    schedule: str = "constant"
    """With --hold, the schedule of lr: constant, cosine or linear."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> None:
        """Simulate all alphas as one batch and print the measurements beside the predictions."""
        from steadynorm.lab import agreement
        from steadynorm.lab.simulate import half_life_steps

        if not self.hold:
            refuse_options(self, ("balance_steps", "pull", "schedule"), "only with --hold")
        if not self.alpha:
            raise ValueError("--alpha: pass at least one")
        shape, nesterov = parse_shape(self.shape), self.momentum == "nesterov"
        settings = [ParamSetting(self.lr, alpha, shape, self.lmo, nesterov, self.weight_decay) for alpha in self.alpha]
        steps = half_life_steps(self.half_lives, self.lr, self.weight_decay)
        if self.hold:
            self._compare_holds(settings, steps)
            return
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
        columns = ["alpha", "|θ|/|u|", "exact/sim.", "paper/sim."]
        columns += ["response", "expected", "effective lr"] if self.response else []
        table = new_table(title, columns, right=columns)
        for norm, response in rows:
            cells = [format_value(norm.alpha), f"{norm.simulated:.4f} ± {norm.error:.4f}"]
            cells += [f"{norm.exact_ratio:.4f}", f"{norm.paper_ratio:.4f}"]
            if response is not None:
                cells.append(f"{response.response:.4f} ± {response.response_error:.4f}")
                cells += [format_value(response.expected_response), format_value(response.effective_lr)]
            table.add_row(*cells)
        Output().print(table)

    def _compare_holds(self, settings: Sequence[ParamSetting], steps: int) -> None:
        """Simulate each way to hold the norm under each setting, and print norms beside the target."""
        from steadynorm.lab import agreement

        if self.momentum == "trace" or self.response:
            raise ValueError("--hold takes --momentum plain or nesterov, and no --response")
        plan = LrPlan(steps, schedule=self.schedule)
        norms = [
            norm
            for setting in settings
            for norm in agreement.compare_holds(
                setting,
                self.hold,
                plan,
                balance_steps=self.balance_steps,
                pull=self.pull,
                seeds=self.seeds,
                seed=self.seed,
            )
        ]
        if self.json:
            print(json.dumps([asdict(norm) for norm in norms], indent=1))
            return
        title = (
            f"{self.shape} ({settings[0].entry.name}), lr {format_value(self.lr)} ({self.schedule}), decay "
            f"{format_value(self.weight_decay)}, pull {format_value(self.pull)}, T {format_value(self.balance_steps)}: "
            f"{steps} steps, {self.seeds} seeds"
        )
        columns = ["alpha", "hold", "target |θ|/|u|", "mean", "mean/target", "end", "end/target"]
        table = new_table(title, columns, right=[column for column in columns if column != "hold"])
        for norm in norms:
            table.add_row(
                format_value(norm.alpha), norm.hold, f"{norm.target:.4f}", f"{norm.mean:.4f} ± {norm.error:.4f}",
                f"{norm.mean_ratio:.4f}", f"{norm.end:.4f}", f"{norm.end_ratio:.4f}",
            )  # fmt: skip
        Output().print(table)
