"""What CONTRIBUTING says of adding an lmo, an optimizer and a family, followed to the letter."""

import copy
import math
import pickle
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn

import steadynorm as sn
from steadynorm import lmo, theory
from steadynorm.decay import recognition
from steadynorm.decay.families import FAMILIES, Family
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Batch, Scalars
from steadynorm.optim.peak_relative import PeakRelativeOptimizer
from steadynorm.optim.state import zeros_like
from steadynorm.optim.validation import group_defaults
from steadynorm.theory import updates
from steadynorm.theory.equilibrium import eta_of

# --- a family: normalised updates of an exponential moving average, as those of Scion


class SignumFamily(Family):
    name, momentum_key, has_target, has_forecast = "signum", "mix", True, True

    def momentum(self, group):
        return float(group["mix"])

    def alpha(self, group):
        return self.momentum(group)

    def gain(self, momentum, group):
        return theory.momentum_gain(momentum)

    def target_decay(self, target, lr, group, kernel=None):
        return theory.weight_decay_for(target, lr, self.alpha(group))

    def filter(self, group):
        return theory.ema(self.alpha(group))

    def kernel(self, shape, group):
        return theory.overlap("sign", None)


SIGNUM = SignumFamily()


# --- an optimizer


def signum(batch: Batch, scalars: Scalars, settings: object) -> None:
    """m_t = (1-a) m + a g;  u = sign(m_t)."""
    m = batch.state["momentum_buffer"]
    m.lerp_(batch.take_grad(), scalars["mix"] * batch.active)
    batch.descend(m.sign(), scalars)


class Signum(PeakRelativeOptimizer):
    arithmetic = Arithmetic(signum, ("momentum_buffer",), is_elementwise=True, normalizes=True)
    signature_keys = ("mix",)
    family = SIGNUM

    def __init__(
        self, params, lr=1e-3, *, mix=0.1, weight_decay=0.1, peak_lr=None, steady_norm_sq=None, hold="decay",
        balance_steps=100.0, cautious=False, capturable=False, weight_residual=None, check_finite=False, maximize=False,
    ):  # fmt: skip
        super().__init__(params, group_defaults(locals()))

    def fresh_state(self, group, p):
        return {"momentum_buffer": zeros_like(p, self.mesh)}

    def scalars(self, group, bucket):
        lr, mix = float(group["lr"]), float(group["mix"])
        return {"gamma": lr, "eta": eta_of(lr, group["weight_decay"]), "mix": mix, "momentum_keep": 1 - mix}


def steps(optimizer: torch.optim.Optimizer, p: Tensor, which: range) -> None:
    for t in which:
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - t / 40)
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()


def test_an_optimizer_made_by_the_recipe_takes_the_right_steps_and_resumes():
    p, twin = nn.Parameter(torch.ones(6, 4)), torch.ones(6, 4)
    optimizer, m = Signum([p], lr=0.02, weight_decay=0.5), torch.zeros(6, 4)
    for t in range(20):
        lr = 0.02 * (1 - t / 40)
        m = 0.9 * m + 0.1 * torch.randn(6, 4, generator=torch.Generator().manual_seed(t))
        twin = (1 - lr * 0.5 * lr / 0.02) * twin - lr * m.sign()
        steps(optimizer, p, range(t, t + 1))
    torch.testing.assert_close(p.data, twin)
    again = nn.Parameter(p.detach().clone())
    resumed = Signum([again], lr=0.02, weight_decay=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, own in ((optimizer, p), (resumed, again)):
        steps(one, own, range(20, 25))
    torch.testing.assert_close(p, again, rtol=0, atol=0)
    with pytest.raises(ValueError, match="another"):
        sn.LionC([nn.Parameter(torch.ones(6, 4))]).load_state_dict(optimizer.state_dict())


def test_the_monitor_forecasts_with_the_family_of_a_new_optimizer():
    p = nn.Parameter(torch.zeros(100, 80))
    optimizer = Signum([p], lr=0.02, steady_norm_sq=0.5)
    monitor = sn.Monitor(optimizer, every=1)
    for t in range(300):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
    record = monitor.measure()[-1]
    assert record["weight_norm"] == pytest.approx(record["forecast_norm"], rel=0.03)


# --- correct, for somebody else's class


class TheirSignum(torch.optim.Optimizer):
    def __init__(self, params, lr, mix, weight_decay):
        super().__init__(params, {"lr": lr, "mix": mix, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, group["mix"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * m.sign())


def test_correct_follows_the_momentum_of_a_family_made_by_the_recipe(monkeypatch):
    monkeypatch.setitem(FAMILIES, "signum", SIGNUM)
    known = recognition.family_of
    monkeypatch.setattr(
        "steadynorm.decay.foreign.family_of",
        lambda optimizer, *rest, **more: (
            SIGNUM if isinstance(optimizer, TheirSignum) else known(optimizer, *rest, **more)
        ),
    )
    p = nn.Parameter(torch.ones(3))
    optimizer = sn.correct(TheirSignum([p], lr=0.1, mix=0.1, weight_decay=0.2), peak_lr=0.1)
    for each in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        group = each.param_groups[0]
        group["lr"], group["mix"] = 0.05, 0.4
        group["params"][0].grad = torch.ones(3)
        each.step()
        expected = 0.2 * 0.5 * theory.momentum_gain(0.4) / theory.momentum_gain(0.1)
        assert group["weight_decay"] == pytest.approx(expected)


# --- an lmo


def test_scionc_trains_with_an_lmo_made_by_the_recipe(monkeypatch):
    """The sign, with entries of 1/sqrt(d_in): |u|^2 = d_out."""
    view, kernel = updates.UPDATES["sign"].view, theory.overlap("sign", None)
    row = updates.Update("root-sign", view, lambda m, n: float(m), lambda m, n: kernel)
    monkeypatch.setitem(updates.UPDATES, "root-sign", row)
    entry = lmo.Lmo(
        row, lambda x: x.sign() / math.sqrt(x.shape[-1]), lambda x: x.abs().amax((-2, -1)) * math.sqrt(x.shape[-1])
    )
    monkeypatch.setitem(lmo.LMOS, "root-sign", entry)
    p = nn.Parameter(torch.zeros(40, 30))
    optimizer = sn.ScionC([p], lr=0.05, lmo="root-sign", steady_norm_sq=0.5, overlap="exact")
    assert sn.lmo.get("root-sign").update_norm_sq((40, 30)) == 40
    norms = []
    for t in range(600):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(t))
        optimizer.step()
        norms.append(p.square().sum().item())
    assert fmean(norms[200:]) == pytest.approx(0.5 * 40, rel=0.05)
