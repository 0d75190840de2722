"""What a step asks of a GPU, counted on fake CUDA tensors: few launches, little traffic, temporaries within the budget."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import steadynorm as sn
from benchmarks import roofline
from benchmarks.launches import EMBEDDINGS, HIDDEN, VECTORS
from benchmarks.roofline import GPUS, device_seconds
from steadynorm.lab.launch_counter import (
    BLOCK_ELEMENTS,
    BLOCKS_PER_LAUNCH,
    CONTENDERS,
    LaunchCounter,
    Work,
    count_step,
    make_scionc,
    table,
)
from steadynorm.optim import buckets
from steadynorm.optim.arithmetic import CHUNK_MIB
from steadynorm.polar import Polar

MUON, SCIONC = "torch.optim.Muon", "ScionC, 5 steps"
FP32 = 4  # bytes


@pytest.fixture(scope="module")
def counted() -> dict[str, LaunchCounter]:
    """Count one step on the hidden matrices of GPT-124M, which takes seconds."""
    return {name: count_step(CONTENDERS[name], HIDDEN) for name in (MUON, SCIONC)}


def test_hidden_matrices_take_at_most_300_kernels(counted):
    assert counted[SCIONC].counts.kernels <= 300
    assert counted[MUON].counts.kernels > 1000  # one matrix at a time


def test_hidden_matrices_take_fewer_bytes_and_operations_than_torchs_muon(counted):
    ours, theirs = counted[SCIONC].counts, counted[MUON].counts
    assert ours.gigabytes <= 9 < 0.9 * theirs.gigabytes
    assert ours.tflop < 0.8 * theirs.tflop  # the Gram form


def test_torchs_muon_takes_the_operations_of_its_formula(counted):
    """Five steps of x x^T, its square and a product into x: 2 d^2 n, 2 d^3 and 2 d^2 n operations."""
    sides = [sorted(shape) for shape in HIDDEN]
    expected = 5 * sum(4 * d * d * n + 2 * d**3 for d, n in sides)
    assert counted[MUON].counts.tflop == pytest.approx(1e-12 * expected)


def test_temporaries_of_hidden_matrices_fit_the_budget(counted):
    most = max(rows * columns * FP32 for rows, columns in HIDDEN) / 2**20
    assert most < counted[SCIONC].counts.temporary_mebibytes <= CHUNK_MIB


def test_all_of_gpt_124m_takes_few_kernels_and_fewer_bytes_than_torchs_muon_within_the_budget():
    ours, theirs = (count_step(CONTENDERS[name], HIDDEN + EMBEDDINGS + VECTORS).counts for name in (SCIONC, MUON))
    assert ours.kernels <= 440
    assert ours.gigabytes <= 11.4 < theirs.gigabytes
    assert ours.temporary_mebibytes <= CHUNK_MIB


def test_blocks_and_whole_matrices_share_launches_and_copy_nothing_for_it(monkeypatch):
    """Twelve fused 2304 x 768 matrices are 36 of 768 x 768: together with twelve whole ones they need one iteration."""

    def make(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        fused, whole = {"params": params[:12], "blocks": 3}, {"params": params[12:]}
        return [sn.ScionC([fused, whole], lmo="spectral", polar_steps=5)]

    shapes = ((2304, 768),) * 12 + ((768, 768),) * 12
    together = count_step(make, shapes).counts
    monkeypatch.setattr(buckets, "find_companions", lambda chunks: [[chunk] for chunk in chunks])
    apart = count_step(make, shapes).counts
    assert together.kernels <= apart.kernels - 24
    assert together.gigabytes == pytest.approx(apart.gigabytes)
    assert together.temporary_mebibytes <= CHUNK_MIB


@pytest.mark.parametrize(
    "make",
    [lambda p: [sn.LionC(p, peak_lr=0.02)], lambda p: [sn.SGDC(p)], lambda p: [sn.SGDC(p, nesterov=True)]],
    ids=["LionC", "SGDC", "SGDC Nesterov"],
)
def test_element_wise_optimizers_take_few_kernels_within_the_budget(make):
    counts = count_step(make, HIDDEN).counts
    assert counts.kernels <= 300 and counts.tflop == 0
    assert counts.temporary_mebibytes <= CHUNK_MIB


@pytest.mark.parametrize(("shape", "count"), [((768, 768), 18), ((3072, 768), 6)], ids=["square", "tall"])
def test_a_small_budget_holds_and_costs_launches(shape, count):
    """36 MiB take eight or two matrices at a time."""
    small, large = (count_step(make_scionc(5, chunk_mib=budget), (shape,) * count).counts for budget in (36, 1024))
    assert small.temporary_mebibytes <= 36 < large.temporary_mebibytes
    assert small.kernels > 2 * large.kernels
    assert small.gigabytes == pytest.approx(large.gigabytes, rel=0.01)


def test_temporaries_of_a_square_factor_are_three_matrices():
    """y, its Gram matrix and their polynomial; then y, the polynomial and the next y."""
    polar = Polar(keeps_dtype=False)
    found = count((16, 256, 256), run=polar).counts.temporary_mebibytes
    assert found == pytest.approx(3 * 16 * 256 * 256 * 2 / 2**20, rel=0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: [sn.ScionC(p, lmo="spectral", chunk_mib=4, nesterov=True)],
        lambda p: [sn.ScionC(p, lmo="spectral", chunk_mib=4, momentum_dtype="bfloat16")],
        lambda p: [sn.ScionC(p, lmo="spectral", chunk_mib=4, hold="balance", cautious=True, nesterov=True)],
        lambda p: [sn.ScionC(p, lmo="sign", chunk_mib=4, cautious=True, momentum_dtype="bfloat16")],
        lambda p: [sn.MuonC(p, use_muon=True, chunk_mib=4)],
        lambda p: [sn.MuonC(p, use_muon=False, chunk_mib=4, cautious=True)],
    ],
    ids=["Nesterov", "bf16 momentum", "balance, cautious", "sign, cautious", "MuonC", "MuonC's Adam"],
)
def test_the_budget_holds_whatever_the_settings(make):
    """Four matrices of 147,456 elements would take 5.6 MiB and more at once."""
    assert count_step(make, ((768, 192),) * 4).counts.temporary_mebibytes <= 4


# --- the counter itself, on operations whose launches and bytes are known


def count(*shapes: tuple[int, ...], run: Callable[..., object], dtype: torch.dtype = torch.float32) -> LaunchCounter:
    """Return the counts of an operation on fake tensors of these shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes]
        counter = LaunchCounter()
        counter.ignore(tensors)
        with counter:
            run(*tensors)
    return counter


