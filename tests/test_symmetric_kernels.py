"""The Triton kernels without a GPU: values by Triton's interpreter, dispatch on fake CUDA tensors, code by compiling."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from steadynorm.polar import Polar, symmetric_kernels

HERE = Path(__file__).parent
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
TORCH_PRODUCTS = {f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm")}

TRITON = version("triton") if importlib.util.find_spec("triton") else ""
needs_triton = pytest.mark.skipif(not TRITON, reason="Triton is not installed")
# The interpreter of older ones does not work with numpy 2.4, and their compiler spills registers on B200.
needs_recent_triton = pytest.mark.skipif(
    not TRITON or tuple(map(int, TRITON.split(".")[:2])) < (3, 7), reason="Triton 3.7 or later is not installed"
)


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """Return what interpreted_kernels.py found."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, HERE / "interpreted_kernels.py"]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@needs_recent_triton
@pytest.mark.parametrize("kind", ["products", "polynomials", "unsymmetric products"])
def test_interpreted_kernels_round_the_exact_lower_half_once_and_mirror_it(kind, interpreted):
    assert interpreted[kind]
    for case, outcome in interpreted[kind].items():
        assert outcome["beyond rounding"] != "not finite", f"{case}: memory beside the input was read"
        assert outcome["untouched"], f"{case}: memory beside the result was written"
        assert outcome["symmetric"], case
        assert outcome["beyond rounding"] <= 1e-6 * max(1.0, outcome["size"]), case  # fp32 sums in another order


@needs_recent_triton
def test_a_row_of_the_lower_half_begins_in_the_first_column_and_ends_on_the_diagonal(interpreted):
    """Up to a million rows and columns, where a rounded square root is off by one."""
    assert set(interpreted["misplaced"].values()) == {0}


@needs_recent_triton
def test_the_iteration_gives_the_same_with_kernels_and_without(interpreted):
    """Entries are about 0.1; fp16 Gram matrices are rounded a dozen times on the way."""
    assert interpreted["iteration"] < 4e-3


@pytest.fixture
def with_triton(monkeypatch):
    """Ask for the kernels, and let `import triton` succeed whether it is installed or not."""
    monkeypatch.setenv(symmetric_kernels.VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))


@pytest.mark.parametrize("variable", [None, "", "0"])
def test_kernels_are_off_unless_asked_for(variable, with_triton, monkeypatch):
    assert symmetric_kernels.is_enabled(CUDA, torch.float16)
    if variable is None:
        monkeypatch.delenv(symmetric_kernels.VARIABLE)
    else:
        monkeypatch.setenv(symmetric_kernels.VARIABLE, variable)
    assert not symmetric_kernels.is_enabled(CUDA, torch.float16)


def test_kernels_are_for_half_precision_on_cuda_only(with_triton):
    assert symmetric_kernels.is_enabled(CUDA, torch.bfloat16)
    assert not symmetric_kernels.is_enabled(CPU, torch.bfloat16)
    assert not symmetric_kernels.is_enabled(CUDA, torch.float32)


def test_the_error_for_an_unknown_setting_names_its_values(monkeypatch):
    monkeypatch.setenv(symmetric_kernels.VARIABLE, "on")
    with pytest.raises(ValueError, match=r"STEADYNORM_TRITON='on'.*0 or 1"):
        symmetric_kernels.is_enabled(CUDA, torch.float16)


def test_asking_for_kernels_without_triton_raises_with_the_remedy(with_triton, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match=r"triton cannot be imported.*pip install triton.*unset STEADYNORM_TRITON"):
        symmetric_kernels.is_enabled(CUDA, torch.float16)


