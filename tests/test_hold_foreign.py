"""Claims about `hold=` and `cautious=` where torch takes the step: AdamC, and other people's optimizers with `correct`.

Twins are in fp64 and in the notation of `decay/rescale.py`: a step without decay, then what holds the norm.
"""

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from contract import parameters, set_gradients
from torch import Tensor, nn
from torch.optim import Optimizer

import steadynorm as sn
from steadynorm.decay.families import ADAM as ADAM_FAMILY
from steadynorm.decay.families import MUON
from steadynorm.decay.hold import BALANCE_STEPS, HOLD_KEYS, HOLD_STATE, target_norm_sq
from steadynorm.decay.skip import StandIn

LR, DECAY = 0.01, 0.1
SHAPES = {"wide": (4, 6), "tall": (6, 4), "wide too": (4, 6)}


def corrected(cls: type[Optimizer], params: Any, **settings: Any) -> Optimizer:
    """An optimizer of torch, with those settings that `correct` takes given to it."""
    own = {key: settings.pop(key) for key in (*HOLD_KEYS, "steady_norm_sq", "skip") if key in settings}
    return sn.correct(cls(params, **{"lr": LR, "weight_decay": DECAY, **settings}), **own)


MAKERS: dict[str, Callable[..., Any]] = {
    "AdamC": partial(sn.AdamC, lr=LR, weight_decay=DECAY),
    "AdamC fused": partial(sn.AdamC, lr=LR, weight_decay=DECAY, fused=True),
    "AdamW": partial(corrected, torch.optim.AdamW),
    "AdamW foreach": partial(corrected, torch.optim.AdamW, foreach=True),
    "NAdam": partial(corrected, torch.optim.NAdam, decoupled_weight_decay=True),
    "Muon": partial(corrected, torch.optim.Muon),
}
ADAM = tuple(name for name in MAKERS if name not in ("Muon", "NAdam"))
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
adam_makers = pytest.mark.parametrize("make", [MAKERS[name] for name in ADAM], ids=ADAM)


def lr_at(t: int) -> float:
    return LR * (1 - t / 100)


def run(optimizer: Optimizer, params: dict[str, nn.Parameter], steps: Any, **gradients: Any) -> None:
    for t in steps:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(t)
        set_gradients(params, t, **gradients)
        optimizer.step()


def norm_sq(p: Tensor) -> float:
    return float(p.detach().double().square().sum())


# ---------------------------------------------------------------- fixed


@every_maker
@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_fixed_keeps_the_norm_of_the_first_step(make: Callable[..., Any], dtype: torch.dtype, margin: float):
    params = parameters(SHAPES, dtype)
    first = {name: norm_sq(p) for name, p in params.items()}
    optimizer = make(list(params.values()), hold="fixed")
    for t in range(50):
        before = {name: p.detach().clone() for name, p in params.items()}
        run(optimizer, params, [t])
        for name, p in params.items():
            assert math.sqrt(norm_sq(p) / first[name]) == pytest.approx(1, rel=margin), (name, t)
            assert not torch.equal(p, before[name])


@adam_makers
def test_fixed_norm_is_the_target_where_one_is_given(make: Callable[..., Any]):
    params = parameters(SHAPES)
    run(make(list(params.values()), hold="fixed", steady_norm_sq=0.04), params, range(3))
    for p in params.values():
        assert norm_sq(p) == pytest.approx(0.04 * p.numel(), rel=1e-5)


@pytest.mark.parametrize("cls", [sn.AdamC, sn.LionC])
def test_fixed_norm_relative_to_the_peak_is_that_of_the_first_step(cls: Any):
    """The norm at which peak lr and decay would settle is no target that the user has named."""
    params = parameters(SHAPES, torch.float64)
    first = {name: norm_sq(p) for name, p in params.items()}
    run(cls(list(params.values()), lr=LR, weight_decay=DECAY, hold="fixed"), params, range(3))
    for name, p in params.items():
        assert norm_sq(p) == pytest.approx(first[name], rel=1e-9)


@adam_makers
def test_zero_weights_are_free_of_a_fixed_norm_and_decay(make: Callable[..., Any]):
    p = nn.Parameter(torch.zeros(5))
    q = nn.Parameter(torch.zeros(5))
    held, plain = make([p], hold="fixed"), make([q])
    for optimizer, weight in ((held, p), (plain, q)):
        for t in range(5):
            set_gradients({"p": weight}, t, pull=0.0)
            optimizer.step()
    assert float(held.state[p]["held_norm_sq"]) == -1
    torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-5)  # decay follows the step in one and precedes it in the other
    assert not torch.equal(p, torch.zeros(5))


