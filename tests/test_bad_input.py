"""Unusual models: each is a clear error that names the parameter and the remedy, or works as documented.

docs/integrations.md lists them for users.
"""

import copy
import gc
import re
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadynorm as sn

OWN: dict[str, Callable[[Any], Any]] = {
    "ScionC": lambda params: sn.ScionC(params, lmo="by-shape"),
    "Scion": lambda params: sn.Scion(params, lmo="by-shape", weight_decay=0.1),
    "AdamC": sn.AdamC,
    "LionC": sn.LionC,
    "SGDC": sn.SGDC,
    "RenormalizedAdamW": sn.RenormalizedAdamW,
}
ENGINE = [name for name in OWN if name != "AdamC"]
ALL = {**OWN, "correct(AdamW)": lambda params: sn.correct(torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1))}


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    """Train with each layer in its own dtype."""
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.ones(3, 4)
        for layer in model:  # pyright: ignore[reportGeneralTypeIssues]
            x = layer(x.to(layer.weight.dtype))
        x.float().square().sum().backward()
        optimizer.step()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


# --- a parameter used by nobody


@pytest.mark.parametrize("name", ALL)
def test_an_unused_parameter_is_left_unchanged(name: str):
    """Without a gradient there is no update and no decay, as in torch; the others train as if it were absent."""
    model, alone = model_of(), model_of()
    model.register_parameter("unused", nn.Parameter(torch.full((6, 6), 7.0)))
    train(model[:3], ALL[name](model.named_parameters()), 3)
    train(alone, ALL[name](alone.named_parameters()), 3)
    assert torch.equal(model.unused, torch.full((6, 6), 7.0))
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


def test_the_monitor_shows_which_parameter_nobody_uses():
    model = model_of()
    model.register_parameter("unused", nn.Parameter(torch.full((6, 6), 7.0)))
    optimizer = OWN["ScionC"](model.named_parameters())
    monitor = sn.Monitor(optimizer)
    train(model[:3], optimizer)
    layers = monitor.measure()[-1]["layers"]
    assert [name for name, layer in layers.items() if layer["grad"] is None] == ["unused"]
    assert layers["unused"]["norm"] == layers["unused"]["forecast"] == pytest.approx(42.0)


# --- lazily initialised modules


@pytest.mark.parametrize("name", OWN)
def test_a_lazy_module_is_an_error_that_names_it(name: str):
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(
        ValueError, match=r"group 0: '1\.weight' has no shape yet \(a lazy module\); run the model once"
    ):
        OWN[name](lazy.named_parameters())
    with pytest.raises(ValueError, match=r"group 0: parameter 2 has no shape yet"):
        OWN[name](lazy.parameters())
    lazy(torch.ones(1, 4))
    OWN[name](lazy.parameters())


def test_a_lazy_module_cannot_be_grouped():
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet; run the model once"):
        sn.param_groups(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)), output="1")


def test_a_corrected_adamw_may_be_made_before_a_lazy_module_runs():
    """torch makes AdamW's state at the first step, so this works, as it does without the correction."""
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = ALL["correct(AdamW)"](lazy.parameters())
    optimizer.param_groups[0]["lr"] = 5e-4
    lazy(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.05)


@pytest.mark.parametrize("named", [True, False])
def test_a_lazy_module_is_an_error_that_names_it_where_its_shape_is_needed(named: bool):
    """Until its first step a corrected AdamW needs shapes only to say at which norm to hold weights, and to show them."""
    lazy = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    made: Any = torch.optim.AdamW(lazy.named_parameters() if named else lazy.parameters(), weight_decay=0.1)
    name = r"'1\.weight'" if named else "parameter 2"
    with pytest.raises(
        ValueError, match=rf"correct: group 0: hold='balance' needs the shape.*{name} has none yet.*run the model"
    ):
        sn.correct(made, hold="balance")
    sn.correct(made, hold="fixed")
    with pytest.raises(ValueError, match=r"explain: .*(1\.weight|parameter 2) has no shape yet .*run the model once"):
        sn.explain(made)
    lazy(torch.ones(1, 4)).sum().backward()
    made.step()
    assert "2x4" in sn.explain(made)


