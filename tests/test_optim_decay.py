"""The corrected decay of our own optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from contract import parameters, set_gradients
from optim_shapes import FP64, SHAPES
from torch import nn

import steadynorm as sn
from steadynorm import theory

# --- what the correction is


def shrink(optimizer: Any, p: nn.Parameter, gamma: float, **settings: Any) -> float:
    """Return the share of a weight that one step removes: it starts from 1 and its gradient is zero, so nothing else
    acts.
    """
    with torch.no_grad():
        p.fill_(1.0)
    optimizer.param_groups[0].update(settings, lr=gamma)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return 1 - p.flatten()[0].item()


CORRECTED: dict[str, Callable[..., Any]] = {
    "ScionC": partial(sn.ScionC, lmo="spectral"),
    "AdamC": sn.AdamC,
    "LionC": sn.LionC,
    "SGDC": sn.SGDC,
    "correct(AdamW)": lambda *args, **settings: sn.correct(torch.optim.AdamW(*args, **settings)),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_halving_the_lr_quarters_the_corrected_shrink(name: str):
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = CORRECTED[name]([p], lr=0.1)
    full = shrink(optimizer, p, 0.1)
    assert full > 1e-4
    assert shrink(optimizer, p, 0.05) == pytest.approx(full / 4)
    assert shrink(optimizer, p, 0.1) == pytest.approx(full)


@pytest.mark.parametrize(
    "make",
    [
        partial(sn.Scion, lmo="spectral", weight_decay=0.5),
        lambda params, **how: sn.ScionC([{"params": params, "weight_decay": 0.5}], lmo="spectral", **how),
        partial(sn.RenormalizedAdamW, weight_decay=0.5),
    ],
)
def test_halving_the_lr_halves_the_constant_shrink(make):
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = make([p], lr=0.1)
    assert shrink(optimizer, p, 0.1) == pytest.approx(0.05)
    assert shrink(optimizer, p, 0.05) == pytest.approx(0.025)


@pytest.mark.parametrize("make", [sn.AdamC, sn.LionC, sn.SGDC])
def test_a_group_with_corrected_false_keeps_constant_decay(make):
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = make([{"params": [p], "corrected": False}], lr=0.1, weight_decay=0.5)
    assert shrink(optimizer, p, 0.1) == pytest.approx(0.05)
    assert shrink(optimizer, p, 0.05) == pytest.approx(0.025)


def test_halving_the_steady_norm_doubles_the_decay():
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = sn.ScionC([p], lr=0.05, lmo="spectral", steady_norm_sq=2.0)
    assert shrink(optimizer, p, 0.05, steady_norm_sq=1.0) == pytest.approx(
        2 * shrink(optimizer, p, 0.05, steady_norm_sq=2.0)
    )


def test_the_decay_reacts_to_momentum():
    """It is (2 - alpha) / alpha: from alpha = 0.1 to 0.5 the decay falls from 19 to 3."""
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = sn.ScionC([p], lr=0.05, lmo="spectral", steady_norm_sq=2.0)
    slow, fast = shrink(optimizer, p, 0.05, alpha=0.1), shrink(optimizer, p, 0.05, alpha=0.5)
    assert slow / fast == pytest.approx(19 / 3)
    assert slow == pytest.approx(19 / 4 * 0.05**2)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 1.0])
def test_nesterov_divides_the_decay_by_its_factor(alpha: float):
    p = nn.Parameter(torch.ones(4, 4))
    plain, nesterov = (
        sn.ScionC([p], lr=0.01, alpha=alpha, lmo="spectral", nesterov=on).weight_decay_of(p) for on in (False, True)
    )
    factor = 1 + 4 * alpha - 6 * alpha**2 + 2 * alpha**3
    assert plain / nesterov == pytest.approx(factor)


def test_the_exact_decay_of_a_square_matrix_is_clearly_below_the_linear_one():
    """Updates of a square matrix overlap less than their inputs, so less decay holds the same norm."""
    p, v = nn.Parameter(torch.ones(32, 32)), nn.Parameter(torch.ones(512))
    for q, lmo, least, most in ((p, "spectral", 0.7, 0.85), (v, "bias", 0.97, 1.0)):
        linear, exact = (
            sn.ScionC([q], lr=1e-3, lmo=lmo, overlap=overlap).weight_decay_of(q) for overlap in ("linear", "exact")
        )
        assert least < exact / linear < most


def test_the_trace_decay_goes_with_the_square_of_alpha():
    """A trace buffer and its step are 1/alpha as large; with an EMA buffer the decay follows only lr."""
    for trace, factor in ((True, 4.0), (False, 1.0)):
        p = nn.Parameter(torch.ones(3, dtype=FP64))
        optimizer = sn.SGDC([p], lr=0.1, alpha=0.2, weight_decay=0.1, trace=trace)
        start = shrink(optimizer, p, 0.1)
        assert start == pytest.approx(0.01)
        assert shrink(optimizer, p, 0.1, alpha=0.1) == pytest.approx(factor * start)


def test_the_trace_is_torchs_momentum():
    """SGDC(trace=True) without decay is torch's SGD with momentum 1 - alpha."""
    params, plain = parameters(SHAPES), parameters(SHAPES)
    optimizer = sn.SGDC(params.values(), lr=0.1, alpha=0.1, weight_decay=0.0, trace=True, nesterov=True)
    reference = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9, nesterov=True)
    for t in range(5):
        for each, values in ((optimizer, params), (reference, plain)):
            set_gradients(values, t)
            each.step()
    for name in params:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-5, atol=1e-6)


