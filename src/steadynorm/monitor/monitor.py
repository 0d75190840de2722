"""Watch a run: norms, alignment and forecast of every layer, at little cost and without touching training.

weights, gradients, updates -> small tensors on the device -> one transfer -> records
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadynorm.decay.hold import hold_of
from steadynorm.decay.recognition import forecast_family, unwrap
from steadynorm.monitor.forecasts import Forecasts, Mark
from steadynorm.monitor.group_values import group_labels, read_group_values, read_lr, read_targets
from steadynorm.monitor.history import History
from steadynorm.monitor.layers import Layer, find_layers
from steadynorm.monitor.probe import Probe
from steadynorm.monitor.record import Snapshot, compose
from steadynorm.monitor.spectral import products_per_record
from steadynorm.monitor.track import Start
from steadynorm.monitor.transfer import Row, fetch
from steadynorm.records.advice import advise
from steadynorm.records.role_norms import ROLE_LABELS
from steadynorm.records.schema import Record, Records


class Monitor:
    """Measure an optimizer's weights and updates at its steps; `measure()` returns the records since the last call.

    Weights or state may be sharded (FSDP2, tensor parallel, mesh=). Every process then makes a Monitor and measures at
    the same steps; records are the same on all of them.

    A record is a dict ready for JSON, with the keys of `steadynorm.records.QUANTITIES` that apply and those that were
    logged. Steps count from 1, and weights are those after the step. None means not finite or unknown.

    - Norms by role, such as "weight_norm/hidden", are given if there are several roles.
    - lr, alpha, effective_lr, weight_decay and steady_norm_sq are those of the group named hidden, else of the first;
      groups that differ from it follow as "lr/<group>" and so on.
    - "excess_alignment/<group>" is given if there are several groups.
    - "layers" maps the name of each parameter to the keys of `steadynorm.records.LAYER_QUANTITIES`.

    An update that one of our optimizers skips because of a non-finite gradient has no alignment, and the forecast passes
    over it. Updates that others skip, such as a GradScaler, are not known.

    Args:
        optimizer: Any torch optimizer, also in Accelerate's or Lightning's wrapper. Its parameters are measured.
        model: Provides names and roles (embedding, output, fused q, k, v) where the groups do not.
        every: Steps between two records. Each record iterates until the spectral norm is within 1 %.
        flush: How many records stay on the device before all of them move to the host. A step waits for the device at no
            other time; `measure()` does, with one transfer per device.
        alignment: Whether to measure the alignment of weights and update. By default it is measured where that costs no
            memory: in steadynorm's own optimizers except AdamC. True measures it everywhere, in other optimizers by a
            copy of the weights during each measured step.
        forecast: Whether to compute the expected norm and alignment, from the weights at the first step. There is no
            forecast for RenormalizedAdamW, coupled decay, cautious decay (`theory.forecast_cautious` has one) and unknown
            classes, and none of the norm for SGD. A layer loses its forecast once some of its rows or experts had no
            gradient and waited (`own_time`), because its slices have then taken different numbers of steps.

    Examples:
        >>> from steadynorm import ScionC
        >>> layer = nn.Linear(4, 4, bias=False); optimizer = ScionC(layer.parameters(), lmo="spectral")
        >>> monitor = Monitor(optimizer)
        >>> loss = layer(torch.ones(1, 4)).sum(); loss.backward()
        >>> monitor.log(loss=loss); optimizer.step()
        >>> [record] = monitor.measure(); record["step"], record["lr"], record["loss"] == loss.item()
        (1, 0.01, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module | None = None,
        *,
        every: int = 1,
        flush: int = 50,
        alignment: bool | None = None,
        forecast: bool = True,
    ):
        for name, value in (("every", every), ("flush", flush)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Monitor: {name}={value!r} must be a whole number of at least 1")
        optimizer = unwrap(optimizer, "Monitor")
        find_layers(optimizer, model)  # raises now rather than at the first step if something cannot be measured
        self.optimizer, self.model, self.every, self.flush = optimizer, model, every, flush
        self.steps = 0
        self._watched = 0  # steps seen by this monitor, as opposed to those of a run that it continues
        self._source = object()
        self._family = forecast_family(optimizer)
        self._probe = Probe(optimizer, alignment=alignment)
        self._forecasts = Forecasts(optimizer, self._family if forecast else None)
        self._param_ids: list[list[int]] = []  # the parameters that the probe measures, by group
        self._start_rows: list[tuple[list[Layer], Row]] = []  # starts that are still on the device
        self._snapshots: list[Snapshot] = []
        self._records: list[Record] = []
        self._history = History()
        self._logged: dict[str, float | Tensor] = {}
        self._differing: set[str] = set()  # "lr/<group>" and so on that records show
        self._row: Row | None = None  # of the current step; None if it is not measured
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._hooks = [
            optimizer.register_step_pre_hook(before),  # pyright: ignore[reportArgumentType]
            optimizer.register_step_post_hook(after),  # pyright: ignore[reportArgumentType]
        ]

    def log(self, **values: float | Tensor) -> None:
        """Put numbers or one-element tensors into the record of the next step, if it is measured.

        A tensor stays on its device until records are requested. `grad_norm` replaces the measured norm: pass what
        torch.nn.utils.clip_grad_norm_ returns.
        """
        for name in values:
            if name in ("step", "layers"):
                raise ValueError(f"Monitor: {name!r} is a key of every record; log it under another name")
        self._logged |= {name: _loggable(name, value) for name, value in values.items()}

    def measure(self) -> Records:
        """Return the records of the steps measured since the last call, oldest first."""
        self._drain()
        records, self._records = Records(self._records), []
        records.resumed, records.source = self.steps > self._watched, self._source
        return records

    def advice(self) -> list[str]:
        """Return what the records so far say: for each role one sentence with the figures behind it.

        A figure is a mean over the last third of the records, with its standard error. Roles whose figures are
        missing are left out, as are runs of fewer than nine records.
        """
        self._drain()
        by_role: dict[str, set[str]] = {}
        for layer in (layer for layer in self._probe.layers if layer.parameter.numel()):
            by_role.setdefault(layer.role, set()).add(hold_of(self.optimizer.param_groups[layer.group]))
        holds = {role: held.pop() for role, held in by_role.items() if len(held) == 1}
        if len(by_role) == 1:  # records then speak of all weights
            holds[""] = next(iter(holds.values()), "decay")
        return advise(self._history.as_run(), holds)

    @property
    def roles(self) -> list[str]:
        """The roles of its parameters, as records call them: hidden, output, embedding, vectors."""
        present = {layer.role for layer in self._probe.layers if layer.parameter.numel()}
        return [role for role in ROLE_LABELS if role in present]

    def close(self) -> None:
        """Detach from the optimizer; records taken so far remain available."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- at a step

    @torch.no_grad()
    def _before_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._refresh()
        self._row = Row() if (self.steps + 1) % self.every == 0 else None
        if self._row is not None and len(self._snapshots) == self.flush:
            self._drain()  # before the step, because its skips would be counted before the forecast knows of it
        if not _has_closure(args, kwargs):
            self._probe.see_gradients(self._row)
        if self._row is not None:
            self._probe.prepare()

    @torch.no_grad()
    def _after_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _has_closure(args, kwargs):
            self._probe.see_gradients(self._row)
        self.steps += 1
        self._watched += 1
        marks = self._forecasts.note_step(self._probe.moved)
        if self._row is not None:
            self._snapshots.append(self._snapshot(self._row, marks))
        self._row, self._logged = None, {}

    def _snapshot(self, row: Row, marks: dict[Layer, Mark]) -> Snapshot:
        layers = self._probe.layers
        self._probe.measure(row, products_per_record(self.every))
        for name, value in self._logged.items():
            if isinstance(value, Tensor):
                row.put(value, [("log", name)])
        labels = group_labels(self.optimizer, layers)
        on_host = {"step": self.steps, **read_group_values(self.optimizer, labels, self._family, self._differing)}
        on_host |= {name: value for name, value in self._logged.items() if not isinstance(value, Tensor)}
        groups = self.optimizer.param_groups
        lrs, holds = [read_lr(group) for group in groups], [hold_of(group) for group in groups]
        targets = read_targets(self.optimizer, layers, self._family)
        return Snapshot(on_host, labels, lrs, holds, targets, layers, marks, row.close())

    def _refresh(self) -> None:
        """Measure the parameters that the optimizer has now; new ones start their forecast here."""
        ids = [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]
        if ids == self._param_ids:
            return
        old = {(layer.name, layer.group, layer.parameter): layer for layer in self._probe.layers}
        layers = [
            old.get((layer.name, layer.group, layer.parameter), layer)
            for layer in find_layers(self.optimizer, self.model)
        ]
        kept = set(old.values())
        new = [layer for layer in layers if layer not in kept]
        self._probe.set_layers(layers, new)
        self._forecasts.drop(kept - set(layers))
        self._forecasts.add(new)
        self._param_ids = ids
        self._start_rows.append((new, self._probe.measure_start(new)))

    def _drain(self) -> None:
        """Move everything on the device to the host, and make records of it."""
        start_rows, snapshots = self._start_rows, self._snapshots
        self._start_rows, self._snapshots = [], []
        skips_row = Row()
        self._probe.put_skips(skips_row, self._probe.layers)
        *fetched, now = fetch(
            [*(row for _, row in start_rows), *(snapshot.row for snapshot in snapshots), skips_row.close()]
        )
        start_values, record_values = fetched[: len(start_rows)], fetched[len(start_rows) :]
        for (layers, _), values in zip(start_rows, start_values, strict=True):
            self._forecasts.start(layers, values)
        pairs = [(snapshot.marks, values) for snapshot, values in zip(snapshots, record_values, strict=True)]
        advanced = self._forecasts.advance(pairs, now)
        for snapshot, values, marks in zip(snapshots, record_values, advanced, strict=True):
            self._records.append(compose(snapshot, values, marks, self._forecasts))
            self._history.add(self._records[-1])

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors from which a resumed run continues as if uninterrupted.

        Records that were not requested yet are included.
        """
        self._drain()
        return {
            "steps": self.steps,
            "records": list(self._records),
            "apart": sorted(self._differing),
            "power": self._probe.power_vectors(),
            "starts": {layer.name: list(self._forecasts.starts[layer]) for layer in self._probe.layers},
            "courses": self._forecasts.state_dict(),
            "skips": {layer.name: count for layer, count in self._forecasts.skips.items()},
            "history": self._history.state_dict(),
            "waited": {layer.name: count for layer, count in self._probe.waited.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; layers it does not name start now.

        Raises:
            ValueError: If the state belongs to another model.
        """
        self._refresh()
        self._drain()
        by_name = {layer.name: layer for layer in self._probe.layers}
        if unknown := [name for name in state["starts"] if name not in by_name]:
            raise ValueError(
                f"Monitor: the saved state has {unknown[0]!r}, which the optimizer does not: another model?"
            )
        self._probe.load_power_vectors(state["power"])
        self._forecasts.starts |= {by_name[name]: Start(*values) for name, values in state["starts"].items()}
        self._forecasts.load_state_dict(state["courses"], by_name)
        self._forecasts.skips |= {by_name[name]: n for name, n in state.get("skips", {}).items() if name in by_name}
        self._probe.load_waited(state.get("waited", {}))
        self._history.load_state_dict(state.get("history", {}))
        self.steps, self._records, self._differing = int(state["steps"]), list(state["records"]), set(state["apart"])
        self._watched = 0


def _loggable(name: str, value: Any) -> float | Tensor:
    """Return a value as records take it; raise ValueError, by its name, unless it is one number."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"Monitor: {name} has shape {tuple(value.shape)}; log one number, such as its mean")
        return value.detach()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"Monitor: {name}={value!r} is not a number; log a number or a one-element tensor") from None


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether step() was given a closure, which computes the gradients: they are seen after the step then."""
    return any(value is not None for value in (*args[1:2], kwargs.get("closure")))