def test_fixed_norm_of_bf16_weights_is_not_lost_to_rounding():
    p = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    first, optimizer = norm_sq(p), sn.AdamC([p], lr=0.02, hold="fixed")
    run(optimizer, {"p": p}, range(50), pull=0.0)
    assert norm_sq(p) == pytest.approx(first, rel=0.01)


# ---------------------------------------------------------------- balance


def pulled(make: Callable[..., Any], pull: float, **settings: Any) -> float:
    """Mean of |theta|^2 over its target under noise and a constant pull along the weights, lr falling to a tenth."""
    target, steps = 0.05, 600
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(20, 25, generator=generator) * math.sqrt(target))
    optimizer = make([p], **{"lr": LR, "weight_decay": LR / (2 * target), **settings})
    ratios = []
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = LR * (0.55 + 0.45 * math.cos(math.pi * t / steps))
        rms = p.detach().square().mean().sqrt()
        p.grad = torch.randn(p.shape, generator=generator) - pull * p.detach() / rms
        optimizer.step()
        ratios.append(norm_sq(p) / p.numel() / target)
    return sum(ratios[200:]) / len(ratios[200:])


@pytest.mark.parametrize("name", ["AdamC", "AdamW"])
@pytest.mark.parametrize("pull", [0.1, -0.1])
def test_balance_meets_its_target_where_the_open_loop_misses_it(name: str, pull: float):
    assert pulled(MAKERS[name], pull, hold="balance", balance_steps=50) == pytest.approx(1, abs=0.02)
    assert abs(pulled(MAKERS[name], pull) - 1) > 0.3


def test_balance_of_muon_meets_its_target():
    p = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1)
    optimizer = corrected(torch.optim.Muon, [p], steady_norm_sq=0.5, hold="balance", balance_steps=20)
    for t in range(300):
        set_gradients({"p": p}, t, pull=-1.0)
        optimizer.step()
    family = sn.decay.foreign.correction_of(optimizer).family
    update_sq = family.nominal_norm_sq(p.shape, optimizer.param_groups[0])
    assert norm_sq(p) == pytest.approx(0.5 * update_sq, rel=0.02)


# ---------------------------------------------------------------- twins


def adam_twin(
    start: Tensor, steps: int, *, hold: str, cautious: bool, T: float = BALANCE_STEPS, decay: Any = None
) -> Tensor:
    """AdamW without decay, then what holds the norm, in the notation of `decay/rescale.py`."""
    theta, m, v = start.double().clone(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    target, D, R = LR / (2 * DECAY) * theta.numel(), None, float(theta.norm())
    p = {"p": nn.Parameter(theta.clone())}
    for t in range(steps):
        gamma = lr_at(t)
        p["p"].data.copy_(theta)
        set_gradients(p, t)
        g = p["p"].grad
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9 ** (t + 1)) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
        n = float(theta @ theta)
        theta = theta - gamma * u
        n_v = float(theta @ theta)
        mask = (m * theta > 0).double() if cautious else torch.ones_like(theta)
        if hold == "fixed":
            theta = theta * R / math.sqrt(n_v)
            continue
        eta = gamma * decay(gamma) if hold == "decay" else 0.0
        if hold == "balance":
            now = (n_v - n) / gamma
            D = now if D is None else D + (now - D) / (T / 10)
            share = float(theta @ (mask * theta)) / n_v
            eta = gamma * D / (2 * target * share) + min(1.0, max(-1.0, n / target - 1)) / (2 * T)
            eta = min(0.5, max(-0.1, eta))
        theta = (1 - eta * mask) * theta
    return theta


@adam_makers
@pytest.mark.parametrize(
    ("hold", "cautious"), [("balance", False), ("fixed", False), ("decay", True), ("balance", True)]
)
def test_held_step_equals_its_twin(make: Callable[..., Any], hold: str, cautious: bool):
    p = nn.Parameter(torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.3)
    start = p.detach().clone()
    optimizer = make([p], hold=hold, cautious=cautious)
    keys = dict(optimizer.param_groups[0])
    decay = lambda gamma: sn.decay.rule.weight_decay_now({**keys, "lr": gamma}, sn.decay.families.ADAM)  # noqa: E731
    run(optimizer, {"p": p}, range(20))
    twin = adam_twin(start, 20, hold=hold, cautious=cautious, decay=decay)
    torch.testing.assert_close(p.detach(), twin, rtol=1e-10, atol=1e-12)


