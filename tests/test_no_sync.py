"""step() never waits for the device: shown without one, on fake cuda tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import steadynorm as sn
from steadynorm.optim import arithmetic

FP32, BF16 = torch.float32, torch.bfloat16
WHOLE = [
    ((8, 8), FP32),
    ((8, 8), FP32),
    ((8, 12), BF16),
    ((8,), FP32),
    ((8,), BF16),
    ((4, 3, 3, 3), FP32),
    ((2, 6, 5), BF16),
]
PARAMS = [*WHOLE, ((52, 4), FP32), ((52, 4), BF16)]  # the last two have more than 200 elements, so they are cut by rows
CHUNK_MIB = 200 * 16 / 2**20


class NoCrossing(TorchDispatchMode):
    """Fail on any operation that moves data between devices.

    A 0-d CPU tensor is an argument of most kernels. aten::where copies it to the device first, and waits for that.
    """

    crossings = ("aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::_local_scalar_dense", "aten::item")
    crossings += ("aten::where",)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in self.crossings:
            devices = {t.device.type for t in (*args, out) if isinstance(t, torch.Tensor)}
            assert len(devices) == 1 and "item" not in func._schema.name and "scalar" not in func._schema.name, func
        return out


def corrected(params, **settings):
    return sn.correct(torch.optim.AdamW(params, fused=True, weight_decay=0.1), skip=params[1], **settings)


def scion(params, **settings):
    return sn.Scion([p for p in params if p.ndim == 2], chunk_mib=CHUNK_MIB, **settings)


OPTIMIZERS = {
    "ScionC": lambda params: sn.ScionC(params, lmo="by-shape"),
    "ScionC exact": lambda params: sn.ScionC(
        params, lmo="by-shape", nesterov=True, overlap="exact", momentum_dtype="bfloat16"
    ),
    "ScionC balance": lambda params: sn.ScionC(params, lmo="by-shape", hold="balance"),
    "ScionC balance cautious": lambda params: sn.ScionC(params, lmo="by-shape", hold="balance", cautious=True),
    "ScionC fixed": lambda params: sn.ScionC(params, lmo="by-shape", hold="fixed"),
    "ScionC cautious": lambda params: sn.ScionC(params, lmo="by-shape", cautious=True),
    "Scion sign": lambda params: scion(params, lmo="sign", weight_decay=0.1),
    "Scion row": lambda params: scion(params, lmo="row", weight_decay=0.1),
    "Scion embedding fixed": lambda params: scion(params, lmo="embedding", hold="fixed"),
    "LionC": lambda params: sn.LionC(params),
    "LionC balance": lambda params: sn.LionC(params, hold="balance"),
    "SGDC": lambda params: sn.SGDC(params, nesterov=True),
    "RenormalizedAdamW": lambda params: sn.RenormalizedAdamW(params),
    "AdamC": lambda params: sn.AdamC(params, fused=True),
    "AdamC balance": lambda params: sn.AdamC(params, fused=True, hold="balance"),
    "AdamC fixed": lambda params: sn.AdamC(params, fused=True, hold="fixed"),
    "AdamC cautious": lambda params: sn.AdamC(params, fused=True, cautious=True),
    "correct(AdamW)": corrected,
    "correct(AdamW) balance": lambda params: corrected(params, hold="balance"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_fake_cuda_tensors_copies_nothing_between_devices(name, monkeypatch):
    monkeypatch.setattr(arithmetic, "CHUNK_MIB", CHUNK_MIB)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda")) for shape, dtype in PARAMS]
        optimizer = OPTIMIZERS[name](params)
        with NoCrossing():
            for factor in (0.5, 0.25):
                for group in optimizer.param_groups:
                    group["lr"] *= factor
                for p in params:
                    p.grad = torch.empty_like(p)
                optimizer.step()


def test_the_check_itself_catches_a_crossing():
    with FakeTensorMode(), NoCrossing():
        x = torch.empty(3, device="cuda")
        with pytest.raises(AssertionError):
            x.cpu()
        with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
            x.sum().item()
        with pytest.raises(AssertionError):
            torch.where(torch.ones((), dtype=torch.bool), x, 0.0)


@pytest.mark.parametrize("name", ["ScionC", "AdamC"])
def test_skips_are_counted_over_several_devices(name):
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [torch.nn.Parameter(torch.empty(4, device=device)) for device in ("cuda:0", "cuda:1")]
        assert OPTIMIZERS[name](params).skipped_steps().device == params[0].device
