"""Claims about `correct(optimizer, skip=...)` within a group: each parameter's decay, and that nothing else changes.

With a zero gradient these optimizers do nothing but decay, so a weight that starts at one tells its own decay.
"""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decay_cases import (
    COPIES,
    DECAY,
    DECOUPLED,
    LR,
    SCHEDULES,
    adamw,
    decays,
    parameters,
    refused,
    step,
    through_disk,
    weight,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer, lr_scheduler

import steadynorm as sn
from steadynorm import correct, uncorrect
from steadynorm.decay.hold import HOLD_KEYS
from steadynorm.decay.rule import KEYS, applied_weight_decay


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(2, 2, dtype=torch.float64)
        self.norm = torch.nn.LayerNorm(2, dtype=torch.float64)
        self.head = torch.nn.Linear(2, 3, dtype=torch.float64)


def shrink(optimizer: Optimizer, lr: float | None = None) -> list[float]:
    """Return what one update on zero gradients takes away from each weight, over lr: the decay it saw."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
        for p in group["params"]:
            torch.nn.init.ones_(p)
    step(optimizer)
    return [
        float(1 - p.detach().flatten()[0]) / float(group["lr"])
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def layout(optimizer: Optimizer) -> list[Any]:
    """Return the groups without what the correction writes: parameters by identity, in order."""
    own = {*KEYS, "weight_decay", "largest_lr"}
    return [
        {key: [*map(id, value)] if key == "params" else value for key, value in group.items() if key not in own}
        for group in optimizer.param_groups
    ]


def three(**settings: Any) -> torch.optim.AdamW:
    """Return one group of three weights."""
    return adamw({"params": [weight(), weight(), weight()]}, **settings)


# ---------------------------------------------------------------- the decay of each


@pytest.mark.parametrize("name", DECOUPLED)
def test_a_skipped_parameter_keeps_constant_decay_in_its_place(name: str) -> None:
    optimizer = DECOUPLED[name]([weight(), weight(), weight()], lr=LR, weight_decay=DECAY)
    before = layout(optimizer)
    correct(optimizer, skip=parameters(optimizer)[1], decoupled=True)
    assert layout(optimizer) == before
    for lr in (LR, LR / 2, LR / 4, LR):
        assert shrink(optimizer, lr) == pytest.approx([DECAY * lr / LR, DECAY, DECAY * lr / LR], rel=1e-9)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(DECAY * lr / LR)
    assert {key: value for key, value in layout(optimizer)[0].items() if key != "lr"} == {
        key: value for key, value in before[0].items() if key != "lr"
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_skip_equals_groups_split_by_hand(flags: dict[str, bool], dtype: torch.dtype) -> None:
    """In bf16, a factor applied beforehand would be lost in rounding."""
    ours, hand = ([weight(5, dtype=dtype), weight(3, 4, dtype=dtype), weight(2, dtype=dtype)] for _ in range(2))
    one = correct(adamw({"params": ours}, **flags), skip=ours[1])
    two = correct(adamw({"params": [hand[0], hand[2]]}, {"params": [hand[1]]}, **flags), skip=1)
    schedulers = [SCHEDULES["lambda"](optimizer) for optimizer in (one, two)]
    for t in range(12):
        generator = torch.Generator().manual_seed(t)
        for p, q in zip(ours, hand, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
            q.grad = p.grad.clone()
        for optimizer, scheduler in zip((one, two), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert all(torch.allclose(p, q, rtol=1e-12, atol=0) for p, q in zip(ours, hand, strict=True))


def test_a_skipped_parameter_without_a_gradient_stays_as_it_is() -> None:
    optimizer = three()
    first, second, third = parameters(optimizer)
    correct(optimizer, skip=[second, third])
    for p in (first, second):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert second[0, 0].item() == pytest.approx(1 - LR * DECAY)
    assert (third == 1).all()


def test_a_fused_step_that_a_scaler_skips_decays_nothing() -> None:
    optimizer = adamw({"params": [weight(dtype=torch.float32), weight(dtype=torch.float32)]}, fused=True)
    correct(optimizer, skip=parameters(optimizer)[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (True, False):
        for p in parameters(optimizer):
            p.grad = torch.full_like(p, math.inf) if bad else torch.zeros_like(p)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert all((p == 1).all() for p in parameters(optimizer)) is bad


def test_a_closure_sees_the_optimizers_own_groups_and_its_gradients_count() -> None:
    optimizer = three()
    correct(optimizer, skip=parameters(optimizer)[1])
    seen = []

    def closure() -> float:
        seen.append((len(optimizer.param_groups), [len(group["params"]) for group in optimizer.param_groups]))
        for p in parameters(optimizer):
            p.grad = torch.zeros_like(p)  # none had one before
        return 1.5

    optimizer.param_groups[0]["lr"] = LR / 2
    assert optimizer.step(closure) == 1.5
    assert seen == [(1, [3])]
    assert [float(1 - p[0, 0].detach()) for p in parameters(optimizer)] == pytest.approx(
        [LR / 2 * DECAY / 2, LR / 2 * DECAY, LR / 2 * DECAY / 2]
    )


def test_a_step_that_fails_leaves_the_groups_as_they_were() -> None:
    optimizer = three()
    correct(optimizer, skip=parameters(optimizer)[1])
    before = layout(optimizer)

    def closure() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert layout(optimizer) == before
    assert shrink(optimizer, LR / 2) == pytest.approx([DECAY / 2, DECAY, DECAY / 2])


class Counting(torch.optim.AdamW):
    """Keep a counter in the group, as pytorch_optimizer does, and another on itself; call the parent's step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        loss = super().step(closure)
        self.calls += 1
        return loss


def test_step_writes_to_groups_and_optimizer_are_kept() -> None:
    params = [weight(), weight()]
    optimizer = correct(Counting(params, lr=LR, weight_decay=DECAY), skip=params[1])
    adamw()  # torch hooks AdamW.step once an AdamW is made: from here on hooks run twice in a step of Counting
    for _ in range(3):
        assert shrink(optimizer, LR / 2) == pytest.approx([DECAY / 2, DECAY])
    assert (optimizer.param_groups[0]["step"], optimizer.calls) == (3, 3)  # pyright: ignore[reportAttributeAccessIssue]
    assert optimizer.state[params[1]]["step"] == 3


def test_an_optimizer_that_is_let_go_frees_its_memory_at_once() -> None:
    """Its moments are twice the model: they must not wait for the garbage collector."""
    params = [weight(), weight()]
    optimizer = correct(torch.optim.AdamW(params, lr=LR, weight_decay=DECAY), skip=params[1])
    step(optimizer)
    moment = weakref.ref(optimizer.state[params[1]]["exp_avg"])
    gc.disable()
    try:
        del optimizer
        assert moment() is None
    finally:
        gc.enable()


def test_two_groups_may_each_have_their_own_skip() -> None:
    params = [weight() for _ in range(4)]
    optimizer = adamw({"params": params[:2]}, {"params": params[2:], "lr": LR / 10, "weight_decay": 0.9})
    correct(optimizer, skip=[params[1], params[2]])
    for group in optimizer.param_groups:
        group["lr"] /= 2
    assert shrink(optimizer) == pytest.approx([DECAY / 2, DECAY, 0.9, 0.45])


@pytest.mark.parametrize("lr", [LR, LR / 2, 4 * LR])
def test_skip_beside_a_target_keeps_the_decay_that_was_set(lr: float) -> None:
    optimizer = three()
    correct(optimizer, skip=parameters(optimizer)[0], steady_norm_sq=0.5)
    assert shrink(optimizer, lr) == pytest.approx([DECAY, lr, lr])


# ---------------------------------------------------------------- joining a run


def per_group(optimizer: Optimizer, last_epoch: int = -1) -> lr_scheduler.LambdaLR:
    return lr_scheduler.LambdaLR(optimizer, [lambda t, k=k: 0.9 ** (t * k) for k in (1, 2)], last_epoch)


def two_groups() -> Optimizer:
    return adamw({"params": [weight(), weight()]}, {"params": [weight()], "lr": LR / 2})


@pytest.mark.parametrize("order", ["corrected, then loaded", "loaded, then corrected"])
@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_a_correction_with_skip_joins_a_run_in_the_middle(order: str, scheduled: str) -> None:
    """`skip` used to split the group, which fits neither the checkpoint nor a scheduler with a lambda per group."""
    plain = two_groups()
    scheduler = per_group(plain)
    for t in range(20):
        step(plain, seed=t)
        scheduler.step()
    saved = through_disk(plain, scheduler)

    joined = two_groups()
    again = per_group(joined) if scheduled == "before" else None
    if order == "corrected, then loaded":
        correct(joined, skip=parameters(joined)[0])
        joined.load_state_dict(saved[0])
    else:
        joined.load_state_dict(saved[0])
        correct(joined, skip=parameters(joined)[0])
    if again is not None:
        again.load_state_dict(saved[1])
    again = again or per_group(joined, last_epoch=19)
    moment = joined.state[parameters(joined)[0]]["exp_avg"]
    assert torch.equal(moment, plain.state[parameters(plain)[0]]["exp_avg"])
    for state in joined.state.values():  # so that nothing but the decay moves the weights
        state["exp_avg"].zero_()
    for t in range(20, 25):
        for group, peak, k in zip(joined.param_groups, (LR, LR / 2), (1, 2), strict=True):
            assert group["lr"] == pytest.approx(peak * 0.9 ** (t * k))
        factors = [0.9**t, 0.9 ** (2 * t)]
        assert shrink(joined) == pytest.approx([DECAY, DECAY * factors[0], DECAY * factors[1]], rel=1e-6)
        again.step()


@pytest.mark.parametrize("arguments", [{}, {"skip": "b"}], ids=str)
def test_a_corrected_checkpoint_brings_its_skip(arguments: dict[str, Any]) -> None:
    def made() -> Optimizer:
        return adamw({"params": [("a", weight()), ("b", weight())]})

    saved = correct(made(), skip="b")
    shrink(saved, LR / 2)
    for loads_first in (True, False):
        resumed = made()
        if loads_first:
            resumed.load_state_dict(through_disk(saved)[0])
            correct(resumed, **arguments)
        else:
            correct(resumed, **arguments)
            resumed.load_state_dict(through_disk(saved)[0])
        assert shrink(resumed) == pytest.approx([DECAY / 2, DECAY])


def test_skip_applies_to_a_resumed_run_without_skips() -> None:
    saved, optimizer = correct(three()), three()
    shrink(saved, LR / 2)
    correct(optimizer, skip=parameters(optimizer)[2])
    optimizer.load_state_dict(through_disk(saved)[0])
    assert shrink(optimizer) == pytest.approx([DECAY / 2, DECAY / 2, DECAY])


@pytest.mark.parametrize("hold", ["decay", "fixed"])
@pytest.mark.parametrize("loads_first", [True, False])
def test_a_skipped_group_of_a_resumed_run_has_its_base_decay_and_is_not_held(loads_first: bool, hold: str) -> None:
    """The checkpoint was corrected everywhere: it has the decay of its last step, and holds every group."""

    def made() -> Optimizer:
        return adamw({"params": [weight()]}, {"params": [weight()]})

    saved, resumed = correct(made(), hold=hold), made()
    shrink(saved, LR / 1000)
    if loads_first:
        resumed.load_state_dict(through_disk(saved)[0])
    correct(resumed, hold=hold, skip=[parameters(resumed)[1]])
    if not loads_first:
        resumed.load_state_dict(through_disk(saved)[0])
    assert shrink(resumed)[1] == pytest.approx(DECAY)
    head = resumed.param_groups[1]
    assert (head["corrected"], head["weight_decay"], head.get("hold")) == (False, DECAY, None)


def old_layout() -> dict[str, Any]:
    """Return a checkpoint from when `skip` split groups: the second of three parameters has its own group at the end."""
    params = [weight() for _ in range(4)]
    optimizer = adamw({"params": [params[0], params[2]]}, {"params": [params[3]]}, {"params": [params[1]]})
    correct(optimizer, skip=2, peak_lr=LR)
    for group in optimizer.param_groups:
        group["lr"] = LR / 2
    for k, p in enumerate(params):
        p.grad = torch.full_like(p, k + 1.0)
    optimizer.step()
    return through_disk(optimizer)[0]


def test_a_checkpoint_with_split_groups_loads_into_the_layout_of_today() -> None:
    optimizer = adamw({"params": [weight(), weight(), weight()]}, {"params": [weight()]})
    correct(optimizer, skip=parameters(optimizer)[1])
    optimizer.load_state_dict(old_layout())
    moments = [optimizer.state[p]["exp_avg"][0, 0].item() for p in parameters(optimizer)]
    assert moments == pytest.approx([0.1, 0.2, 0.3, 0.4])  # each has its own state
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    assert shrink(optimizer) == pytest.approx([DECAY / 2, DECAY, DECAY / 2, DECAY / 2])


def test_a_checkpoint_with_other_groups_is_refused_as_by_torch() -> None:
    optimizer = adamw({"params": [weight(), weight(), weight()]}, {"params": [weight()]})
    correct(optimizer, skip=parameters(optimizer)[:2])
    with refused(optimizer, "different number of parameter groups"):
        optimizer.load_state_dict(old_layout())


def test_a_dcp_checkpoint_with_split_groups_does_not_skip_the_whole_group() -> None:
    """torch's DCP goes by names and hands the keys of the last matching group to the whole one."""
    net, other = Net(), Net()
    names = dict(net.named_parameters())
    old = adamw({"params": [p for name, p in names.items() if name != "head.weight"]}, {"params": [net.head.weight]})
    correct(old, skip=1, peak_lr=LR)
    shrink(old, LR / 2)
    saved = get_optimizer_state_dict(net, old)
    new = correct(adamw(*other.named_parameters()), skip="head.weight")
    set_optimizer_state_dict(other, new, saved)
    expected = [DECAY if name == "head.weight" else DECAY / 2 for name in names]
    assert shrink(new, LR / 2) == pytest.approx(expected)


@pytest.mark.parametrize("options", [None, StateDictOptions(flatten_optimizer_state_dict=True)], ids=["whole", "flat"])
def test_skip_survives_torchs_dcp(options: StateDictOptions | None) -> None:
    net, other = Net(), Net()
    saved = correct(adamw(*net.named_parameters()), skip="head")
    before = shrink(saved, LR / 2)
    resumed = correct(adamw(*other.named_parameters()), skip="head")
    state = get_optimizer_state_dict(net, saved, options=options)
    set_optimizer_state_dict(other, resumed, state, options=options)
    assert shrink(resumed) == pytest.approx(before)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_keeps_the_skip_and_a_lost_correction_is_restored_with_it(way: str) -> None:
    optimizer = three()
    correct(optimizer, skip=parameters(optimizer)[1])
    expected = shrink(optimizer, LR / 2)
    copied = COPIES[way](COPIES[way](optimizer))
    assert shrink(copied) == expected
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        getattr(copied, hooks).clear()  # as in a pickle from before copies kept them
    assert shrink(copied) == pytest.approx([DECAY / 2] * 3)
    assert shrink(correct(copied)) == expected


# ---------------------------------------------------------------- what `skip` takes


WAYS: dict[str, Callable[[Net], Any]] = {
    "parameters": lambda net: [net.head.weight, net.head.bias],
    "generator": lambda net: net.head.parameters(),
    "names": lambda net: ["head.weight", "head.bias"],
    "module": lambda net: net.head,
    "modules": lambda net: [net.head],
    "a module's name": lambda net: "head",
    "glob": lambda net: "head.*",
    "globs": lambda net: ["h*.weight", "h*.bias"],
}


@pytest.mark.parametrize("named", ["in the groups", "by the model", "both"])
@pytest.mark.parametrize("way", WAYS)
def test_skip_takes_parameters_modules_names_and_globs(way: str, named: str) -> None:
    net = Net()
    optimizer = adamw(*(net.parameters() if named == "by the model" else net.named_parameters()))
    correct(optimizer, None if named == "in the groups" else net, skip=WAYS[way](net))
    expected = [DECAY if name.startswith("head") else DECAY / 2 for name, _ in net.named_parameters()]
    assert shrink(optimizer, LR / 2) == pytest.approx(expected)


def test_names_may_leave_out_what_compiling_adds() -> None:
    net = torch.compile(Net())
    optimizer = correct(adamw(*net.parameters()), net, skip="head.weight")  # pyright: ignore
    assert shrink(optimizer, LR / 2)[4:] == pytest.approx([DECAY, DECAY / 2])


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("haed.weight", r"skip names 'haed\.weight', which no group has; did you mean 'head\.weight',"),
        ("heads", r"did you mean 'head'"),
        ("*.wieght", r"skip names '\*\.wieght', which no group has; did you mean"),
        (torch.nn.Linear(2, 2), r"skip holds Linear, of which this optimizer has no parameter"),
    ],
    ids=str,
)
def test_an_unmatched_skip_suggests_the_nearest_name(skip: Any, message: str) -> None:
    optimizer = adamw(*Net().named_parameters())
    with refused(optimizer, message):
        correct(optimizer, skip=skip)


