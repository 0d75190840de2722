"""Simulated systems are reproducible, independent of their batch, fast without a visible error, and as theory says."""

import math

import numpy as np
import pytest
import torch

from steadynorm import theory
from steadynorm.lab import simulate
from steadynorm.lab.simulate import System

LR, DECAY = 0.1, 0.3  # eta = 0.03: a half-life of 23 steps


def twin(system: System, steps: int, seed: int) -> list[float]:
    """Simulate one seed of one system by the paper's lines, with an SVD per step."""
    generator = torch.Generator().manual_seed(1_000_003 * 0 + seed)

    def noise() -> torch.Tensor:
        return torch.randn(system.shape, dtype=torch.float64, generator=generator)

    theta, m, norms = torch.zeros(system.shape, dtype=torch.float64), noise(), []
    lr, decay, alpha = (
        np.broadcast_to(each, (steps,)).tolist() for each in (system.lr, system.weight_decay, system.alpha)
    )
    for t in range(steps):
        g = noise()
        m = (1 - alpha[t]) * m + (g if system.momentum == "trace" else alpha[t] * g)
        x = (1 - alpha[t]) * m + alpha[t] * g if system.momentum == "nesterov" else m
        if system.lmo == "spectral":
            u, _, vh = torch.linalg.svd(x, full_matrices=False)
            u = u @ vh
        else:
            u = torch.sign(x) if system.lmo == "sign" else x
        theta = theta - lr[t] * (decay[t] * theta + u / u.norm())
        norms.append(theta.square().sum().item())
    return norms


@pytest.mark.parametrize("momentum", simulate.MOMENTA)
@pytest.mark.parametrize(
    ("lmo", "shape"), [("spectral", (6, 6)), ("spectral", (4, 9)), ("sign", (5, 3)), ("bias", (7,))]
)
def test_a_batch_of_scheduled_systems_equals_the_papers_lines(momentum: str, lmo: str, shape: tuple[int, ...]):
    steps = 40
    alphas = [np.linspace(0.1, 1.0, steps), 0.3]
    systems = [
        System(lmo, shape, np.linspace(0.2, 0.05, steps), np.linspace(0.1, 0.4, steps), a, momentum) for a in alphas
    ]
    for system, seen in zip(systems, simulate.run(systems, steps, seeds=2), strict=True):
        for seed in range(2):
            assert seen.norm_sq[seed] == pytest.approx(
                twin(system, steps, seed), rel=2e-3
            )  # 12 steps leave 1e-3 of a tiny singular value


def test_the_numbers_do_not_depend_on_what_runs_beside():
    one = System("spectral", (8, 8), LR, DECAY, 0.2)
    others = [System("bias", (5,), LR, DECAY, 0.5), System("spectral", (8, 8), LR, DECAY, 0.9)]
    alone = simulate.run([one], 30, seeds=2)[0]
    among = simulate.run([others[0], one, others[1]], 30, seeds=3)[1]
    np.testing.assert_array_equal(alone.norm_sq, among.norm_sq[:2])


def test_another_seed_gives_other_numbers():
    one = System("bias", (5,), LR, DECAY, 0.5)
    assert simulate.run([one], 5, seed=1)[0].norm_sq[0, 0] == pytest.approx(LR**2)  # a first step has a known length
    assert simulate.run([one], 5, seed=1)[0].norm_sq[0, -1] != simulate.run([one], 5, seed=2)[0].norm_sq[0, -1]


def test_trace_momentum_with_a_constant_alpha_equals_plain_momentum():
    plain, trace = (System("bias", (9,), LR, DECAY, 0.3, kind) for kind in ("plain", "trace"))
    # m_0 = g_0 weighs less in a trace, so they agree once it is forgotten
    seen = simulate.run([plain, trace], 400)
    assert seen[1].norm_sq[0, -100:] == pytest.approx(seen[0].norm_sq[0, -100:], rel=1e-3)