@adam_makers
def test_constant_decay_is_cautious_without_a_factor(make: Callable[..., Any]):
    p = nn.Parameter(torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.3)
    start = p.detach().clone()
    optimizer = make([{"params": [p], "corrected": False}], cautious=True)
    run(optimizer, {"p": p}, range(10))
    twin = adam_twin(start, 10, hold="decay", cautious=True, decay=lambda gamma: DECAY)
    torch.testing.assert_close(p.detach(), twin, rtol=1e-10, atol=1e-12)


def test_cautious_decay_sees_signs_of_tiny_moments():
    """The product of a small weight and a small moment is zero in fp32."""
    p = nn.Parameter(torch.tensor([1e-25, 1e-25]))
    group = {"params": [p], "corrected": False}
    optimizer = sn.AdamC([group], lr=1e-30, weight_decay=1e29, cautious=True, peak_lr=1e-30, eps=1e3)
    p.grad = torch.tensor([1e-20, -1e-20])
    for _ in range(2):
        optimizer.step()
    assert p.tolist() == pytest.approx([0.81e-25, 1e-25], rel=1e-3, abs=0)


SCHEDULES = {  # of 300 steps, each with an lr that rises steeply; in units of the largest
    "warm restarts": lambda t: 0.5 * (1 + math.cos(math.pi * (t % 100) / 100)),
    "from zero up": lambda t: 0.5 * (1 + math.cos(math.pi * t / 100)) + 1e-6 if t < 100 else 1.0,
    "exponential warmup": lambda t: 10 ** min(0.0, t / 20 - 4),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["AdamC", "AdamW", "Muon"])
def test_balance_stays_on_target_when_the_lr_rises_steeply(name: str, schedule: str):
    """What a step does to the norm is in part the work of earlier, smaller steps."""
    p = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
    optimizer = MAKERS[name]([p], hold="balance", **({"steady_norm_sq": 1.0} if name == "Muon" else {}))
    family = MUON if name == "Muon" else ADAM_FAMILY
    target = math.sqrt(target_norm_sq(optimizer.param_groups[0], family, p.shape) or 0.0)
    p.data *= target / p.norm()
    for t in range(300):
        optimizer.param_groups[0]["lr"] = LR * SCHEDULES[schedule](t)
        set_gradients({"p": p}, t)
        optimizer.step()
        assert t < 40 or p.norm().item() == pytest.approx(target, rel=0.05), t


def test_means_of_an_old_checkpoint_are_measured_again():
    """They were over gamma^2, beside a 1 where there is a 2 now."""
    params = parameters(SHAPES)
    optimizer = MAKERS["AdamW"](list(params.values()), hold="balance")
    run(optimizer, params, range(3))
    old = copy.deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        state[HOLD_STATE["balance"]] = torch.tensor([1e6, 1.0], dtype=state[HOLD_STATE["balance"]].dtype)
    optimizer.load_state_dict(old)
    run(optimizer, params, range(3, 4))
    for p in params.values():
        mean, measured = optimizer.state[p][HOLD_STATE["balance"]].tolist()
        assert abs(mean) < 100 and measured == 2


# ---------------------------------------------------------------- groups, skips, steps not taken