def test_skip_by_name_without_names_says_how_to_add_them() -> None:
    optimizer = adamw(*Net().parameters())
    with refused(optimizer, r"'head'.*model\.named_parameters\(\), or correct\(\) the model"):
        correct(optimizer, skip="head")


class Language(Net):
    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_correct_with_a_model_skips_the_weight_of_its_output_layer() -> None:
    net = Language()
    optimizer = correct(adamw(*net.parameters()), net)
    expected = [DECAY if p is net.head.weight else DECAY / 2 for p in net.parameters()]
    assert shrink(optimizer, LR / 2) == pytest.approx(expected)
    nobody = correct(adamw(*net.parameters()), net, skip=())
    assert shrink(nobody, LR / 2) == pytest.approx([DECAY / 2] * 6)
    elsewhere = correct(adamw(net.body.weight), net)  # the output layer belongs to another optimizer
    assert shrink(elsewhere, LR / 2) == pytest.approx([DECAY / 2])


def test_a_model_whose_output_layer_is_unknown_asks_for_skip() -> None:
    net = Net()
    optimizer = adamw(*net.parameters())
    with refused(optimizer, r"which layer of Net is the output; pass skip=<its name>, or skip=\(\).*head, body"):
        correct(optimizer, net)


def test_a_wrong_type_of_model_raises_type_error() -> None:
    optimizer = adamw()
    with refused(optimizer, r"takes the model second, not list; pass what to leave out as skip=", TypeError):
        correct(optimizer, parameters(optimizer))  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- what others read


