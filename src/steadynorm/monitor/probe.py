"""Measure the layers of an optimizer on the device, during a step and without waiting for the device."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.hold import is_rescaled
from steadynorm.decay.recognition import is_decoupled
from steadynorm.decay.rule import applied_weight_decay
from steadynorm.dtensor import local
from steadynorm.monitor.group_values import read_lr
from steadynorm.monitor.layers import MAX_ENTRY_LMOS, Layer
from steadynorm.monitor.norms import gradient, l2_norms, max_entry_norm, totals
from steadynorm.monitor.spectral import SpectralNorms, spectral_norms
from steadynorm.monitor.transfer import ALONG, BEFORE, SKIPS, UPDATE, WAITED, Row
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.sharding.layout import layout_of


class Probe:
    """Puts values of the weights, gradients and updates of one optimizer into rows."""

    def __init__(self, optimizer: Optimizer, *, alignment: bool | None):
        self.optimizer = optimizer
        self.layers: list[Layer] = []
        self.moved: set[Layer] = set()  # those that had a gradient in the current step
        self.waited: dict[Layer, Tensor] = {}  # 0-d: the steps in which some slices of a layer had no gradient
        self._own = optimizer if isinstance(optimizer, SteadyOptimizer) else None
        self._observed = self._own if alignment is not False else None  # its own step yields the products
        self._copies_weights = alignment is True and self._own is None
        self._by_device: dict[torch.device, list[Layer]] = {}
        self._spectral: list[SpectralNorms] = []
        self._waiting: list[Layer] = []  # layers with slices that wait while they have no gradient
        self._before: dict[Layer, Tensor] = {}  # copies of the weights before the step

    def set_layers(self, layers: list[Layer], new: list[Layer]) -> None:
        """Measure these layers from now on; `new` are those that were not measured before."""
        vectors = self.power_vectors()
        for group in spectral_norms(new):
            group(group.WARM_UP)
            vectors |= group.by_layer()
        self.layers = layers
        self._by_device = {}
        for layer in layers:
            self._by_device.setdefault(layer.parameter.device, []).append(layer)
        self._spectral = spectral_norms(layers)
        self.load_power_vectors(vectors)
        if (own := self._own) is not None:
            groups = own.param_groups
            self._waiting = [layer for layer in layers if own.slices(groups[layer.group], layer.parameter).waiting_ndim]

    def power_vectors(self) -> dict[str, Tensor]:
        """Return the vectors that the next spectral norms start from, by layer name."""
        return {name: vectors for group in self._spectral for name, vectors in group.by_layer().items()}

    def load_power_vectors(self, vectors: Mapping[str, Tensor]) -> None:
        """Restore the vectors of the layers named; raise ValueError, and change nothing, if one does not fit."""
        for name, own in self.power_vectors().items():
            if name in vectors and vectors[name].shape != own.shape:
                raise ValueError(
                    f"Monitor: the saved power vectors of {name} are {tuple(vectors[name].shape)}, not "
                    f"{tuple(own.shape)}: they are of another model"
                )
        for group in self._spectral:
            group.load(vectors)

    def load_waited(self, waited: Mapping[str, Tensor]) -> None:
        """Restore the counts of the layers named, each on the device of its weights, wherever it was saved or loaded to."""
        own = (layer for layer in self.layers if layer.name in waited)
        self.waited |= {layer: waited[layer.name].to(layer.parameter.device, copy=True) for layer in own}

    def prepare(self) -> None:
        """Get ready for a measured step."""
        if self._observed is not None:
            self._observed.observing = True
        if self._copies_weights:
            self._before = {layer: layer.local_weights.clone() for layer in self.layers}

    def see_gradients(self, row: Row | None) -> None:
        """Find the layers that have a gradient, and put its norm in the row if there is one.

        Gradients are unscaled where a GradScaler leaves that to the optimizer.
        """
        self.moved = {layer for layer in self.layers if layer.parameter.grad is not None}
        for layer in self._waiting:
            if self._own is not None and layer in self.moved:
                # A process that holds no slice counts 0, and takes part in the sum over all of them.
                if layer not in self.waited:
                    self.waited[layer] = torch.zeros((), device=layer.parameter.device)
                if (grad := gradient(layer)).numel():
                    waits = self._own.any_waiting(self._own.param_groups[layer.group], layer.parameter, grad)
                    self.waited[layer] = self.waited[layer] + waits
        if row is None:
            return
        scale = getattr(self.optimizer, "grad_scale", None)
        for device, layers in self._by_device.items():
            if moved := [layer for layer in layers if layer in self.moved]:
                lengths = l2_norms([gradient(layer) for layer in moved], [layer.layout for layer in moved])
                lengths = lengths if scale is None else lengths / scale.to(device)
                row.put(lengths, [("grad", layer) for layer in moved])

    def measure(self, row: Row, products: int) -> None:
        """Put everything but gradients in the row, after the step; a spectral norm takes `products` with A^T A."""
        for layers in self._by_device.values():
            lengths = l2_norms([layer.local_weights for layer in layers], [layer.layout for layer in layers])
            row.put(lengths, [("norm", layer) for layer in layers])
        for group in self._spectral:
            row.put(group(products), [("spectral", key) for key in group.keys])
        for layer in self.layers:
            if layer.lmo.name in MAX_ENTRY_LMOS and layer.parameter.numel():
                row.put(max_entry_norm(layer), [(layer.lmo.name, layer)])
        for layers, values in self._inner_products():
            values = totals(values, [layer.layout for layer in layers])
            row.put(values, [(kind, layer) for kind in (ALONG, UPDATE, BEFORE) for layer in layers])
        self._before = {}
        self.put_skips(row, self.layers)
        for layer in (layer for layer in self.layers if layer in self.waited):
            row.put(totals(self.waited[layer].unsqueeze(0), [layer.layout]), [(WAITED, layer)])

    def put_skips(self, row: Row, layers: list[Layer]) -> None:
        """Put the counters of skipped updates in the row, if the optimizer has them; all processes count alike."""
        counters: dict[torch.device, dict[Layer, Tensor]] = {}
        for layer in layers:
            count = self.optimizer.state.get(layer.parameter, {}).get("skipped")
            if isinstance(count, Tensor):
                counters.setdefault(count.device, {})[layer] = local(count)
        for by_layer in counters.values():
            row.put(torch.stack(list(by_layer.values())), [(SKIPS, layer) for layer in by_layer])

    def measure_start(self, layers: list[Layer]) -> Row:
        """Return where layers start: their norm, and what the optimizer's state says of the past."""
        row = Row()
        for layer in layers:
            state = self.optimizer.state.get(layer.parameter, {})
            row.put(l2_norms([layer.local_weights], [layer.layout]), [("norm", layer)])
            for key in ("momentum_buffer", "exp_avg"):
                if isinstance(value := state.get(key), Tensor):
                    layout = layout_of(layer.parameter, {key: value})
                    row.put(l2_norms([local(value)], [layout]), [("momentum", layer)])
            if "step" in state:
                row.put(local(torch.as_tensor(state["step"])), [("count", layer)])
        self.put_skips(row, layers)
        return row.close()

    def _inner_products(self) -> list[tuple[list[Layer], Tensor]]:
        """Return <theta, u>, |u|^2 and |theta|^2 of the step just taken, (3, layers), for this process's part.

        They come from the optimizer, or from the copies of the weights; copies do not tell an update from what a hook
        did to the weights after the step to hold their norm, so such layers have none.
        """
        if self._observed is not None:
            layer_of = {layer.parameter: layer for layer in self.layers}  # tensors hash by identity
            return [([layer_of[p] for p in params], values) for params, values in self._observed.observed]
        decoupled = is_decoupled(self.optimizer)
        products = []
        for layer, before in self._before.items():
            group = self.optimizer.param_groups[layer.group]
            if layer in self.moved and not is_rescaled(group):
                decay = applied_weight_decay(self.optimizer, group, layer.parameter) if decoupled else 0.0
                lr = read_lr(group)
                wide = torch.promote_types(before.dtype, torch.float32)
                theta, after = before.to(wide).flatten(), layer.local_weights.to(wide).flatten()
                u = theta * (1 - lr * decay) - after  # times gamma
                u *= (theta != after).any() / (lr or 1.0)  # nothing moved: a skipped step, which did not decay either
                pairs = ((theta, u), (u, u), (theta, theta))
                products.append(([layer], torch.stack([torch.linalg.vecdot(x, y) for x, y in pairs]).unsqueeze(1)))
        return products
