"""torch's own tools around a step: a compiled training step, accumulation, GradScaler with clipping, EMA and SWA
weights.

Each stops, resumes from what torch saves, and ends with the weights of an unbroken run.
"""

import io
import math
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from following import DECAY, LR, MAKERS, AppliedDecay, Steps, assert_same, weights
from small import batch, loss_of, net
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import steadynorm as sn

TOTAL, STOP = 8, 5


class Run:
    """Hold a model, an optimizer and a scheduler; a subclass says what a step is and what else is saved."""

    def __init__(self, name: str = "ScionC"):
        self.model = net()
        self.optimizer = MAKERS[name](self.model)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, ratio)
        self.steps = Steps(self.optimizer)

    def step(self, t: int) -> None:
        loss_of(self.model, t).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def train(self, first: int, last: int) -> None:
        for t in range(first, last):
            self.optimizer.zero_grad()
            self.step(t)
            self.scheduler.step()

    def saved(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.saved().items()}, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        found = torch.load(file, weights_only=True)
        for name, part in self.saved().items():
            part.load_state_dict(found[name])


def ratio(step: int) -> float:
    return (step + 1) / 3 if step < 3 else 1 - (step - 2) / 10


def check_resuming(make: Any) -> tuple[Any, Any]:
    """Compare an unbroken run with one that was stopped and resumed; return both."""
    whole, stopped, resumed = make(), make(), make()
    whole.train(0, TOTAL)
    stopped.train(0, STOP)
    resumed.load(stopped.save())
    resumed.train(STOP, TOTAL)
    assert_same(weights(whole.model), weights(resumed.model))
    return whole, resumed


# --- correction in the middle


class AdamWRun(Run):
    """An AdamW run of 200 steps, with a scheduler that has a lambda per group."""

    def __init__(self, **options: Any):
        self.model = net()
        hidden = [p for name, p in self.model.named_parameters() if not name.startswith("conv")]
        groups = [{"params": hidden}, {"params": self.model.conv.parameters(), "lr": LR / 2}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [long_ratio, long_ratio])


def long_ratio(step: int) -> float:
    return (step + 1) / 20 if step < 20 else 0.5 * (1 + math.cos(math.pi * (step - 19) / 200))


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("order", ["corrected, then loaded", "loaded, then corrected"])
def test_a_correction_with_skip_joins_an_adamw_run_of_200_steps(order: str, implementation: dict[str, bool]):
    plain, joined = AdamWRun(**implementation), AdamWRun(**implementation)
    plain.train(0, 100)
    head, hidden, conv = joined.model.head.weight, joined.model.hidden.weight, joined.model.conv.weight
    for what in order.split(", then "):
        if what == "corrected":
            sn.correct(joined.optimizer, joined.model, skip=["head.weight"])
        else:
            joined.load(plain.save())
    assert_same(weights(plain.model), weights(joined.model))
    applied = AppliedDecay(joined.optimizer)
    joined.train(100, 200)
    applied.check(
        lambda step: {head: DECAY, hidden: DECAY * long_ratio(step), conv: DECAY * long_ratio(step)}, 100, 200
    )
    assert {int(state["step"]) for state in joined.optimizer.state.values()} == {200}


# --- accumulation


class Accumulating(Run):
    parts = 4

    def step(self, t: int) -> None:
        x, y = batch(t)
        for xs, ys in zip(x.chunk(self.parts), y.chunk(self.parts), strict=True):
            (nn.functional.cross_entropy(self.model(xs), ys) / self.parts).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_accumulated_gradients_make_one_step(name: str):
    whole, _ = check_resuming(lambda: Accumulating(name))
    whole.steps.check([ratio(t) for t in range(TOTAL)])


# --- GradScaler


class Scaled(Run):
    """Scale the loss and unscale for clipping; at step 2 the loss overflows and the scaler skips the step."""

    overflow = 2

    def __init__(self, name: str = "ScionC"):
        super().__init__(name)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)

    def step(self, t: int) -> None:
        loss = loss_of(self.model, t)
        self.scaler.scale(loss * (math.inf if t == self.overflow else 1.0)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "scaler": self.scaler}


