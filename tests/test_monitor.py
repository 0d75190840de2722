"""The monitor: what it measures is what slow twins measure; it waits for nothing, changes nothing, loses nothing."""

import copy
import json
import math
import statistics

import pytest
import torch
from test_no_sync import SHAPES, NoCrossing, optimizers
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import steadynorm as sn
from steadynorm.lmo import LMOS
from steadynorm.monitor import log_records, record
from steadynorm.monitor.motion import motion_of, target_of
from steadynorm.optim import buckets


def noise(shape, *seeds: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(1000**k * s for k, s in enumerate(seeds))))


def parameters(*shapes, seed=0, dtype=torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(noise(shape, seed, k).to(dtype)) for k, shape in enumerate(shapes)]


def set_noise(params, t: int) -> None:
    for k, p in enumerate(params):
        p.grad = noise(p.shape, t, k, 7).to(p.dtype)


def train(optimizer, params, steps: int, *, start: int = 0, each=lambda t: None) -> None:
    for t in range(start, start + steps):
        set_noise(params, t)
        each(t)
        optimizer.step()


def assert_alike(records, others, rel=1e-9) -> None:
    """Equal, but for the last digits of forecasts, which depend on how many steps are walked at once."""
    if isinstance(records, list):
        assert len(records) == len(others)
        for one, two in zip(records, others, strict=True):
            assert_alike(one, two, rel)
    elif isinstance(records, dict):
        assert list(records) == list(others)
        for key in records:
            assert_alike(records[key], others[key], rel)
    else:
        assert records is others is None or math.isclose(records, others, rel_tol=rel, abs_tol=1e-12)


# --- norms


