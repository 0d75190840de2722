"""Bad input to our own optimizers: the error says where, what and the remedy, and nothing is changed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from contract import assert_same, parameters, set_gradients, snapshot, train
from optim_shapes import MATRIX
from torch import Tensor, nn

import steadynorm as sn

# --- bad input: where, what, remedy; nothing changed


def adam_group(params: list[Tensor], **settings: Any) -> sn.AdamC:
    """A value that the constructor refuses as an argument is also refused in a group."""
    return sn.AdamC([{"params": params, **settings}])


def renormalized_group(params: list[Tensor], **settings: Any) -> sn.RenormalizedAdamW:
    return sn.RenormalizedAdamW([{"params": params, **settings}])


BAD: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "negative lr": (sn.ScionC, {"lmo": "spectral", "lr": -1.0}, r"group 0.*lr=-1.*not negative"),
    "nan lr": (sn.Scion, {"lmo": "spectral", "lr": math.nan}, r"group 0.*lr=nan"),
    "lr in words": (sn.ScionC, {"lmo": "spectral", "lr": "1e-3"}, r"group 0.*lr='1e-3' must be a number"),
    "lr None": (sn.LionC, {"lr": None}, r"group 0.*lr=None must be a number"),
    "nan tensor lr": (sn.Scion, {"lmo": "spectral", "lr": torch.tensor(math.nan)}, r"group 0.*lr=nan"),
    "alpha 0": (sn.ScionC, {"lmo": "spectral", "alpha": 0.0}, r"group 0.*alpha=0.*\(0, 1\]"),
    "alpha above 1": (sn.SGDC, {"alpha": 1.5}, r"group 0.*alpha=1.5.*\(0, 1\]"),
    "alpha nan": (sn.Scion, {"lmo": "spectral", "alpha": math.nan}, r"group 0.*alpha=nan"),
    "alpha None": (sn.ScionC, {"lmo": "spectral", "alpha": None}, r"group 0.*alpha=None must be a number"),
    "alpha in words": (sn.SGDC, {"alpha": "0.1"}, r"group 0.*alpha='0\.1' must be a number"),
    "C^2 None": (sn.ScionC, {"lmo": "spectral", "steady_norm_sq": None}, r"group 0.*steady_norm_sq=None must be a n"),
    "C^2 zero": (sn.ScionC, {"lmo": "spectral", "steady_norm_sq": 0.0}, r"group 0.*steady_norm_sq=0"),
    "C^2 negative": (sn.LionC, {"steady_norm_sq": -1.0}, r"group 0.*steady_norm_sq=-1"),
    "C^2 negative, Adam": (sn.AdamC, {"steady_norm_sq": -1.0}, r"group 0.*steady_norm_sq=-1"),
    "unreachable": (
        sn.ScionC,
        {"lmo": "spectral", "lr": 0.5, "steady_norm_sq": 0.1},
        r"group 0.*unreachable.*raise steady_norm_sq or lower lr",
    ),
    "unreachable, exact": (
        sn.ScionC,
        {"lmo": "spectral", "lr": 0.5, "steady_norm_sq": 0.1, "overlap": "exact"},
        r"group 0.*unreachable.*lower lr or raise steady_norm_sq",
    ),
    "unknown lmo": (sn.ScionC, {"lmo": "spectrum"}, r"group 0.*unknown lmo 'spectrum'.*spectral"),
    "no lmo": (sn.ScionC, {}, r"group 0.*param_groups\(model\)"),
    "no lmo, Scion": (sn.Scion, {}, r"group 0.*param_groups\(model\)"),
    "unknown overlap": (sn.ScionC, {"lmo": "spectral", "overlap": "cubic"}, r"group 0.*overlap='cubic'.*'exact'"),
    "unknown polar": (sn.ScionC, {"lmo": "spectral", "polar": "qr"}, r"group 0.*polar='qr'.*svd"),
    "polar steps": (sn.ScionC, {"lmo": "spectral", "polar_steps": 0}, r"group 0.*polar_steps=0"),
    "half a block": (
        sn.ScionC,
        {"lmo": "spectral", "blocks": 1.5},
        r"group 0.*blocks=1\.5: pass the number of equal blocks",
    ),
    "blocks in words": (
        sn.Scion,
        {"lmo": "sign", "blocks": "2"},
        r"group 0.*blocks='2': pass the number of equal blocks",
    ),
    "blocks": (sn.ScionC, {"lmo": "spectral", "blocks": 3}, r"group 0.*blocks=3 does not divide"),
    "negative decay": (sn.Scion, {"lmo": "spectral", "weight_decay": -0.1}, r"group 0.*weight_decay=-0.1"),
    "no decay number": (sn.Scion, {"lmo": "spectral", "weight_decay": None}, r"group 0.*weight_decay"),
    "nan decay": (sn.AdamC, {"weight_decay": math.nan}, r"weight_decay.*nan"),
    "negative peak": (sn.LionC, {"peak_lr": -1.0}, r"group 0.*peak_lr=-1"),
    "zero peak": (sn.AdamC, {"peak_lr": 0.0}, r"group 0.*peak_lr=0"),
    "one beta": (sn.LionC, {"betas": 0.9}, r"group 0.*betas=0\.9 must be two numbers"),
    "no betas": (sn.RenormalizedAdamW, {"betas": None}, r"group 0.*betas=None must be two numbers"),
    "beta 1": (sn.LionC, {"betas": (0.9, 1.0)}, r"group 0.*betas\[1\]=1"),
    "beta nan": (sn.RenormalizedAdamW, {"betas": (math.nan, 0.9)}, r"group 0.*betas\[0\]=nan"),
    "eps": (sn.RenormalizedAdamW, {"eps": -1.0}, r"group 0.*eps=-1"),
    "fixed, Renormalized": (
        renormalized_group,
        {"hold": "fixed"},
        r"group 0.*hold='fixed'.*RenormalizedAdamW has neither",
    ),
    "cautious, Renormalized": (renormalized_group, {"cautious": True}, r"group 0.*cautious=True.*use AdamC"),
    "beta of a group, Adam": (adam_group, {"betas": (1.5, 0.9)}, r"AdamC, group 0.*betas\[0\]=1.5"),
    "one beta of a group, Adam": (adam_group, {"betas": (0.9,)}, r"AdamC, group 0.*two numbers"),
    "eps of a group, Adam": (adam_group, {"eps": -1.0}, r"AdamC, group 0.*eps=-1"),
}


def test_asking_for_the_decay_of_a_parameter_in_no_group_is_refused():
    optimizer = sn.ScionC([nn.Parameter(torch.ones(MATRIX))], lmo="spectral")
    with pytest.raises(ValueError, match=r"ScionC.weight_decay_of: no group has this parameter of shape \(2,\)"):
        optimizer.weight_decay_of(torch.zeros(2))


@pytest.mark.parametrize("case", BAD)
def test_the_error_for_a_bad_setting_says_where_and_what_and_names_the_remedy(case: str):
    make, settings, message = BAD[case]
    p = nn.Parameter(torch.ones(MATRIX))
    with pytest.raises(ValueError, match=message):
        make([p], **settings)


@pytest.mark.parametrize("case", [case for case in BAD if BAD[case][0] is sn.ScionC])
def test_a_bad_group_added_later_leaves_the_optimizer_as_it_was(case: str):
    _, settings, message = BAD[case]
    params = parameters({"w": MATRIX})
    optimizer = sn.ScionC([{"params": list(params.values()), "lmo": "spectral"}])
    late = nn.Parameter(torch.ones(MATRIX))
    with pytest.raises(ValueError, match=message.replace("group 0", r"group 1 \(\"late\"\)")):
        optimizer.add_param_group({"params": [late], "name": "late", **settings})
    assert len(optimizer.param_groups) == 1
    assert late not in optimizer.state
    set_gradients(params, 0)
    optimizer.step()


@pytest.mark.parametrize(
    "lmo", ["spectral", "spectral-transposed", "sign", "embedding", "row", "column", "conv", "conv-tap"]
)
@pytest.mark.parametrize("cls", [sn.Scion, sn.ScionC])
def test_a_matrix_lmo_on_a_vector_is_refused(cls, lmo: str):
    with pytest.raises(ValueError, match=rf"group 0.*lmo '{lmo}'.*\(5,\).*bias"):
        cls([nn.Parameter(torch.ones(5))], lmo=lmo)


@pytest.mark.parametrize("cls", [sn.Scion, sn.ScionC, sn.SGDC])
def test_momentum_is_refused_with_the_reason_also_in_a_group(cls):
    lmo = {} if cls is sn.SGDC else {"lmo": "spectral"}
    with pytest.raises(TypeError, match=r"momentum.*opposite.*alpha"):
        cls([nn.Parameter(torch.ones(MATRIX))], momentum=0.9, **lmo)
    with pytest.raises(TypeError, match=r"group 0.*momentum.*alpha"):
        cls([{"params": [nn.Parameter(torch.ones(MATRIX))], "momentum": 0.9}], **lmo)


STEP_TIME: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "alpha": (partial(sn.ScionC, lmo="by-shape"), {"alpha": 1.1}, r"alpha=1.1"),
    "alpha nan": (sn.SGDC, {"alpha": math.nan}, r"alpha=nan"),
    "C^2": (partial(sn.ScionC, lmo="by-shape"), {"steady_norm_sq": -1.0}, r"steady_norm_sq=-1"),
    "C^2 nan": (partial(sn.ScionC, lmo="by-shape"), {"steady_norm_sq": math.nan}, r"steady_norm_sq=nan"),
    "unreachable": (partial(sn.ScionC, lmo="by-shape"), {"steady_norm_sq": 1e-9}, r"unreachable"),
    "unreachable, Lion": (partial(sn.LionC, steady_norm_sq=1.0), {"steady_norm_sq": 1e-9}, r"unreachable"),
    "decay": (partial(sn.Scion, lmo="by-shape"), {"weight_decay": math.nan}, r"weight_decay=nan"),
    "flip": (partial(sn.Scion, lmo="by-shape"), {"weight_decay": 1e6}, r"exceeds 1"),
    "betas": (sn.LionC, {"betas": (0.9, math.nan)}, r"beta"),
    "betas, no decay": (partial(sn.LionC, weight_decay=0.0), {"betas": (0.9, math.nan)}, r"beta"),
    "betas, Renormalized": (sn.RenormalizedAdamW, {"betas": (1.5, 0.9)}, r"beta"),
    "one beta, Renormalized": (sn.RenormalizedAdamW, {"betas": (0.9,)}, r"betas=\(0\.9,\) must be two numbers"),
    "eps, Renormalized": (sn.RenormalizedAdamW, {"eps": math.nan}, r"eps=nan"),
    "balance, Renormalized": (
        sn.RenormalizedAdamW,
        {"hold": "balance"},
        r"hold='balance'.*RenormalizedAdamW has neither",
    ),
    "flip, Adam": (sn.AdamC, {"corrected": False, "weight_decay": 1e6}, r"exceeds 1"),
    "flip, fused Adam": (partial(sn.AdamC, fused=True), {"base_weight_decay": 1e6}, r"exceeds 1"),
    **{
        f"{settings}, {how}": (partial(sn.AdamC, **{how: True}), settings, message)
        for how in ("foreach", "fused")
        for settings, message in (
            ({"betas": (1.0, 0.9)}, r"betas\[0\]=1"),
            ({"betas": (math.nan, 0.9)}, r"betas\[0\]=nan"),
            ({"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
            ({"eps": math.nan}, r"eps=nan"),
        )
    },
}


@pytest.mark.parametrize("case", STEP_TIME)
def test_a_setting_scheduled_out_of_range_raises_before_anything_is_written(case: str):
    """The second group is at fault, and by then the first would have been written."""
    make, settings, message = STEP_TIME[case]
    params = parameters({"first": MATRIX, "second": (5,)})
    optimizer = make([{"params": [params["first"]]}, {"params": [params["second"]], "name": "late"}])
    train(optimizer, params, range(2), lr=optimizer.param_groups[0]["lr"])
    before = snapshot(optimizer, params)
    optimizer.param_groups[1].update(settings)
    set_gradients(params, 2)
    with pytest.raises(ValueError, match=rf'group 1 \("late"\).*{message}'):
        optimizer.step()
    assert_same(snapshot(optimizer, params), before)


# --- AdamC: all or nothing


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"lr": None}, ValueError), ({"lr": torch.ones(2)}, ValueError), ({"betas": ("a", "b")}, (TypeError, ValueError))],
    ids=str,
)
def test_a_group_that_adamc_refuses_is_not_left_in_it(settings, error):
    optimizer = sn.AdamC([nn.Parameter(torch.ones(2))])
    with pytest.raises(error, match="AdamC, group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **settings})
    assert len(optimizer.param_groups) == len(optimizer.state) == 1
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()


def test_replaced_parameters_are_refused_as_new_ones_are():
    optimizer = sn.AdamC([("w", nn.Parameter(torch.ones(2)))])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2, dtype=torch.float16))]
    with pytest.raises(ValueError, match=r"AdamC, group 0: 'w' has dtype torch\.float16"):
        optimizer.state_dict()


def test_a_fused_step_that_skips_all_counts_all(monkeypatch):
    """On an accelerator, one flag on the device stops the kernels of all parameters."""
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = sn.AdamC(groups, lr=0.1, fused=True)
    monkeypatch.setattr(
        optimizer, "_agree",
        lambda alike: [(each._replace(device=torch.device("cuda")), torch.stack([g.isfinite().all() for g in each.grads()])) for each in alike],
    )  # fmt: skip
    for bad, count in ((True, 3), (False, 3)):
        for p in params:
            p.grad = torch.ones_like(p)
        if bad:
            params[2].grad[1] = math.inf
        optimizer.step()
        assert optimizer.skipped_steps() == count
        assert all(torch.equal(p, torch.ones_like(p)) == bad for p in params)
        assert [int(optimizer.state[p]["step"]) for p in params] == [0 if bad else 1] * 3
    assert not hasattr(optimizer, "found_inf")