def test_the_monitor_and_the_table_know_the_decay_of_a_skipped_parameter() -> None:
    net = Net()
    optimizer = correct(adamw(*net.named_parameters()), skip="head.weight")
    monitor = sn.Monitor(optimizer, net, alignment=True)
    for t in range(3):
        for group in optimizer.param_groups:
            group["lr"] = LR / 2
        step(optimizer, seed=t)
    group = optimizer.param_groups[0]
    decays = [applied_weight_decay(optimizer, group, p) for p in (net.body.weight, net.head.weight)]
    assert decays == [DECAY / 2, DECAY]
    lines = {line.split()[0]: line for line in sn.explain(optimizer.param_groups).splitlines()}
    assert "corrected, 0.2 at peak lr" in lines["body.weight"]
    assert "constant 0.2" in lines["head.weight"]
    assert len(monitor.measure()) == 3


def test_the_forecast_of_a_skipped_parameter_goes_by_its_own_decay() -> None:
    """One of two equal vectors is skipped: each forecast equals that of an optimizer with only that decay."""

    def forecasts(*decays: float, skip: Any = ()) -> list[float]:
        params = [weight(4), weight(4)]
        groups = [{"params": params}] if len(decays) == 1 else [{"params": [p]} for p in params]
        optimizer = adamw(*groups, lr=LR / 2)
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        if skip:
            correct(optimizer, skip=[params[k] for k in skip], peak_lr=LR)
        monitor = sn.Monitor(optimizer)
        for t in range(5):
            step(optimizer, seed=t)
        return [layer["forecast"] for layer in monitor.measure()[-1]["layers"].values()]

    assert forecasts(DECAY, skip=[1]) == pytest.approx(forecasts(DECAY / 2, DECAY), rel=1e-6)