@pytest.mark.parametrize(
    ("lmo", "shape", "blocks"),
    [
        ("spectral", (48, 48), 1),
        ("spectral", (96, 24), 1),
        ("spectral", (24, 96), 1),
        ("spectral", (72, 24), 3),
        ("spectral", (3, 24, 40), 1),
        ("spectral-transposed", (24, 72), 3),
        ("spectral-transposed", (3, 24, 40), 1),
        ("conv", (32, 4, 3, 3), 1),
        ("conv-tap", (16, 12, 2, 2), 1),
    ],
    ids=["square", "tall", "wide", "blocks", "stack", "transposed blocks", "transposed stack", "conv", "taps"],
)
def test_spectral_norm_within_a_percent_of_svd_on_a_slowly_changing_matrix(lmo, shape, blocks):
    params = parameters(shape, shape)
    optimizer = sn.Scion(params, lr=0.02, lmo=lmo, blocks=blocks, weight_decay=0.05)
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 50)
    last = monitor.measure()[-1]
    exact = []
    for k, p in enumerate(params):
        p = p.detach()
        if lmo == "conv-tap":
            parts, scale = p.flatten(2).movedim(-1, 0), 4 * math.sqrt(12 / 16)
        elif lmo == "spectral-transposed":  # stored d_in x d_out, blocks by columns
            parts = [part for w in p.view(-1, *shape[-2:]) for part in w.chunk(blocks, -1)]
            scale = math.sqrt(shape[-2] * blocks / shape[-1])
        else:
            columns = p[0].numel() if lmo == "conv" else shape[-1]
            rows = shape[0] if lmo == "conv" else shape[-2]
            parts, scale = p.reshape(-1, rows // blocks, columns), math.sqrt(columns * blocks / rows)
        values = [torch.linalg.svdvals(part)[0].item() * scale for part in parts]
        layer = statistics.geometric_mean(values)
        assert abs(last["layers"][f"0.{k}"]["spectral"] / layer - 1) < 0.01
        exact += values
    assert abs(last["spectral_norm"] / statistics.geometric_mean(exact) - 1) < 0.01


@pytest.mark.parametrize("every", [1, 10, 50, 100])
def test_spectral_norm_within_a_percent_of_svd_while_training(every):
    """At lr 0.05 half of the weights is new after 35 steps. One power iteration per record was up to 33 % low."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.Tanh(), nn.Linear(160, 96), nn.Tanh(), nn.Linear(96, 10))
    optimizer = sn.ScionC(sn.param_groups(model, lr=0.05, output="4"))
    monitor = sn.Monitor(optimizer, model, every=every)
    teacher, exact = noise((64, 10), 3), {}
    for t in range(200):
        optimizer.zero_grad()
        x = noise((32, 64), t)
        nn.functional.cross_entropy(model(x), (x @ teacher).argmax(-1)).backward()
        optimizer.step()
        if (t + 1) % max(every, 10) == 0:
            exact[t + 1] = [LMOS["spectral"].norm(model[k].weight.detach()).item() for k in (0, 2)]
    records = monitor.measure()
    assert len(records) == 200 // every
    for row in records:
        if row["step"] in exact:
            measured = [row["layers"][f"{k}.weight"]["spectral"] for k in (0, 2)]
            assert measured == pytest.approx(exact[row["step"]], rel=0.01)


def test_following_a_turning_matrix_from_record_to_record():
    """The vector is kept from step to step: a fresh one each time would stay some 20 % low."""
    p = nn.Parameter(noise((64, 64), 1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    monitor = sn.Monitor(optimizer)
    for t in range(60):
        p.data += 0.02 * noise((64, 64), 5, t)
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert abs(monitor.measure()[-1]["spectral_norm"] / torch.linalg.matrix_norm(p.detach(), 2).item() - 1) < 0.01


def test_first_record_is_not_far_too_low():
    """A random vector sees half of the largest singular value; new layers get some iterations at once."""
    params = parameters((64, 64), (128, 32))
    optimizer = torch.optim.SGD(params, lr=0.0)
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 1)
    exact = [LMOS["spectral"].norm(p.detach()).item() for p in params]
    assert monitor.measure()[0]["spectral_norm"] == pytest.approx(statistics.geometric_mean(exact), rel=0.05)


def test_zero_matrix_is_left_out_of_the_mean_and_keeps_its_vector():
    a, zero = nn.Parameter(noise((16, 16), 1)), nn.Parameter(torch.zeros(16, 16))
    optimizer = torch.optim.SGD([a, zero], lr=0.0)
    monitor = sn.Monitor(optimizer)
    for p in (a, zero):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    vector = monitor.state_dict()["power"]["0.1"]
    for _ in range(3):
        optimizer.step()
    last = monitor.measure()[-1]
    assert last["layers"]["0.1"] | {"spectral": None, "norm": 0.0} == last["layers"]["0.1"]
    assert last["spectral_norm"] == last["layers"]["0.0"]["spectral"]
    assert torch.equal(monitor.state_dict()["power"]["0.1"], vector)
    assert vector.norm().item() == pytest.approx(1, abs=1e-6)
    zero.data.copy_(noise((16, 16), 2))
    for _ in range(60):
        optimizer.step()
    exact = torch.linalg.matrix_norm(zero.detach(), 2).item()
    assert monitor.measure()[-1]["layers"]["0.1"]["spectral"] == pytest.approx(exact, rel=0.01)


def test_role_norms_are_means_of_table_1():
    """Geometric over matrices, arithmetic over vectors; sign d_in max|A|; l2 over everything."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 9))
    params = list(model.parameters())
    for k, p in enumerate(params):
        p.data.copy_(noise(p.shape, 3, k))
    optimizer = sn.ScionC(sn.param_groups(model, output="3"))
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 40)
    set_noise(params, 99)
    optimizer.step()
    last = monitor.measure()[-1]
    spectral = [LMOS["spectral"].norm(model[k].weight.detach()).item() for k in (1, 2)]
    rms = [model[k].bias.detach().square().mean().sqrt().item() for k in (1, 2, 3)]
    assert last["spectral_norm"] == pytest.approx(math.sqrt(math.prod(spectral)), rel=0.01)
    assert last["bias_norm"] == pytest.approx(sum(rms) / 3, rel=1e-5)
    assert last["sign_norm"] == pytest.approx(8 * model[3].weight.abs().max().item(), rel=1e-6)
    assert last["embedding_norm"] == pytest.approx(model[0].weight.abs().max().item(), rel=1e-6)
    everything = torch.cat([p.detach().flatten() for p in params])
    gradient = torch.cat([p.grad.flatten() for p in params])
    assert last["weight_norm"] == pytest.approx(everything.norm().item(), rel=1e-5)
    assert last["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-5)
    assert last["layers"]["1.weight"]["norm"] == pytest.approx(model[1].weight.norm().item(), rel=1e-5)
    assert last["layers"]["1.weight"]["grad"] == pytest.approx(model[1].weight.grad.norm().item(), rel=1e-5)


def test_roles_of_a_foreign_optimizer_come_from_the_model_else_from_the_shape():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(7, 4), nn.Linear(4, 12), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    params = list(model.parameters())
    known, blind = (torch.optim.AdamW(params, lr=0.0) for _ in range(2))
    with_model, without = sn.Monitor(known, model), sn.Monitor(blind)
    train(known, params, 40)
    train(blind, params, 40)
    named, plain = with_model.measure()[-1], without.measure()[-1]
    assert list(named["layers"]) == ["embed.weight", "qkv.weight", "qkv.bias"]
    assert list(plain["layers"]) == ["0.0", "0.1", "0.2"]
    assert named["sign_norm"] == pytest.approx(4 * model.embed.weight.abs().max().item(), rel=1e-6)
    blocks = [torch.linalg.matrix_norm(part, 2).item() for part in model.qkv.weight.detach().split(4)]
    assert named["layers"]["qkv.weight"]["spectral"] == pytest.approx(statistics.geometric_mean(blocks), rel=0.01)
    assert named["layers"]["embed.weight"]["spectral"] is None
    assert plain["sign_norm"] is None
    assert plain["layers"]["0.0"]["spectral"] is not None
    assert named["bias_norm"] == plain["bias_norm"]


@pytest.mark.parametrize("make", ["ScionC", "AdamW by groups", "ScionC without a model"])
def test_norms_by_role_add_up_to_all_weights(make):
    model = nn.ModuleDict(
        {"embed": nn.Embedding(7, 6), "fc": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "lm_head": nn.Linear(8, 7)}
    )
    if make.startswith("ScionC"):
        optimizer = sn.ScionC(sn.param_groups(model, output="lm_head"))
    else:
        optimizer = torch.optim.AdamW(sn.param_groups(model, kind="adam", output="lm_head"))
    monitor = sn.Monitor(optimizer, None if "without" in make else model)
    train(optimizer, list(model.parameters()), 1)
    [last] = monitor.measure()
    parts = {
        "hidden": [model["fc"].weight],
        "output": [model["lm_head"].weight],
        "embedding": [model["embed"].weight],
        "vectors": [model["fc"].bias, *model["norm"].parameters(), model["lm_head"].bias],
    }
    for part, params in parts.items():
        assert last[f"weight_norm/{part}"] == pytest.approx(math.hypot(*(p.norm().item() for p in params)), rel=1e-5)
        forecasts = [
            last["layers"][name]["forecast"] for name, p in model.named_parameters() if any(p is q for q in params)
        ]
        assert last[f"forecast_norm/{part}"] == pytest.approx(math.hypot(*forecasts))
    assert math.hypot(*(last[f"weight_norm/{part}"] for part in parts)) == pytest.approx(last["weight_norm"])


def test_groups_are_named_by_what_is_in_them_and_never_by_number():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    matrices, biases = [model[0].weight, model[2].weight], [model[0].bias, *model[1].parameters()]
    groups = [{"params": biases, "lr": 1e-3}, {"params": matrices}, {"params": [model[2].bias], "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    monitor = sn.Monitor(optimizer, model)
    train(optimizer, list(model.parameters()), 1)
    [last] = monitor.measure()
    assert (last["lr"], last["lr/vectors (0.bias)"], last["lr/vectors (2.bias)"]) == (1e-2, 1e-3, 1e-4)


def test_layers_are_recorded_in_the_order_of_the_model():
    """Not of the optimizer's groups, which differ between the runs that a report compares."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    for optimizer in (
        sn.ScionC(sn.param_groups(model, output="2")),
        torch.optim.AdamW([{"params": model[2].parameters()}, {"params": model[:2].parameters()}]),
    ):
        monitor = sn.Monitor(optimizer, model)
        train(optimizer, list(model.parameters()), 1)
        assert list(monitor.measure()[0]["layers"]) == [name for name, _ in model.named_parameters()]
        monitor.close()


def test_output_layer_unknown_to_the_model_is_no_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sn.Monitor(optimizer, model)
    train(optimizer, list(model.parameters()), 1)
    assert monitor.measure()[0]["layers"]["1.weight"]["spectral"] > 0


# --- alignment


def slow_alignment(optimizer, params, steps, decay_of, each=lambda t: None) -> list[list[float]]:
    """By copies of the weights in fp64: u = ((1 - eta) theta - theta_next) / gamma."""
    out = []
    for t in range(steps):
        set_noise(params, t)
        each(t)
        before = [p.detach().double().clone() for p in params]
        optimizer.step()
        row = []
        for k, (p, b) in enumerate(zip(params, before, strict=True)):
            group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
            eta = group["lr"] * decay_of(group, params[k])
            u = (1 - eta) * b - p.detach().double()
            row.append((b.flatten() @ u.flatten() / (b.norm() * u.norm())).item())
        out.append(row)
    return out


OWN = {
    "Scion": lambda p: sn.Scion(p, lr=0.05, lmo="by-shape", weight_decay=0.1),
    "Scion sign": lambda p: sn.Scion(p[:2], lr=0.05, lmo="sign", weight_decay=0.1),
    "ScionC": lambda p: sn.ScionC(p, lr=0.05, lmo="by-shape", nesterov=True),
    "LionC": lambda p: sn.LionC(p, lr=0.02),
    "SGDC": lambda p: sn.SGDC(p, lr=0.05),
    "SGDC trace": lambda p: sn.SGDC(p, lr=0.02, trace=True, nesterov=True),
}
FOREIGN = {
    "Muon": lambda p: torch.optim.Muon(p[:3], lr=0.02),
    "corrected Muon": lambda p: sn.correct(torch.optim.Muon(p[:3], lr=0.02)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5),
    "AdamC": lambda p: sn.AdamC(p, lr=0.02, weight_decay=0.5),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.0, momentum=0.9),
}
LAYERS = [(12, 12), (12, 12), (8, 20), (10,), (4, 3, 2, 2)]


@pytest.mark.parametrize("name", [*OWN, *FOREIGN])
@pytest.mark.parametrize("pieces", ["batched", "cut by rows"])
def test_alignment_equals_copies_of_the_weights(name, pieces, monkeypatch):
    if pieces == "cut by rows":
        monkeypatch.setattr(buckets, "MAX_ELEMENTS_CPU", 40)
    made = {**OWN, **FOREIGN}[name]
    params, twin = (parameters(*LAYERS, dtype=torch.float64) for _ in range(2))
    optimizer, slow = made(params), made(twin)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    monitor = sn.Monitor(optimizer, alignment=name in FOREIGN or None)

    def schedule(of):
        def each(t):
            for group in of.param_groups:
                group["lr"] = 0.02 * (1 - t / 20)

        return each

    def decay(group, p):
        return slow.weight_decay_of(p) if isinstance(slow, sn.ScionC) else group["weight_decay"]

    train(optimizer, params[:count], 8, each=schedule(optimizer))
    expected = slow_alignment(slow, twin[:count], 8, decay, schedule(slow))
    for each, row in zip(monitor.measure(), expected, strict=True):
        assert [layer["alignment"] for layer in each["layers"].values()] == pytest.approx(row, abs=1e-6)


def test_alignment_on_two_cores_equals_one():
    def run(threads):
        torch.set_num_threads(threads)
        try:
            params = parameters(*[(24, 24)] * 5, (48, 16), (7,))
            optimizer = sn.ScionC(params, lr=0.05, lmo="by-shape")
            monitor = sn.Monitor(optimizer)
            train(optimizer, params, 4)
            return monitor.measure()
        finally:
            torch.set_num_threads(1)

    assert run(2) == run(1)


def test_alignment_is_asked_for_where_it_costs_memory():
    params = parameters((6, 6))
    optimizer = torch.optim.AdamW(params)
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 2)
    assert monitor.measure()[-1]["alignment"] is None
    own = sn.ScionC(params, lmo="spectral")
    with sn.Monitor(own, alignment=False) as quiet:
        train(own, params, 2)
        assert quiet.measure()[-1]["alignment"] is None
        assert not own.observed


def test_skipped_update_and_zero_weights_have_no_alignment():
    zero, skipped = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = sn.ScionC([zero, skipped], lmo="spectral")
    monitor = sn.Monitor(optimizer)
    set_noise([zero, skipped], 0)
    optimizer.step()
    skipped.grad[1, 1] = math.nan  # there is momentum by now, so there is an update that is not made
    optimizer.step()
    first, second = monitor.measure()
    assert first["layers"]["0.0"] | {"alignment": None, "expected": 0.0} == first["layers"]["0.0"]
    assert [layer["alignment"] is None for layer in first["layers"].values()] == [True, False]
    assert [layer["alignment"] is None for layer in second["layers"].values()] == [False, True]
    assert second["grad_norm"] is None


@pytest.mark.parametrize("gradient", [math.nan, 1e30])
def test_a_step_that_adamc_skipped_has_no_alignment(gradient):
    """Weights as they were, so the decay that they did not get is no update either."""
    [p] = parameters((6, 6))
    optimizer = sn.AdamC([p])
    monitor = sn.Monitor(optimizer, alignment=True)
    p.grad = torch.full_like(p, gradient)
    optimizer.step()
    assert optimizer.skipped_steps().item() == 1
    assert monitor.measure()[0]["layers"]["0.0"]["alignment"] is None


# --- numbers whose squares do not fit fp32


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e10, 1e15, 1e20, 1e30])
def test_norms_and_spectral_norms_at_any_size(size):
    params = [nn.Parameter(size * p.detach()) for p in parameters((12, 8), (6, 6), (5,))]
    optimizer = sn.ScionC(params, lr=0.0, lmo="by-shape")
    monitor = sn.Monitor(optimizer)
    for p in params:
        p.grad = size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    optimizer.step()
    [record] = monitor.measure()
    for layer, p in zip(record["layers"].values(), params, strict=True):
        exact = p.detach().double()
        assert layer["norm"] == pytest.approx(exact.norm().item(), rel=1e-5)
        assert layer["forecast"] == pytest.approx(exact.norm().item(), rel=1e-5)
        assert layer["grad"] == pytest.approx(p.grad.double().norm().item(), rel=1e-5)
        if p.ndim == 2:
            spectral = torch.linalg.matrix_norm(exact, 2).item() * math.sqrt(p.shape[1] / p.shape[0])
            assert layer["spectral"] == pytest.approx(spectral, rel=0.05)


@pytest.mark.parametrize("make", [lambda p: sn.ScionC(p, lmo="spectral"), sn.SGDC, torch.optim.AdamW])
@pytest.mark.parametrize("size", [1e20, math.inf, math.nan])
def test_alignment_that_cannot_be_worked_out_is_none_and_not_zero(make, size):
    [p] = parameters((6, 6))
    p.data *= size
    optimizer = make([p])
    monitor = sn.Monitor(optimizer, alignment=True)
    set_noise([p], 0)
    optimizer.step()
    optimizer.step()
    [layer] = monitor.measure()[-1]["layers"].values()
    assert layer["alignment"] is None and layer["excess"] is None
    if math.isfinite(size):
        assert layer["norm"] == pytest.approx(p.detach().double().norm().item(), rel=1e-5)
    else:
        assert layer["norm"] is None and layer["forecast"] is None and layer["expected"] is None


# --- no waiting, one transfer


@pytest.mark.parametrize("which", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 9))])
def test_monitored_step_on_fake_cuda_tensors_copies_nothing_between_devices(which, monkeypatch):
    monkeypatch.setattr(buckets, "MAX_ELEMENTS", 200)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in SHAPES]
        optimizer = list(optimizers(params))[which]
        monitor = sn.Monitor(optimizer, alignment=True)
        with NoCrossing():
            for _ in range(3):
                for p in params:
                    p.grad = torch.empty(p.shape, device="cuda")
                monitor.log(loss=torch.empty((), device="cuda"), seconds=1.0)
                optimizer.step()
        assert len(monitor._taken) == 3
        assert {str(device) for each in monitor._taken for device in each.row.parts} == {"cuda:0"}


class Reads(TorchDispatchMode):
    """Counts what brings values to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def test_one_transfer_a_measure_and_none_in_a_step(monkeypatch):
    params = parameters(*LAYERS)
    optimizer = sn.ScionC(params, lr=0.05, lmo="by-shape")
    monitor = sn.Monitor(optimizer)
    transfers = []
    original = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: transfers.append(self.numel()) or original(self))
    with Reads() as reads:
        train(optimizer, params, 10, each=lambda t: monitor.log(loss=torch.tensor(1.0)))
        assert transfers == []
        assert len(monitor.measure()) == 10
    assert reads.count == 0
    assert len(transfers) == 1


def test_more_records_than_flush_move_to_the_host_and_none_is_lost(monkeypatch):
    params = parameters((6, 6))
    optimizer = sn.ScionC(params, lmo="spectral")
    monitor, whole = sn.Monitor(optimizer, flush=4), sn.Monitor(optimizer, flush=100)
    fetches = []
    original = record.fetch
    monkeypatch.setattr("steadynorm.monitor.monitor.fetch", lambda rows: fetches.append(len(rows)) or original(rows))
    train(optimizer, params, 11)
    assert fetches == [1 + 4 + 1, 4 + 1]  # with the starts and the skips so far; the last three are on the device still
    records = monitor.measure()
    assert [each["step"] for each in records] == list(range(1, 12))
    assert_alike(records, whole.measure())
    assert monitor.measure() == []


# --- reading only


@pytest.mark.parametrize("name", [*OWN, *FOREIGN])
def test_training_is_bit_identical_with_and_without_a_monitor(name):
    made = {**OWN, **FOREIGN}[name]
    watched, alone = parameters(*LAYERS), parameters(*LAYERS)
    one, two = made(watched), made(alone)
    torch.manual_seed(3)
    monitor = sn.Monitor(one, alignment=True)
    for optimizer, params in ((one, watched), (two, alone)):
        train(optimizer, params[: sum(len(group["params"]) for group in optimizer.param_groups)], 5)
    assert len(monitor.measure()) == 5
    assert all(torch.equal(p, q) for p, q in zip(watched, alone, strict=True))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))  # nor did it draw a random number


