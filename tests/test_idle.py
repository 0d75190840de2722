"""Gradients that are exactly zero: slices wait for their next gradient, and stale updates fade."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import steadynorm as sn
from steadynorm import theory
from steadynorm.optim import idle


def steps(optimizer, p, gradients):
    for gradient in gradients:
        p.grad = gradient
        optimizer.step()


def rms(p):
    return p.detach().square().mean().sqrt().item()


def of_seed(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- waiting


@pytest.mark.parametrize("momentum_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("lmo", "shape"), [("embedding", (5, 6)), ("spectral", (5, 4, 6)), ("row", (5, 4, 6))])
def test_a_slice_moves_as_if_only_its_own_steps_existed(lmo, shape, nesterov, momentum_dtype):
    """Slice k gets a gradient in every (k+1)-th step; it must be where a separate parameter with these steps is."""
    settings = {"lr": 0.05, "nesterov": nesterov, "polar": "svd", "momentum_dtype": momentum_dtype}
    together = torch.nn.Parameter(of_seed(0, *shape))
    apart = [torch.nn.Parameter(together[k : k + 1].detach().clone()) for k in range(shape[0])]
    whole = sn.ScionC([together], lmo=lmo, **settings)
    single = [sn.ScionC([p], lmo=lmo, **settings) for p in apart]
    for t in range(40):
        gradient = of_seed(t, *shape)
        for k, (p, optimizer) in enumerate(zip(apart, single, strict=True)):
            if t % (k + 1):
                gradient[k] = 0
            else:
                steps(optimizer, p, [gradient[k : k + 1].clone()])
        steps(whole, together, [gradient])
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)


def test_dense_rows_move_along_the_rest_of_their_momentum():
    p = torch.nn.Parameter(torch.zeros(2, 3))
    gradient = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    for own_time, moved in ((True, 1), (False, 3)):
        with torch.no_grad():
            p.zero_()
        optimizer = sn.Scion([p], lr=0.1, lmo="embedding", own_time=own_time)
        steps(optimizer, p, [gradient, gradient.flip(0), gradient.flip(0)])
        assert p[0].tolist() == pytest.approx([-0.1 * moved] * 3)


def test_a_large_table_cut_by_rows_waits_row_by_row(monkeypatch):
    small, large = (torch.nn.Parameter(of_seed(1, 64, 8)) for _ in range(2))
    gradients = [of_seed(t, 64, 8) * (torch.arange(64) % 3 == t % 3).unsqueeze(1) for t in range(6)]
    steps(sn.ScionC([small], lmo="embedding"), small, gradients)
    monkeypatch.setattr("steadynorm.machine.CACHED_ELEMENTS", 40)
    steps(sn.ScionC([large], lmo="embedding"), large, gradients)
    assert torch.equal(small, large)


def test_rare_and_frequent_rows_settle_alike_as_forecast():
    """Words follow a Zipf law. A row's norm is that of its own number of steps, and the table's norm is their sum."""
    words, width, count = 400, 16, 1000
    chances = 1 / torch.arange(1, words + 1.0)
    table, seen = torch.nn.Parameter(torch.zeros(words, width)), torch.zeros(words, dtype=torch.long)
    optimizer = sn.ScionC([table], lr=0.05, lmo="embedding")
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        used = torch.multinomial(chances, 64, True, generator=generator).unique()
        seen[used] += 1
        table.grad = torch.zeros(words, width)
        table.grad[used] = torch.randn(len(used), width, generator=generator)
        optimizer.step()
    decay = optimizer.weight_decay_of(table)
    kernel = theory.overlap("embedding", (words, width))
    expected = theory.forecast(np.full(count, 0.05), decay, 0.1, overlap=kernel)  # by own steps, from 1
    by_row = torch.from_numpy(np.concatenate([[0.0], expected]))[seen]
    mean_square = table.detach().square().mean(1)
    assert mean_square.sum().sqrt() == pytest.approx(by_row.sum().sqrt().item(), rel=0.1)
    frequent, rare = seen >= 0.6 * count, (seen >= 100) & (seen < 300)
    assert frequent.sum() > 5 and rare.sum() > 50
    for rows in (frequent, rare):
        assert mean_square[rows].mean().sqrt() == pytest.approx(by_row[rows].mean().sqrt().item(), rel=0.1)
    assert mean_square[rare].mean() < 1.1 * mean_square[frequent].mean()


@pytest.mark.parametrize("native", ["0", "1"])
def test_an_expert_without_gradients_stays_finite_and_stands_still(native, monkeypatch):
    """The last of four experts gets no gradients after step 20; with momentum that decayed, it was NaN before step 1000."""
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", native)
    experts = torch.nn.Parameter(of_seed(0, 4, 32, 32))
    optimizer = sn.ScionC([experts], lmo="spectral", polar_steps=2)
    gradients = [of_seed(t, 4, 32, 32) for t in range(8)]
    for t in range(300):
        experts.grad = gradients[t % 8].clone()
        if t >= 20:
            experts.grad[3] = 0
        optimizer.step()
        if t == 20:
            before = experts[3].detach().clone()
    assert experts.isfinite().all()
    assert torch.equal(experts[3], before)
    assert not torch.equal(experts[2], before)
    assert optimizer.skipped_steps() == 0


def test_an_expert_of_a_dense_stack_fades():
    """Otherwise the rest of its momentum would carry it to 13 times the norm of the others."""
    experts = torch.nn.Parameter(of_seed(0, 3, 16, 16))
    optimizer = sn.ScionC([experts], lr=0.02, lmo="spectral", polar_steps=2, own_time=False)
    for t in range(220):
        experts.grad = of_seed(t + 1, 3, 16, 16)
        if t >= 20:
            experts.grad[2] = 0
        before = experts.detach().clone()
        optimizer.step()
    decay = 1 - 0.02 * optimizer.weight_decay_of(experts)
    torch.testing.assert_close(experts[2], decay * before[2])
    assert (experts[1] - decay * before[1]).norm() > 0.01


def test_a_dense_stack_above_the_size_of_a_chunk_takes_the_steps_of_a_small_one(monkeypatch):
    """Its experts fade one by one, so it is not cut between them."""
    whole, cut = (torch.nn.Parameter(of_seed(0, 3, 4, 4)) for _ in range(2))
    optimizers = [sn.ScionC([p], lr=0.02, lmo="spectral", own_time=False) for p in (whole, cut)]
    for t in range(4):
        for p, optimizer, most in zip((whole, cut), optimizers, (1 << 18, 16), strict=True):
            monkeypatch.setattr("steadynorm.machine.CACHED_ELEMENTS", most)
            p.grad = of_seed(t + 1, 3, 4, 4)
            p.grad[2] = 0
            optimizer.step()
    torch.testing.assert_close(cut, whole)


# --- fading


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize(
    ("make", "shape", "bound"),
    [
        (lambda p: sn.ScionC([p], lmo="bias"), (16,), 1.25),
        (lambda p: sn.ScionC([p], lmo="spectral"), (12, 12), 0.4),
        (lambda p: sn.ScionC([p], lmo="sign"), (12, 12), 0.12),
        (lambda p: sn.LionC([p], lr=0.01, betas=(0.9, 0.9), weight_decay=0.08), (16,), 1.25),
    ],
)
def test_one_gradient_does_not_move_weights_for_ever(make, shape, bound, native, monkeypatch):
    """Momentum sticks at denormals, and a bias once walked to 1/lambda = 12.5.

    Now 109 steps of 0.01 remain, then decay.
    """
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", native)
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = make(p)
    steps(optimizer, p, [of_seed(0, *shape)])
    sizes = []
    for _ in range(400):
        steps(optimizer, p, [torch.zeros(shape)])
        sizes.append(rms(p))
    assert max(sizes) < bound
    assert sizes[200:] == sorted(sizes[200:], reverse=True)
    assert sizes[-1] < 0.9 * max(sizes)


def test_only_decay_remains_once_the_update_has_faded():
    p = torch.nn.Parameter(of_seed(1, 6, 6))
    optimizer = sn.Scion([p], lr=0.1, lmo="spectral", weight_decay=0.5)
    steps(optimizer, p, [of_seed(0, 6, 6), *[torch.zeros(6, 6)] * 300])
    before = p.detach().clone()
    steps(optimizer, p, [torch.zeros(6, 6)])
    assert torch.allclose(p, (1 - 0.05) * before, rtol=1e-6)


@pytest.mark.parametrize("power", [-100, 60])
def test_fading_does_not_depend_on_the_scale_of_gradients(power):
    gradients = [of_seed(0, 6, 6), *[torch.zeros(6, 6)] * 150, of_seed(1, 6, 6) * 2.0**-20, *[torch.zeros(6, 6)] * 20]
    ends = []
    for scale in (1.0, 2.0**power):
        p = torch.nn.Parameter(of_seed(2, 6, 6))
        steps(sn.ScionC([p], lmo="spectral"), p, [scale * gradient for gradient in gradients])
        ends.append(p.detach())
    assert torch.allclose(*ends, atol=1e-6)


@pytest.mark.parametrize(
    ("lmo", "shape", "dim", "blocks"),
    [
        ("spectral", (9, 4), 0, 3),
        ("spectral-transposed", (4, 9), 1, 3),
        ("spectral", (4, 9), 1, ("inputs", 3)),
        ("spectral-transposed", (9, 4), 0, ("inputs", 3)),
        ("spectral", (9, 4), 0, (1, 2, 3, 3)),
        ("spectral", (4, 9), 1, ("inputs", [2, 1, 3, 3])),
    ],
)
def test_a_block_fades_by_itself(lmo, shape, dim, blocks):
    p = torch.nn.Parameter(of_seed(3, *shape))
    optimizer = sn.Scion([p], lr=0.01, lmo=lmo, blocks=blocks)
    for t in range(200):
        gradient = of_seed(t, *shape)
        if t:
            gradient.narrow(dim, 3, 3).zero_()
        steps(optimizer, p, [gradient])
    before = p.detach().clone()
    steps(optimizer, p, [gradient])
    moved = (p.detach() - before).abs().amax(1 - dim).view(3, 3).amax(1)
    assert moved[1] < 1e-3 * moved[0]
    assert moved[0] > 1e-3 and moved[2] > 1e-3


def test_a_returning_gradient_moves_at_full_size_at_once():
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = sn.Scion([p], lr=0.1, lmo="bias")
    steps(optimizer, p, [torch.ones(4), *[torch.zeros(4)] * 400])
    before = p.detach().clone()
    steps(optimizer, p, [1e-6 * torch.ones(4)])
    assert (before - p.detach()).tolist() == pytest.approx([0.1] * 4, rel=1e-5)


def test_a_gradient_that_is_not_finite_leaves_the_count_as_it_was():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = sn.Scion([p], lmo="bias")
    steps(optimizer, p, [torch.ones(3), torch.zeros(3), torch.full((3,), torch.nan)])
    assert optimizer.state[p]["momentum_left"].tolist() == pytest.approx([0.9])


def test_checkpoints_from_earlier_versions_load_and_resume():
    p = torch.nn.Parameter(of_seed(0, 4, 4))
    optimizer = sn.ScionC([p], lmo="spectral")
    steps(optimizer, p, [of_seed(1, 4, 4)])
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["momentum_left"]
    for group in saved["param_groups"]:
        del group["own_time"]
    other = sn.ScionC([torch.nn.Parameter(p.detach().clone())], lmo="spectral")
    other.load_state_dict(saved)
    assert other.state_dict()["state"][0]["momentum_left"].tolist() == [1.0]
    assert other.param_groups[0]["own_time"] is True


@pytest.mark.parametrize("value", [2e38, 3e38])
def test_gradients_whose_difference_overflows_are_skipped_and_counted(value):
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = sn.ScionC([p], lmo="bias")
    steps(optimizer, p, [torch.full((4,), value), torch.full((4,), -value)])
    assert p.isfinite().all()
    assert optimizer.skipped_steps() == 2


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
def test_magnitudes_of_cut_parameters_are_those_of_the_whole(shape):
    x = of_seed(0, 3, *shape)
    cuts = [x[:, :1], x[:, 1:]]
    for slices in (idle.WHOLE, *([idle.Slices(waiting_ndim=1)] if len(shape) > 1 else [])):
        joined = idle.join([idle.magnitudes(cut, slices) for cut in cuts], slices)
        assert torch.equal(joined, idle.magnitudes(x, slices))


# --- what a monitor says of it


def test_the_forecast_of_a_table_is_unknown_once_a_row_has_waited():
    table = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = sn.ScionC([table], lmo="embedding")
    monitor = sn.Monitor(optimizer)
    gradients = [torch.ones(4, 3) for _ in range(4)]
    gradients[2][1] = 0
    steps(optimizer, table, gradients)
    forecasts = [record["forecast_norm"] for record in monitor.measure()]
    assert [forecast is None for forecast in forecasts] == [False, False, True, True]
    again = sn.Monitor(sn.ScionC([table], lmo="embedding"))
    again.load_state_dict(monitor.state_dict())
    steps(again.optimizer, table, gradients[:1])
    assert again.measure()[-1]["forecast_norm"] is None


def test_counts_of_waiting_rows_are_loaded_to_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch):
    """A checkpoint read with map_location="cpu" has them on the CPU."""
    table = torch.nn.Parameter(torch.zeros(4, 3))
    monitor = sn.Monitor(sn.ScionC([table], lmo="embedding"), forecast=False)
    steps(monitor.optimizer, table, [torch.eye(4, 3)])
    saved = monitor.state_dict()
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.nn.Parameter(torch.empty(4, 3, device="cuda"))
        again = sn.Monitor(sn.ScionC([there], lmo="embedding"), forecast=False)
        monkeypatch.setattr(again, "_drain", lambda: None)  # fake tensors have no values to fetch
        again.load_state_dict(saved)
        assert [count.device.type for count in again._probe.waited.values()] == ["cuda"]
    beside = sn.Monitor(sn.ScionC([table], lmo="embedding"), forecast=False)
    beside.load_state_dict(saved)
    (count,) = beside._probe.waited.values()
    assert count == 1
    assert count.data_ptr() != saved["waited"]["0.0"].data_ptr()


def test_products_count_only_the_rows_that_moved():
    table = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = sn.Scion([table], lr=0.1, lmo="embedding")
    monitor = sn.Monitor(optimizer)
    steps(optimizer, table, [torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])])
    (record,) = monitor.measure()
    assert record["alignment"] == pytest.approx(3 / (6 * 3) ** 0.5)