@pytest.mark.parametrize("name", MAKERS)
def test_a_grad_scaler_works_with_clipping(name: str):
    whole, resumed = check_resuming(lambda: Scaled(name))
    assert whole.scaler.get_scale() == resumed.scaler.get_scale() != 2.0**10
    taken = [ratio(t) for t in range(TOTAL) if t != Scaled.overflow]
    whole.steps.check(taken)  # a step left out has no decay either


def test_the_scale_does_not_change_the_weights():
    scaled, plain = Scaled(), Run()
    scaled.overflow = -1
    for run in (scaled, plain):
        for group in run.optimizer.param_groups:
            group["polar"] = "svd"
        run.train(0, TOTAL)
    for name, value in weights(plain.model).items():
        torch.testing.assert_close(value, weights(scaled.model)[name], rtol=1e-4, atol=1e-5)


# --- averages of weights


class Averaged(Run):
    decay = 0.8

    def __init__(self, name: str = "ScionC"):
        super().__init__(name)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(self.decay))

    def step(self, t: int) -> None:
        super().step(t)
        self.ema.update_parameters(self.model)

    def saved(self) -> dict[str, Any]:
        return {**super().saved(), "ema": self.ema}


@pytest.mark.parametrize("name", MAKERS)
def test_an_ema_of_the_weights_follows_them(name: str):
    """The average follows its formula and does not affect training."""
    whole, resumed = check_resuming(lambda: Averaged(name))
    assert_same(weights(whole.ema), weights(resumed.ema))
    plain, mean = Run(name), {}
    for t in range(TOTAL):
        plain.train(t, t + 1)
        for key, value in weights(plain.model).items():
            mean[key] = value if t == 0 else Averaged.decay * mean[key] + (1 - Averaged.decay) * value
    assert_same(weights(plain.model), weights(whole.model))
    for key, value in mean.items():
        torch.testing.assert_close(value, whole.ema.module.state_dict()[key])


def test_swa_takes_over_the_lr_and_the_decay_follows():
    """SWALR anneals to its own lr, here above the schedule's last value but below the peak, so nothing is ambiguous."""
    run = Run("AdamC")
    run.train(0, STOP)
    swa = SWALR(run.optimizer, swa_lr=LR / 2, anneal_epochs=2, anneal_strategy="linear")
    for t in range(STOP, TOTAL):
        run.optimizer.zero_grad()
        run.step(t)
        swa.step()
    matrix = next(k for k, group in enumerate(run.optimizer.param_groups) if group["name"] == "matrix")
    for row in run.steps.rows:
        lr, decay = row[matrix]
        assert decay == pytest.approx(run.optimizer.param_groups[matrix]["base_weight_decay"] * lr / LR)
    assert run.steps.lrs(matrix)[-1] == pytest.approx(LR / 2)


# --- compiled


class Compiled(Run):
    """Compile forward, backward and the optimizer's step into one function."""

    def __init__(self, name: str = "ScionC"):
        super().__init__(name)
        self.frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def whole_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            return loss.detach()

        self.whole_step = torch.compile(whole_step, backend=self.frames)

    def step(self, t: int) -> None:
        self.whole_step(*batch(t))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_compiled_training_step_trains(name: str):
    """It takes the steps of the plain one while lr changes, without compiling again."""
    torch._dynamo.reset()
    run, plain = Compiled(name), Run(name)
    run.train(0, 3)
    compiled = run.frames.frame_count
    run.train(3, TOTAL)
    assert run.frames.frame_count == compiled
    run.steps.check([ratio(t) for t in range(TOTAL)])
    plain.train(0, TOTAL)
    for key, value in weights(plain.model).items():
        torch.testing.assert_close(value, weights(run.model)[key], rtol=1e-2, atol=2e-3)
