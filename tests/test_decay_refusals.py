"""Claims about `correct(optimizer)`: which optimizers and arguments it refuses."""

import math
from typing import Any

import pytest
import torch
from decay_cases import DECAY, LR, FusedAdam, Lion, SomebodysScion, Stranger, adamw, decays, refused, weight

import steadynorm as sn
from steadynorm import correct, theory

# ---------------------------------------------------------------- which optimizers


COUPLED = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {}),
]


@pytest.mark.parametrize(("cls", "settings"), COUPLED)
@pytest.mark.parametrize("decoupled", [None, True])
def test_coupled_decay_is_refused_with_the_reason(cls: Any, settings: dict[str, Any], decoupled: Any) -> None:
    optimizer = cls([weight()], lr=LR, weight_decay=DECAY, **settings)
    with refused(optimizer, rf"(?s){cls.__name__}.*decay is added to the gradient \(coupled L2\).*use .*AdamW"):
        correct(optimizer, decoupled=decoupled)


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_torch_optimizers_without_decay_are_refused(cls: Any) -> None:
    optimizer = cls([weight()], lr=LR)
    with refused(optimizer, cls.__name__):
        correct(optimizer)


def test_adafactor_is_refused_because_its_lr_follows_the_weights() -> None:
    optimizer = torch.optim.Adafactor([weight()], lr=LR, weight_decay=DECAY)
    for decoupled in (None, True):
        with refused(optimizer, "Adafactor: it scales its lr by the weights' RMS"):
            correct(optimizer, decoupled=decoupled)


def test_one_coupled_group_is_enough_to_refuse_adam() -> None:
    groups = [{"params": [weight()], "decoupled_weight_decay": flag} for flag in (True, False)]
    optimizer = torch.optim.Adam(groups, lr=LR, weight_decay=DECAY)
    with refused(optimizer, "coupled L2"):
        correct(optimizer)


def test_an_unknown_class_needs_decoupled_true() -> None:
    optimizer = Stranger([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, r"Stranger is unknown; pass decoupled=True"):
        correct(optimizer)
    with refused(optimizer, "decoupled=False"):
        correct(optimizer, decoupled=False)
    assert decays(correct(optimizer, decoupled=True), LR / 2) == [DECAY / 2]


def test_an_unknown_class_named_adam_is_treated_as_adam() -> None:
    optimizer = FusedAdam([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "decoupled=True"):
        correct(optimizer)
    assert decays(correct(optimizer, decoupled=True, steady_norm_sq=0.5)) == [LR / (2 * 0.5)]


def test_foreign_adamw_and_subclasses_are_adamw() -> None:
    class AdamW(Stranger):  # as in older transformers, timm, ...
        pass

    for base in (torch.optim.AdamW, AdamW):
        mine = type("Mine", (base,), {})
        assert decays(correct(mine([weight()], lr=LR, weight_decay=DECAY)), LR / 2) == [DECAY / 2]


def test_a_muon_with_an_impossible_momentum_is_refused() -> None:
    optimizer = torch.optim.Muon([weight()], lr=LR, momentum=1.0)
    with refused(optimizer, r"group 0.*momentum 1, outside"):
        correct(optimizer)
    optimizer = SomebodysScion([weight()], lr=LR, alpha=0.0)
    with refused(optimizer, r"group 0.*alpha 0, outside"):
        correct(optimizer)


class KellersMuon(Stranger):
    """A Muon that always uses Nesterov, without saying so in its groups."""


def test_a_muon_without_a_nesterov_flag_raises_once_it_matters() -> None:
    optimizer = correct(KellersMuon([weight()], lr=LR, weight_decay=DECAY, momentum=0.85))
    assert decays(optimizer, LR / 2) == [DECAY / 2]  # the momentum has not moved
    optimizer.param_groups[0]["momentum"] = 0.95
    with refused(optimizer, r"group 0: .*Nesterov.*set group\['nesterov'\] = True \(Keller Jordan's"):
        optimizer.step()
    gains = [theory.momentum_gain(1 - momentum, nesterov=True) for momentum in (0.95, 0.85)]
    expected = DECAY / 2 * gains[0] / gains[1]
    assert decays(optimizer, nesterov=True) == pytest.approx([expected], rel=1e-12)

    optimizer = KellersMuon([weight()], lr=LR, weight_decay=DECAY, momentum=0.95)
    with refused(optimizer, r"correct: group 0: .*set group\['nesterov'\]"):
        correct(optimizer, steady_norm_sq=1.5)
    optimizer.param_groups[0]["nesterov"] = True
    expected = theory.weight_decay_for(1.5, LR, 1 - 0.95, nesterov=True)
    assert decays(correct(optimizer, steady_norm_sq=1.5)) == pytest.approx([expected], rel=1e-12)


def test_a_class_named_lion_without_betas_is_refused() -> None:
    class LionLike(Stranger):
        pass

    for more in ({}, {"alpha": 0.1}):
        optimizer = LionLike([weight()], lr=LR, weight_decay=DECAY, **more)
        with refused(optimizer, "betas"):
            correct(optimizer)


def test_a_group_without_an_lr_is_refused() -> None:
    optimizer = Stranger([weight()], weight_decay=DECAY)
    optimizer.param_groups[0]["lr"] = None
    with refused(optimizer, r"correct: group 0: it has no lr.*set one"):
        correct(optimizer, decoupled=True)


def test_a_capturable_step_whose_norm_is_held_is_refused() -> None:
    optimizer = adamw(capturable=True)
    with refused(optimizer, r"correct: group 0: capturable=True: .*leave hold and cautious out"):
        correct(optimizer, hold="balance")
    with pytest.raises(ValueError, match=r"AdamC, group 0: capturable=True: .*pass fused=True"):
        sn.AdamC([weight()], capturable=True)


def test_correcting_twice_is_an_error() -> None:
    optimizer = correct(adamw())
    with refused(optimizer, "corrected already"):
        correct(optimizer)
    own = sn.AdamC([weight()])
    with refused(own, "AdamC"):
        correct(own)


# ---------------------------------------------------------------- bad arguments leave the optimizer as it was


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"overlap": "cubic"}, "overlap='cubic'"),
    *(({"steady_norm_sq": value}, "steady_norm_sq=") for value in (0.0, -1.0, math.nan, math.inf)),
    *(({"peak_lr": value}, "peak_lr=") for value in (0.0, -1.0, math.nan, math.inf)),
    ({"peak_lr": [LR, -1.0]}, "peak_lr=-1"),
    ({"peak_lr": [LR]}, "peak_lr has 1 values for 2 groups"),
    ({"skip": [2]}, "group 2.*2 groups"),
    ({"skip": [-3]}, "group -3.*2 groups"),
    ({"skip": ["nobody"]}, "'nobody'"),
    ({"skip": [torch.nn.Parameter(torch.ones(1))]}, "does not have"),
    ({"skip": ["a"], "peak_lr": [LR, LR, LR]}, "peak_lr"),
    ({"skip": ["a"], "peak_lr": -1.0}, "peak_lr=-1"),
    ({"skip": ["a", "nobody"]}, "'nobody'"),
    ({"skip": [1, 2]}, "group 2"),
]