# --- the model is changed after the optimizer was made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("name", ENGINE)
def test_a_parameter_cast_to_another_dtype_keeps_its_state(name: str, part: bool, dtype: torch.dtype):
    model, reference = model_of(), model_of()
    optimizer, unchanged = OWN[name](model.parameters()), OWN[name](reference.parameters())
    train(model, optimizer, 2)
    train(reference, unchanged, 2)
    (model[1] if part else model).to(dtype)
    train(model, optimizer, 2)
    train(reference, unchanged, 2)
    assert model[1].weight.dtype == dtype
    state = optimizer.state[model[1].weight]
    assert ("weight_residual" in state) == (dtype == torch.bfloat16)
    assert {value.dtype for key, value in state.items() if value.ndim and key != "weight_residual"} == {torch.float32}
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)


def test_another_dtype_under_adamc_is_an_error_and_nothing_is_written():
    """torch's AdamW fails in the middle: decayed, not stepped."""
    model = model_of()
    optimizer = sn.AdamC(model.named_parameters())
    train(model, optimizer)
    model.to(torch.bfloat16)
    before = snapshot(model)
    with pytest.raises(
        ValueError, match=r"'0\.weight' is \(6, 4\) torch\.bfloat16 .* exp_avg is .* torch\.float32 .*changed after"
    ):
        train(model, optimizer)
    for key, value in before.items():
        assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize("name", OWN)
def test_another_shape_is_an_error_that_names_the_parameter(name: str):
    """A vocabulary may be resized in place."""
    model = model_of()
    optimizer = OWN[name](model.named_parameters())
    train(model, optimizer)
    model[0].weight.data, model[0].bias.data, model[1].weight.data = torch.ones(9, 4), torch.ones(9), torch.ones(6, 9)
    before = snapshot(model)
    with pytest.raises(
        ValueError, match=r"'0\.weight' is \(9, 4\) .* is \(6, 4\) .*changed after the optimizer was made"
    ):
        train(model, optimizer)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", OWN)
def test_another_device_is_an_error_that_names_the_parameter(name: str):
    """There is no second device here, so the state moves instead."""
    model = model_of()
    optimizer = OWN[name](model.named_parameters())
    state = optimizer.state[model[0].weight]
    state.update({key: value.to("meta") for key, value in state.items() if value.ndim})
    with pytest.raises(ValueError, match=r"'0\.weight' is .* on cpu, but its .* on meta: .*changed after"):
        train(model, optimizer)


def test_a_replaced_parameter_is_found_by_the_monitor():
    """The optimizer keeps the old one, whose gradient stays None: it would never train."""
    model = model_of()
    optimizer = sn.ScionC(sn.param_groups(model, output="2"))
    sn.Monitor(optimizer, model).close()
    model[1] = nn.Linear(6, 6)
    with pytest.raises(ValueError, match=r"1\.weight of the optimizer is not the model's: .*make the optimizer last"):
        sn.Monitor(optimizer, model)


# --- quantised, integer, 8-bit floating-point


INTEGER = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
EIGHT_BITS = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("bad", [INTEGER, EIGHT_BITS], ids=["int8", "float8"])
@pytest.mark.parametrize("name", OWN)
def test_integer_and_8_bit_parameters_are_refused(name: str, bad: nn.Parameter):
    with pytest.raises(
        ValueError, match=r"'w' has dtype torch\.(int8|float8_e4m3fn); only real floating-point.*16 bits"
    ):
        OWN[name]([("w", bad)])


def test_frozen_quantised_weights_are_left_out_of_the_groups():
    """A model may have quantised weights and trained adapters."""
    model = model_of()
    model[0].weight = INTEGER
    names = [name for group in sn.param_groups(model, output="2") for name, _ in group["params"]]
    assert "0.weight" not in names
    assert "0.bias" in names


def test_trainable_8_bit_weights_cannot_be_grouped():
    model = model_of()
    model[1].weight = EIGHT_BITS
    with pytest.raises(ValueError, match=r"1\.weight has dtype torch\.float8_e4m3fn; freeze it.*or train a wider copy"):
        sn.param_groups(model, output="2")


