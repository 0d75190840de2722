"""step() never waits for the device: shown without one, on fake cuda tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import steadynorm as sn
from steadynorm.optim import buckets

SHAPES = [(16, 16), (16, 16), (48, 16), (16, 64), (40, 8), (8,), (8,), (4, 3, 3, 3), (2, 6, 5)]


class NoCrossing(TorchDispatchMode):
    """Fails on any operation that moves data between devices; a 0-d CPU tensor is a kernel argument, not a copy."""

    crossings = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_local_scalar_dense", "aten::item")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in self.crossings:
            devices = {t.device.type for t in (*args, out) if isinstance(t, torch.Tensor)}
            assert len(devices) == 1 and "item" not in func._schema.name and "scalar" not in func._schema.name, func
        return out


def optimizers(params):
    matrices = [p for p in params if p.ndim == 2]
    yield sn.ScionC(params, lr=1e-2, lmo="by-shape")
    yield sn.ScionC(params, lr=1e-2, lmo="by-shape", nesterov=True, overlap="exact", momentum_dtype="bfloat16")
    yield sn.Scion(matrices, lr=1e-2, lmo="sign", weight_decay=0.1)
    yield sn.Scion(matrices, lr=1e-2, lmo="row", weight_decay=0.1)
    yield sn.LionC(params, lr=1e-3)
    yield sn.SGDC(params, lr=1e-2, nesterov=True)
    yield sn.RenormalizedAdamW(params)
    yield sn.AdamC(params, fused=True)
    yield sn.correct(torch.optim.AdamW(params, fused=True, weight_decay=0.1), skip=params[1])


@pytest.mark.parametrize("which", range(9))
def test_step_on_fake_cuda_tensors_copies_nothing_between_devices(which, monkeypatch):
    monkeypatch.setattr(buckets, "MAX_ELEMENTS", 200)  # so that parameters are cut by rows, too
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
        optimizer = list(optimizers(params))[which]
        with NoCrossing():
            for lr in (1e-3, 5e-4):
                for group in optimizer.param_groups:
                    group["lr"] = lr
                for p in params:
                    p.grad = torch.empty(p.shape, device="cuda")
                optimizer.step()


def test_check_itself_catches_a_crossing():
    with FakeTensorMode(), NoCrossing():
        x = torch.empty(3, device="cuda")
        with pytest.raises(AssertionError):
            x.cpu()
        with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
            x.sum().item()