@pytest.mark.parametrize(("arguments", "match"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_bad_argument_leaves_the_optimizer_unchanged(arguments: dict[str, Any], match: str) -> None:
    optimizer = adamw({"params": [("a", weight()), ("b", weight())]}, {"params": [("c", weight())], "name": "head"})
    with refused(optimizer, match):
        correct(optimizer, **arguments)
    assert decays(correct(optimizer), LR / 2) == [DECAY / 2] * 2  # and a good call still works


@pytest.mark.parametrize("by", ["parameter", "name", "index"])
def test_skip_accepts_a_single_item(by: str) -> None:
    head = weight()
    optimizer = adamw({"params": [("2.weight", weight())]}, {"params": [("4.weight", head)]})
    correct(optimizer, skip={"parameter": head, "name": "4.weight", "index": 1}[by])
    assert decays(optimizer, LR / 2) == [DECAY / 2, DECAY]


@pytest.mark.parametrize("function", [correct, sn.Monitor])
def test_passing_a_model_instead_of_an_optimizer_raises(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__} takes an optimizer, not Linear; make one first"):
        function(torch.nn.Linear(2, 2))


def test_skipping_anything_else_is_a_type_error() -> None:
    optimizer = adamw()
    with refused(optimizer, "skip takes parameters, modules, names, globs and group indices", TypeError):
        correct(optimizer, skip=[1.5])


@pytest.mark.parametrize("skip", [False, True, [False]], ids=str)
def test_false_is_not_the_index_of_the_first_group(skip: Any) -> None:
    """It would leave that group, often the only one, uncorrected without a word."""
    optimizer = adamw()
    with refused(optimizer, r"not True or False; pass skip=\(\) to leave nothing out", TypeError):
        correct(optimizer, skip=skip)


def test_an_error_in_the_second_group_leaves_the_first_unchanged() -> None:
    optimizer = Lion([{"params": [weight()]}, {"params": [weight()]}], lr=LR, weight_decay=DECAY)
    del optimizer.param_groups[1]["betas"]
    with refused(optimizer, "betas"):
        correct(optimizer)