# --- requires_grad toggled during training


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_frozen_for_a_while_stands_still_and_resumes(name: str):
    """Weights and state stay unchanged, without decay; afterwards the parameter continues with its momentum."""
    model = model_of()
    optimizer = ALL[name](model.named_parameters())
    train(model, optimizer, 2)
    frozen = model[1].weight.requires_grad_(False)
    before, state = frozen.clone(), copy.deepcopy(optimizer.state[frozen])
    train(model, optimizer, 2)
    assert torch.equal(frozen, before)
    assert all(torch.equal(optimizer.state[frozen][key], value) for key, value in state.items())
    frozen.requires_grad_(True)
    train(model, optimizer, 1)
    assert not torch.equal(frozen, before)


def test_a_parameter_unfrozen_after_grouping_is_added_as_a_group():
    model = model_of()
    model[1].requires_grad_(False)
    optimizer = sn.ScionC(sn.param_groups(model, output="2"))
    model[1].requires_grad_(True)
    before = model[1].weight.detach().clone()
    train(model, optimizer)
    assert torch.equal(model[1].weight, before)  # left out, as param_groups says
    hidden = next(group for group in optimizer.param_groups if group["name"] == "hidden")
    settings = {key: value for key, value in hidden.items() if key not in ("params", "param_names", "name")}
    optimizer.add_param_group({**settings, "name": "late", "params": [("1.weight", model[1].weight)]})
    train(model, optimizer)
    assert not torch.equal(model[1].weight, before)


@pytest.mark.parametrize(("setting", "other"), [("lr", 0.02), ("alpha", 0.05), ("steady_norm_sq", 5.0)])
def test_a_setting_that_the_groups_would_hide_is_refused(setting, other):
    """Groups and optimizer disagree, and the optimizer's setting would not be used."""
    model = nn.Linear(4, 4)
    groups = sn.param_groups(model, output=False, **{setting: 1.5 * other})
    with pytest.raises(ValueError, match=f"would not be used.*param_groups.model, {setting}="):
        sn.ScionC(groups, **{setting: other})
    groups = sn.param_groups(model, output=False, **{setting: other})
    assert sn.ScionC(groups, **{setting: other}).param_groups[0][setting] == other


# --- parameters replaced in the groups, state cleared


def equal_weights(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", OWN)
def test_a_cleared_state_starts_again(name: str):
    """Many loops do `optimizer.state = defaultdict(dict)` between phases: it acts as a new optimizer."""
    model = model_of()
    optimizer = OWN[name](model.parameters())
    train(model, optimizer, 2)
    other = copy.deepcopy(model)
    optimizer.state = defaultdict(dict)
    assert optimizer.skipped_steps() == 0
    optimizer.state[model[0].weight].clear()
    optimizer.state.pop(model[1].weight)
    train(model, optimizer, 2)
    train(other, OWN[name](other.parameters()), 2)
    assert equal_weights(model, other)
    assert len(optimizer.state_dict()["state"]) == 6


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OWN)
def test_parameters_replaced_in_the_groups_train_in_place_of_the_old(name: str, steps: int):
    """Accelerate does this under FSDP2. The state of the old parameters is dropped: torch could not save with it."""
    model = model_of()
    optimizer = OWN[name](model.parameters())
    train(model, optimizer, steps)
    new = model_of(1)
    old, before = [weakref.ref(p) for p in model.parameters()], snapshot(model)
    optimizer.param_groups[0]["params"] = list(new.parameters())
    saved = optimizer.state_dict()
    assert set(saved["state"]) == set(range(6)) and set(optimizer.state) == set(new.parameters())
    other = copy.deepcopy(new)
    train(new, optimizer, 2)
    train(other, OWN[name](other.parameters()), 2)
    assert equal_weights(new, other)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    del model
    gc.collect()
    assert all(ref() is None for ref in old)


