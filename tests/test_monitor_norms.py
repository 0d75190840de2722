"""The monitor's norms equal those of slow twins."""

import math
import statistics

import pytest
import torch
from monitor_cases import noise, parameters, set_noise, train
from torch import nn

import steadynorm as sn
from steadynorm.lmo import LMOS

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
def test_the_spectral_norm_of_a_slowly_changing_matrix_is_within_a_percent_of_its_svd(lmo, shape, blocks):
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


@pytest.mark.parametrize(
    ("lmo", "blocks", "dim", "sizes"),
    [
        ("spectral", (24, 12, 12), -2, [24, 12, 12]),
        ("spectral", ("inputs", 3), -1, [12, 12, 12]),
        ("spectral", ("inputs", (20, 8, 8)), -1, [20, 8, 8]),
        ("spectral-transposed", (20, 8, 8), -1, [20, 8, 8]),
        ("spectral-transposed", ("inputs", (24, 12, 12)), -2, [24, 12, 12]),
    ],
)
@pytest.mark.parametrize("stacked", [False, True], ids=["matrix", "stack"])
def test_the_spectral_norm_of_every_block_is_measured(lmo, blocks, dim, sizes, stacked):
    p = parameters((2, 48, 36) if stacked else (48, 36))[0]
    optimizer = sn.Scion([p], lr=0.02, lmo=lmo, blocks=blocks, weight_decay=0.05)
    monitor = sn.Monitor(optimizer)
    train(optimizer, [p], 30)
    last = monitor.measure()[-1]
    values = []
    for matrix in p.detach().view(-1, 48, 36):
        for part in matrix.split(sizes, dim):
            d_out, d_in = part.shape if lmo == "spectral" else part.mT.shape
            share = d_in / matrix.shape[dim] if blocks[0] == "inputs" else 1.0
            values.append(torch.linalg.matrix_norm(part, 2).item() * math.sqrt(d_in / d_out) / share)
    assert last["layers"]["0.0"]["spectral"] == pytest.approx(statistics.geometric_mean(values), rel=0.01)
    again = sn.Monitor(optimizer)
    again.load_state_dict(monitor.state_dict())
    train(optimizer, [p], 1)
    assert again.measure()[-1]["spectral_norm"] == pytest.approx(last["spectral_norm"], rel=0.05)


@pytest.mark.parametrize("every", [1, 10, 50, 100])
def test_the_spectral_norm_while_training_is_within_a_percent_of_the_svd(every):
    """At lr 0.05 half of the weights is new after 35 steps. One power iteration per record was up to 33 % low."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 160), nn.Tanh(), nn.Linear(160, 96), nn.Tanh(), nn.Linear(96, 10))
    optimizer = sn.ScionC(sn.param_groups(model, lr=0.05, output="4"))
    monitor = sn.Monitor(optimizer, model, every=every)
    teacher, exact = noise((64, 10), 3), {}
    for t in range(100):
        optimizer.zero_grad()
        x = noise((32, 64), t)
        nn.functional.cross_entropy(model(x), (x @ teacher).argmax(-1)).backward()
        optimizer.step()
        if (t + 1) % max(every, 10) == 0:
            exact[t + 1] = [LMOS["spectral"].norm(model[k].weight.detach()).item() for k in (0, 2)]
    records = monitor.measure()
    assert len(records) == 100 // every
    for row in records:
        if row["step"] in exact:
            measured = [row["layers"][f"{k}.weight"]["spectral"] for k in (0, 2)]
            assert measured == pytest.approx(exact[row["step"]], rel=0.01)


def test_the_spectral_norm_follows_a_turning_matrix_from_record_to_record():
    """The vector is kept from step to step: a fresh one each time would stay some 20 % low."""
    p = nn.Parameter(noise((64, 64), 1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    monitor = sn.Monitor(optimizer)
    for t in range(60):
        p.data += 0.02 * noise((64, 64), 5, t)
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert abs(monitor.measure()[-1]["spectral_norm"] / torch.linalg.matrix_norm(p.detach(), 2).item() - 1) < 0.01


def test_the_first_record_is_not_far_too_low():
    """A random vector sees half of the largest singular value, so new layers get several iterations at once."""
    params = parameters((64, 64), (128, 32))
    optimizer = torch.optim.SGD(params, lr=0.0)
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 1)
    exact = [LMOS["spectral"].norm(p.detach()).item() for p in params]
    assert monitor.measure()[0]["spectral_norm"] == pytest.approx(statistics.geometric_mean(exact), rel=0.05)


def test_a_zero_matrix_is_left_out_of_the_mean_and_keeps_its_vector():
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
    """They are geometric over matrices, arithmetic over vectors; sign has d_in max|A|, l2 covers everything."""
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
    """The optimizer's groups have another order, which differs between the runs that a report compares."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    for optimizer in (
        sn.ScionC(sn.param_groups(model, output="2")),
        torch.optim.AdamW([{"params": model[2].parameters()}, {"params": model[:2].parameters()}]),
    ):
        monitor = sn.Monitor(optimizer, model)
        train(optimizer, list(model.parameters()), 1)
        assert list(monitor.measure()[0]["layers"]) == [name for name, _ in model.named_parameters()]
        monitor.close()


def test_an_output_layer_unknown_to_the_model_is_no_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = sn.Monitor(optimizer, model)
    train(optimizer, list(model.parameters()), 1)
    assert monitor.measure()[0]["layers"]["1.weight"]["spectral"] > 0


# --- numbers whose squares do not fit fp32


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e10, 1e15, 1e20, 1e30])
def test_norms_and_spectral_norms_are_right_at_any_size(size):
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
