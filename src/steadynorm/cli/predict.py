"""Define `steadynorm predict`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from steadynorm import prediction
from steadynorm.cli import predict_tables as tables
from steadynorm.cli.text import format_value, parse_shape
from steadynorm.conversion import translation
from steadynorm.conversion.equivalents import find_equivalents
from steadynorm.prediction import LrPlan, NormForecast, ParamSetting

_SCIONC = "scionc"
_ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def command(_: str, argv: Sequence[str]) -> Any:
    """Return `predict` in the form that the parser takes."""
    return Predict


@dataclass(frozen=True)
class Predict:
    """Norms, half-life, effective lr and matching decay of a setting; with --steps the norm over a whole run."""

    lr: float
    """Learning rate gamma."""
    optimizer: str = _SCIONC
    """Optimizer the settings belong to: scionc; or adamw, lion or torch's muon, which are translated to ScionC's."""
    alpha: float | None = None
    """Weight of the new gradient in the momentum (1 - momentum elsewhere); default: 0.1, or that of --optimizer."""
    weight_decay: float | None = None
    """Decay lambda; or pass --steady-norm-sq."""
    steady_norm_sq: float | None = None
    """Target C^2 = |theta|^2 / |u|^2; prints the decay that reaches it."""
    shape: tuple[str, ...] = ("384x384", "384x1536", "384")
    """One or more parameter shapes, such as 384x1536."""
    lmo: str = "by-shape"
    """spectral, sign, embedding, bias, row, column, conv; by-shape: spectral for matrices, bias for vectors."""
    nesterov: bool = False
    """Nesterov momentum."""
    betas: tuple[float, float] | None = None
    """Betas of --optimizer adamw (0.9 0.999) or lion (0.9 0.99)."""
    momentum: float | None = None
    """Momentum of --optimizer muon (0.95)."""
    plain_momentum: bool = False
    """--optimizer muon without Nesterov momentum."""
    adjust: str | None = None
    """adjust_lr_fn of --optimizer muon: original (torch's default) or match_rms_adamw."""
    blocks: int = 1
    """Row blocks treated as separate matrices (fused QKV: 3)."""
    tokens_per_step: float | None = None
    """Print the half-life in tokens as well."""
    steps_per_epoch: float | None = None
    """Print the half-life in epochs as well."""
    other_alphas: tuple[float, ...] = _ALPHAS
    """Alphas to print the matching decay for."""
    other_lrs: tuple[float, ...] = ()
    """Learning rates to print the matching decay for; default: halves and doubles of --lr."""
    steps: int | None = None
    """Forecast a run of this many steps."""
    warmup: int = 0
    """Steps of linear warmup in the forecast."""
    schedule: str = "cosine"
    """Schedule of lr after the warmup: constant, cosine or linear."""
    final: float = 0.0
    """Last lr as a fraction of the peak."""
    start_rms: float = 0.0
    """RMS per element of the initial weights, for the forecast."""
    page: Path | None = None
    """Write the forecast to this HTML page."""
    json: bool = False
    """Print JSON instead of tables."""

    def __call__(self) -> None:
        """Print the prediction and write its page if there is to be one."""
        if self.steps is None and self.page is not None:
            raise ValueError("--page draws a forecast: pass --steps as well")
        forecasts = self._predict() if self.optimizer == _SCIONC else self._translate()
        if self.page is not None:
            whose = f"alpha {format_value(self._alpha)}" if self.optimizer == _SCIONC else self.optimizer
            title = f"Forecast: lr {format_value(self.lr)}, {whose}, {self.schedule}"
            tables.write_page(self.page, title, forecasts)
            print(f"page: {self.page}")

    @property
    def _alpha(self) -> float:
        return translation.SCION_ALPHA if self.alpha is None else self.alpha

    @property
    def _plan(self) -> LrPlan | None:
        return None if self.steps is None else LrPlan(self.steps, self.warmup, self.schedule, self.final)

    @property
    def _convert_half_life(self) -> tables.HalfLives:
        return partial(
            prediction.convert_half_life, tokens_per_step=self.tokens_per_step, steps_per_epoch=self.steps_per_epoch
        )

    def _predict(self) -> dict[str, NormForecast]:
        """Print what ScionC's settings do; return the forecasts by shape."""
        foreign = {"betas": self.betas, "momentum": self.momentum, "adjust": self.adjust}
        if misplaced := [f"--{name}" for name, value in foreign.items() if value is not None]:
            raise ValueError(f"{', '.join(misplaced)}: an option of another optimizer; name it with --optimizer")
        settings = [
            ParamSetting(
                self.lr, self._alpha, parse_shape(text), self.lmo, self.nesterov, self.weight_decay,
                self.steady_norm_sq, self.blocks,
            )
            for text in self.shape
        ]  # fmt: skip
        predictions = [prediction.predict(setting) for setting in settings]
        matches = [prediction.matches(setting, self.other_alphas, self.other_lrs) for setting in settings]
        same = [find_equivalents(setting) for setting in settings]
        forecasts: dict[str, NormForecast] = {}
        if (plan := self._plan) is not None:
            for text, setting in zip(self.shape, settings, strict=True):
                forecasts[text] = prediction.forecast(setting, plan, start_rms=self.start_rms)
        if self.json:
            rows = [
                {
                    **asdict(predicted),
                    "half_life": self._convert_half_life(predicted.exact.half_life),
                    "matches": [asdict(match) for match in matching],
                    "equivalents": equivalent,
                }
                for predicted, matching, equivalent in zip(predictions, matches, same, strict=True)
            ]
            self._print_json(rows, forecasts)
            return forecasts
        names = {text: f"{text} ({row.setting.entry.name})" for text, row in zip(self.shape, predictions, strict=True)}
        columns = [names[text] for text in self.shape]
        console = Console()
        console.print(tables.prediction_table(columns, predictions, self._convert_half_life))
        console.print(tables.matching_table(columns, matches))
        console.print(tables.equivalents_table(columns, same))
        self._print_forecasts(console, {names[text]: forecast for text, forecast in forecasts.items()})
        return forecasts

    def _translate(self) -> dict[str, NormForecast]:
        """Print what another optimizer's settings do and ScionC's equivalent; return the forecasts by shape."""
        if self.steady_norm_sq is not None:
            raise ValueError("--steady-norm-sq is ScionC's; --optimizer takes the --weight-decay you tuned")
        tuned = self._tuned()
        shapes = {text: parse_shape(text) for text in self.shape}
        rows = translation.translate(
            tuned, [shapes[text] for text in self.shape], self.lmo, blocks=self.blocks, alpha=self.alpha
        )
        trained = [text for text, row in zip(self.shape, rows, strict=True) if not row.refusal]
        forecasts: dict[str, NormForecast] = {}
        if (plan := self._plan) is not None:
            for text in trained:
                forecasts[text] = translation.forecast(tuned, shapes[text], plan, start_rms=self.start_rms)
        if self.json:
            self._print_json([tables.translation_json(tuned, row) for row in rows], forecasts)
            return forecasts
        console = Console()
        console.print(tables.translation_table(tuned, self.shape, rows, self._convert_half_life))
        same = [find_equivalents(row.prediction.setting) for row in rows if row.prediction is not None]
        console.print(tables.equivalents_table(trained, same))
        for note in tables.translation_notes(tuned, rows):
            console.print(note, highlight=False, markup=False)
        self._print_forecasts(console, forecasts)
        return forecasts

    def _tuned(self) -> translation.Tuned:
        """Return the settings of --optimizer; raise ValueError if one is missing or belongs to another."""
        name = self.optimizer
        if name not in translation.TUNED:
            choices = ", ".join((_SCIONC, *translation.TUNED))
            raise ValueError(f"optimizer {name!r} is unknown; choose one of {choices}")
        if self.weight_decay is None:
            raise ValueError(f"--optimizer {name}: pass the --weight-decay you tuned; --steady-norm-sq is ScionC's")
        optional = {"betas": self.betas, "momentum": self.momentum, "adjust": self.adjust}
        optional["nesterov"] = False if self.plain_momentum else None
        options: dict[str, Any] = {key: value for key, value in optional.items() if value is not None}
        kind = translation.TUNED[name]
        if foreign := sorted(options.keys() - kind.__dataclass_fields__.keys()):
            raise ValueError(f"--optimizer {name} has no {', '.join(foreign)}")
        return kind(self.lr, self.weight_decay, **options)

    def _print_json(self, rows: Sequence[dict[str, Any]], forecasts: Mapping[str, NormForecast]) -> None:
        for text, row in zip(self.shape, rows, strict=True):
            if text in forecasts:
                constant, corrected = forecasts[text].constant, forecasts[text].corrected
                row["forecast"] = {"constant": constant.tolist(), "corrected": corrected.tolist()}
        print(json.dumps(rows, indent=1))

    def _print_forecasts(self, console: Console, forecasts: Mapping[str, NormForecast]) -> None:
        for name, forecast in forecasts.items():
            lines = [
                f"\n{name}: weight norm over {self.steps} steps, {self.schedule}, warmup {self.warmup}, from weights of "
                f"RMS {format_value(self.start_rms)} (--start-rms)"
            ]
            for label, norms in (("constant decay ", forecast.constant), ("corrected decay", forecast.corrected)):
                middle, end = (format_value(float(norms[at])) for at in (len(norms) // 2, -1))
                lines.append(f"  {label} {prediction.spark(norms)} middle {middle}, end {end}")
            for line in lines:
                console.print(line, highlight=False, soft_wrap=True)