@pytest.mark.parametrize("name", OWN)
def test_a_replaced_parameter_that_cannot_be_trained_is_named_and_nothing_is_written(name: str):
    model = model_of()
    optimizer = OWN[name](model.parameters())
    train(model, optimizer)
    optimizer.param_groups[0]["params"][2] = bad = nn.Parameter(torch.ones(6, 6, dtype=torch.complex64))
    before = snapshot(model)
    bad.grad = torch.ones_like(bad)
    with pytest.raises(ValueError, match=r"group 0: parameter 2 .* has dtype torch\.complex64"):
        optimizer.step()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert bad not in optimizer.state


@pytest.mark.parametrize("name", OWN)
def test_foreign_entries_in_the_state_are_kept_and_loaded(name: str):
    """Some loops keep their own notes or averages there; torch neither reads nor drops them."""
    model, other = model_of(), model_of()
    optimizer, reference = OWN[name](model.parameters()), OWN[name](other.parameters())
    mine = {"note": "mine", "average": torch.arange(5.0), "seen": [1, 2]}
    for p in (model[0].weight, model[1].weight):
        optimizer.state[p].update(copy.deepcopy(mine))
    for _ in range(2):  # before and after loading
        train(model, optimizer)
        train(other, reference)
        assert equal_weights(model, other)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        state = optimizer.state[model[1].weight]
        assert (state["note"], state["seen"]) == ("mine", [1, 2])
        assert torch.equal(state["average"], mine["average"])
        assert "note" not in optimizer.state[model[2].weight]


@pytest.mark.parametrize("cls", [sn.Scion, sn.ScionC, sn.AdamC, sn.LionC, sn.SGDC, sn.RenormalizedAdamW])
def test_an_lr_that_a_list_of_groups_would_hide_is_refused_by_scion(cls: Any):
    """torch takes it for groups to come, which is usual beside layer-wise lrs, and so do our other optimizers."""

    def lrs(second: dict[str, float], **lr: float) -> list[float]:
        lmo = {"lmo": "sign"} if cls in (sn.Scion, sn.ScionC) else {}
        groups = [{"params": [nn.Parameter(torch.ones(2, 2))], **lmo, **each} for each in ({"lr": 0.03}, second)]
        return [group["lr"] for group in cls(groups, **lr).param_groups]

    if cls in (sn.Scion, sn.ScionC):
        with pytest.raises(ValueError, match=rf"{cls.__name__}: lr=0\.02 would not be used.*group\['lr'\]"):
            lrs({"lr": 0.04}, lr=0.02)
    else:
        assert lrs({"lr": 0.04}, lr=0.02) == [0.03, 0.04]
    assert lrs({"lr": 0.04}, lr=0.04) == lrs({"lr": 0.04}) == [0.03, 0.04]
    assert lrs({}, lr=0.02) == [0.03, 0.02]


def test_the_lr_is_not_lost_where_the_groups_of_param_groups_are_a_plain_list():
    groups = sn.ScionC(list(sn.param_groups(nn.Linear(4, 4), output=False)), lr=0.02).param_groups
    assert [group["lr"] for group in groups] == [0.02, 0.02]


# --- arguments that are not what was meant


@pytest.mark.parametrize("cls", [sn.ScionC, sn.Scion, sn.AdamC, sn.LionC, sn.SGDC, sn.RenormalizedAdamW])
@pytest.mark.parametrize("model", [nn.Linear(4, 4), model_of()], ids=["module", "sequence of modules"])
def test_passing_a_model_instead_of_its_parameters_is_an_error(cls: Any, model: nn.Module):
    kind = "" if cls in (sn.ScionC, sn.Scion) else ", kind='adam'"
    with pytest.raises(TypeError, match=rf"pass {cls.__name__}\(param_groups\(model{kind}\)\)"):
        cls(model)


