"""What accelerators do otherwise, run on a CPU that is treated as one: whole buckets, packed state, weights in place."""

import copy

import pytest
import torch
from torch import Tensor, nn

import steadynorm as sn
from steadynorm import machine
from steadynorm.lab.bench import spectra
from steadynorm.optim import batch, buckets, companions, idle
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.scion_rule import SCION_ARITHMETIC
from steadynorm.polar import Polar, iteration

SHAPES = [(16, 16), (16, 16), (48, 16), (16, 64), (16, 64), (40, 8), (8,), (8,), (4, 3, 3, 3), (2, 6, 5), ()]
OPTIMIZERS = {
    "ScionC": lambda params: sn.ScionC(params, lmo="by-shape"),
    "ScionC exact, Nesterov": lambda params: sn.ScionC(params, lmo="by-shape", nesterov=True, overlap="exact"),
    "ScionC bf16 momentum": lambda params: sn.ScionC(params, lmo="by-shape", momentum_dtype="bfloat16"),
    "ScionC balance": lambda params: sn.ScionC(params, lmo="by-shape", hold="balance"),
    "ScionC fixed": lambda params: sn.ScionC(params, lmo="by-shape", hold="fixed"),
    "ScionC cautious": lambda params: sn.ScionC(params, lmo="by-shape", cautious=True),
    "ScionC maximize": lambda params: sn.ScionC(params, lmo="by-shape", maximize=True),
    "Scion embedding": lambda params: sn.Scion([p for p in params if p.ndim == 2], lmo="embedding", weight_decay=0.1),
    "Scion blocks": lambda params: sn.Scion([params[2]], lmo="spectral", blocks=3, weight_decay=0.1),
    "Scion blocks beside whole matrices": lambda params: sn.Scion(
        [
            {"params": [params[2]], "lmo": "spectral", "blocks": 3},
            {"params": [params[3], params[4]], "lmo": "spectral", "blocks": ("inputs", 4)},
            {"params": [params[5]], "lmo": "spectral", "blocks": (16, 8, 16)},
            {"params": params[:2], "lmo": "spectral"},
            {"params": [params[8]], "lmo": "conv-tap"},
        ],
        weight_decay=0.1,
    ),
    "MuonC": lambda params: sn.MuonC([{"params": [p], "use_muon": p.ndim == 2} for p in params], peak_lr=0.02),
    "MuonC balance": lambda params: sn.MuonC(
        [p for p in params if p.ndim == 2], use_muon=True, hold="balance", peak_lr=0.02
    ),
    "Scion newton-schulz": lambda params: sn.Scion(params[:5], lmo="spectral", polar="newton-schulz"),
    "LionC": lambda params: sn.LionC(params, peak_lr=0.02),
    "SGDC": lambda params: sn.SGDC(params, nesterov=True, peak_lr=0.1),
    "RenormalizedAdamW": lambda params: sn.RenormalizedAdamW(params),
}


@pytest.fixture
def accelerator(monkeypatch):
    """Treat the CPU as an accelerator."""
    monkeypatch.setattr(machine, "is_accelerator", lambda device: True)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(0.1 * torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    """Take steps with gradients that are at times missing, zero in some rows, or not finite."""
    for t in steps:
        g = torch.Generator().manual_seed(t)
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 - t / 20)
        for k, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
            if t == 3 and k in (1, 4):
                p.grad.view(-1)[0] = torch.nan
            if t in (4, 5) and k in (3, 5, 9):
                p.grad[:1] = 0
            if t == 6 and k == 1:
                p.grad = None
        optimizer.step()


