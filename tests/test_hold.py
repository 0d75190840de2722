"""Own optimizers hold the norm: balanced decay and fixed norms against slow twins, in simulations, at the edges."""

import copy
import math

import pytest
import torch
import twins_optim as twin
from contract import assert_same, noise, parameters, snapshot, train
from torch import Tensor, nn

import steadynorm as sn
from steadynorm.decay.hold import StepSums, balanced_eta, fixed_scale, hold_of, target_norm_sq
from steadynorm.optim import base

FP64 = torch.float64
GAMMA = [0.05 * (0.55 + 0.45 * math.cos(math.pi * t / 30)) for t in range(30)]


# --- twins


def pulled(t: int, theta: Tensor) -> Tensor:
    """Noise and an outward pull, in which independence fails."""
    return noise("hold", t, theta.shape) - 0.5 * theta


def rows_waiting(t: int, theta: Tensor) -> Tensor:
    """The same, with every third row without a gradient."""
    g = pulled(t, theta)
    g[t % 3 :: 3] = 0.0
    return g


def follow_twin(optimizer, p: nn.Parameter, gradient, updates, held: twin.Held) -> None:
    """Step both, and compare them after every step. `updates` turns the gradient of step t into the twin's u."""
    theta = p.detach().clone()
    for t, gamma in enumerate(GAMMA):
        for group in optimizer.param_groups:
            group["lr"] = gamma
        g = gradient(t, theta)
        p.grad = g.clone()
        optimizer.step()
        u, moves = updates(g)
        theta = held.step(theta, u, gamma, moves)
        torch.testing.assert_close(p.detach(), theta, rtol=1e-11, atol=1e-12)


class ScionUpdates:
    def __init__(self, lmo: str, shape, alpha: float = 0.1):
        self.lmo, self.alpha, self.m = lmo, alpha, torch.zeros(shape, dtype=FP64)

    def __call__(self, g: Tensor) -> tuple[Tensor, Tensor]:
        moves = torch.ones_like(g)
        if self.lmo == "embedding":
            moves = (g != 0).any(1, keepdim=True).double().expand_as(g)
        self.m = torch.where(moves > 0, (1 - self.alpha) * self.m + self.alpha * g, self.m)
        return twin.update(self.lmo, self.m), moves


@pytest.mark.parametrize("balance_steps", [1, 30])
@pytest.mark.parametrize("hold", ["balance", "fixed"])
@pytest.mark.parametrize(
    ("lmo", "shape"), [("spectral", (4, 6)), ("bias", (7,)), ("sign", (4, 6)), ("embedding", (9, 4))]
)
def test_scionc_equals_its_twin(lmo, shape, hold, balance_steps):
    p = parameters({"p": shape}, FP64)["p"]
    optimizer = sn.ScionC([p], lmo=lmo, polar="svd", steady_norm_sq=1.3, hold=hold, balance_steps=balance_steps)
    target = 1.3 * float(twin.update(lmo, torch.randn(shape, dtype=FP64)).square().sum())
    gradient = rows_waiting if lmo == "embedding" else pulled
    follow_twin(optimizer, p, gradient, ScionUpdates(lmo, shape), twin.Held(hold, target, balance_steps))