def test_devices_without_bf16_tensor_cores_are_refused(with_triton, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RuntimeError, match=r"cuda:0 has compute capability 7\.5.*need 8\.0"):
        symmetric_kernels.is_enabled(CUDA, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert symmetric_kernels.is_enabled(CUDA, torch.float16)


def test_rocm_is_refused(with_triton, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(RuntimeError, match="ROCm"):
        symmetric_kernels.is_enabled(CUDA, torch.float16)


class Products(TorchDispatchMode):
    """Count operations of ours, and torch's products by whether they are square."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("steadynorm::"):
            self.counts[name] += 1
        elif name in TORCH_PRODUCTS:
            self.counts["square" if out.shape[-2] == out.shape[-1] else "oblong"] += 1
        return out


@pytest.fixture
def as_if_installed(monkeypatch):
    """Ask for the kernels, without looking for triton: an empty module would confuse torch.compile."""
    monkeypatch.setenv(symmetric_kernels.VARIABLE, "1")
    monkeypatch.setattr(symmetric_kernels, "_missing", lambda device: "")


@pytest.mark.parametrize("shape", [(3, 256, 512), (256, 512), (2, 60, 40)])
def test_polar_factors_on_cuda_leave_no_symmetric_product_to_torch(shape, as_if_installed, monkeypatch):
    polar = Polar()
    with FakeTensorMode(), Products() as products:
        assert polar(torch.empty(shape, device="cuda")).shape == shape
    assert products.counts["steadynorm::symmetric_product"] and products.counts["oblong"]
    assert not products.counts["square"]
    monkeypatch.delenv(symmetric_kernels.VARIABLE)
    with FakeTensorMode(), Products() as products:
        polar(torch.empty(shape, device="cuda"))
    assert products.counts["square"] and set(products.counts) == {"square", "oblong"}


@needs_triton
def test_kernels_compile_into_one_graph(monkeypatch):
    monkeypatch.setenv(symmetric_kernels.VARIABLE, "1")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with FakeTensorMode():
        torch.compile(Polar(), backend=backend, fullgraph=True)(torch.empty(3, 256, 512, device="cuda"))
    [graph] = graphs
    targets = {str(node.target) for node in graph.graph.nodes}
    assert {"steadynorm.symmetric_product.default", "steadynorm.symmetric_polynomial.default"} <= targets


def empty(*shape: int, dtype: torch.dtype = torch.float16, device: str = "meta") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def test_results_have_the_shape_of_the_product():
    left, gram, each = empty(2, 3, 5, 7), empty(2, 3, 5, 5), empty(2, 3, 1, 1, dtype=torch.float32)
    assert symmetric_kernels.symmetric_product(left, left.mT).shape == (2, 3, 5, 5)
    assert symmetric_kernels.symmetric_polynomial(gram, 1.0, 2.0, 3.0).shape == gram.shape
    assert symmetric_kernels.symmetric_polynomial(gram, each, each, each).shape == gram.shape
    assert symmetric_kernels.symmetric_polynomial(gram.mT, 1.0, 2.0, 3.0).is_contiguous()


product, polynomial = symmetric_kernels.symmetric_product, symmetric_kernels.symmetric_polynomial
REFUSED = {
    "shapes": (lambda: product(empty(2, 3, 4), empty(2, 3, 4)), "do not give square matrices"),
    "batches": (lambda: product(empty(2, 3, 4), empty(1, 4, 3)), "do not give square matrices"),
    "two dtypes": (lambda: product(empty(3, 4), empty(4, 3, dtype=torch.bfloat16)), "two fp16 or two bf16"),
    "fp32": (lambda: product(*(empty(3, 3, dtype=torch.float32),) * 2), "two fp16 or two bf16"),
    "oblong": (lambda: polynomial(empty(3, 4), 1.0, 1.0, 1.0), r"square matrices, got shape \(3, 4\)"),
    "fp32 gram": (lambda: polynomial(empty(3, 3, dtype=torch.float32), 1.0, 1.0, 1.0), "fp16 or bf16"),
    "too few": (lambda: polynomial(empty(2, 3, 3), *(empty(1, dtype=torch.float32),) * 3), "pass 2 of torch.float32"),
    "fp16 coefficients": (lambda: polynomial(empty(2, 3, 3), *(empty(2),) * 3), "pass 2 of torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_a_kernel_would_misread_are_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@needs_triton
@pytest.mark.parametrize(
    ("matrices", "side", "block"),
    [
        (48, 768, 128),
        (1, 768, 64),  # 21 large tiles: most of a GPU would be idle
        (1, 2048, 128),  # 136 large tiles
        (1, 1920, 64),  # 120
        (1000, 320, 64),  # large tiles would compute 1.6 times as much
        (1000, 384, 128),  # 1.14 times
        (1000, 60, 64),
    ],
)
def test_large_tiles_are_for_many_tiles_with_little_padding(matrices, side, block):
    from steadynorm.polar import triton_kernels

    assert triton_kernels.choose_tiling(matrices, side, aligned=True).block == block
    assert triton_kernels.choose_tiling(matrices, side, aligned=False) == triton_kernels.UNALIGNED


UNALIGNED = {
    "odd rows": lambda: empty(4, 515, 1024),
    "odd columns": lambda: empty(4, 512, 1027),
    "a step of two": lambda: empty(4, 512, 2048)[..., ::2],
    "a gap between rows": lambda: empty(4, 512, 1027)[..., :1024],
    "steps of 16 only": lambda: empty(4, 32, 64, 16)[..., 0],
    "an odd start": lambda: empty(4 * 512 * 1024 + 16, device="cpu")[1:-15].view(4, 512, 1024),
}
ALIGNED = {
    "rows": lambda: empty(4, 512, 1024),
    "columns": lambda: empty(4, 1024, 512).mT,
    "a wide gap": lambda: empty(6, 512, 1024)[::2, :, 32:],
}


@needs_triton
@pytest.mark.parametrize(("cases", "aligned"), [(ALIGNED, True), (UNALIGNED, False)])
def test_only_what_triton_loads_in_vectors_counts_as_aligned(cases, aligned):
    from steadynorm.polar import triton_kernels

    for case, make in cases.items():
        assert triton_kernels.are_aligned(make()) == aligned, case
    assert not triton_kernels.are_aligned(ALIGNED["rows"](), UNALIGNED["odd rows"]())


# What the tensor cores of A100, H100 and B200 are called in their machine code.
TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


def compile_kernel(kernel, arguments: tuple, constants: dict, tiling, capability: int):
    """Compile a kernel as the launch with these arguments would, for a device that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    pointers = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    constants = constants | tiling.constants()
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        value = constants.get(name, arguments[position] if position < len(arguments) else None)
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = pointers[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    by_position = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, by_position, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=tiling.options())


def disassemble(cubin: bytes, folder: Path) -> tuple[str, str]:
    """Return the machine code of a kernel, and the resources that it takes."""
    import triton

    tools, file = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", folder / "kernel.cubin"
    file.write_bytes(cubin)
    commands = [[tools / "nvdisasm", file], [tools / "cuobjdump", "-res-usage", file]]
    code, usage = (
        subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout for command in commands
    )
    return code, usage


def kernel_calls(side: int, length: int, layout: str) -> list[tuple]:
    """Return both kernels with the arguments of launches in fp16 and bf16, and the tensors that decide on a tiling."""
    from steadynorm.polar import triton_kernels as kernels

    calls = []
    for dtype, transposed, per_matrix in ((torch.float16, False, True), (torch.bfloat16, True, False)):
        x = empty(4, *((length, side) if transposed else (side, length)), dtype=dtype)
        x = x.mT if transposed else x
        if layout == "strided":
            x = empty(4, side, 2 * length, dtype=dtype)[..., ::2]
        out = empty(4, side, side, dtype=dtype)
        coefficients = (empty(4, dtype=torch.float32),) * 3 if per_matrix else (1.0, 2.0, 3.0)
        polynomial = kernels.polynomial_arguments(out, coefficients, out)
        calls.append((kernels.product_kernel, kernels.product_arguments(x, x.mT, out), {}, x))
        calls.append((kernels.polynomial_kernel, polynomial, {"PER_MATRIX": per_matrix}, out))
    return calls


@needs_recent_triton
@pytest.mark.slow  # four compilations of 2 to 4 seconds in each case
@pytest.mark.parametrize(
    ("matrices", "side", "length", "layout"),
    [(48, 768, 3072, "rows"), (1, 768, 3072, "rows"), (1, 515, 1027, "rows"), (1, 515, 1027, "strided")],
)
@pytest.mark.parametrize("capability", TENSOR_CORES)
def test_compiled_kernels_use_tensor_cores_and_spill_nothing(
    capability, matrices, side, length, layout, tmp_path, monkeypatch
):
    from steadynorm.polar import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tilings = set()
    for kernel, arguments, constants, operand in kernel_calls(side, length, layout):
        tiling = triton_kernels.choose_tiling(matrices, side, aligned=triton_kernels.are_aligned(operand))
        tilings.add(tiling)
        compiled = compile_kernel(kernel, arguments, constants, tiling, capability)
        code, usage = disassemble(compiled.asm["cubin"], tmp_path)
        case = f"{kernel.__name__} {tiling} {constants}: {usage}"
        assert re.search(rf"\b{TENSOR_CORES[capability]}\b", code), case
        assert not re.search(r"\b(STL|LDL)\b", code), case
        assert re.search(r"\bREG:\d+ STACK:0 .*LOCAL:0\b", usage), case
    small = triton_kernels.SMALL if matrices == 1 else triton_kernels.LARGE
    assert tilings == {small if side == 768 else triton_kernels.UNALIGNED}