def test_absolute_targets_take_the_theorys_decay():
    """LionC and AdamC with steady_norm_sq have no base decay, and the peak plays no part."""
    p = nn.Parameter(torch.ones(3, dtype=FP64))
    lion = sn.LionC([p], lr=1e-3, betas=(0.9, 0.99), steady_norm_sq=0.01, weight_decay=123.0)
    decay = theory.lion_weight_decay_for(0.01, 5e-4, 0.9, 0.99)
    assert shrink(lion, p, 5e-4) == pytest.approx(5e-4 * decay, rel=1e-9)
    adam = sn.AdamC([p], lr=1e-3, steady_norm_sq=0.01, weight_decay=123.0)
    assert shrink(adam, p, 5e-4) == pytest.approx(5e-4 * 5e-4 / 0.02)


def test_an_lr_above_the_peak_is_allowed_only_if_the_peak_was_given():
    for make in (sn.AdamC, sn.LionC, sn.SGDC):
        p = nn.Parameter(torch.ones(3, dtype=FP64))
        optimizer = make([p], lr=0.1, weight_decay=0.1, peak_lr=0.05)
        assert shrink(optimizer, p, 0.1) == pytest.approx(0.1 * 0.1 * 2)
        guessed = make([p], lr=0.1, weight_decay=0.1)
        with pytest.raises(ValueError, match=r"group 0.*peak_lr"):
            shrink(guessed, p, 0.2)


def test_the_peak_of_a_group_is_its_own():
    """With layer-wise lr, each group's decay is full at its own peak, whatever the constructor's lr."""
    for make in (sn.AdamC, sn.LionC, sn.SGDC):
        params = parameters({"a": (3,), "b": (3,)})
        groups = [{"params": [params["a"]], "lr": 0.01}, {"params": [params["b"]], "lr": 0.1, "peak_lr": 0.2}]
        optimizer = make(groups, lr=1.0, weight_decay=0.4)
        set_gradients(params, 0)
        optimizer.step()
        assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.2])