def trained(name: str, dtype: torch.dtype) -> tuple[list[Tensor], torch.optim.Optimizer]:
    params = parameters(dtype)
    optimizer = OPTIMIZERS[name](params)
    train(optimizer, params, range(8))
    return [p.detach() for p in params], optimizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_accelerator_path_gives_the_weights_and_state_of_the_cpu_path(name, dtype, monkeypatch):
    """Large parameters take a kernel each, small ones are copied to a stack. Polar factors of fp32 are exact on both paths."""
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "0")
    expected, reference = trained(name, dtype)
    monkeypatch.setattr(machine, "is_accelerator", lambda device: True)
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2}[dtype]
    for large in (1, batch.LARGE_ELEMENTS):
        monkeypatch.setattr(batch, "LARGE_ELEMENTS", large)
        weights, optimizer = trained(name, dtype)
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(optimizer.state.values(), reference.state.values(), strict=True):
            for state in (ours, theirs):
                state.pop("weight_residual", None)  # all of its bits are below those that the weights show
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_state_of_like_parameters_lies_in_one_memory_also_after_loading_and_copying(accelerator):
    params = parameters()
    optimizer = sn.ScionC(params, lmo="by-shape")
    train(optimizer, params, range(2))
    other = sn.ScionC(parameters(), lmo="by-shape")
    other.load_state_dict(optimizer.state_dict())
    for each in (optimizer, other, copy.deepcopy(optimizer)):
        state = list(each.state.values())
        for key in ("momentum_buffer", "momentum_left", "skipped"):
            assert batch.lie_side_by_side([state[0][key], state[1][key]])
            assert batch.lie_side_by_side([state[3][key], state[4][key]])


def test_a_resumed_run_on_the_accelerator_path_is_bit_exact(accelerator):
    params, again = parameters(torch.float32), parameters(torch.float32)
    optimizer, resumed = (sn.ScionC(p, lmo="by-shape") for p in (params, again))
    train(optimizer, params, range(5))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(again, params, strict=True):
        p.data.copy_(q.data)
    train(optimizer, params, range(5, 10))
    train(resumed, again, range(5, 10))
    assert all(torch.equal(p, q) for p, q in zip(again, params, strict=True))


def test_tensors_side_by_side_are_stacked_without_a_copy():
    memory = torch.arange(24.0).view(4, 2, 3)
    side_by_side, apart = list(memory[1:].unbind(0)), [memory[0], memory[2]]
    view = batch.stack(side_by_side)
    assert torch.equal(view, memory[1:])
    assert view.data_ptr() == memory[1].data_ptr()
    assert batch.stack(apart).data_ptr() != memory.data_ptr()
    assert batch.stack([memory[0].T, memory[1].T]).shape == (2, 3, 2)  # not contiguous: a copy
    batch.write_back(apart, torch.zeros(2, 2, 3))
    assert memory[0].count_nonzero() == memory[2].count_nonzero() == 0


def test_a_step_leaves_gradients_as_they_are(accelerator):
    """Also those that lie side by side, as in the buckets of DistributedDataParallel."""
    params = parameters(torch.float32)
    optimizer = sn.ScionC(params, lmo="by-shape", nesterov=True, maximize=True)
    side_by_side = torch.full((2, 16, 16), 0.5)
    for p, grad in zip(params, [*side_by_side, *(torch.full_like(p, 0.5) for p in params[2:])], strict=True):
        p.grad = grad
    optimizer.step()
    assert all(p.grad is not None and torch.equal(p.grad, torch.full_like(p, 0.5)) for p in params)


@pytest.mark.parametrize("large", [1, batch.LARGE_ELEMENTS], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stacked_gradients_are_finite_and_tell_which_were_not(dtype, large, monkeypatch):
    monkeypatch.setattr(batch, "LARGE_ELEMENTS", large)
    grads = [torch.ones(2, 3, dtype=dtype) for _ in range(5)]
    for grad, value in zip(grads, (torch.nan, torch.inf, -torch.inf, 0.0), strict=False):
        grad[0, 0] = value
    stacked = batch.stack_finite(grads, torch.float32)
    assert stacked.isfinite().all()
    assert idle.is_finite(idle.magnitudes(stacked, idle.WHOLE)).tolist() == [False, False, False, True, True]
    assert torch.equal(stacked[3:], torch.stack(grads[3:]).float())


# --- matrices of several buckets in one iteration


def iterations(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], monkeypatch) -> list[tuple[int, ...]]:
    """Return the shapes that went through polar iterations in one step."""
    shapes: list[tuple[int, ...]] = []
    original = iteration.find_factors

    def spy(*args, **settings):
        factors = original(*args, **settings)
        shapes.append(tuple(factors.shape))
        return factors

    monkeypatch.setattr(iteration, "find_factors", spy)
    train(optimizer, params, range(1))
    return sorted(shapes)


def fused_and_whole(**whole) -> tuple[list[nn.Parameter], sn.ScionC]:
    params = [nn.Parameter(torch.randn(shape)) for shape in [(48, 16), (48, 16), (16, 16), (16, 64)]]
    fused = {"params": params[:2], "lmo": "spectral", "blocks": 3}
    return params, sn.ScionC([fused, {"params": params[2:], "lmo": "spectral", **whole}])