def test_compiled_step_is_measured_and_compiles_no_more_often():
    params = parameters((8, 8), (8,))
    optimizer = sn.ScionC(params, lmo="by-shape")
    monitor = sn.Monitor(optimizer)
    torch._dynamo.reset()
    compilations = []
    step = torch.compile(optimizer.step, backend=lambda graph, _: compilations.append(1) or graph)
    for t in range(6):
        set_noise(params, t)
        step()
        if t == 2:
            settled = len(compilations)
    torch._dynamo.reset()
    assert len(compilations) == settled
    records = monitor.measure()
    assert [each["step"] for each in records] == [1, 2, 3, 4, 5, 6]
    assert all(each["alignment"] is not None for each in records)


def test_closed_monitor_sees_no_more_and_a_second_one_sees_the_same():
    params = parameters((6, 6), (6,))
    optimizer = sn.ScionC(params, lmo="by-shape")
    with sn.Monitor(optimizer) as first:
        second = sn.Monitor(optimizer)
        train(optimizer, params, 3)
    train(optimizer, params, 2, start=3)
    records = first.measure()
    assert len(records) == 3
    assert second.measure()[:3] == records
    second.close()
    train(optimizer, params, 1)
    assert not optimizer.observed
    assert copy.deepcopy(optimizer).observed == ()