def test_adamc_and_convert_keep_the_skip() -> None:
    net = Net()
    optimizer = correct(adamw(*net.named_parameters()), skip="head.weight")
    expected = shrink(optimizer, LR / 2)
    loaded = sn.AdamC(net.named_parameters(), lr=LR, weight_decay=DECAY)
    saved = copy.deepcopy(optimizer.state_dict())
    loaded.load_state_dict(saved)
    assert shrink(loaded) == pytest.approx(expected)
    converted, _ = sn.convert(optimizer, net, output=False)
    constant = [p for group in converted.param_groups if not group["corrected"] for p in group["params"]]
    assert [id(p) for p in constant] == [id(net.head.weight)]


# ---------------------------------------------------------------- skip, by whole groups; parts of them: test_decay_skip.py


@pytest.mark.parametrize("index", [1, -1])
def test_skip_takes_a_group_index(index: int) -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=[index])
    assert len(optimizer.param_groups) == 2
    assert decays(optimizer, LR / 2) == [DECAY / 2, DECAY]
    assert decays(optimizer, LR * 3 / 4) == pytest.approx([DECAY * 3 / 4, DECAY])


def test_skipping_a_whole_group_does_not_split_it() -> None:
    head = weight()
    optimizer = adamw({"params": [weight()]}, {"params": [head]})
    SCHEDULES["cosine"](optimizer)
    step(optimizer)
    correct(optimizer, skip=[head])
    assert len(optimizer.param_groups) == 2
    assert decays(optimizer, LR / 2) == [DECAY / 2, DECAY]