def test_blocks_and_whole_matrices_of_one_size_share_an_iteration(accelerator, monkeypatch):
    params, optimizer = fused_and_whole(lr=0.003)
    assert iterations(optimizer, params, monkeypatch) == [(1, 16, 64), (7, 16, 16)]


@pytest.mark.parametrize(
    "other", [{"polar_steps": 5}, {"polar": "newton-schulz"}, {"chunk_mib": 16 * 16 * 8 / 2**20}], ids=str
)
def test_other_settings_and_a_small_budget_keep_iterations_apart(other, accelerator, monkeypatch):
    params, optimizer = fused_and_whole(**other)
    assert iterations(optimizer, params, monkeypatch) == [(1, 16, 16), (1, 16, 64), (6, 16, 16)]


def test_a_cpu_shares_nothing():
    params, optimizer = fused_and_whole()
    train(optimizer, params, range(1))
    _, steps = optimizer._prepare()
    chunks = [buckets.Chunk(step, slice(0, len(step.grads)), [None]) for step in steps]
    assert companions.find_companions(chunks) == [[chunk] for chunk in chunks]


def test_the_budget_decides_how_many_parameters_are_processed_at_once(accelerator):
    params, kind = [nn.Parameter(torch.zeros(64, 64)) for _ in range(6)], Arithmetic(lambda *_: None, ())
    for mebibytes, chunks in ((1, 1), (64 * 64 * 8 * 2 / 2**20, 3), (1e-9, 6)):
        elements = kind.chunk_elements({"chunk_mib": mebibytes}, row_separable=False)
        bucket = buckets.Bucket(0, (64, 64), SCION_ARITHMETIC, False, None, list(params), chunk_elements=elements)
        assert len(list(buckets.split(bucket, 6))) == chunks


def test_a_stack_of_experts_is_cut_to_the_budget_and_takes_the_same_steps(accelerator):
    """Experts wait for their own gradients; where they only fade together, their stack stays whole."""

    def steps(own_time: bool, **budget) -> tuple[Tensor, list]:
        weight = nn.Parameter(0.1 * torch.ones(6, 16, 16, dtype=torch.float64))
        optimizer = sn.ScionC([weight], lmo="spectral", own_time=own_time, **budget)
        train(optimizer, [weight], range(5))
        (_, cuts), *_ = buckets.split(optimizer._prepare()[1][0].bucket, 1)
        return weight.detach(), cuts

    budget = {"chunk_mib": 2 * 16 * 16 * 16 / 2**20}  # two experts, 16 bytes per element
    whole, _ = steps(own_time=True)
    weight, cuts = steps(own_time=True, **budget)
    assert cuts == [slice(0, 2), slice(2, 4), slice(4, 6)]
    torch.testing.assert_close(weight, whole, rtol=1e-12, atol=1e-12)
    assert steps(own_time=False, **budget)[1] == [None]


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ValueError, match="chunk_mib"):
        sn.ScionC(parameters(), lmo="by-shape", chunk_mib=0)


# --- polar factors


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32), (16, 64), (8, 12)])
def test_an_fp16_iteration_has_the_error_of_fp32(shape):
    """bf16, with three bits less, has half as much again where singular values are small."""
    for kind, x in spectra(*shape).items():
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        errors = {
            dtype: ((Polar(dtype=dtype)(x).double() - u @ vh).norm() / (u @ vh).norm()).item()
            for dtype in ("float16", "float32")
        }
        assert errors["float16"] < 1.15 * errors["float32"] + 0.002, (kind, errors)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e30])
def test_an_fp16_iteration_takes_matrices_of_any_scale(scale):
    x = spectra(16, 48)["gaussian"]
    expected = Polar(dtype="float16")(x)
    factor = Polar(dtype="float16")((x * scale).float())
    assert (factor - expected).norm() < (0.05 if scale < 1e-40 else 1e-3) * expected.norm()  # denormals have few digits


def test_zero_matrices_stay_zero_among_others():
    x = torch.stack([torch.zeros(8, 8), torch.eye(8)])
    factors = Polar(dtype="float16")(x)
    assert factors[0].count_nonzero() == 0
    assert (factors[1].diagonal() - 1).abs().max() < 0.2
    assert torch.equal(Polar("newton-schulz", dtype="float16")(x)[0], torch.zeros(8, 8))
