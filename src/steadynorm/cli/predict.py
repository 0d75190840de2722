"""Define `steadynorm predict`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from steadynorm import prediction
from steadynorm.cli import predict_tables as tables
from steadynorm.cli.text import Output, format_value, parse_shape, refuse_options
from steadynorm.conversion import translation
from steadynorm.conversion.equivalents import find_equivalents, from_fixed_norm
from steadynorm.conversion.knobs import describe_setting, find_knobs
from steadynorm.prediction import LrPlan, NormForecast, ParamSetting

_SCIONC, _HYPERBALL = "scionc", "hyperball"
_ALPHAS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_FOREIGN = ("betas", "momentum", "adjust", "plain_momentum")  # options that ScionC does not have
_OWN = ("nesterov", "other_alphas", "other_lrs", "half_life", "rms", "relative_update")  # that only ScionC has
_MOST = 1e50  # of a wish; its square is a number as well


class _Shown(NamedTuple):
    rows: list[dict[str, Any]]  # as JSON, one per shape
    blocks: Sequence[Table | str]
    forecasts: dict[str, NormForecast]  # by shape
    names: dict[str, str]  # of shapes, where the forecasts are printed


@dataclass(frozen=True)
class Predict:
    """Norms, half-life, effective lr and matching decay of a setting; with --steps the norm over a whole run."""

    lr: float
    """Learning rate gamma."""
    optimizer: str = _SCIONC
    """Optimizer the settings belong to: scionc; or adamw, lion, torch's muon or hyperball (--lr is relative and
    --start-rms the fixed RMS, as in MuonH and AdamH), which are translated to ScionC's."""
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
    blocks: tuple[int, ...] = (1,)
    """Row blocks treated as separate matrices: how many equal ones (fused QKV: 3), or all their sizes (2048 512 512)."""
    tokens_per_step: float | None = None
    """Print the half-life in tokens as well."""
    steps_per_epoch: float | None = None
    """Print the half-life in epochs as well."""
    other_alphas: tuple[float, ...] = _ALPHAS
    """Alphas to print the matching decay for."""
    other_lrs: tuple[float, ...] = ()
    """Learning rates to print the matching decay for; default: halves and doubles of --lr."""
    half_life: float | None = None
    """Half-life in steps that you want; prints which knob to turn. Default: twice the present one."""
    rms: float | None = None
    """RMS per element that you want, likewise. Default: twice the present one."""
    relative_update: float | None = None
    """Relative update lr |u| / |theta| that you want, likewise. Default: half the present one."""
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
        if self.steps is None:
            refuse_options(self, ("warmup", "schedule", "final", "page"), "of a forecast; pass --steps as well")
        if not self.shape:
            raise ValueError("--shape: pass at least one, such as 384x1536")
        shown = self._predict() if self.optimizer in (_SCIONC, _HYPERBALL) else self._translate()
        if self.json:
            for text, row in zip(self.shape, shown.rows, strict=True):
                if forecast := shown.forecasts.get(text):
                    constant, corrected = forecast.constant.tolist(), forecast.corrected.tolist()
                    row["forecast"] = {"constant": constant, "corrected": corrected}
            print(json.dumps(shown.rows, indent=1))
        else:
            self._print(shown)
        if self.page is not None:
            whose = f"alpha {format_value(self._alpha)}" if self.optimizer == _SCIONC else self.optimizer
            title = f"Forecast: lr {format_value(self.lr)}, {whose}, {self.schedule}"
            page = tables.write_page(self.page, title, shown.forecasts)
            print(f"page: {page}", file=sys.stderr if self.json else sys.stdout)

    @property
    def _blocks(self) -> int | tuple[int, ...]:
        return self.blocks[0] if len(self.blocks) == 1 else self.blocks

    @property
    def _alpha(self) -> float:
        return translation.SCION_ALPHA if self.alpha is None else self.alpha

    def _convert_half_life(self, steps: float) -> dict[str, float]:
        return prediction.convert_half_life(steps, self.tokens_per_step, self.steps_per_epoch)

    def _forecast(self, forecast: Callable[..., NormForecast], subjects: Mapping[str, Any]) -> dict[str, NormForecast]:
        """Return the forecasts by shape; none without --steps."""
        if self.steps is None:
            return {}
        plan = LrPlan(self.steps, self.warmup, self.schedule, self.final)
        return {text: forecast(subject, plan, start_rms=self.start_rms) for text, subject in subjects.items()}

    def _predict(self) -> _Shown:
        """Return what ScionC's settings do."""
        refuse_options(self, _FOREIGN, "an option of another optimizer; name it with --optimizer")
        if self.optimizer == _SCIONC and (self.weight_decay is None) == (self.steady_norm_sq is None):
            raise ValueError("pass --weight-decay or --steady-norm-sq, and not both")
        self._check_wishes()
        settings = [self._setting(parse_shape(text)) for text in self.shape]
        predictions = [prediction.predict(setting) for setting in settings]
        matches = [prediction.matches(setting, self.other_alphas, self.other_lrs) for setting in settings]
        same = [find_equivalents(setting) for setting in settings]
        wishes = {"half_life": self.half_life, "rms": self.rms, "relative_update": self.relative_update}
        knobs = [find_knobs(setting, **wishes) for setting in settings]
        rows = [
            {
                **asdict(predicted),
                "half_life": self._convert_half_life(predicted.exact.half_life),
                "matches": [asdict(match) for match in matching],
                "equivalents": equivalent,
                "knobs": [asdict(knob) for knob in turned],
            }
            for predicted, matching, equivalent, turned in zip(predictions, matches, same, knobs, strict=True)
        ]
        columns = [f"{text} ({setting.entry.name})" for text, setting in zip(self.shape, settings, strict=True)]
        blocks = [
            tables.prediction_table(columns, predictions, self._convert_half_life),
            *([tables.matching_table(columns, matches)] if self.optimizer == _SCIONC else []),
            tables.equivalents_table(columns, same),
            *tables.knob_lines(columns[0], settings[0], describe_setting(settings[0]), knobs[0]),
        ]
        forecasts = self._forecast(prediction.forecast, dict(zip(self.shape, settings, strict=True)))
        return _Shown(rows, blocks, forecasts, dict(zip(self.shape, columns, strict=True)))

    def _check_wishes(self) -> None:
        """Raise ValueError if a wish is out of range."""
        for name in ("half_life", "rms", "relative_update"):
            value, option = getattr(self, name), "--" + name.replace("_", "-")
            if value is not None and not 0 < value < _MOST:
                raise ValueError(f"{option} {value:g}: must be above 0 and below {_MOST:g}")
        if self.relative_update is not None and self.relative_update >= 1:
            raise ValueError(
                f"--relative-update {self.relative_update:g}: must be below 1; an update would be longer than the weights"
            )

    def _setting(self, shape: tuple[int, ...]) -> ParamSetting:
        """Return ScionC's setting for a shape."""
        if self.optimizer == _SCIONC:
            return ParamSetting(
                self.lr, self._alpha, shape, self.lmo, self.nesterov, self.weight_decay, self.steady_norm_sq, self._blocks
            )  # fmt: skip
        if self.weight_decay is not None or self.steady_norm_sq is not None:
            raise ValueError("--optimizer hyperball fixes the norm at --start-rms: leave decay and target out")
        if self.start_rms == 0:
            raise ValueError(
                "--optimizer hyperball: pass --start-rms, the RMS per element at which the weights are fixed"
            )
        return from_fixed_norm(
            self.lr, self.start_rms, shape, self.lmo, alpha=self._alpha, nesterov=self.nesterov, blocks=self._blocks
        )

    def _translate(self) -> _Shown:
        """Return what another optimizer's settings do, and ScionC's equivalent."""
        if self.steady_norm_sq is not None:
            raise ValueError("--steady-norm-sq is ScionC's; --optimizer takes the --weight-decay you tuned")
        refuse_options(
            self,
            _OWN,
            f"ScionC's; leave it out with --optimizer {self.optimizer}, or pass it with the settings that this translates to",
        )
        tuned, shapes = self._tuned(), [parse_shape(text) for text in self.shape]
        rows = translation.translate(tuned, shapes, self.lmo, blocks=self._blocks, alpha=self.alpha)
        trained = {text: row for text, row in zip(self.shape, rows, strict=True) if row.prediction is not None}
        same = [find_equivalents(row.prediction.setting) for row in rows if row.prediction is not None]
        blocks = [
            tables.translation_table(tuned, self.shape, rows, self._convert_half_life),
            tables.equivalents_table(list(trained), same),
            *tables.translation_notes(tuned, rows),
        ]
        subjects = {text: row.shape for text, row in trained.items()}
        forecasts = self._forecast(partial(translation.forecast, tuned), subjects)
        return _Shown([tables.translation_json(tuned, row) for row in rows], blocks, forecasts, {})

    def _tuned(self) -> translation.Tuned:
        """Return the settings of --optimizer; raise ValueError if one is missing or belongs to another."""
        name = self.optimizer
        if name not in translation.TUNED:
            choices = ", ".join((_SCIONC, *translation.TUNED, _HYPERBALL))
            raise ValueError(f"optimizer {name!r} is unknown; choose one of {choices}")
        if self.weight_decay is None:
            raise ValueError(f"--optimizer {name}: pass the --weight-decay you tuned; --steady-norm-sq is ScionC's")
        nesterov = False if self.plain_momentum else None
        options = {"betas": self.betas, "momentum": self.momentum, "adjust": self.adjust, "nesterov": nesterov}
        options = {option: value for option, value in options.items() if value is not None}
        kind = translation.TUNED[name]
        if foreign := sorted(options.keys() - kind.__dataclass_fields__.keys()):
            raise ValueError(f"--optimizer {name} has no {', '.join(foreign)}")
        return kind(self.lr, self.weight_decay, **options)

    def _print(self, shown: _Shown) -> None:
        console = Output()
        for block in shown.blocks:
            console.print(block, highlight=False, markup=False)
        for text, forecast in shown.forecasts.items():
            lines = (
                f"\n{shown.names.get(text, text)}: weight norm over {self.steps} steps, {self.schedule}, warmup "
                f"{self.warmup}, from weights of RMS {format_value(self.start_rms)} (--start-rms)"
            )
            for label, norms in (("constant decay ", forecast.constant), ("corrected decay", forecast.corrected)):
                middle, end = (format_value(float(norms[at])) for at in (len(norms) // 2, -1))
                lines += f"\n  {label} {prediction.spark(norms)} middle {middle}, end {end}"
            console.print(lines, highlight=False, soft_wrap=True)