@pytest.mark.parametrize("hold", ["balance", "fixed"])
@every_maker
def test_zero_lr_changes_no_bit(make: Callable[..., Any], hold: str):
    params = parameters(SHAPES)
    optimizer = make(list(params.values()), hold=hold)
    run(optimizer, params, range(3))
    before = {name: p.detach().clone() for name, p in params.items()}
    means = {name: optimizer.state[p][HOLD_STATE[hold]].clone() for name, p in params.items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    set_gradients(params, 3)
    optimizer.step()
    for name, p in params.items():
        assert torch.equal(p, before[name])
        assert torch.equal(optimizer.state[p][HOLD_STATE[hold]], means[name])


@pytest.mark.parametrize("settings", [{"hold": "balance"}, {"hold": "fixed"}, {"cautious": True}], ids=str)
@adam_makers
def test_parameter_without_gradient_is_not_touched(make: Callable[..., Any], settings: dict[str, Any]):
    params = parameters(SHAPES)
    optimizer = make(list(params.values()), **settings)
    run(optimizer, params, range(2))
    before = params["tall"].detach().clone()
    set_gradients({name: params[name] for name in ("wide", "wide too")}, 2)
    params["tall"].grad = None
    optimizer.step()
    assert torch.equal(params["tall"], before)


def test_non_finite_gradient_leaves_a_held_parameter_as_it_was():
    params = parameters(SHAPES)
    optimizer = sn.AdamC(list(params.values()), lr=LR, hold="balance")
    run(optimizer, params, range(2))
    before, means = params["tall"].detach().clone(), optimizer.state[params["tall"]]["balance_means"].clone()
    set_gradients(params, 2)
    params["tall"].grad[0, 0] = torch.inf  # pyright: ignore[reportOptionalSubscript]
    optimizer.step()
    assert torch.equal(params["tall"], before)
    assert torch.equal(optimizer.state[params["tall"]]["balance_means"], means)


def test_step_that_a_loss_scaler_skips_on_the_device_holds_nothing():
    p = nn.Parameter(torch.randn(8))
    optimizer = corrected(torch.optim.AdamW, [p], fused=True, hold="balance")
    run(optimizer, {"p": p}, range(2))
    before, means = p.detach().clone(), optimizer.state[p]["balance_means"].clone()
    optimizer.found_inf = torch.ones(())  # pyright: ignore[reportAttributeAccessIssue]
    run(optimizer, {"p": p}, [2])
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["balance_means"], means)


def test_skipped_parameters_keep_constant_decay_in_a_held_group():
    params, plain = parameters(SHAPES), parameters(SHAPES)
    optimizer = corrected(torch.optim.AdamW, list(params.values()), hold="fixed", skip=params["tall"])
    reference = torch.optim.AdamW(list(plain.values()), lr=LR, weight_decay=DECAY)
    first = norm_sq(params["wide"])
    for t in range(5):
        run(optimizer, params, [t], pull=0.0)
        run(reference, plain, [t], pull=0.0)
    assert torch.equal(params["tall"], plain["tall"])
    assert norm_sq(params["wide"]) == pytest.approx(first, rel=1e-5)
    assert "held_norm_sq" not in optimizer.state[params["tall"]]


def test_skipped_group_is_not_held_and_a_group_keeps_its_own_choice():
    params = list(parameters(SHAPES).values())
    groups = [{"params": [params[0]]}, {"params": [params[1]], "hold": "balance"}, {"params": [params[2]]}]
    optimizer = corrected(torch.optim.AdamW, groups, hold="fixed", skip=2)
    assert [group.get("hold") for group in optimizer.param_groups] == ["fixed", "balance", None]


@pytest.mark.parametrize("hold", ["fixed", "balance"])
def test_hooks_from_before_the_correction_see_weights_as_they_stay(hold: str):
    """A monitor made before `correct` used to measure norms before they were scaled, and to advise against the hold."""
    params = parameters(SHAPES)
    optimizer, seen = torch.optim.AdamW(list(params.values()), lr=LR, weight_decay=DECAY), []
    optimizer.register_step_post_hook(lambda *_: seen.append([norm_sq(p) for p in params.values()]))
    sn.correct(optimizer, hold=hold)
    for t in range(3):
        run(optimizer, params, [t], pull=-0.1)
        assert seen[-1] == [norm_sq(p) for p in params.values()]


def test_balance_leaves_constant_decay_alone():
    params, plain = parameters(SHAPES), parameters(SHAPES)
    held, open_loop = (
        sn.AdamC([{"params": [p["wide"]], "corrected": False}, {"params": [p["tall"]]}], lr=LR, hold=hold)
        for p, hold in ((params, "balance"), (plain, "decay"))
    )
    for t in range(5):
        run(held, params, [t], pull=0.0)
        run(open_loop, plain, [t], pull=0.0)
    assert torch.equal(params["wide"], plain["wide"])
    assert not torch.equal(params["tall"], plain["tall"])