def decayed(make: Any, **settings: Any) -> Any:
    """Return an optimizer whose only group has taken a step, and whose lr has then fallen to a tenth."""
    optimizer = make([nn.Parameter(torch.ones(4, 4))], lr=0.02, weight_decay=0.1, **settings)
    for lr in (0.02, 0.004, 0.002):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 4)
        optimizer.step()
    return optimizer


RELATIVE = [sn.AdamC, sn.LionC, sn.SGDC, partial(sn.MuonC, use_muon=True)]


@pytest.mark.parametrize("settings", [{}, {"peak_lr": 0.02}], ids=["guessed", "given"])
@pytest.mark.parametrize("make", RELATIVE)
def test_a_group_added_below_the_peaks_of_others_warns_that_its_peak_is_a_guess(make: Any, settings: dict[str, float]):
    """Its decay would be ten times that of its neighbour at the same lr."""
    optimizer = decayed(make, **settings)
    optimizer.defaults["peak_lr"] = None  # as where only the groups have peaks
    late = {"params": [nn.Parameter(torch.ones(4, 4))], "lr": 0.002, "name": "late"}
    message = r'group 1 \("late"\): it names no peak, so peak_lr=0\.002 was taken from its lr=0\.002.* 0\.1\. .*group 0 is at '
    with pytest.warns(UserWarning, match=message + r"lr=0\.002, below its peak_lr=0\.02; put peak_lr=") as caught:
        optimizer.add_param_group(late)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "named", [{"peak_lr": 0.02}, {"initial_lr": 0.02}, {"corrected": False}, {"weight_decay": 0.0}]
)
@pytest.mark.parametrize("make", RELATIVE)
def test_a_group_that_names_its_peak_or_needs_none_is_added_without_a_warning(make: Any, named: dict[str, Any]):
    optimizer = decayed(make)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "lr": 0.002, **named})
    make(optimizer.param_groups)  # some trainers build an optimizer from another's groups
    optimizer = make([nn.Parameter(torch.ones(4, 4))], lr=0.02, weight_decay=0.1)
    optimizer.param_groups[0]["lr"] = 0.002  # no step yet: a scheduler begins its warmup
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})


# --- a target or a constant decay


def test_a_constant_decay_for_all_groups_is_refused_with_the_target_it_means():
    p = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"steady_norm_sq=0\.95: pass that.*use Scion") as error:
        sn.ScionC([p], lr=0.01, alpha=0.1, lmo="spectral", weight_decay=0.1)
    assert "switch the correction off" in str(error.value)
    optimizer = sn.ScionC([p], lr=0.01, alpha=0.1, lmo="spectral", steady_norm_sq=0.95)
    assert optimizer.weight_decay_of(p) == pytest.approx(0.1)


def test_a_group_has_a_target_or_a_constant_decay():
    p, q = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    with pytest.raises(ValueError, match=r"group 0.*weight_decay=0\.1.*steady_norm_sq=3\.0.*give one"):
        sn.ScionC([{"params": [p], "weight_decay": 0.1, "steady_norm_sq": 3.0}], lmo="spectral")
    constant = {"params": [p], "weight_decay": 0.1, "steady_norm_sq": None}
    optimizer = sn.ScionC([constant, {"params": [q]}], lmo="spectral")
    optimizer.param_groups[0]["lr"] = 1e-3
    assert optimizer.weight_decay_of(p) == 0.1
    assert optimizer.weight_decay_of(q) == pytest.approx(0.08)
    again = sn.ScionC(optimizer.param_groups)  # some trainers build an optimizer from another's groups
    again.load_state_dict(optimizer.state_dict())
    assert again.weight_decay_of(p) == 0.1


def test_checkpoints_with_a_target_beside_a_constant_decay_still_load():
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = sn.ScionC([{"params": [p], "weight_decay": 0.1}], lmo="spectral")
    saved = optimizer.state_dict()
    saved["param_groups"][0]["steady_norm_sq"] = 1.1875
    optimizer.load_state_dict(saved)
    assert optimizer.weight_decay_of(p) == 0.1
