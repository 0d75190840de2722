"""Time optimizer steps side by side: one process, interleaved, median of many rounds.

`MODELS` have hidden matrices only, `WHOLE` all parameters of two models: the ones that Muon takes, and the rest.

Peers iterate in bf16. A CPU without bf16 instructions emulates it, some sixty times slower than fp32, so ratios to them
say little there. The fair comparison is `PLAIN`, Muon's iteration in plain fp32.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import progress
from steadynorm.decay.foreign import correct
from steadynorm.lmo import LMOS
from steadynorm.optim import AdamC, MuonC, Scion, ScionC
from steadynorm.polar import Polar
from steadynorm.progress import Say

Shape = tuple[int, int]
Factory = Callable[[list[torch.nn.Parameter]], Optimizer]

VIT_S16: tuple[Shape, ...] = ((1152, 384), (384, 384), (1536, 384), (384, 1536)) * 12 + ((384, 768), (384, 384))
GPT_124M_LAYER: tuple[Shape, ...] = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
MODELS = {"vit-s16": VIT_S16, "gpt-124m (3 layers)": GPT_124M_LAYER * 3}

GPT_124M_REST: tuple[tuple[int, ...], ...] = ((50304, 768),)  # the tied table; NanoGPT has no biases or norm weights
VIT_S16_REST: tuple[tuple[int, ...], ...] = ((1000, 384), (1000,), *((384,),) * 26, *((1536,),) * 12)
WHOLE: dict[str, tuple[Sequence[Shape], Sequence[tuple[int, ...]]]] = {
    "gpt-124m": (GPT_124M_LAYER * 12, GPT_124M_REST),
    "vit-s16": (VIT_S16, VIT_S16_REST),
}

LONG = 20.0  # seconds after which an action gets no more rounds
MUON, PLAIN = "torch Muon", "Newton-Schulz in fp32"
PAIR, PLAIN_PAIR = f"{MUON} + AdamW", f"{PLAIN} + AdamW"


@dataclass(frozen=True)
class Contender:
    """Optimizer to time, and the polar factor it computes, if any."""

    name: str
    make: Factory
    polar: Callable[[Tensor], Tensor] | None = None


def make_contenders() -> list[Contender]:
    """Return torch's optimizers and ours."""
    return [
        Contender(MUON, lambda p: torch.optim.Muon(p, lr=1e-3), _torch_newton_schulz),
        Contender(PLAIN, PlainMuon, newton_schulz_fp32),
        Contender("torch AdamW fused", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True)),
        Contender("Muon, corrected", lambda p: correct(torch.optim.Muon(p, lr=1e-3)), _torch_newton_schulz),
        Contender("AdamC fused", lambda p: AdamC(p, lr=1e-3, fused=True)),
        Contender(
            "Scion, 5 steps",
            lambda p: Scion(p, lr=1e-3, lmo="spectral", weight_decay=0.1, polar_steps=5),
            Polar(steps=5),
        ),
        Contender("ScionC, 5 steps", lambda p: ScionC(p, lr=1e-3, lmo="spectral", polar_steps=5), Polar(steps=5)),
        Contender("ScionC, 4 steps", lambda p: ScionC(p, lr=1e-3, lmo="spectral", polar_steps=4), Polar(steps=4)),
        Contender("MuonC, 5 steps", lambda p: MuonC(p, lr=1e-3, use_muon=True, polar_steps=5), Polar(steps=5)),
    ]


def whole_steps(model: str, skip: Sequence[str] = ()) -> dict[str, Callable[[], object]]:
    """Return a step over all parameters of a model: torch's two optimizers, plain fp32 with AdamW, and MuonC.

    Each has parameters of its own, and AdamW is fused, as fast as it gets. `skip` names steps to leave out.
    """
    hidden, rest = WHOLE[model]

    def pair(muon: Factory) -> Callable[[], object]:
        both = muon(parameters(hidden)), torch.optim.AdamW(parameters(rest), lr=1e-3, fused=True)
        return lambda: [optimizer.step() for optimizer in both]

    def muonc(steps: int) -> Callable[[], object]:
        kinds = ((parameters(hidden), True), (parameters(rest), False))
        groups = [{"params": params, "use_muon": use_muon} for params, use_muon in kinds]
        return MuonC(groups, lr=1e-3, polar_steps=steps).step

    makers: dict[str, Callable[[], Callable[[], object]]] = {
        PAIR: lambda: pair(lambda p: torch.optim.Muon(p, lr=1e-3)),
        PLAIN_PAIR: lambda: pair(PlainMuon),
        "MuonC, 5 steps": lambda: muonc(5),
        "MuonC, 4 steps": lambda: muonc(4),
    }
    return {name: make() for name, make in makers.items() if name not in skip}


def newton_schulz_fp32(x: Tensor) -> Tensor:
    """Return the result of Muon's five steps in fp32."""
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / y.norm()
    for _ in range(5):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), y, beta=3.4445)
    return y.mT if tall else y