# --- records


def test_records_are_plain_json_and_logged_values_come_with_them():
    params = parameters((6, 6), (4,))
    optimizer = sn.correct(torch.optim.AdamW([{"params": params[:1], "name": "a"}, {"params": params[1:], "lr": 0.1}]))
    monitor = sn.Monitor(optimizer)
    set_noise(params, 0)
    clipped_from = torch.nn.utils.clip_grad_norm_(params, 0.1)
    monitor.log(loss=torch.tensor(2.5), grad_norm=clipped_from, tokens=7)
    optimizer.step()
    monitor.log(gone=1.0)
    monitor.log(loss=torch.tensor(math.inf))
    optimizer.step()
    first, second = json.loads(json.dumps(monitor.measure(), allow_nan=False))
    assert (first["loss"], first["tokens"], second["loss"], second["gone"]) == (2.5, 7, None, 1)
    assert "gone" not in first
    assert first["grad_norm"] == pytest.approx(clipped_from.item())
    assert math.hypot(*(layer["grad"] for layer in first["layers"].values())) == pytest.approx(0.1, rel=1e-5)
    assert second["grad_norm"] == pytest.approx(0.1, rel=1e-5)
    assert (first["lr"], first["lr/vectors"]) == (0.001, 0.1)
    assert "alpha/vectors" not in first  # the same in both
    for bad in ({"step": 1.0}, {"loss": torch.ones(2)}):
        with pytest.raises(ValueError, match=r"another name|one number"):
            monitor.log(**bad)