def touched(counter: LaunchCounter) -> int:
    """Return the counted bytes."""
    return round(1e9 * counter.counts.gigabytes)


@pytest.mark.parametrize(
    ("run", "elements"),
    [
        (lambda x, y: x + y, 3),
        (lambda x, y: x.add_(y), 3),
        (lambda x, y: torch.add(x, x, out=y), 3),
        (lambda x, y: x.zero_(), 1),
        (lambda x, y: x.lerp_(y, 0.5), 3),
        (lambda x, y: torch._foreach_add_([x], [y]), 3),
        (lambda x, y: torch._foreach_copy_([x], [y]), 2),
        (lambda x, y: torch._foreach_mul([x], 2.0), 2),
    ],
    ids=["new", "in place", "out=", "fill", "three operands", "foreach in place", "foreach copy", "foreach new"],
)
def test_every_operand_is_read_once_and_every_result_written_once(run, elements):
    counter = count((16, 8), (16, 8), run=run)
    assert counter.counts.kernels == 1
    assert touched(counter) == elements * 16 * 8 * FP32


def test_expanded_operands_are_read_as_what_they_are():
    counter = count((16, 8), (8,), run=lambda x, row: x * row.expand(16, 8))
    assert touched(counter) == (2 * 16 * 8 + 8) * FP32


def test_views_and_empty_memory_launch_nothing():
    counter = count(
        (16, 8), run=lambda x: (x.mT, x.narrow(0, 2, 4), x.view(-1), x.unbind(0), torch.empty_like(x), x.detach())
    )
    assert counter.counts.kernels == touched(counter) == 0