class PlainMuon(Optimizer):
    """Momentum and `newton_schulz_fp32`, one parameter at a time: none of our code, nothing in bf16."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.lerp_(p.grad, 0.05)
                p.mul_(1 - 0.1 * group["lr"]).add_(newton_schulz_fp32(m), alpha=-group["lr"])


def _torch_newton_schulz(x: Tensor) -> Tensor:
    from torch.optim._muon import _zeropower_via_newtonschulz

    return _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def parameters(shapes: Sequence[tuple[int, ...]], seed: int = 0, device: str = "cpu") -> list[torch.nn.Parameter]:
    """Return parameters of these shapes, each with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(device)) for shape in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).to(device)
    return params


def wall_seconds(action: Callable[[], object]) -> float:
    """Return how long an action takes by the clock of the host."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def interleaved(
    actions: Mapping[str, Callable[[], object]],
    rounds: int,
    say: Say = lambda line: None,
    seconds_of: Callable[[Callable[[], object]], float] = wall_seconds,
) -> dict[str, float]:
    """Return the median seconds of each action, running each once per round so that slow moments affect all alike.

    An action gets at least three rounds, and no more after LONG seconds. One that takes longer than LONG is not run
    again: its first run counts. `say` gets the expected time once each action has run. `seconds_of` is the clock.

    >>> interleaved({"nothing": lambda: None}, rounds=3)["nothing"] < 1
    True
    """
    first = {name: seconds_of(action) for name, action in actions.items()}  # warm-up
    times: dict[str, list[float]] = {name: [seconds] if seconds > LONG else [] for name, seconds in first.items()}
    repeated = [name for name, seconds in first.items() if seconds <= LONG]
    total = sum(min(rounds * first[name], max(LONG, 3 * first[name])) for name in repeated)
    progress.announce(f"{len(repeated)} contenders, {rounds} rounds", total, say)
    with progress.bars(shown=total > progress.LONG) as bars:
        task = bars.add_task("timing", total=rounds * len(repeated))
        for _ in range(rounds):
            for name in repeated:
                if len(times[name]) < 3 or sum(times[name]) < LONG:
                    times[name].append(seconds_of(actions[name]))
                bars.advance(task)
    return {name: statistics.median(values) for name, values in times.items()}


def step_times(
    contenders: Sequence[Contender], shapes: Sequence[Shape], rounds: int, say: Say = lambda line: None
) -> dict[str, float]:
    """Return the median seconds of each contender's step on parameters of these shapes."""
    return interleaved({contender.name: _step(contender, shapes) for contender in contenders}, rounds, say)


def _step(contender: Contender, shapes: Sequence[Shape]) -> Callable[[], None]:
    params = parameters(shapes)
    optimizer, grads = contender.make(params), [p.grad for p in params]

    def step() -> None:
        for p, grad in zip(params, grads, strict=True):  # some optimizers remove the gradient
            p.grad = grad
        optimizer.step()

    return step


def gemm_rate(dtype: torch.dtype) -> float:
    """Return the operations per second of a plain product, which bounds all polar iterations."""
    count, side = 4, 768
    x = torch.randn(count, side, side).to(dtype)
    return count * 2 * side**3 / interleaved({"bmm": lambda: torch.bmm(x, x)}, rounds=10)["bmm"]


def newton_schulz_operations(shapes: Sequence[Shape], steps: int = 5) -> float:
    """Return the operations of the peers' iteration: per step x x^T, its square and one product into x."""
    return sum(LMOS["spectral"].operations(shape, steps=steps) for shape in shapes)


def spectra(rows: int, columns: int, seed: int = 0) -> dict[str, Tensor]:
    """Return test matrices: Gaussian, singular values down to 1e-3, low rank plus noise."""
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
    """Return the relative error |polar - exact| / |exact| by kind of spectrum, averaged over shapes."""
    errors: dict[str, list[float]] = {}
    for shape in shapes:
        for kind, x in spectra(*shape).items():
            u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
            error = (polar(x).double() - u @ vh).norm() / (u @ vh).norm()
            errors.setdefault(kind, []).append(error.item())
    return {kind: statistics.mean(values) for kind, values in errors.items()}


def table(times: Mapping[str, float], errors: Mapping[str, Mapping[str, float]] = {}) -> str:
    """Return a Markdown table: step time, ratio to torch's Muon and to plain fp32, polar error by spectrum if measured."""
    kinds = ("gaussian", "hard", "low rank + noise") if errors else ()
    references = [name for name in (MUON, PAIR, PLAIN, PLAIN_PAIR) if name in times]
    columns = ["ms", *(f"faster than {name}" for name in references), *(f"error, {kind}" for kind in kinds)]
    rows = []
    for name, seconds in times.items():
        cells = [name, f"{1e3 * seconds:.1f}", *(f"{times[reference] / seconds:.2f}x" for reference in references)]
        rows.append([*cells, *(f"{errors[name][kind]:.3f}" if name in errors else "" for kind in kinds)])
    return markdown_table(["optimizer", *columns], rows)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """Return a Markdown table whose columns are flush right, except for those at the positions `left`.

    >>> print(markdown_table(["name", "ms"], [["a", 1.5]]))
    | name | ms |
    |---|---:|
    | a | 1.5 |
    """
    rules = ["---" if k in left else "---:" for k in range(len(header))]
    lines = [header, *(map(str, row) for row in rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, f"|{'|'.join(rules)}|", *body])
