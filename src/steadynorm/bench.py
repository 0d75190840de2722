"""Side-by-side timing of optimizer steps: one process, interleaved, median of many rounds."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.external import correct
from steadynorm.lmo import LMOS
from steadynorm.optim import AdamC, Scion, ScionC
from steadynorm.polar import Polar

Shape = tuple[int, int]
Factory = Callable[[list[torch.nn.Parameter]], Optimizer]

VIT_S16: tuple[Shape, ...] = ((1152, 384), (384, 384), (1536, 384), (384, 1536)) * 12 + ((384, 768), (384, 384))
GPT_124M_LAYER: tuple[Shape, ...] = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
MODELS = {"vit-s16": VIT_S16, "gpt-124m (3 layers)": GPT_124M_LAYER * 3}


@dataclass(frozen=True)
class Contender:
    """An optimizer to time, and the polar factor it computes, if any."""

    name: str
    make: Factory
    polar: Callable[[Tensor], Tensor] | None = None


def own_and_torch() -> list[Contender]:
    """torch's optimizers and ours; the first is what ratios refer to."""
    return [
        Contender("torch Muon", lambda p: torch.optim.Muon(p, lr=1e-3), _torch_newton_schulz),
        Contender("torch AdamW fused", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
        Contender("Muon, corrected", lambda p: correct(torch.optim.Muon(p, lr=1e-3)), _torch_newton_schulz),
        Contender("AdamC fused", lambda p: AdamC(p, lr=1e-3, fused=True)),
        Contender("Scion, 5 steps", lambda p: Scion(p, lr=1e-3, lmo="spectral", weight_decay=0.1), Polar(steps=5)),
        Contender("ScionC, 5 steps", lambda p: ScionC(p, lr=1e-3, lmo="spectral"), Polar(steps=5)),
        Contender("ScionC, 4 steps", lambda p: ScionC(p, lr=1e-3, lmo="spectral", polar_steps=4), Polar(steps=4)),
    ]


def _torch_newton_schulz(x: Tensor) -> Tensor:
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def parameters(shapes: Sequence[Shape], seed: int = 0) -> list[torch.nn.Parameter]:
    """Parameters of these shapes with a gradient each."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator)) for shape in shapes]
    for p in made:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    return made


def interleaved(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each action; in every round each runs once, so that a slow moment hits all alike.

    >>> interleaved({"nothing": lambda: None}, rounds=3)["nothing"] < 1
    True
    """
    seen: dict[str, list[float]] = {name: [] for name in actions}
    for each in actions.values():  # warm up
        each()
    for _ in range(rounds):
        for name, each in actions.items():
            start = time.perf_counter()
            each()
            seen[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seen.items()}


def step_times(contenders: Sequence[Contender], shapes: Sequence[Shape], rounds: int) -> dict[str, float]:
    """Median seconds of each contender's step on parameters of these shapes."""
    return interleaved({each.name: _step(each, shapes) for each in contenders}, rounds)


def _step(contender: Contender, shapes: Sequence[Shape]) -> Callable[[], None]:
    params = parameters(shapes)
    optimizer, grads = contender.make(params), [p.grad for p in params]

    def step() -> None:
        for p, grad in zip(params, grads, strict=True):  # some optimizers take the gradient away
            p.grad = grad
        optimizer.step()

    return step


def gemm_rate(side: int = 768, rounds: int = 10) -> float:
    """bf16 floating-point operations a second of a plain product of this side: the limit of all polar iterations."""
    x = torch.randn(4, side, side).bfloat16()
    return 4 * 2 * side**3 / interleaved({"bmm": lambda: torch.bmm(x, x)}, rounds)["bmm"]


def newton_schulz_operations(shapes: Sequence[Shape], steps: int = 5) -> float:
    """Operations of the peers' iteration: a step takes x x^T, its square and one product into x."""
    return sum(LMOS["spectral"].operations(shape, steps=steps) for shape in shapes)


def spectra(rows: int, columns: int, seed: int = 0) -> dict[str, Tensor]:
    """Test matrices: Gaussian; singular values spread over 1e-3; low rank plus noise."""
    g = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(rows, columns, generator=g)
    u, _, vh = torch.linalg.svd(gaussian.double(), full_matrices=False)
    spread = torch.logspace(0, -3, min(rows, columns), dtype=torch.float64)
    low_rank = torch.randn(rows, 8, generator=g) @ torch.randn(8, columns, generator=g) / 8**0.5
    return {
        "gaussian": gaussian,
        "hard": ((u * spread) @ vh).float(),
        "low rank + noise": low_rank + 0.01 * torch.randn(rows, columns, generator=g),
    }


def polar_errors(
    polar: Callable[[Tensor], Tensor], shapes: Sequence[Shape] = ((384, 384), (384, 1536))
) -> dict[str, float]:
    """Relative error |polar - exact| / |exact| by kind of spectrum, mean over these shapes."""
    found: dict[str, list[float]] = {}
    for shape in shapes:
        for kind, x in spectra(*shape).items():
            u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
            error = (polar(x).double() - u @ vh).norm() / (u @ vh).norm()
            found.setdefault(kind, []).append(error.item())
    return {kind: statistics.mean(values) for kind, values in found.items()}


def table(
    contenders: Sequence[Contender], times: Mapping[str, float], errors: Mapping[str, Mapping[str, float]]
) -> str:
    """Markdown: step time, ratio to the first contender, polar error by kind of spectrum."""
    kinds = ("gaussian", "hard", "low rank + noise")
    lines = [
        f"| optimizer | ms | faster than {contenders[0].name} | {' | '.join(f'error, {kind}' for kind in kinds)} |"
    ]
    lines.append("|---|---:|---:|" + "---:|" * len(kinds))
    for each in contenders:
        seconds = times[each.name]
        shown = [f"{errors[each.name][kind]:.3f}" if each.name in errors else "" for kind in kinds]
        ratio = times[contenders[0].name] / seconds
        lines.append(f"| {each.name} | {1e3 * seconds:.1f} | {ratio:.2f}x | {' | '.join(shown)} |")
    return "\n".join(lines)