@pytest.mark.parametrize("shape", [(256, 256), (192, 768)])
def test_large_matrices_take_the_fast_polar_factor_at_no_visible_error(shape: tuple[int, int]):
    """With common noise, |theta|^2 is within 0.5 % of one SVD per step."""
    steps = 60
    system = System("spectral", shape, 0.1, 0.5, 0.3)
    assert system.large
    fast = simulate.run([system], steps)[0].norm_sq[0, -20:].mean()
    generator = torch.Generator().manual_seed(0)
    theta, m, exact = torch.zeros(shape), torch.randn(shape, generator=generator), []
    for _ in range(steps):
        m = 0.7 * m + 0.3 * torch.randn(shape, generator=generator)
        u, _, vh = torch.linalg.svd(m, full_matrices=False)
        theta = 0.95 * theta - 0.1 * (u @ vh) / math.sqrt(shape[0])
        exact.append(theta.square().sum().item())
    assert fast == pytest.approx(np.mean(exact[-20:]), rel=5e-3)


@pytest.mark.parametrize("momentum", ["plain", "nesterov"])
def test_one_gradient_moves_theta_by_the_effective_lr(momentum: str):
    seen = simulate.gradient_response("bias", (256,), lr=2.0, alpha=0.2, momentum=momentum, seeds=16)
    expected = theory.effective_lr(2.0, 0.2, nesterov=momentum == "nesterov")
    assert seen.mean == pytest.approx(expected, abs=0.005 * expected + 3 * seen.error)
    assert seen.error < 0.02 * expected


def test_a_bent_lmo_passes_on_its_linear_part_only():
    """sign: sqrt(a_1) = sqrt(2/pi) of the effective lr."""
    seen = simulate.gradient_response("sign", (32, 32), lr=1.0, alpha=0.5, seeds=32)
    expected = theory.effective_lr(1.0, 0.5) * math.sqrt(2 / math.pi)
    assert seen.mean == pytest.approx(expected, abs=0.01 * expected + 3 * seen.error)
    assert seen.mean < 0.9 * theory.effective_lr(1.0, 0.5)


def test_a_random_system_settles_where_the_paper_says():
    lr, decay = 1e-3, 1.0
    steps = simulate.half_life_steps(8, lr, decay)
    seen = simulate.random_system(lr, decay, steps, seeds=4).late_mean(norm=True)
    assert seen.mean == pytest.approx(math.sqrt(0.5), abs=0.005 + 3 * seen.error)


def test_a_random_system_follows_its_lr_series():
    rates = np.array([0.1, 0.2, 0.0])
    seen = simulate.random_system(rates, 0.5, 3, size=7, seeds=1)
    noise = np.random.default_rng([0, 0]).standard_normal((3, 7))
    theta = -0.1 * noise[0]
    assert seen.norm_sq[0, 0] == pytest.approx(np.square(theta).sum())
    theta = 0.9 * theta - 0.2 * noise[1]
    assert seen.norm_sq[0, 1:] == pytest.approx(2 * [np.square(theta).sum()])  # lr 0: nothing moves


def test_progress_and_done_are_called_for_every_system():
    told, ended = [], {}
    systems = [System("bias", (3,), LR, DECAY, a) for a in (0.1, 0.2, 0.3)]
    simulate.run(systems, 10, progress=told.append, done=lambda i, t: ended.__setitem__(i, t))
    assert sum(told) == 30
    assert sorted(ended) == [0, 1, 2]


def test_an_error_in_done_stops_the_rest_and_restores_the_threads():
    def fail(*_: object) -> None:
        raise OSError("disk full")

    threads = torch.get_num_threads()
    systems = [System("bias", (3,), LR, DECAY, 0.1), System("spectral", (16, 16), LR, DECAY, 0.1)]
    with pytest.raises(OSError, match="disk full"):
        simulate.run(systems, 3000, done=fail)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"alpha": np.full(9, 0.1)}, "one value for each of the 10 steps"),
        ({"lr": math.nan}, "lr is not finite"),
        ({"weight_decay": 20.0}, "below 1"),
        ({"momentum": "heavy"}, "plain, nesterov, trace"),
        ({"lmo": "nothing"}, "unknown lmo"),
        ({"shape": (3,), "lmo": "spectral"}, "needs 2 dimensions"),
    ],
)
def test_impossible_settings_are_refused(change: dict, message: str):
    given = {"lmo": "bias", "shape": (3,), "lr": 0.1, "weight_decay": 0.1, "alpha": 0.5} | change
    with pytest.raises(ValueError, match=message):
        simulate.run([System(**given)], 10)


def test_more_steps_than_a_run_can_have_are_refused():
    with pytest.raises(ValueError, match=r"half-lives 1e\+30: 6.9e\+33 steps are more than a run can have"):
        simulate.half_life_steps(1e30, 0.001, 0.1)
