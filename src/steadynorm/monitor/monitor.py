"""Watch a run: norms, alignment and forecast of every layer, at a cost that hardly shows, without touching training.

weights, gradients, updates -> small tensors on the device -> one transfer -> records
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadynorm.decay.families import forecast_family, is_decoupled, unwrap
from steadynorm.decay.rule import applied_weight_decay
from steadynorm.monitor.layers import Layer, find_layers
from steadynorm.monitor.norms import gradient, norms, peak, totals
from steadynorm.monitor.record import (
    ALONG,
    BEFORE,
    SKIPS,
    UPDATE,
    WAITED,
    Record,
    Records,
    Row,
    Taken,
    compose,
    fetch,
    group_labels,
    group_numbers,
    skips_in,
)
from steadynorm.monitor.spectral import SpectralNorms, products_per_record, spectral_norms
from steadynorm.monitor.track import Forecasts, RecordView, Start, TrackPosition
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.idle import Slices, extremes
from steadynorm.optim.sharding.layout import layout_of, local
from steadynorm.records.role_norms import ROLE_LABELS


@dataclass(frozen=True)
class Plan:
    """What is measured where; made anew when the optimizer's parameters change."""

    layers: list[Layer]
    by_device: dict[torch.device, list[Layer]]
    by_parameter: dict[Tensor, Layer]  # tensors hash by identity
    peaks: list[Layer]
    spectral: list[SpectralNorms]


def _plan(layers: list[Layer]) -> Plan:
    by_device: dict[torch.device, list[Layer]] = {}
    for layer in layers:
        by_device.setdefault(layer.parameter.device, []).append(layer)
    peaks = [layer for layer in layers if layer.lmo.entry_size is not None and layer.parameter.numel()]
    return Plan(layers, by_device, {layer.parameter: layer for layer in layers}, peaks, spectral_norms(layers))