def test_a_skipped_group_may_go_above_the_guessed_peak() -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=[1])
    optimizer.param_groups[1]["lr"] = 5 * LR
    step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, DECAY]


@pytest.mark.parametrize("target", [{}, {"steady_norm_sq": 0.3}], ids=["relative", "absolute"])
def test_a_group_without_decay_stays_undecayed(target: dict[str, float]) -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}), **target)
    for lr in (LR, LR / 2):
        corrected, without = decays(optimizer, lr)
        assert corrected > 0
        assert without == 0.0


def test_skipping_a_parameter_of_scion_leaves_its_decay_constant():
    """Scion reads its decay from the group by itself, so the stand-in's groups must not look corrected."""
    corrected, skipped = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = correct(sn.Scion([corrected, skipped], lr=LR, lmo="bias", weight_decay=DECAY), skip=[skipped])
    optimizer.param_groups[0]["lr"] = LR / 2
    corrected.grad, skipped.grad = torch.zeros(2), torch.zeros(2)
    optimizer.step()
    assert 1 - corrected[0].item() == pytest.approx(LR / 2 * DECAY / 2, rel=1e-3)
    assert 1 - skipped[0].item() == pytest.approx(LR / 2 * DECAY, rel=1e-3)
    assert optimizer.param_groups[0]["corrected"] is True


