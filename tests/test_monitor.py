"""The monitor waits for nothing, changes nothing and loses nothing."""

import copy
import json
import math

import pytest
import torch
from monitor_cases import FOREIGN, LAYERS, OWN, assert_alike, noise, parameters, set_noise, train
from test_no_sync import CHUNK_MIB, OPTIMIZERS, PARAMS, NoCrossing
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import steadynorm as sn
from steadynorm.decay.recognition import forecast_family
from steadynorm.monitor import group_values, log_records, transfer
from steadynorm.optim import arithmetic

# --- no waiting, one transfer


@pytest.mark.parametrize(
    "name", ["ScionC", *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "ScionC")]
)
def test_a_monitored_step_on_fake_cuda_tensors_copies_nothing_between_devices(name, monkeypatch):
    monkeypatch.setattr(arithmetic, "CHUNK_MIB", CHUNK_MIB)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda")) for shape, dtype in PARAMS]
        optimizer = OPTIMIZERS[name](params)
        monitor = sn.Monitor(optimizer, alignment=True)
        with NoCrossing():
            for _ in range(3):
                for p in params:
                    p.grad = torch.empty_like(p)
                monitor.log(loss=torch.empty((), device="cuda"), seconds=1.0)
                optimizer.step()
        assert len(monitor._snapshots) == 3
        assert {str(device) for each in monitor._snapshots for device in each.row.parts} == {"cuda:0"}


class Reads(TorchDispatchMode):
    """Count the operations that bring values to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")
        return func(*args, **(kwargs or {}))


def test_one_transfer_per_measure_and_none_per_step(monkeypatch):
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


def test_records_beyond_flush_move_to_the_host_and_none_is_lost(monkeypatch):
    params = parameters((6, 6))
    optimizer = sn.ScionC(params, lmo="spectral")
    monitor, whole = sn.Monitor(optimizer, flush=4), sn.Monitor(optimizer, flush=100)
    fetches = []
    original = transfer.fetch
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


def test_a_compiled_step_is_measured_and_compiles_no_more_often():
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


def test_a_closed_monitor_sees_no_more_and_a_second_one_sees_the_same():
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


def test_what_cannot_be_logged_is_refused_by_its_name():
    monitor = sn.Monitor(sn.Scion(parameters((4, 4)), lmo="spectral"))
    refused = {
        r"'step' is a key of every record; log it under another name": {"step": 1.0},
        r"loss has shape \(2,\); log one number, such as its mean": {"loss": torch.ones(2)},
        r"loss='x' is not a number; log a number or a one-element tensor": {"loss": "x"},
        r"loss=None is not a number": {"loss": None},
        r"loss=\[1\.0, 2\.0\] is not a number": {"loss": [1.0, 2.0]},
    }
    for message, bad in refused.items():
        with pytest.raises(ValueError, match=f"Monitor: {message}"):
            monitor.log(tokens=7, **bad)
    assert monitor._logged == {}


@pytest.mark.parametrize("make", [sn.LionC, sn.AdamC, lambda params, **hold: sn.ScionC(params, lmo="spectral", **hold)])
def test_no_decay_is_recorded_where_a_fixed_norm_replaces_it(make):
    params = parameters((6, 6), (6, 6))
    optimizer = make([{"params": params[:1], "hold": "fixed", "name": "held"}, {"params": params[1:], "name": "free"}])
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 2)
    for record in monitor.measure():
        assert record["weight_decay"] == 0
        assert record["weight_decay/free"] > 0


def test_the_numbers_are_those_the_step_used():
    """They are read after the step and before the scheduler; lambda_t of ScionC is not in its group at all."""
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


def test_every_third_step_can_be_measured():
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


def test_an_added_group_is_picked_up():
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
def test_odd_parameters_are_measured(dtype, make):
    """Empty, 0-d and half-precision parameters are all in the record."""
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


class RelativeStep(torch.optim.Optimizer):
    """An optimizer that finds its lr by itself, as Hugging Face's Adafactor does."""

    def __init__(self, params):
        super().__init__(params, {"lr": None, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)


def test_an_optimizer_without_an_lr_is_measured():
    params = parameters((4, 4))
    optimizer = RelativeStep(params)
    monitor = sn.Monitor(optimizer, alignment=True)
    train(optimizer, params, 1)
    [record] = monitor.measure()
    assert record["weight_norm"] == pytest.approx(params[0].norm().item())
    assert record["lr"] is record["alignment"] is record["angle"] is None


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
    """Names did not tell another model apart, or were not there to compare."""

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


def test_parameters_outside_the_model_and_frozen_ones_are_allowed():
    model, temperature = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Parameter(torch.ones(1))
    sn.Monitor(torch.optim.AdamW([*model.parameters(), temperature]), model)
    sn.Monitor(torch.optim.AdamW(model[1].parameters()), model)
    model[0].requires_grad_(False)
    sn.Monitor(torch.optim.AdamW([*model[1].parameters(), temperature]), model)


def test_unmeasurable_input_is_refused_with_a_reason():
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"0\.0 is complex; make its real"):
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


def test_the_monitor_leaves_the_optimizer_state_unchanged():
    """torch's state is a defaultdict: asking for a parameter would make an entry, and DCP takes it for a made state."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3, 3))])
    with sn.Monitor(optimizer):
        assert not optimizer.state


def test_a_moving_target_is_recorded_and_constant_decay_has_none():
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


def test_uncorrected_groups_have_no_target():
    params = parameters((3,), (4,), (5,))
    groups = [{"params": [p]} for p in params]
    groups[1]["weight_decay"] = 0.0
    optimizer = sn.correct(torch.optim.AdamW(groups, weight_decay=0.1), steady_norm_sq=4e-4, skip=[0])
    columns = [group_values._values_of(optimizer, group, None) for group in optimizer.param_groups]
    assert [column["steady_norm_sq"] for column in columns] == [None, None, 4e-4]


def test_the_effective_lr_is_unknown_without_muons_nesterov_flag():
    optimizer = torch.optim.Muon(parameters((4, 4)), momentum=0.95)
    del optimizer.param_groups[0]["nesterov"]
    numbers = group_values._values_of(optimizer, optimizer.param_groups[0], forecast_family(optimizer))
    assert numbers["alpha"] == pytest.approx(0.05) and numbers["effective_lr"] is None


def test_nan_in_rows_of_this_process_gives_no_spectral_norm():
    """The whole matrix behaves the same. It was once 0, which the mean over layers leaves out."""
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