class Monitor:
    """Measures an optimizer's weights and updates at its steps; `measure()` returns the records since the last call.

    Arguments:
        optimizer: any torch optimizer, ours or not, also in Accelerate's or Lightning's wrapper. What is measured are
            its parameters.
        model: gives names and roles (embedding, output, fused q, k, v) where the groups do not carry them.
        every: steps between two records. Each record iterates for the spectral norm until it is within 1 %.
        flush: so many records are held on the device; when there are more, all move to the host and wait there to be
            asked for. A step waits for the device at no other time; `measure()` does, with one transfer a device.
        alignment: of weights and update. By default where it costs no memory: in steadynorm's own optimizers but
            AdamC. True: everywhere, in other optimizers by a copy of the weights during each measured step.
        forecast: the expected norm and alignment beside the measured, from the weights that the first step finds.
            There is none for RenormalizedAdamW, coupled decay and classes we do not know, and no norm for SGD. A layer
            of which some rows or experts had no gradient and waited (`own_time`) has none from then on: each of its
            slices has taken another number of steps.

    Weights or state may be sharded (FSDP2, tensor parallel, mesh=). Then every process makes a Monitor and measures at
    the same steps; records are the same on all.

    A record is a dict ready for JSON; None is what is not finite, not known or does not apply.
        step: counted from 1. Weights are those after the step.
        weight_norm, grad_norm: l2 of all. Gradients are those the optimizer sees, so clipped ones if they are clipped;
            log(grad_norm=...) puts the norm before clipping in their place.
        spectral_norm: |A|_2 / sqrt(d_out/d_in), geometric mean over the matrices (each block one) that are not zero;
            within 1 % of an SVD's, at any `every`.
        sign_norm, embedding_norm, bias_norm: d_in max|A|, max|A|, root mean square; arithmetic means.
        forecast_norm: what weight_norm is expected to be.
        weight_norm/hidden, forecast_norm/hidden and so on: of the hidden matrices, the output layer, the embeddings
            and the vectors, where there are several of these.
        alignment, expected_alignment, excess_alignment: cos(theta_{t-1}, u_t), what momentum alone makes of it, and
            measured - expected; means over the spectral layers, over all if there are none.
        lr, alpha, effective_lr, weight_decay, steady_norm_sq (where there is a target): of the group named hidden, else
            the first; of groups that differ from it also "lr/<group>" and so on. "excess_alignment/<group>" where there are several.
        layers: name -> norm, forecast, grad, alignment, expected, excess, spectral.
        And what was logged. An update that our optimizers skip for a non-finite gradient has no alignment, and the
        forecast passes over it; those that others leave out (a GradScaler's, say) it does not know of.

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
        find_layers(optimizer, model)  # what cannot be measured is told now, not at the first step
        self.optimizer, self.model, self.every, self.flush = optimizer, model, every, flush
        self.steps = 0
        self._watched = 0  # steps that this monitor has seen, as distinct from those of a run that it continues
        self._source = object()
        self._observes = alignment is not False and isinstance(optimizer, SteadyOptimizer)
        self._copies = alignment is True and not self._observes
        self._family = forecast_family(optimizer)
        self._forecasts = Forecasts(optimizer, self._family if forecast else None)
        self._plan = _plan([])
        self._planned: tuple[Any, ...] = ()  # the parameters it was made for
        self._starts: dict[Layer, Start] = {}
        self._waiting: dict[Layer, Slices] = {}  # layers with slices that wait while they have no gradient
        self._waited: dict[Layer, Tensor] = {}  # 0-d: steps in which some of its slices had no gradient, on the device
        self._new: list[tuple[list[Layer], Row]] = []  # starts that are still on the device
        self._taken: list[Taken] = []
        self._records: list[Record] = []
        self._logged: dict[str, float | Tensor] = {}
        self._apart: set[str] = set()  # "lr/<group>" and so on that records show
        # Of the step under way:
        self._row: Row | None = None  # None: not measured
        self._moved: set[Layer] = set()
        self._before: dict[Layer, Tensor] = {}
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._hooks = [
            optimizer.register_step_pre_hook(before),  # pyright: ignore[reportArgumentType]
            optimizer.register_step_post_hook(after),  # pyright: ignore[reportArgumentType]
        ]

    def log(self, **values: float | Tensor) -> None:
        """Put numbers or one-element tensors into the record of the coming step, if it is measured.

        A tensor stays on its device until records are asked for.
        `grad_norm` takes the place of the measured one: what torch.nn.utils.clip_grad_norm_ returns.
        """
        for name, value in values.items():
            if name in ("step", "layers"):
                raise ValueError(f"Monitor: {name!r} is the record's own; log it under another name")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"Monitor: {name} has shape {tuple(value.shape)}; log one number, such as its mean")
        self._logged |= {
            name: value.detach() if isinstance(value, Tensor) else float(value) for name, value in values.items()
        }

    def measure(self) -> Records:
        """Return the records of the steps measured since the last call, oldest first."""
        self._drain()
        records, self._records = Records(self._records), []
        records.resumed, records.source = self.steps > self._watched, self._source
        return records

    @property
    def roles(self) -> list[str]:
        """The roles that its parameters play, as records call them: hidden, output, embedding, vectors."""
        played = {layer.part_of for layer in self._plan.layers if layer.parameter.numel()}
        return [role for role in ROLE_LABELS if role in played]

    def close(self) -> None:
        """Detach from the optimizer; records taken so far can still be had."""
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
        if self._row is not None and len(self._taken) == self.flush:
            self._drain()  # now: after the step its skips would be counted that the forecast has not noted yet
        if not _closure(args, kwargs):
            self._see_gradients()
        if self._row is not None and self._observes:
            self.optimizer.observing = True  # pyright: ignore[reportAttributeAccessIssue]
        if self._row is not None and self._copies:
            self._before = {layer: layer.part.clone() for layer in self._plan.layers}

    @torch.no_grad()
    def _after_step(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _closure(args, kwargs):
            self._see_gradients()
        self.steps += 1
        self._watched += 1
        marks = self._forecasts.note(self._moved)
        if self._row is not None:
            self._take(self._row, marks)
        self._row, self._before, self._logged = None, {}, {}

    def _see_gradients(self) -> None:
        """Which layers have a gradient, and its norm; unscaled where a GradScaler leaves that to the optimizer."""
        self._moved = {layer for layer in self._plan.layers if layer.parameter.grad is not None}
        self._see_waiting()
        scale = getattr(self.optimizer, "grad_scale", None)
        for device, layers in self._plan.by_device.items() if self._row is not None else ():
            moved = [layer for layer in layers if layer in self._moved]
            if moved and self._row is not None:
                found = norms([gradient(layer) for layer in moved], [layer.layout for layer in moved])
                found = found if scale is None else found / scale.to(device)
                self._row.put(found, [("grad", layer) for layer in moved])

    def _see_waiting(self) -> None:
        """Count the steps in which slices of a layer wait: from then on the forecast does not know its norm."""
        for layer, slices in self._waiting.items():
            if layer in self._moved and (part := gradient(layer)).numel():
                waits = extremes(part.unsqueeze(0), slices).nonzero().logical_not().any().float()
                self._waited[layer] = self._waited.get(layer, torch.zeros_like(waits)) + waits

    def _put_waited(self, row: Row) -> None:
        for layer in (layer for layer in self._plan.layers if layer in self._waited):
            row.put(totals(self._waited[layer].unsqueeze(0), [layer.layout]), [(WAITED, layer)])

    def _take(self, row: Row, marks: list[TrackPosition]) -> None:
        """Measure now, on the device."""
        plan = self._plan
        for layers in plan.by_device.values():
            found = norms([layer.part for layer in layers], [layer.layout for layer in layers])
            row.put(found, [("norm", layer) for layer in layers])
        for each in plan.spectral:
            row.put(each(products_per_record(self.every)), [("spectral", key) for key in each.keys])
        for layer in plan.peaks:
            row.put(peak(layer), [(layer.lmo.name, layer)])
        for layers, products in self._products():
            products = totals(products, [layer.layout for layer in layers])
            row.put(products, [(kind, layer) for kind in (ALONG, UPDATE, BEFORE) for layer in layers])
        self._put_skips(row, plan.layers)
        self._put_waited(row)
        for name, value in self._logged.items():
            if isinstance(value, Tensor):
                row.put(value, [("log", name)])
        labels = group_labels(self.optimizer, plan.layers)
        known = {"step": self.steps, **group_numbers(self.optimizer, labels, self._family, self._apart)}
        known |= {name: value for name, value in self._logged.items() if not isinstance(value, Tensor)}
        self._taken.append(Taken(known, labels, plan.layers, marks, row.close()))

    def _put_skips(self, row: Row, layers: list[Layer]) -> None:
        """The counters of skipped updates, where the optimizer has them; replicas and shards count alike."""
        counters: dict[torch.device, dict[Layer, Tensor]] = {}
        for layer in layers:
            count = self.optimizer.state.get(layer.parameter, {}).get("skipped")
            if isinstance(count, Tensor):
                counters.setdefault(count.device, {})[layer] = local(count)
        for some in counters.values():
            row.put(torch.stack(list(some.values())), [(SKIPS, layer) for layer in some])

    def _products(self) -> list[tuple[list[Layer], Tensor]]:
        """<theta, u>, |u|^2, |theta|^2 of the step just taken, (3, layers): from the optimizer, or from the copies.

        Of sharded weights, of this process's part.
        """
        if self._observes:
            observed = self.optimizer.observed  # pyright: ignore[reportAttributeAccessIssue]
            return [([self._plan.by_parameter[p] for p in params], products) for params, products in observed]
        decoupled = is_decoupled(self.optimizer)
        out = []
        for layer, before in self._before.items():
            if layer in self._moved:
                group = self.optimizer.param_groups[layer.group]
                eta = (
                    float(group["lr"]) * applied_weight_decay(self.optimizer, group, layer.parameter)
                    if decoupled
                    else 0.0
                )
                wide = torch.promote_types(before.dtype, torch.float32)
                theta, after = before.to(wide).flatten(), layer.part.to(wide).flatten()
                u = theta * (1 - eta) - after  # times gamma, which the cosine does not see
                u *= (theta != after).any()  # nothing moved: a skipped step, which did not decay either
                pairs = ((theta, u), (u, u), (theta, theta))
                out.append(([layer], torch.stack([torch.linalg.vecdot(x, y) for x, y in pairs]).unsqueeze(1)))
        return out

    # --- plan and records

    def _refresh(self) -> None:
        """See to it that the plan is of the optimizer's parameters; new ones start their forecast here."""
        groups = self.optimizer.param_groups
        planned = tuple(id(p) for group in groups for p in group["params"]), tuple(len(g["params"]) for g in groups)
        if planned == self._planned:
            return
        old = {(layer.name, layer.group, layer.parameter): layer for layer in self._plan.layers}
        found = find_layers(self.optimizer, self.model)
        layers = [old.get((layer.name, layer.group, layer.parameter), layer) for layer in found]
        new = [layer for layer in layers if layer not in set(old.values())]
        vectors = {name: v for each in self._plan.spectral for name, v in each.by_layer().items()}
        for each in spectral_norms(new):
            each.warm_up()
            vectors |= each.by_layer()
        self._forecasts.drop(set(old.values()) - set(layers))
        self._forecasts.begin(new)
        self._plan, self._planned = _plan(layers), planned
        if isinstance(self.optimizer, SteadyOptimizer):
            slices = {layer: self.optimizer.slices(groups[layer.group], layer.parameter) for layer in layers}
            self._waiting = {layer: each for layer, each in slices.items() if each.waiting_ndim}
        for each in self._plan.spectral:
            each.load(vectors)
        self._new.append((new, self._start_row(new)))

    def _start_row(self, layers: list[Layer]) -> Row:
        """Where layers start: norm, and what their optimizer's state says of the past."""
        row = Row()
        for layer in layers:
            state = self.optimizer.state.get(layer.parameter, {})
            row.put(norms([layer.part], [layer.layout]), [("norm", layer)])
            for key in ("momentum_buffer", "exp_avg"):
                if isinstance(value := state.get(key), Tensor):
                    found = norms([local(value)], [layout_of(layer.parameter, {key: value})])
                    row.put(found, [("momentum", layer)])
            if "step" in state:
                row.put(local(torch.as_tensor(state["step"])), [("count", layer)])
        self._put_skips(row, layers)
        return row.close()

    def _drain(self) -> None:
        """Bring all that is on the device to the host and make records of it."""
        new, taken = self._new, self._taken
        self._new, self._taken = [], []
        last = Row()
        self._put_skips(last, self._plan.layers)
        *values, now = fetch([*(row for _, row in new), *(each.row for each in taken), last.close()])
        for (layers, _), found in zip(new, values[: len(new)], strict=True):
            for layer in layers:
                norm, momentum, count = (found.get((kind, layer), 0.0) for kind in ("norm", "momentum", "count"))
                self._starts[layer] = Start(norm**2, momentum > 0, int(count))
            self._forecasts.skips |= skips_in(found)
        rows = values[len(new) :]
        seen = [RecordView(each.marks, skips_in(found)) for each, found in zip(taken, rows, strict=True)]
        marks = self._forecasts.advance(self._starts, seen, skips_in(now))
        for each, found, moved in zip(taken, rows, marks, strict=True):
            self._records.append(compose(each._replace(marks=moved), found, self._starts, self._forecasts.units))

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if unbroken: plain values and tensors, with records not yet asked for."""
        self._drain()
        return {
            "steps": self.steps,
            "records": list(self._records),
            "apart": sorted(self._apart),
            "power": {name: v for each in self._plan.spectral for name, v in each.by_layer().items()},
            "starts": {layer.name: list(self._starts[layer]) for layer in self._plan.layers},
            "courses": self._forecasts.state_dict(),
            "skips": {layer.name: count for layer, count in self._forecasts.skips.items()},
            "waited": {layer.name: count for layer, count in self._waited.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; layers it does not name start now. ValueError if it is of another model."""
        self._refresh()
        self._drain()
        by_name = {layer.name: layer for layer in self._plan.layers}
        if unknown := [name for name in state["starts"] if name not in by_name]:
            raise ValueError(
                f"Monitor: the saved state has {unknown[0]!r}, which the optimizer does not: another model?"
            )
        for each in self._plan.spectral:
            each.check(state["power"])
        for each in self._plan.spectral:
            each.load(state["power"])
        self._starts |= {by_name[name]: Start(*values) for name, values in state["starts"].items()}
        self._forecasts.load_state_dict(state["courses"], by_name)
        self._forecasts.skips |= {by_name[name]: n for name, n in state.get("skips", {}).items() if name in by_name}
        self._waited |= {by_name[name]: n.clone() for name, n in state.get("waited", {}).items() if name in by_name}
        self.steps, self._records, self._apart = int(state["steps"]), list(state["records"]), set(state["apart"])
        self._watched = 0


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether step() was given a closure, which makes the gradients: they are seen after the step then."""
    return any(value is not None for value in (*args[1:2], kwargs.get("closure")))