def test_numbers_are_those_the_step_used():
    """Read after the step and before the scheduler; lambda_t of ScionC is not in its group at all."""
    params = parameters((6, 6), (9, 3))
    groups = [
        {"params": params[1:], "lmo": "sign", "lr": 0.2, "weight_decay": 0.004, "name": "output"},
        {"params": params[:1], "lmo": "spectral", "name": "hidden"},
    ]
    optimizer = sn.ScionC(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.0 if t == 2 else 1 / (1 + t))
    monitor = sn.Monitor(optimizer)
    for t in range(3):
        set_noise(params, t)
        optimizer.step()
        scheduler.step()
    records = monitor.measure()
    assert [each["lr"] for each in records] == [0.01, 0.005, 0.0]
    assert [each["weight_decay"] for each in records] == pytest.approx([0.08, 0.04, 0.0])
    assert [each["weight_decay/output"] for each in records] == [0.004] * 3
    assert [each["lr/output"] for each in records] == [0.2, 0.1, 0.0]  # shown still where it does not differ
    assert records[0]["effective_lr"] == pytest.approx(sn.theory.effective_lr(0.01, 0.1))
    assert records[0]["alpha"] == 0.1


def test_every_third_step():
    params, all_params = parameters((8, 8)), parameters((8, 8))
    sparse_opt, full_opt = (sn.ScionC(p, lr=0.05, lmo="spectral") for p in (params, all_params))
    sparse, full = sn.Monitor(sparse_opt, every=3), sn.Monitor(full_opt)
    for optimizer, p in ((sparse_opt, params), (full_opt, all_params)):
        train(optimizer, p, 10, each=lambda t, of=optimizer: of.param_groups[0].update(lr=0.05 / (1 + t)))
    records, by_step = sparse.measure(), {each["step"]: each for each in full.measure()}
    assert [each["step"] for each in records] == [3, 6, 9]
    for each in records:
        same = by_step[each["step"]]
        for key in ("weight_norm", "alignment", "lr"):
            assert each[key] == same[key]
        for key in ("forecast_norm", "expected_alignment"):  # every step counts, measured or not
            assert each[key] == pytest.approx(same[key], rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weights_become_null_and_recover(bad):
    params = parameters((6, 6), (6,))
    optimizer = torch.optim.AdamW(params, lr=0.0)
    monitor = sn.Monitor(optimizer, alignment=True)
    train(optimizer, params, 1)
    good = params[0].detach().clone()
    params[0].data[1, 2] = bad
    train(optimizer, params, 1)
    params[0].data.copy_(good)
    train(optimizer, params, 60)
    _, ill, *_, well = json.loads(json.dumps(monitor.measure(), allow_nan=False))
    assert (ill["weight_norm"], ill["spectral_norm"], ill["layers"]["0.0"]["norm"]) == (None, None, None)
    assert ill["layers"]["0.1"]["norm"] is not None
    assert well["spectral_norm"] == pytest.approx(torch.linalg.matrix_norm(good, 2).item(), rel=0.01)


def test_missing_gradients_count_as_none_and_the_rest_is_measured():
    params = parameters((6, 6), (6, 6), (3,))
    optimizer = sn.ScionC(params, lr=0.05, lmo="by-shape")
    monitor = sn.Monitor(optimizer)
    set_noise(params, 0)
    params[1].grad = None
    optimizer.step()
    for p in params:
        p.grad = None
    optimizer.step()
    first, second = monitor.measure()
    here = [params[0], params[2]]
    assert first["layers"]["0.1"] | {"grad": None, "alignment": None, "expected": None} == first["layers"]["0.1"]
    assert first["layers"]["0.1"]["forecast"] == pytest.approx(params[1].norm().item(), rel=1e-6)  # it has not moved
    assert first["grad_norm"] == pytest.approx(math.hypot(*(noise(p.shape, 0, k, 7).norm() for k, p in zip((0, 2), here, strict=True))), rel=1e-5)  # fmt: skip
    assert second["grad_norm"] is None
    assert second["weight_norm"] == pytest.approx(first["weight_norm"], rel=1e-6)
    assert second["forecast_norm"] == first["forecast_norm"]


def test_gradients_made_by_a_closure_are_those_measured():
    p = nn.Parameter(noise((5, 5), 1))
    optimizer = torch.optim.SGD([p], lr=0.1)
    monitor = sn.Monitor(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum() / 2  # the gradient is p itself
        loss.backward()
        return loss

    before = p.norm().item()
    optimizer.step(closure)
    assert monitor.measure()[0]["grad_norm"] == pytest.approx(before, rel=1e-5)


def test_added_group_is_picked_up():
    params = parameters((6, 6), (4, 6))
    optimizer = sn.ScionC(params[:1], lr=0.05, lmo="spectral")
    monitor = sn.Monitor(optimizer)
    train(optimizer, params[:1], 3)
    kept = monitor.state_dict()["power"]["0.0"]
    optimizer.add_param_group({"params": params[1:], "name": "late"})
    start = params[1].norm().item()
    train(optimizer, params, 1, start=3)
    *_, last = monitor.measure()
    assert list(last["layers"]) == ["0.0", "1.0"]
    forecast = sn.theory.forecast([0.05], optimizer.weight_decay_of(params[1]), 0.1, start=start**2 / 4 / (4 / 6))
    assert last["layers"]["1.0"]["forecast"] == pytest.approx(math.sqrt(forecast[0] * 4 * 4 / 6), rel=1e-5)
    assert not torch.equal(monitor.state_dict()["power"]["0.0"], kept)  # one iteration further, not begun again
    assert monitor.state_dict()["power"]["0.0"].flatten() @ kept.flatten() > 0.9


@pytest.mark.parametrize("make", [torch.optim.AdamW, sn.LionC, lambda p, lr: sn.ScionC(p, lr, lmo="by-shape")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_odd_parameters(dtype, make):
    """Empty, 0-d, half precision: all in the record, none in the way."""
    params = parameters((0, 3), (), (5, 4), (3, 2, 2), dtype=dtype)
    optimizer = make(params, lr=1e-2)
    monitor = sn.Monitor(optimizer, alignment=True)
    train(optimizer, params, 40)
    last = monitor.measure()[-1]
    total = math.sqrt(sum(p.detach().double().square().sum().item() for p in params))
    assert last["weight_norm"] == pytest.approx(total, rel=1e-5)
    assert last["layers"]["0.0"]["norm"] == 0
    assert last["layers"]["0.2"]["spectral"] == pytest.approx(
        torch.linalg.matrix_norm(params[2].detach().double(), 2).item() * math.sqrt(4 / 5), rel=0.02
    )
    assert last["bias_norm"] == pytest.approx(params[1].abs().item(), rel=1e-5)
    assert last["forecast_norm"] is not None
    rounded = make is torch.optim.AdamW and dtype == torch.bfloat16  # its last step did not move the 0-d weight
    assert [layer["alignment"] is None for layer in last["layers"].values()] == [True, rounded, False, False]


def test_sparse_gradients_are_measured():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    monitor = sn.Monitor(optimizer, embedding)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert monitor.measure()[0]["grad_norm"] == pytest.approx(math.sqrt(4 * 2**2 + 4))


def test_scaled_gradients_are_unscaled_where_the_optimizer_does_it():
    """torch.amp.GradScaler hands fused optimizers the scale instead of dividing by it."""
    params = parameters((4, 4))
    optimizer = torch.optim.AdamW(params, fused=True)
    monitor = sn.Monitor(optimizer)
    set_noise(params, 0)
    exact = params[0].grad.norm().item()
    params[0].grad *= 1024
    optimizer.grad_scale = torch.tensor(1024.0)
    optimizer.step()
    assert monitor.measure()[0]["grad_norm"] == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("named", [False, True])
def test_another_model_or_a_replaced_layer_is_refused_by_identity(named):
    """Names alone let another model pass, or were not there to compare."""

    def make(width=8):
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))

    model = make()
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters())
    sn.Monitor(optimizer, model).close()
    with pytest.raises(ValueError, match=r"another model|not the model's"):
        sn.Monitor(optimizer, make())
    with pytest.raises(ValueError, match="another model"):
        sn.Monitor(optimizer, nn.ModuleDict({"other": make(6)}))
    model[0] = nn.Linear(4, 8)
    with pytest.raises(ValueError, match=r"replaced after the optimizer was made.*make the optimizer last"):
        sn.Monitor(optimizer, model)


def test_parameters_beside_the_model_and_frozen_ones_are_no_mistake():
    model, temperature = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Parameter(torch.ones(1))
    sn.Monitor(torch.optim.AdamW([*model.parameters(), temperature]), model)
    sn.Monitor(torch.optim.AdamW(model[1].parameters()), model)
    model[0].requires_grad_(False)
    sn.Monitor(torch.optim.AdamW([*model[1].parameters(), temperature]), model)


def test_what_cannot_be_measured_is_refused_with_a_reason():
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"0\.0 is complex; hold real"):
        sn.Monitor(torch.optim.AdamW([p]))
    optimizer = torch.optim.AdamW(parameters((2, 2)))
    for bad in ({"every": 0}, {"flush": 1.5}, {"every": True}):
        with pytest.raises(ValueError, match="whole number"):
            sn.Monitor(optimizer, **bad)
    assert not optimizer._optimizer_step_pre_hooks


