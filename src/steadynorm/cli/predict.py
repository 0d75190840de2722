"""`steadynorm predict` and `steadynorm simulate`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from steadynorm import prediction as predict
from steadynorm import progress, theory
from steadynorm.cli import predict_tables as translations
from steadynorm.conversion import equivalents, translation

_ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def command(name: str, argv: Sequence[str]) -> Any:
    """`predict` or `simulate` as the parser takes it."""
    return {"predict": Predict, "simulate": Simulate}[name]


def parse_shape(text: str) -> tuple[int, ...]:
    """384x1536 -> (384, 1536).

    >>> parse_shape("384x1536")
    (384, 1536)
    """
    try:
        return tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"shape {text!r}: write the sides with an x between them, such as 384x1536 or 768") from None


def number(value: float | None) -> str:
    """Five significant digits.

    >>> number(0.080000000001)
    '0.08'
    """
    return "" if value is None else f"{value:.5g}"


@dataclass(frozen=True)
class Predict:
    """Norms, half-life, effective lr and matching decay of a setting; with --steps the norm over a whole run."""

    lr: float
    """Learning rate gamma."""
    optimizer: str = translations.SCIONC
    """Whose settings these are: scionc; or adamw, lion or torch's muon, which are then translated to ScionC's."""
    alpha: float | None = None
    """Weight of the new gradient in the momentum (1 - momentum elsewhere); 0.1, or what --optimizer has."""
    weight_decay: float | None = None
    """Decay lambda; or give --steady-norm-sq."""
    steady_norm_sq: float | None = None
    """Target C^2 = |theta|^2 / |u|^2; the decay that reaches it is printed."""
    shape: tuple[str, ...] = ("384x384", "384x1536", "384")
    """One or more parameter shapes, such as 384x1536."""
    lmo: str = "by-shape"
    """spectral, sign, embedding, bias, row, column, conv; by-shape: spectral for matrices, bias for vectors."""
    nesterov: bool = False
    """Nesterov momentum."""
    betas: tuple[float, float] | None = None
    """Of --optimizer adamw (0.9 0.999) or lion (0.9 0.99)."""
    momentum: float | None = None
    """Of --optimizer muon (0.95)."""
    plain_momentum: bool = False
    """--optimizer muon without Nesterov's momentum."""
    adjust: str | None = None
    """adjust_lr_fn of --optimizer muon: original (torch's default) or match_rms_adamw."""
    blocks: int = 1
    """Row blocks treated as matrices of their own (fused QKV: 3)."""
    tokens_per_step: float | None = None
    """Gives the half-life in tokens, too."""
    steps_per_epoch: float | None = None
    """Gives the half-life in epochs, too."""
    other_alphas: tuple[float, ...] = _ALPHAS
    """Alphas to print the matching decay for."""
    other_lrs: tuple[float, ...] = ()
    """Learning rates to print the matching decay for; default: halves and doubles of --lr."""
    steps: int | None = None
    """Forecast a run of so many steps."""
    warmup: int = 0
    """Its linear warmup, in steps."""
    schedule: str = "cosine"
    """How lr goes after it: constant, cosine or linear."""
    final: float = 0.0
    """The last lr as a fraction of the peak."""
    start_rms: float = 0.0
    """RMS per element of the initial weights, for the forecast."""
    page: Path | None = None
    """Write the forecast to this HTML page."""
    json: bool = False
    """Print JSON instead of tables."""

    def __call__(self) -> None:
        """Print or write everything asked for."""
        if self.optimizer != translations.SCIONC:
            self._translate()
            return
        words = {"betas": self.betas, "momentum": self.momentum, "adjust": self.adjust}
        if foreign := [f"--{name}" for name, value in words.items() if value is not None]:
            raise ValueError(f"{', '.join(foreign)}: an option of another optimizer; name it with --optimizer")
        settings = [self._setting(parse_shape(text)) for text in self.shape]
        predictions = [predict.predict(each) for each in settings]
        lrs = self.other_lrs or (self.lr / 4, self.lr / 2, 2 * self.lr, 4 * self.lr)
        matches = [predict.matches(each, self.other_alphas, lrs) for each in settings]
        same = [equivalents.equivalents(each) for each in settings]
        forecasts = self._forecasts(settings)
        if self.json:
            rows = [
                {
                    **asdict(p),
                    "half_life": self._half_lives(p.exact),
                    "matches": [asdict(x) for x in m],
                    "equivalents": e,
                }
                for p, m, e in zip(predictions, matches, same, strict=True)
            ]
            for row, forecast in zip(rows, forecasts, strict=False):
                row["forecast"] = _plain(forecast)
            print(json.dumps(rows, indent=1))
        else:
            self._print(predictions, matches, same, forecasts)
        if self.page is not None:
            self._write(dict(zip(self.shape, forecasts, strict=True)))
            print(f"page: {self.page}")

    @property
    def _alpha(self) -> float:
        return translation.SCION_ALPHA if self.alpha is None else self.alpha

    def _setting(self, shape: tuple[int, ...]) -> predict.ParamSetting:
        return predict.ParamSetting(
            self.lr, self._alpha, shape, self.lmo, self.nesterov, self.weight_decay, self.steady_norm_sq, self.blocks
        )

    def _units(self) -> dict[str, float]:
        """What a half-life is counted in besides steps, per step."""
        found = {}
        if self.tokens_per_step is not None:
            found["tokens"] = self.tokens_per_step
        if self.steps_per_epoch is not None:
            found["epochs"] = 1 / self.steps_per_epoch
        return found

    def _half_lives(self, level: predict.Level) -> dict[str, float]:
        return {unit: level.half_life * each for unit, each in {"steps": 1.0, **self._units()}.items()}

    def _plan(self) -> predict.LrPlan | None:
        if self.steps is None:
            if self.page is not None:
                raise ValueError("--page draws a forecast: give --steps as well")
            return None
        return predict.LrPlan(self.steps, self.warmup, self.schedule, self.final)

    def _forecasts(self, settings: Sequence[predict.ParamSetting]) -> list[predict.NormForecast]:
        plan = self._plan()
        return [] if plan is None else [predict.forecast(each, plan, start_rms=self.start_rms) for each in settings]

    def _translate(self) -> None:
        """Print what another optimizer's settings do, and ScionC's that do the same."""
        words = {"betas": self.betas, "momentum": self.momentum, "adjust": self.adjust}
        words["nesterov"] = False if self.plain_momentum else None
        if self.steady_norm_sq is not None:
            raise ValueError("--steady-norm-sq is ScionC's; --optimizer takes the --weight-decay you tuned")
        tuned = translations.tuned_of(self.optimizer, self.lr, self.weight_decay, **words)
        shapes = [parse_shape(text) for text in self.shape]
        rows = translations.rows(tuned, shapes, self.lmo, self.blocks, self.alpha)
        plan = self._plan()
        shown = [text for text, row in zip(self.shape, rows, strict=True) if not row.refusal]
        forecasts: dict[str, predict.NormForecast] = {}
        if plan is not None:
            for text in shown:
                forecasts[text] = translation.forecast(tuned, parse_shape(text), plan, start_rms=self.start_rms)
        if self.json:
            found = [translations.plain(tuned, row) for row in rows]
            for text, row in zip(self.shape, found, strict=True):
                if text in forecasts:
                    row["forecast"] = _plain(forecasts[text])
            print(json.dumps(found, indent=1))
        else:
            console = Console()
            console.print(translations.table(self.optimizer, tuned, self.shape, rows, self._units()))
            settings = [row.prediction.setting for row in rows if row.prediction is not None]
            console.print(_equivalent(shown, [equivalents.equivalents(each) for each in settings]))
            for note in translations.notes(self.optimizer, rows):
                console.print(note, highlight=False, markup=False)
            self._print_forecasts(console, forecasts)
        if self.page is not None:
            self._write(forecasts)
            print(f"page: {self.page}")

    def _print(
        self,
        predictions: Sequence[predict.Prediction],
        matches: Sequence[Sequence[predict.Match]],
        same: Sequence[dict[str, dict[str, Any]]],
        forecasts: Sequence[predict.NormForecast],
    ) -> None:
        console = Console()
        names = [f"{text} ({p.setting.entry.name})" for text, p in zip(self.shape, predictions, strict=True)]
        given = (
            f"decay {number(self.weight_decay)}" if self.weight_decay else f"target C² {number(self.steady_norm_sq)}"
        )
        table = Table(title=f"lr {number(self.lr)}, alpha {number(self._alpha)}, {given}", title_justify="left")
        for name in ("", *names):
            table.add_column(name, justify="left" if not name else "right")
        table.add_row("effective lr", *(number(p.effective_lr) for p in predictions))
        wanted = self.steady_norm_sq is not None
        self._add_levels(table, "decay, paper's" if wanted else "decay", [p.paper for p in predictions])
        if wanted:
            self._add_levels(table, "decay, exact", [p.exact for p in predictions])
        console.print(table)
        console.print(_matching(names, matches))
        console.print(_equivalent(names, same))
        self._print_forecasts(console, dict(zip(names, forecasts, strict=False)))

    def _print_forecasts(self, console: Console, forecasts: Mapping[str, predict.NormForecast]) -> None:
        for name, forecast in forecasts.items():
            console.print(
                f"\n{name}: weight norm over {self.steps} steps, {self.schedule}, warmup {self.warmup}, from weights of RMS "
                f"{number(self.start_rms)} (--start-rms)",
                highlight=False,
                soft_wrap=True,
            )
            for label, values in (("constant decay ", forecast.constant), ("corrected decay", forecast.corrected)):
                ends = f"middle {number(values[len(values) // 2])}, end {number(values[-1])}"
                console.print(f"  {label} {predict.spark(values)} {ends}", highlight=False, soft_wrap=True)

    def _add_levels(self, table: Table, label: str, levels: Sequence[predict.Level]) -> None:
        rows = {
            label: [x.weight_decay for x in levels],
            "  eta = lr * decay": [x.eta for x in levels],
            "  C² by that formula": [x.formula_norm_sq for x in levels],
            "  C², exact": [x.steady_norm_sq for x in levels],
            "  weight norm |θ|": [x.weight_norm for x in levels],
            "  RMS per element": [x.rms for x in levels],
        }
        halves = [self._half_lives(x) for x in levels]
        rows |= {f"  half-life, {unit}": [each[unit] for each in halves] for unit in halves[0]}
        table.add_section()
        for name, values in rows.items():
            table.add_row(name, *map(number, values))

    def _write(self, forecasts: Mapping[str, predict.NormForecast]) -> None:
        from steadynorm.report import page

        assert self.page is not None
        blocks: list[page.Block] = []
        any_lr = next(iter(forecasts.values())).lr
        length = len(any_lr)
        steps = list(range(1, length + 1, max(1, length // 1000)))
        for text, each in forecasts.items():
            series = [
                page.Series(label, steps, [values[s - 1] for s in steps], toggle=label)
                for label, values in (("constant decay", each.constant), ("corrected decay", each.corrected))
            ]
            blocks.append(page.Plot(f"{text}: weight norm", "step", "|theta|", series, zero=True))
        lr = [any_lr[s - 1] for s in steps]
        blocks.append(page.Plot("Learning rate", "step", "lr", [page.Series("lr", steps, lr)]))
        whose = f"alpha {number(self._alpha)}" if self.optimizer == translations.SCIONC else self.optimizer
        title = f"Forecast: lr {number(self.lr)}, {whose}, {self.schedule}"
        page.write(
            page.Page(title, "Expected weight norm if updates were independent of the weights.", blocks, {}), self.page
        )


def _plain(forecast: predict.NormForecast) -> dict[str, list[float]]:
    return {"constant": forecast.constant.tolist(), "corrected": forecast.corrected.tolist()}


def _matching(names: Sequence[str], matches: Sequence[Sequence[predict.Match]]) -> Table:
    table = Table(title="Decay that keeps C² (paper's formula / exact)", title_justify="left")
    for name in ("lr", "alpha", "effective lr", *names):
        table.add_column(name, justify="right")
    for row in zip(*matches, strict=True):
        decays = [f"{number(m.paper_decay)} / {number(m.exact_decay)}" for m in row]
        table.add_row(number(row[0].lr), number(row[0].alpha), number(row[0].effective_lr), *decays)
    return table


def _equivalent(names: Sequence[str], same: Sequence[dict[str, dict[str, Any]]]) -> Table:
    table = Table(title="The same in other words", title_justify="left")
    for name in ("", *names):
        table.add_column(name)
    for optimizer in dict.fromkeys(key for each in same for key in each):
        cells = [
            ", ".join(f"{k} {v if isinstance(v, bool) else number(v)}" for k, v in each.get(optimizer, {}).items())
            for each in same
        ]
        table.add_row(optimizer, *cells)
    return table


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
    """Where the random numbers start."""
    response: bool = False
    """Measure, too, how far one gradient moves the weights in all, to compare with the effective lr."""
    json: bool = False
    """Print JSON instead of a table."""

    def __call__(self) -> None:
        """Run all alphas as one batch and print measured against predicted."""
        from steadynorm.lab import simulate

        if not (math.isfinite(self.half_lives) and self.half_lives > 0):
            raise ValueError(f"half-lives {self.half_lives}: must be above 0")
        shape, nesterov = parse_shape(self.shape), self.momentum == "nesterov"
        settings = [
            predict.ParamSetting(self.lr, alpha, shape, self.lmo, nesterov, self.weight_decay) for alpha in self.alpha
        ]
        predictions = [predict.predict(each) for each in settings]
        steps = simulate.half_life_steps(self.half_lives, self.lr, self.weight_decay)
        systems = [
            simulate.System(each.entry.name, shape, self.lr, self.weight_decay, each.alpha, self.momentum)
            for each in settings
        ]
        with progress.bar(steps * len(systems), "simulating") as tell:
            seen = simulate.run(systems, steps, seeds=self.seeds, seed=self.seed, progress=tell)
        rows: list[dict[str, float]] = []
        for each, prediction, trajectory in zip(settings, predictions, seen, strict=True):
            measured = trajectory.settled(norm=True)
            row = {
                "alpha": each.alpha,
                "simulated": measured.mean,
                "error": measured.error,
                "exact": math.sqrt(prediction.exact.steady_norm_sq),
                "paper": math.sqrt(prediction.paper.formula_norm_sq),
            }
            rows.append(row)
        if self.response:
            with progress.bar(len(rows), "following one gradient") as tell:
                for row, each, prediction in zip(rows, settings, predictions, strict=True):
                    row |= self._response(each, prediction)
                    tell(1)
        if self.json:
            print(json.dumps(rows, indent=1))
            return
        table = Table(
            title=f"{self.shape} ({settings[0].entry.name}), {self.momentum}, lr {number(self.lr)}, decay "
            f"{number(self.weight_decay)}: {steps} steps, {self.seeds} seeds",
            title_justify="left",
        )
        names = ["alpha", "|θ|/|u|", "exact/sim.", "paper/sim."]
        for name in names + (["response", "expected", "effective lr"] if self.response else []):
            table.add_column(name, justify="right")
        for row in rows:
            cells = [f"{row['simulated']:.4f} ± {row['error']:.4f}"]
            cells += [f"{row[key] / row['simulated']:.4f}" for key in ("exact", "paper")]
            if self.response:
                cells.append(f"{row['response']:.4f} ± {row['response_error']:.4f}")
                cells += [number(row["expected_response"]), number(row["effective_lr"])]
            table.add_row(number(row["alpha"]), *cells)
        Console().print(table)

    def _response(self, setting: predict.ParamSetting, prediction: predict.Prediction) -> dict[str, float]:
        from steadynorm.lab import simulate

        seen = simulate.gradient_response(
            setting.entry.name, setting.shape, lr=self.lr, alpha=setting.alpha, momentum=self.momentum, seeds=64
        )
        return {
            "response": seen.mean,
            "response_error": seen.error,
            "expected_response": prediction.effective_lr * math.sqrt(first_coefficient(setting.kernel)),
            "effective_lr": prediction.effective_lr,
        }


def first_coefficient(kernel: theory.Overlap) -> float:
    """a_1 = f'(0): the linear part of an lmo, all of what one gradient does in the end.

    >>> round(first_coefficient(theory.overlap("sign", (8, 8))), 4)  # 2 / pi
    0.6366
    """
    return kernel(1e-6) / 1e-6