def test_operations_on_the_cpu_are_not_counted():
    counter = LaunchCounter()
    with counter:
        torch.ones(3) + 1
    assert counter.counts.kernels == 0


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [
        ([8] * 64, 1),
        ([8] * 65, 2),
        ([BLOCK_ELEMENTS * BLOCKS_PER_LAUNCH], 1),
        ([BLOCK_ELEMENTS * BLOCKS_PER_LAUNCH + 1], 2),
        ([BLOCK_ELEMENTS * BLOCKS_PER_LAUNCH // 2] * 4, 2),
        ([8] * 63 + [BLOCK_ELEMENTS * BLOCKS_PER_LAUNCH], 2),
    ],
    ids=["64 tensors", "65 tensors", "320 blocks", "321 blocks", "two at a time", "a tensor over two launches"],
)
def test_two_lists_are_launched_64_tensors_and_320_blocks_at_a_time(sizes, launches):
    def add(*tensors: Tensor) -> None:
        torch._foreach_add_(list(tensors[: len(sizes)]), list(tensors[len(sizes) :]))

    assert count(*((size,) for size in sizes * 2), run=add).counts.kernels == launches


def test_lists_that_differ_in_shape_dtype_or_layout_launch_a_kernel_per_tensor():
    def kernels(run: Callable[..., object]) -> int:
        return count((4, 4), (4, 4), (4, 4), (4, 4), run=run).counts.kernels

    assert kernels(lambda a, b, c, d: torch._foreach_add_([a, b], [c, d])) == 1
    assert kernels(lambda a, b, c, d: torch._foreach_add_([a, b], [c.select(0, 0), d.select(0, 0)])) == 2
    assert kernels(lambda a, b, c, d: torch._foreach_add_([a, b], [c.mT, d.mT])) == 2
    assert kernels(lambda a, b, c, d: torch._foreach_add_([a, b], [c, d.half()])) == 2 + 1  # and one rounds


def test_fused_adamw_reads_four_tensors_and_writes_three():
    counter = count_step(lambda p: [torch.optim.AdamW(p, fused=True)], [(256, 64)] * 3)
    fused = [work for work in counter.work if "_fused_adamw" in work.name]
    assert [work.launches for work in fused] == [1]
    assert 1e9 * fused[0].gigabytes == pytest.approx(7 * 3 * 256 * 64 * FP32, abs=64)  # and step counts


def test_products_count_their_operations():
    counter = count((2, 4, 8), (2, 8, 16), run=torch.bmm, dtype=torch.float16)
    assert 1e12 * counter.counts.tflop == pytest.approx(2 * 2 * 4 * 8 * 16)
    assert touched(counter) == 2 * 2 * (4 * 8 + 8 * 16 + 4 * 16)
    assert counter.by_name == {"aten::bmm": 1}


def test_temporaries_are_what_is_alive_at_one_time():
    mebibyte = (2**18,)

    def one_after_the_other(x: Tensor) -> None:
        for _ in range(5):
            x + 1

    def kept(x: Tensor) -> None:
        held = [x + 1 for _ in range(5)]
        held.clear()

    assert count(mebibyte, run=one_after_the_other).counts.temporary_mebibytes == 1
    assert count(mebibyte, run=kept).counts.temporary_mebibytes == 5
    assert count(mebibyte, run=lambda x: x.add_(1).view(2, -1)).counts.temporary_mebibytes == 0


def test_state_and_gradients_are_no_temporaries():
    class InPlace(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    assert p.grad is not None
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    self.state[p]["momentum_buffer"].add_(p.grad.mul_(2))

    assert count_step(lambda p: [InPlace(p)], [(512, 512)]).counts.temporary_mebibytes == 0


def test_the_table_has_a_row_per_optimizer(counted):
    text = table({name: counter.counts for name, counter in counted.items()})
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == [f"| {MUON}", f"| {SCIONC}"]
    assert f" {counted[MUON].counts.kernels:,} " in text


# --- the roofline page


def test_each_kernel_takes_the_longer_of_its_operations_and_its_bytes():
    gpu = GPUS["H100"]
    product, copy = Work("product", 1, gpu.tflop_per_second, 1.0), Work("copy", 8, 0.0, 2 * gpu.gigabytes_per_second)
    assert device_seconds([product, copy], gpu) == pytest.approx(1 + 2)


def test_the_host_bounds_a_step_of_many_short_kernels():
    entry = roofline.Record("m", "o", 1, 1000, 0.0, 0.0, 0.0, {"A100": 1.0, "H100": 9.0, "B200": 0.1})
    assert entry.step_ms("A100") == entry.host_ms == pytest.approx(1e6 * roofline.LAUNCH_SECONDS)
    assert entry.step_ms("H100") == 9.0
    row = roofline.times_table([entry]).splitlines()[-1]
    assert row.count("(host)") == 2 and row.endswith("4.5 (host) | 9.0 | 4.5 (host) |")


def test_the_roofline_page_shows_the_recorded_counts():
    text = roofline.PAGE.read_text(encoding="utf-8")
    assert roofline.page(text, roofline.read()) == text, "run python -m benchmarks.roofline --page"


def test_the_recorded_counts_of_gpt_124m_are_still_true(counted):
    recorded = {(entry.model, entry.optimizer): entry for entry in roofline.read()}
    assert set(recorded) == {(model, optimizer) for model in roofline.MODELS for optimizer in CONTENDERS}
    for optimizer, counter in counted.items():
        entry = roofline.record("GPT-124M", optimizer, HIDDEN, counter)
        assert counts_of(entry) == counts_of(recorded["GPT-124M", optimizer]), "run python -m benchmarks.roofline"


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in roofline.MODELS if model != "GPT-124M"])
def test_the_recorded_counts_of_larger_models_are_still_true(model):
    recorded = {entry.optimizer: entry for entry in roofline.read() if entry.model == model}
    entry = roofline.record(
        model, SCIONC, roofline.MODELS[model], count_step(CONTENDERS[SCIONC], roofline.MODELS[model])
    )
    assert counts_of(entry) == counts_of(recorded[SCIONC]), "run python -m benchmarks.roofline"


def counts_of(entry: roofline.Record) -> str:
    """Return what the page shows of a record."""
    return roofline.counts_table([entry]) + roofline.times_table([entry])


def test_models_have_the_size_that_they_are_named_after():
    sizes = {
        model: sum(nn.Parameter(torch.empty(shape, device="meta")).numel() for shape in shapes)
        for model, shapes in roofline.MODELS.items()
    }
    assert sizes["GPT-124M"] == 12 * 12 * 768**2
    assert 0.9e9 < sizes["1B"] < 1.1e9 and 6e9 < sizes["7B"] < 7e9
    assert "| 7B | 6,476 M | 4096 x 4096, " in roofline.shapes_table()