def test_log_records_writes_scalars():
    class Writer(dict):
        def add_scalar(self, tag, scalar_value, global_step=None):
            self[tag, global_step] = scalar_value

    params = parameters((4, 4))
    optimizer = sn.ScionC(params, lmo="spectral")
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 2)
    records = monitor.measure()
    writer = Writer()
    log_records(writer, records)
    assert writer["weight_norm", 2] == records[1]["weight_norm"]
    assert writer["alignment/0.0", 1] == records[0]["layers"]["0.0"]["alignment"]
    assert ("sign_norm", 1) not in writer


def test_looking_at_an_optimizer_leaves_its_state_as_it_was():
    """torch's state is a defaultdict: asking for a parameter would make an entry, and DCP takes it for a made state."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, 3))])
    with sn.Monitor(optimizer):
        assert not optimizer.state


def test_a_target_that_moves_is_in_the_records_and_a_constant_decay_has_none():
    params = parameters((6, 6), (9, 3))
    groups = [
        {"params": params[:1], "lmo": "spectral", "name": "hidden"},
        {"params": params[1:], "lmo": "sign", "weight_decay": 0.004, "name": "output"},
    ]
    optimizer = sn.ScionC(groups, lr=0.01)
    monitor = sn.Monitor(optimizer)
    for t in range(2):
        optimizer.param_groups[0]["steady_norm_sq"] = 2.0 - t
        set_noise(params, t)
        optimizer.step()
    records = monitor.measure()
    assert [each["steady_norm_sq"] for each in records] == [2.0, 1.0]
    assert "steady_norm_sq/output" not in records[0]
    plain = torch.optim.AdamW(params)
    monitor = sn.Monitor(plain)
    plain.step()
    assert "steady_norm_sq" not in monitor.measure()[0]


def test_groups_that_are_not_steered_have_no_target():
    params = parameters((3,), (4,), (5,))
    groups = [{"params": [p]} for p in params]
    groups[1]["weight_decay"] = 0.0
    optimizer = sn.correct(torch.optim.AdamW(groups, weight_decay=0.1), steady_norm_sq=4e-4, skip=[0])
    assert [target_of(optimizer, group) for group in optimizer.param_groups] == [None, None, 4e-4]


def test_effective_lr_is_not_known_where_a_muon_does_not_say_nesterov():
    optimizer = torch.optim.Muon(parameters((4, 4)), momentum=0.95)
    del optimizer.param_groups[0]["nesterov"]
    numbers = record._numbers_of(optimizer, optimizer.param_groups[0], motion_of(optimizer))
    assert numbers["alpha"] == pytest.approx(0.05) and numbers["effective_lr"] is None


def test_nan_in_rows_of_this_process_is_no_spectral_norm():
    """As in the whole matrix. It was 0, which the mean over layers leaves out."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        params = [nn.Parameter(distribute_tensor(noise((6, 4), k), mesh, [Shard(0)])) for k in range(2)]
        optimizer = sn.ScionC(params, lmo="spectral")
        monitor = sn.Monitor(optimizer)
        with torch.no_grad():
            params[1].to_local()[2, 1] = math.nan
        for p in params:
            p.grad = distribute_tensor(noise((6, 4), 7), mesh, [Shard(0)])
        optimizer.step()
        found = monitor.measure()[-1]
        assert found["spectral_norm"] is None
        monitor.close()
    finally:
        dist.destroy_process_group()