@adam_makers
@pytest.mark.parametrize("settings", [{"hold": "fixed"}, {"hold": "balance"}, {"cautious": True}], ids=str)
def test_group_shows_the_open_loop_decay_and_the_step_has_none(
    make: Callable[..., Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    params = parameters(SHAPES)
    optimizer, seen, prepare = make(list(params.values()), **settings), [], StandIn.prepare

    def spy(self: StandIn, stepper: Optimizer) -> Optimizer:
        chosen = prepare(self, stepper)
        seen.append([group["weight_decay"] for group in chosen.param_groups])
        return chosen

    monkeypatch.setattr(StandIn, "prepare", spy)
    run(optimizer, params, range(2))
    assert seen == [[0.0], [0.0]]
    group = optimizer.param_groups[0]
    assert group["base_weight_decay"] == DECAY
    if not group.get("cautious"):
        assert group["weight_decay"] == pytest.approx(DECAY * lr_at(1) / LR)


def test_closure_and_gradients_that_it_makes_are_held():
    p = nn.Parameter(torch.ones(6))
    optimizer = corrected(torch.optim.AdamW, [p], hold="fixed")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * torch.arange(6.0)).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert norm_sq(p) == pytest.approx(6, rel=1e-5)


def test_failed_step_leaves_the_groups_as_they_were():
    p = nn.Parameter(torch.ones(6))
    optimizer = corrected(torch.optim.AdamW, [p], hold="fixed")

    def closure() -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["weight_decay"] == DECAY
    run(optimizer, {"p": p}, range(2))
    assert norm_sq(p) == pytest.approx(6, rel=1e-5)


# ---------------------------------------------------------------- checkpoints and copies


@pytest.mark.parametrize("settings", [{"hold": "fixed"}, {"hold": "balance"}, {"cautious": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@adam_makers
def test_resumed_run_is_the_unbroken_one(make: Callable[..., Any], settings: dict[str, Any], dtype: torch.dtype):
    params = parameters(SHAPES, dtype)
    optimizer = make(list(params.values()), **settings)
    run(optimizer, params, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    again = parameters(SHAPES, dtype)
    for name, p in again.items():
        p.data.copy_(params[name])
    resumed = make(list(again.values()))  # the checkpoint says how norms are held
    resumed.load_state_dict(saved)
    run(optimizer, params, range(4, 8))
    run(resumed, again, range(4, 8))
    for name, p in params.items():
        assert torch.equal(p, again[name])
        for key in optimizer.state[p]:
            assert torch.equal(optimizer.state[p][key], resumed.state[again[name]][key])
            assert optimizer.state[p][key].dtype == resumed.state[again[name]][key].dtype


@pytest.mark.parametrize("hold", ["fixed", "balance"])
@pytest.mark.parametrize(("source", "destination"), [("AdamC", "AdamW"), ("AdamW", "AdamC")])
def test_checkpoints_go_between_adamc_and_correct(source: str, destination: str, hold: str):
    params = parameters(SHAPES)
    optimizer = MAKERS[source](list(params.values()), hold=hold)
    run(optimizer, params, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    again = parameters(SHAPES)
    for name, p in again.items():
        p.data.copy_(params[name])
    other = MAKERS[destination](list(again.values()), hold=hold)
    other.load_state_dict(saved)
    run(optimizer, params, range(4, 8))
    run(other, again, range(4, 8))
    assert all(torch.equal(p, again[name]) for name, p in params.items())


@adam_makers
def test_checkpoint_from_before_the_norm_was_held_is_held_from_now_on(make: Callable[..., Any]):
    params = parameters(SHAPES)
    optimizer = make(list(params.values()))
    run(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in HOLD_KEYS:
            group.pop(key, None)
    now = {name: norm_sq(p) for name, p in params.items()}
    held = make(list(params.values()), hold="fixed")
    held.load_state_dict(saved)
    run(held, params, range(3, 6))
    for name, p in params.items():
        assert norm_sq(p) == pytest.approx(now[name], rel=1e-5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("settings", [{"hold": "fixed"}, {"hold": "balance"}, {"cautious": True}], ids=str)
@adam_makers
def test_copy_steps_like_the_original(make: Callable[..., Any], settings: dict[str, Any], duplicate: Any):
    params = parameters(SHAPES)
    optimizer = make(list(params.values()), **settings)
    run(optimizer, params, range(3))
    twin = duplicate(optimizer)
    again = dict(zip(params, twin.param_groups[0]["params"], strict=True))
    run(optimizer, params, range(3, 6))
    run(twin, again, range(3, 6))
    assert all(torch.equal(p, again[name]) for name, p in params.items())


def test_checkpoint_that_holds_otherwise_is_reported():
    params = list(parameters(SHAPES).values())
    saved = corrected(torch.optim.AdamW, params, hold="balance").state_dict()
    with pytest.warns(UserWarning, match="the checkpoint's hold=balance replaces the fixed"):
        corrected(torch.optim.AdamW, params, hold="fixed").load_state_dict(saved)


def test_uncorrect_takes_keys_and_state_away():
    params = parameters(SHAPES)
    optimizer = corrected(torch.optim.AdamW, list(params.values()), hold="fixed")
    run(optimizer, params, range(2))
    sn.uncorrect(optimizer)
    assert not set(HOLD_KEYS) & (optimizer.param_groups[0].keys() | optimizer.defaults.keys())
    assert all("held_norm_sq" not in optimizer.state[p] for p in params.values())
    before = norm_sq(params["wide"])
    run(optimizer, params, range(2, 4))
    assert norm_sq(params["wide"]) != pytest.approx(before, rel=1e-5)


# ---------------------------------------------------------------- refusals


class Quantised(torch.optim.AdamW):
    """Renames its moments, as 8-bit optimizers do."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state["state1"] = state.pop("exp_avg")


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (torch.optim.AdamW, {"hold": "tight"}, "group 0: hold='tight' is unknown; choose one of"),
        (torch.optim.AdamW, {"hold": "balance", "balance_steps": 0}, "balance_steps=0 must be"),
        (torch.optim.AdamW, {"hold": "fixed", "cautious": True}, "cautious=True would do nothing"),
        (
            torch.optim.Muon,
            {"cautious": True},
            "only Adam, AdamW and RAdam keep it in their state, not muon; .*AdamC, ScionC or LionC",
        ),
        (
            torch.optim.NAdam,  # its update is not along the first moment
            {"cautious": True, "decoupled_weight_decay": True},
            "only Adam, AdamW and RAdam keep it in their state, not nadam",
        ),
        (
            torch.optim.AdamW,
            {"cautious": True, "weight_decay": 20.0},
            "weight_decay=20 is too strong for cautious=True",
        ),
        (torch.optim.AdamW, {"hold": "balance", "weight_decay": 0.0}, "hold='balance' would do nothing"),
    ],
)
def test_what_a_hook_cannot_do_is_refused(cls: Any, settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        corrected(cls, [nn.Parameter(torch.ones(2, 2))], **settings)


def test_complex_weights_are_held_by_nobody_and_can_be_skipped():
    params = [nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=r"correct: group 0: .*parameter 0 is complex; name it in skip="):
        corrected(torch.optim.AdamW, params, hold="fixed")
    optimizer = corrected(torch.optim.AdamW, params, hold="fixed", skip=params[0])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert params[1].norm().item() == pytest.approx(math.sqrt(3), rel=1e-6)


def test_balance_of_an_unknown_size_of_updates_is_refused():
    class Mystery(Optimizer):
        def __init__(self, params: Any):
            super().__init__(params, {"lr": 0.1, "weight_decay": 0.1})

    with pytest.raises(ValueError, match=r"hold='balance' needs a norm to aim at.* use hold='fixed'"):
        sn.correct(Mystery([nn.Parameter(torch.ones(2))]), decoupled=True, hold="balance")


def test_adamc_refuses_and_leaves_no_group():
    optimizer = sn.AdamC([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="AdamC, group 1: hold='tight' is unknown"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "hold": "tight"})
    assert len(optimizer.param_groups) == 1


def test_moments_under_another_name_are_asked_for():
    p = nn.Parameter(torch.ones(3))
    optimizer = corrected(Quantised, [p], cautious=True)
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"Quantised, group 0: cautious=True reads .*state\['exp_avg'\]"):
        optimizer.step()


def test_cautious_written_into_a_group_of_a_class_without_signs_is_refused():
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = corrected(torch.optim.NAdam, [p], decoupled_weight_decay=True)
    optimizer.param_groups[0]["cautious"] = True
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="NAdam, group 0: cautious=True needs the sign"):
        optimizer.step()
    assert torch.equal(p, torch.ones(2, 2))


@pytest.mark.parametrize("hold", ["fixed", "balance"])
@pytest.mark.parametrize("make", ["AdamC", "AdamW"])
def test_a_tensor_that_needs_no_grad_and_has_one_is_held(make: str, hold: str):
    """So do master copies of weights, whose gradients are written by hand: torch steps them."""
    torch.manual_seed(0)
    theta = 2 * torch.ones(40, 40)
    optimizer = MAKERS[make]([theta], hold=hold)
    for _ in range(200):
        theta.grad = torch.randn(40, 40)
        optimizer.step()
    target = LR / (2 * DECAY) * theta.numel() if hold == "balance" else 4.0 * theta.numel()
    assert float(theta.square().sum()) == pytest.approx(target, rel=0.1 if hold == "balance" else 1e-5)