@pytest.mark.parametrize("own", [{}, {"hold": "fixed"}], ids=["decay", "fixed"])
def test_skipping_a_group_of_scion_keeps_the_settings_that_its_step_reads(own: dict[str, Any]):
    optimizer = sn.Scion([{"params": [weight()]}, {"params": [weight()]}], lr=LR, lmo="bias", weight_decay=DECAY, **own)
    before = [{key: group[key] for key in HOLD_KEYS} for group in optimizer.param_groups]
    assert decays(correct(optimizer, skip=[1]), LR / 2) == [DECAY / 2, DECAY]
    assert decays(uncorrect(optimizer), LR / 2) == [DECAY, DECAY]
    assert [{key: group[key] for key in HOLD_KEYS} for group in optimizer.param_groups] == before


def test_a_skipped_group_leaves_nothing_of_a_checkpoint_that_held_it():
    def made() -> torch.optim.AdamW:
        return adamw({"params": [weight()]}, {"params": [weight()]})

    held = correct(made(), hold="fixed")
    step(held)
    late, early = made(), correct(made(), hold="fixed", skip=[1])
    for loaded in (late, early):
        loaded.load_state_dict(held.state_dict())
    correct(late, skip=[1])
    for loaded in (late, early):
        corrected, skipped = ([*loaded.state[p]] for group in loaded.param_groups for p in group["params"])
        assert ("held_norm_sq" in corrected, "held_norm_sq" in skipped) == (True, False)
        assert not {*HOLD_KEYS} & loaded.param_groups[1].keys()


@pytest.mark.parametrize("asked", [{"hold": "fixed"}, {"cautious": True}], ids=["fixed", "cautious"])
def test_correct_refuses_to_hold_norms_that_renormalized_adamw_sets(asked: dict[str, Any]):
    optimizer = sn.RenormalizedAdamW([weight()], lr=LR, weight_decay=DECAY)
    before = [{**group} for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="RenormalizedAdamW has neither; leave them out, or use AdamC"):
        correct(optimizer, decoupled=True, **asked)
    assert [{**group} for group in optimizer.param_groups] == before


@pytest.mark.parametrize(
    ("own", "asked", "message"),
    [
        ({}, {"hold": "fixed"}, "Scion holds norms inside its own step; pass hold="),
        ({}, {"cautious": True}, "Scion holds norms inside its own step; pass hold="),
        ({"capturable": True}, {}, "Scion fills the scalars of a captured step itself; use ScionC"),
    ],
)
def test_correct_refuses_what_scion_does_in_its_own_step(own: dict[str, Any], asked: dict[str, Any], message: str):
    optimizer = sn.Scion([weight()], lr=LR, lmo="bias", weight_decay=DECAY, **own)
    with pytest.raises(ValueError, match=message):
        correct(optimizer, **asked)
