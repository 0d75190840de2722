"""The step loop: pieces and cores, and batching that changes nothing."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import steadynorm as sn
from steadynorm import machine, threads
from steadynorm.optim import buckets


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


SHAPES = [(24, 24), (24, 24), (48, 16), (16, 48), (24, 24), (7,), (7,), (1, 5), (5, 1), (3, 8, 6), (30, 10)]
MIXED = [torch.float32, torch.float64, torch.float32, torch.bfloat16]


def parameters(dtypes=(torch.float32,), seed=0):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=g).to(dtypes[k % len(dtypes)]) for k, shape in enumerate(SHAPES)]
    return [torch.nn.Parameter(value) for value in made]


def train(params, steps=4, **settings):
    """Train ScionC over groups with every kind of lmo and blocks; gradients depend only on the parameter."""
    groups = [
        {"params": [p], "lmo": "by-shape", "blocks": 2 if p.shape == (48, 16) else 1} if len(p.shape) != 2 or min(p.shape) < 2
        else {"params": [p], "lmo": "spectral" if p.shape != (30, 10) else "sign", "blocks": 2 if p.shape == (48, 16) else 1}
        for p in params
    ]  # fmt: skip
    merged = {}
    for group in groups:
        merged.setdefault((group["lmo"], group["blocks"]), {**group, "params": []})["params"] += group["params"]
    optimizer = sn.ScionC(merged.values(), lr=0.05, **settings)
    for step in range(steps):
        for k, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + k)).to(p.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtypes", [(torch.float64,), MIXED], ids=["fp64", "mixed"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_batched_step_equals_one_parameter_at_a_time(dtypes, nesterov, monkeypatch):
    batched, alone = parameters(dtypes), parameters(dtypes)
    train(batched, nesterov=nesterov)
    monkeypatch.setattr(machine, "CACHED_ELEMENTS", 1)
    train(alone, nesterov=nesterov)
    for a, b in zip(batched, alone, strict=True):
        tolerance = 1e-9 if a.dtype == torch.float64 else 0.02
        assert torch.allclose(a, b, atol=tolerance), (a.shape, a.dtype)


def test_one_piece_per_core_equals_one_core(two_threads):
    """They are equal bit for bit: the thread that runs a piece must not show."""
    cores, one = parameters(), parameters()
    train(cores)
    torch.set_num_threads(1)
    train(one)
    assert all(torch.equal(a, b) for a, b in zip(cores, one, strict=True))


def test_cores_are_used_and_the_thread_setting_comes_back(two_threads, monkeypatch):
    seen = set()
    original = buckets._run_chunk

    def spy(piece, scratch):
        seen.add(torch.get_num_threads())
        original(piece, scratch)

    monkeypatch.setattr(buckets, "_run_chunk", spy)
    train(parameters(), steps=1)
    assert seen == {1}
    assert torch.get_num_threads() == 2


def test_an_error_in_a_piece_is_raised_and_the_thread_setting_comes_back(two_threads, monkeypatch):
    def broken(piece, scratch):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(buckets, "_run_chunk", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(parameters(), steps=1)
    assert torch.get_num_threads() == 2


def test_dispatch_modes_see_every_operation(two_threads):
    """Fake tensors, FLOP counters and the like live in one thread, so under them the step stays there."""

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.products += func._schema.name in ("aten::mm", "aten::bmm")
            return func(*args, **(kwargs or {}))

    params = parameters()
    optimizer = train(params, steps=1)
    with Count():
        optimizer.step()
    assert Count.products > 20


def test_steps_keep_no_memory_of_their_own():
    optimizer = train(parameters())
    assert set(vars(optimizer)["state"][optimizer.param_groups[0]["params"][0]]) == {
        "momentum_buffer",
        "momentum_left",
        "skipped",
    }
    copied = copy.deepcopy(optimizer)
    assert copied._cache._values == {}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_in_a_stack_leaves_its_neighbours_alone(bad):
    clean, dirty = parameters(), parameters()
    train(clean, steps=2)
    optimizer = train(dirty, steps=2)
    before = dirty[1].detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[dirty[1]].items()}
    for params in (clean, dirty):
        for k, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
    dirty[1].grad[3, 4] = bad  # one of three 24 x 24 in one stack
    reference = train(clean, steps=0)
    reference.load_state_dict(optimizer.state_dict())
    reference.step()
    optimizer.step()
    assert torch.equal(dirty[1], before)
    assert torch.equal(optimizer.state[dirty[1]]["momentum_buffer"], state["momentum_buffer"])
    assert optimizer.skipped_steps().item() == 1
    assert all(torch.equal(a, b) for k, (a, b) in enumerate(zip(clean, dirty, strict=True)) if k != 1)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_huge_and_tiny_gradients_are_finite_gradients(scale):
    params, scaled = parameters(), parameters()
    optimizers = [train(p, steps=0, polar="svd") for p in (params, scaled)]
    for k, (p, q) in enumerate(zip(params, scaled, strict=True)):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
        q.grad = p.grad * scale
    for optimizer in optimizers:
        optimizer.step()
    assert optimizers[1].skipped_steps().item() == 0
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(params, scaled, strict=True))


def test_bf16_momentum_halves_the_state_and_stays_close():
    full, half = parameters(), parameters()
    train(full)
    optimizer = train(half, momentum_dtype="bfloat16")
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    for a, b in zip(full, half, strict=True):
        assert (a - b).norm() < 0.15 * 4 * 0.05 * a.numel() ** 0.5
    again = train(parameters(), steps=0, momentum_dtype="bfloat16")
    again.load_state_dict(optimizer.state_dict())
    assert {state["momentum_buffer"].dtype for state in again.state.values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="momentum_dtype='int8'"):
        sn.Scion(parameters(), lmo="by-shape", momentum_dtype="int8")


@pytest.mark.parametrize("nesterov", [False, True])
def test_bf16_momentum_widened_by_rows_is_the_same_as_widened_whole(nesterov, monkeypatch):
    whole, by_rows, settings = parameters(), parameters(), {"momentum_dtype": "bfloat16", "polar": "svd"}
    first = train(whole, nesterov=nesterov, **settings)
    monkeypatch.setattr(machine, "CACHED_ELEMENTS", 7)
    second = train(by_rows, nesterov=nesterov, **settings)
    for a, b in zip(whole, by_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(first.state[a]["momentum_buffer"], second.state[b]["momentum_buffer"])


@pytest.mark.parametrize("nesterov", [False, True])
def test_bf16_momentum_is_the_rounded_momentum_of_its_formula(nesterov):
    """x is made from the momentum before rounding: x_t = m_t, and with Nesterov (1-a) m_t + a g_t."""
    p, alpha, expected = torch.nn.Parameter(torch.zeros(5)), 0.3, torch.zeros(5)
    optimizer = sn.Scion([p], lr=0.5, lmo="bias", momentum_dtype="bfloat16", nesterov=nesterov, alpha=alpha)
    kept = torch.zeros(5, dtype=torch.bfloat16)
    for g in (torch.tensor([1.0, -2.0, 3.0, 1e-3, 7.0]), torch.tensor([-5.0, 2.0, 0.1, 4.0, 1.0])):
        p.grad = g
        optimizer.step()
        m = (1 - alpha) * kept.float() + alpha * g
        x = (1 - alpha) * m + alpha * g if nesterov else m
        kept, expected = m.bfloat16(), expected - 0.5 * 5**0.5 * x / x.norm()
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], kept, rtol=0.01, atol=0)
    torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)


# --- worker threads


def test_a_step_leaves_the_thread_setting_alone(two_threads, monkeypatch):
    train(parameters(), steps=1)  # the pool is made here
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("changed inside a step"))
    train(parameters(), steps=3)


def test_pools_outlive_a_step_and_split_the_cores(two_threads):
    assert threads.pool(50) is threads.pool(3)
    assert threads.pool(50).submit(torch.get_num_threads).result() == 1
    assert threads.pool(1).submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 2


def test_an_error_in_a_worker_is_raised_after_all_have_ended(two_threads):
    ended = []

    def work(item):
        if item == 0:
            raise RuntimeError("piece 0")
        ended.append(item)

    with pytest.raises(RuntimeError, match="piece 0"):
        threads.for_each(work, range(20))
    assert sorted(ended) == list(range(1, 20))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_makes_its_own_pool(two_threads):
    """Without this the child would wait for threads that only its parent has."""
    script = (
        "import os, torch; torch.set_num_threads(2)\n"
        "from steadynorm import threads\n"
        "threads.for_each(print, [1, 2])\n"
        "if (child := os.fork()) == 0:\n"
        "    threads.for_each(print, [3, 4]); os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=300)