def test_weight_decay_of_takes_a_name():
    model = model_of()
    optimizer = sn.ScionC(sn.param_groups(model, output="2"))
    assert optimizer.weight_decay_of("2.weight") == optimizer.weight_decay_of(model[2].weight) == pytest.approx(0.004)
    with pytest.raises(ValueError, match=r"no group has a parameter named '2\.wieght'; did you mean '2\.weight'"):
        optimizer.weight_decay_of("2.wieght")
    unnamed = sn.ScionC(model.parameters(), lmo="by-shape")
    with pytest.raises(ValueError, match="have no names; pass the parameter itself"):
        unnamed.weight_decay_of("2.weight")
    with pytest.raises(ValueError, match="no group has this int; pass one of the optimizer's parameters"):
        unnamed.weight_decay_of(3)  # pyright: ignore[reportArgumentType]


def test_the_error_for_a_group_without_names_or_lmo_says_what_to_write():
    late, model = nn.Parameter(torch.ones(4, 4)), model_of()
    scion = sn.ScionC(sn.param_groups(model, output="2"))
    adam = sn.AdamC(sn.param_groups(model, output="2", kind="adam"))
    for optimizer, lmo in ((scion, ', "lmo": "spectral"'), (adam, "")):
        groups = len(optimizer.param_groups)
        wanted = f'without names to the optimizer; name them: {{"params": [("head.weight", p)]{lmo}}}'
        with pytest.raises(ValueError, match=re.escape(wanted)):
            optimizer.add_param_group({"params": [late]})
        with pytest.raises(TypeError, match=r"add_param_group takes a dict, not list"):
            optimizer.add_param_group([late])  # pyright: ignore[reportArgumentType]
        assert len(optimizer.param_groups) == groups
    with pytest.raises(ValueError, match=r'no lmo; .*\{"params": \[\.\.\.\], "lmo": "spectral"\}, or .*sign'):
        scion.add_param_group({"params": [("late", late)]})
    scion.add_param_group({"params": [("late", late)], "lmo": "spectral"})
    with pytest.raises(ValueError, match="with names to the optimizer; leave the names out"):
        sn.LionC(model.parameters()).add_param_group({"params": [("late", late)]})


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (
            [64, 32],
            r"blocks=\(64, 32\) sums to 96, not to the 128 rows of shape \(128, 4\); pass the row counts of all",
        ),
        (("inputs", (2, 1)), r"blocks=\('inputs', \(2, 1\)\) sums to 3, not to the 4 columns .* column counts of all"),
        (("inputs", 3), r"blocks=\('inputs', 3\) does not divide the 4 columns of shape \(128, 4\); use blocks=1"),
        *(
            (bad, "pass the number of equal blocks .*, the sizes of all blocks")
            for bad in ([], (64, 0, 64), (64, 64.0))
        ),
        *(
            (bad, "or either of them as .* for blocks of the inputs")
            for bad in (("sideways", 2), ("inputs", True), "3")
        ),
    ],
)
def test_blocks_that_do_not_fit_say_what_would(blocks, says):
    with pytest.raises(ValueError, match=rf"ScionC, group 0: .*{says}"):
        sn.ScionC([nn.Parameter(torch.ones(128, 4))], lmo="spectral", blocks=blocks)


@pytest.mark.parametrize("lmo", ["sign", "row", "column", "bias"])
def test_only_spectral_lmos_see_blocks_of_the_inputs(lmo):
    with pytest.raises(ValueError, match=rf"\('inputs', 2\): only spectral lmos see blocks of the inputs, not '{lmo}'"):
        sn.ScionC([nn.Parameter(torch.ones(8, 4))], lmo=lmo, blocks=("inputs", 2))


def test_convolutions_have_no_blocks_of_inputs():
    with pytest.raises(ValueError, match=r"only matrices have blocks of their inputs, not shape \(8, 4, 3\)"):
        sn.ScionC([nn.Parameter(torch.ones(8, 4, 3))], lmo="conv", blocks=("inputs", 2))
    with pytest.raises(ValueError, match=r"blocks\['weight'\]=\('inputs', 2\): weight is a convolution"):
        sn.param_groups(nn.Conv1d(4, 8, 3), output=False, blocks={"weight": ("inputs", 2)})


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'steady_norm'"):
        sn.ScionC(model_of().parameters(), lmo="by-shape", steady_norm=1.0)  # pyright: ignore
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'"):
        sn.AdamC(model_of().parameters(), xyz=1.0)  # pyright: ignore