@pytest.mark.parametrize(("hold", "settings"), [("balance", {}), ("fixed", {}), ("fixed", {"steady_norm_sq": 0.02})])
def test_lionc_equals_its_twin(hold, settings):
    p, m = parameters({"p": (5, 3)}, FP64)["p"], torch.zeros(5, 3, dtype=FP64)
    optimizer = sn.LionC([p], lr=0.05, weight_decay=0.5, hold=hold, **settings)
    peak = 0.05 * twin.lion_gain(0.9, 0.99) / (2 * 0.5)
    target = 15 * settings.get("steady_norm_sq", peak) if hold == "balance" or settings else None

    def updates(g: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal m
        x, m = 0.9 * m + 0.1 * g, 0.99 * m + 0.01 * g
        return torch.sign(x), torch.ones_like(g)

    follow_twin(optimizer, p, pulled, updates, twin.Held(hold, target))


def test_a_fixed_sgdc_equals_its_twin():
    p, m = parameters({"p": (5, 3)}, FP64)["p"], torch.zeros(5, 3, dtype=FP64)
    optimizer = sn.SGDC([p], lr=0.05, hold="fixed")

    def updates(g: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal m
        m = 0.9 * m + 0.1 * g
        return m, torch.ones_like(g)

    follow_twin(optimizer, p, pulled, updates, twin.Held("fixed", None))


def test_cautious_decay_acts_where_update_and_weight_agree():
    p = parameters({"p": (50,)}, FP64)["p"]
    optimizer = sn.Scion([p], lr=0.1, lmo="bias", alpha=1.0, weight_decay=0.5, cautious=True)
    theta, g = p.detach().clone(), noise("g", 0, (50,))
    p.grad = g.clone()
    optimizer.step()
    u = twin.update("bias", g)
    expected = torch.stack([(1 - 0.05 * (u[i] * theta[i] > 0).double()) * theta[i] - 0.1 * u[i] for i in range(50)])
    torch.testing.assert_close(p.detach(), expected)


# --- simulations: noise and a constant pull along the weights


def simulate(pull: float, steps: int = 1200, **settings) -> tuple[float, float]:
    """The mean over the last two thirds, and the end, of |theta|^2 over its target, for a vector of 2000 elements."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(2000))
    optimizer = sn.ScionC([p], lr=0.02, lmo="bias", **settings)
    target, ratios = 1.1875 * 2000, []
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (0.55 + 0.45 * math.cos(math.pi * t / steps))
        p.grad = torch.randn(2000) + pull * math.sqrt(2000) * p.detach() / p.detach().norm()
        optimizer.step()
        ratios.append(float(p.detach().square().sum()) / target)
    late = ratios[steps // 3 :]
    return sum(late) / len(late), ratios[-1]


@pytest.mark.parametrize("balance_steps", [20, 200])
def test_balance_meets_the_target_of_open_loop_under_independent_gradients(balance_steps):
    assert simulate(0.0, hold="balance", balance_steps=balance_steps)[0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("pull", [-0.1, 0.05])
def test_balance_holds_the_target_against_a_pull_that_open_loop_gives_way_to(pull):
    """A negative pull is outward: weights move against the gradient."""
    assert abs(simulate(pull)[0] - 1) > 0.3
    assert simulate(pull, hold="balance", balance_steps=50)[0] == pytest.approx(1.0, abs=0.02)


def test_a_layer_that_is_pulled_inward_needs_negative_decay():
    sums = StepSums(*(torch.tensor([x]) for x in (0.5, 1.0, 1.0, 1.0)))
    eta = balanced_eta(torch.tensor([[1.0, 0.5]]), sums, torch.tensor(0.01), torch.tensor(1.0), 100.0)
    assert float(eta) == pytest.approx((1e-4 - 0.01) / 2)


# --- fixed


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
@pytest.mark.parametrize("cls", [sn.ScionC, sn.Scion, sn.LionC, sn.SGDC])
def test_a_fixed_norm_stays_at_every_step(cls, dtype):
    params = parameters({"matrix": (6, 4), "vector": (5,), "conv": (3, 2, 2, 2)}, dtype)
    settings = {"lmo": "by-shape"} if issubclass(cls, sn.Scion) else {}
    optimizer = cls(list(params.values()), lr=0.02, hold="fixed", **settings)
    held = {}
    for t in range(50):
        train(optimizer, params, [t % 16])
        for group in optimizer.param_groups:
            if group.get("steady_norm_sq") is not None:
                group["steady_norm_sq"] = 1.2
        for name, p in params.items():
            norm = float(p.detach().double().norm())
            if cls is not sn.ScionC:  # there the target moves in `train`
                assert norm == pytest.approx(held.setdefault(name, norm), rel=1e-5 if dtype == torch.float32 else 1e-12)


def test_a_fixed_norm_is_the_target_of_scionc_from_the_first_step():
    p = parameters({"p": (6, 4)})["p"]
    optimizer = sn.ScionC([p], lr=0.02, lmo="spectral", polar="svd", steady_norm_sq=2.0, hold="fixed")
    p.grad = torch.randn(6, 4)
    optimizer.step()
    assert float(p.detach().square().sum()) == pytest.approx(2.0 * 6 / 4 * 4, rel=1e-5)


def test_a_parameter_that_starts_at_zero_stays_free():
    p = nn.Parameter(torch.zeros(5))
    optimizer = sn.Scion([p], lr=0.1, lmo="bias", hold="fixed")
    for _ in range(3):
        p.grad = torch.ones(5)
        optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(0.3 * math.sqrt(5))


def test_rows_that_wait_do_not_move_while_the_norm_is_fixed():
    p = parameters({"p": (9, 4)})["p"]
    optimizer = sn.Scion([p], lr=0.1, lmo="embedding", hold="fixed")
    before = p.detach().clone()
    p.grad = rows_waiting(0, p.detach()).float()
    optimizer.step()
    assert torch.equal(p.detach()[::3], before[::3])
    assert float(p.detach().norm()) == pytest.approx(float(before.norm()), rel=1e-6)


# --- the edges


HELD = [("balance", {}), ("fixed", {}), ("balance", {"cautious": True})]


@pytest.mark.parametrize(("hold", "more"), HELD)
@pytest.mark.parametrize("cls", [sn.ScionC, sn.LionC])
def test_lr_zero_changes_no_bit(cls, hold, more):
    p = parameters({"p": (6, 4)})["p"]
    settings = {"lmo": "sign"} if cls is sn.ScionC else {}
    optimizer = cls([p], lr=0.02, hold=hold, **settings, **more)
    train(optimizer, {"p": p}, range(3))
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize(("hold", "more"), HELD)
def test_a_skipped_step_leaves_what_was_measured(hold, more):
    params = parameters({"a": (6, 4), "b": (6, 4)})
    optimizer = sn.ScionC(list(params.values()), lr=0.02, lmo="spectral", hold=hold, **more)
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    params["a"].grad = torch.full((6, 4), torch.inf)
    params["b"].grad = torch.randn(6, 4)
    optimizer.step()
    after = snapshot(optimizer, params)
    assert int(after["a"].pop("skipped")) == 1 + int(before["a"].pop("skipped"))
    assert_same(before, after, names=["a"])
    assert not torch.equal(before["b"]["weight"], after["b"]["weight"])


@pytest.mark.parametrize(("hold", "more"), HELD)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(hold, more):
    whole, parts = parameters({"p": (6, 4), "q": (5,)}), parameters({"p": (6, 4), "q": (5,)})

    def make(params):
        return sn.ScionC(list(params.values()), lr=0.02, lmo="by-shape", hold=hold, **more)

    one, two = make(whole), make(parts)
    train(one, whole, range(8))
    train(two, parts, range(4))
    resumed = make(parts)
    resumed.load_state_dict(copy.deepcopy(two.state_dict()))
    train(resumed, parts, range(4, 8))
    assert_same(snapshot(one, whole), snapshot(resumed, parts))


@pytest.mark.parametrize("hold", ["balance", "fixed"])
def test_a_checkpoint_from_before_the_norm_was_held_loads(hold):
    params = parameters({"p": (6, 4)})
    old = sn.ScionC(list(params.values()), lr=0.02, lmo="spectral")
    train(old, params, range(2))
    saved = old.state_dict()
    for group in saved["param_groups"]:
        for key in ("hold", "balance_steps", "cautious"):
            del group[key]
    new = sn.ScionC(list(params.values()), lr=0.02, lmo="spectral", hold=hold)
    new.load_state_dict(saved)
    train(new, params, range(2, 4))
    assert new.param_groups[0]["hold"] == hold


def test_a_run_can_change_how_it_holds_its_norm():
    params = parameters({"p": (6, 4)})
    optimizer = sn.ScionC(list(params.values()), lr=0.02, lmo="spectral")
    for hold in ("decay", "balance", "fixed", "decay"):
        optimizer.param_groups[0]["hold"] = hold
        train(optimizer, params, range(2))


def test_constant_decay_stays_what_it_is_beside_balance():
    runs = []
    for hold in ("decay", "balance"):
        params = parameters({"p": (6, 4), "q": (6, 4)})
        groups = [{"params": params["p"]}, {"params": params["q"], "weight_decay": 0.1}]
        optimizer = sn.ScionC(groups, lr=0.02, lmo="spectral", hold=hold)
        train(optimizer, params, range(6))
        runs.append({name: p.detach() for name, p in params.items()})
    assert torch.equal(runs[0]["q"], runs[1]["q"])
    assert not torch.equal(runs[0]["p"], runs[1]["p"])
    assert hold_of(optimizer.param_groups[1]) == "decay"


def test_a_large_parameter_that_would_be_cut_by_rows_is_held_whole(monkeypatch):
    monkeypatch.setattr("steadynorm.machine.CACHED_ELEMENTS", 8)
    params = parameters({"p": (9, 4)})
    optimizer = sn.ScionC(list(params.values()), lr=0.02, lmo="embedding", hold="fixed")
    train(optimizer, params, range(3))
    target = target_norm_sq(optimizer.param_groups[0], optimizer.family, (9, 4))
    assert float(params["p"].detach().square().sum()) == pytest.approx(target, rel=1e-5)


@pytest.mark.parametrize("p", [torch.full((4,), 1e25), torch.full((4,), 1e-30), torch.zeros(4)])
@pytest.mark.parametrize("hold", ["balance", "fixed"])
def test_weights_of_any_size_stay_finite(hold, p):
    p = nn.Parameter(p.clone())
    optimizer = sn.ScionC([p], lr=0.02, lmo="bias", hold=hold)
    for t in range(5):
        p.grad = noise("any", t, (4,)).float()
        optimizer.step()
    assert p.isfinite().all()


def test_fixed_scale_of_weights_and_update_that_cancel_leaves_them():
    one = torch.ones(1)
    assert float(fixed_scale(StepSums(one, one, one, one), torch.tensor(1.0), torch.tensor(1.0))) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: sn.ScionC([p], lmo="bias", hold="pin"),
            "hold='pin' is unknown; choose one of 'decay', 'balance', 'fixed'",
        ),
        (
            lambda p: sn.ScionC([p], lmo="bias", hold="balance", balance_steps=0),
            "balance_steps=0 must be a number of steps",
        ),
        (lambda p: sn.ScionC([p], lmo="bias", hold="fixed", cautious=True), "cautious=True would do nothing"),
        (lambda p: sn.Scion([p], lmo="bias", hold="balance"), "hold='balance' would do nothing"),
        (lambda p: sn.LionC([p], weight_decay=0.0, hold="balance"), "hold='balance' would do nothing"),
        (lambda p: sn.SGDC([p], hold="balance"), "the size of sgd updates does not follow"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_remedy(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make(nn.Parameter(torch.ones(3)))


# --- cautious decay: the target holds because decay is stronger


def cautious_mean_square(make, size: int = 4000, steps: int = 2500) -> float:
    """The mean square of an element over the last third of a run on independent gradients."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(size))
    optimizer, total = make(p), 0.0
    for t in range(steps):
        p.grad = torch.randn(size)
        optimizer.step()
        total += float(p.detach().square().mean()) if t >= 2 * steps // 3 else 0.0
    return total / (steps - 2 * steps // 3)


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (lambda p: sn.ScionC([p], lr=0.03, lmo="bias", steady_norm_sq=1.2, overlap="exact", cautious=True), 1.2),
        (lambda p: sn.LionC([p], lr=0.01, betas=(0.9, 0.95), steady_norm_sq=0.5, cautious=True), 0.5),
    ],
)
def test_cautious_decay_meets_the_target(make, target):
    assert cautious_mean_square(make) == pytest.approx(target, rel=0.05)


def test_without_the_factor_cautious_decay_would_miss_the_target():
    decay = sn.theory.weight_decay_for(1.2, 0.03, 0.1)
    found = cautious_mean_square(lambda p: sn.Scion([p], lr=0.03, lmo="bias", weight_decay=decay, cautious=True))
    assert found > 1.5 * 1.2


def test_cautious_decay_relative_to_the_peak_keeps_the_norm_that_the_peak_gives():
    settled = 0.01 * twin.lion_gain(0.9, 0.95) / (2 * 0.2)  # gamma G / (2 lambda) of plain decay
    found = cautious_mean_square(lambda p: sn.LionC([p], lr=0.01, betas=(0.9, 0.95), weight_decay=0.2, cautious=True))
    assert found == pytest.approx(settled, rel=0.05)


LIVE = {
    "a typo": (sn.ScionC, {"lmo": "spectral"}, {"hold": "ballance"}, "hold='ballance' is unknown"),
    "no target": (sn.SGDC, {}, {"hold": "balance"}, "hold='balance' needs a norm to aim at"),
    "no steps": (sn.LionC, {}, {"balance_steps": 0}, "balance_steps=0 must be"),
    "idle caution": (
        sn.MuonC,
        {"use_muon": True},
        {"hold": "fixed", "cautious": True},
        "cautious=True would do nothing",
    ),
}


@pytest.mark.parametrize("case", LIVE)
def test_a_hold_that_makes_no_sense_is_refused_in_a_live_group_before_anything_is_written(case):
    cls, settings, change, message = LIVE[case]
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = cls([{"params": [p]} for p in params], **settings)

    def step():
        for p in params:
            p.grad = torch.eye(4)
        optimizer.step()

    step()
    before = copy.deepcopy([(p, optimizer.state[p]) for p in params])
    group = optimizer.param_groups[1]
    usual = {key: group[key] for key in change}
    group.update(change)
    for _ in range(2):  # what was refused is not cached
        with pytest.raises(ValueError, match=f"^{cls.__name__}, group 1: {message}"):
            step()
    torch.testing.assert_close([(p, optimizer.state[p]) for p in params], before, rtol=0, atol=0)
    group.update(usual)
    step()


def test_a_hold_is_checked_only_when_it_changes(monkeypatch):
    """Nothing about it costs time in a plain step."""
    p = nn.Parameter(torch.eye(4))
    optimizer = sn.ScionC([p], lmo="spectral")
    p.grad = torch.ones(4, 4)
    optimizer.step()
    monkeypatch.setattr(base, "check_hold", None)
    optimizer.step()
    optimizer.param_groups[0]["hold"] = "fixed"
    with pytest.raises(TypeError, match="not callable"):
        optimizer.step()
