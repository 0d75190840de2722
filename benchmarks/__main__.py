"""Measure everything that docs/benchmarks.md says about this kind of machine (`make bench`).

Print the results, and write them to benchmarks/results-KIND.json and to this kind's sections of the page. CPUs with and without
native bf16 have separate tables (steadynorm.machine).

python -m benchmarks [--rounds 15] [--only PART ...] [--quick]
"""

import argparse
import json
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import monitor, simulation
from benchmarks.memory import memory_of_a_step
from benchmarks.pages import fill
from benchmarks.peers import peers
from steadynorm import correct, machine
from steadynorm.lab import bench

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEADED = ("hidden_matrices",)  # sections that say how they were measured even if all are measured at once


def hidden_matrices(rounds: int) -> dict[str, Any]:
    """Measure step time and polar error of every contender on the hidden matrices of two models."""
    own = bench.make_contenders()
    others, missing = peers()
    if not machine.native_bf16():
        reason = "it iterates in bf16, which this machine emulates, as torch Muon does"
        missing |= dict.fromkeys((peer.name for peer in others), reason)
        own, others = [entry for entry in own if entry.name != "Muon, corrected"], []
    contenders = own + others
    errors = {each.name: bench.polar_errors(each.polar) for each in contenders if each.polar is not None}
    errors |= {"PolarExpress, 5 steps, Frobenius": bench.polar_errors(frobenius_express)}
    dtype = machine.matmul_dtype(torch.device("cpu"))
    out: dict[str, Any] = {"errors": errors, "missing": missing, "models": {}}
    for model, shapes in bench.MODELS.items():
        times = bench.step_times(contenders, shapes, rounds, print)
        limit = bench.newton_schulz_operations(shapes) / bench.gemm_rate(dtype)
        out["models"][model] = {"seconds": times, "peers_work_at_gemm_limit_seconds": limit}
        show(
            f"### {model}, hidden matrices\n\n{bench.table(times, errors)}\n\n"
            f"Five steps of Newton-Schulz, at the rate of a plain {str(dtype).removeprefix('torch.')} product measured in the same run, would take "
            f"{1e3 * limit:.0f} ms."
        )
    worst = ", ".join(f"{kind} {value:.3f}" for kind, value in errors["PolarExpress, 5 steps, Frobenius"].items())
    absent = "".join(f"\n\nNot run: {name} ({reason})." for name, reason in missing.items())
    show(f"For comparison, PolarExpress with 5 steps after a Frobenius norm: {worst}.{absent}")
    return out


def whole_models(rounds: int, *, quick: bool = False) -> dict[str, Any]:
    """Measure a step over all parameters: MuonC against torch's Muon with AdamW, and against plain fp32 with AdamW."""
    out: dict[str, Any] = {}
    for model in bench.WHOLE:
        is_long = quick and not machine.native_bf16()  # emulated, a step of torch's Muon takes minutes
        steps = bench.whole_steps(model, skip=[bench.PAIR] if is_long else [])
        out[model] = bench.interleaved(steps, rounds, print)
        show(f"### {model}, all parameters\n\n{bench.table(out[model])}")
    return out


def frobenius_express(x: torch.Tensor) -> torch.Tensor:
    """Run PolarExpress as published: scaled by the Frobenius norm, lower bound 1e-3, in the dtype of this machine."""
    from steadynorm.polar.coefficients import _compose

    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x) / (1.01 * x.norm())
    y = y.to(machine.matmul_dtype(y.device))
    for a, b, c in _compose(5, 1e-3)[0]:
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y


def memory() -> dict[str, Any]:
    """Measure the state per parameter, and the extra memory that the first step of ScionC on GPT-124M needs at its peak."""
    out: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        with get_context("spawn").Pool(1) as pool:  # a fresh process: no memory kept from before to hide in
            out[dtype] = pool.apply(memory_of_a_step, (dtype,))
    lines = [
        f"- momentum in {name}: {each['state_bytes_per_parameter']:.0f} bytes per parameter; a step takes "
        f"{each['peak_step_mib']:.0f} MiB more at its peak (resident set of a fresh process; ScionC, 5 steps, all of "
        "GPT-124M including the tied table)"
        for name, each in out.items()
    ]
    show("\n".join(lines))
    return out


def correction_overhead(rounds: int) -> dict[str, float]:
    """Measure what `correct` adds to a fused AdamW step on ViT-S/16: the time of its hook over the time of the step."""
    optimizer = correct(torch.optim.AdamW(bench.parameters(bench.VIT_S16), lr=1e-3, fused=True))
    (hook,) = optimizer._optimizer_step_pre_hooks.values()
    times = bench.interleaved({"step": optimizer.step, "hook": lambda: hook(optimizer, (), {})}, 20 * rounds)
    show(f"`correct` adds {1e6 * times['hook']:.1f} us to a fused AdamW step of {1e3 * times['step']:.1f} ms "
         f"on ViT-S/16: {100 * times['hook'] / times['step']:.2f} %.")  # fmt: skip
    return times


def monitoring(rounds: int) -> dict[str, float]:
    """Measure what a monitor at every step adds to a training step of the desk GPT."""
    found = monitor.overhead(4 * rounds)
    show(f"A `Monitor` with alignment and forecast at every step adds {100 * found['overhead']:.1f} % to a "
         f"training step of the desk GPT ({1e3 * found['step_seconds']:.0f} ms).")  # fmt: skip
    return found


def simulating(steps: int) -> dict[str, float]:
    """Compare `simulate` with one SVD per step on the paper's 384 x 384 system."""
    found = simulation.compare(steps)
    show(f"`simulate` takes {1e3 * found['seconds']:.1f} ms per step of a 384 x 384 system, one SVD per step "
         f"{1e3 * found['svd_seconds']:.1f} ms: {found['faster']:.1f}x faster; the norm squared differs by "
         f"{100 * found['norm_sq_difference']:.2f} %.")  # fmt: skip
    return found


def scaling(rounds: int, widths: tuple[int, ...], layers: tuple[int, ...]) -> dict[str, Any]:
    """Measure cost against width (one layer) and depth (width 384): ScionC with 4 steps and Newton-Schulz in fast products."""
    peer = bench.MUON if machine.native_bf16() else bench.PLAIN
    pair = [each for each in bench.make_contenders() if each.name in (peer, "ScionC, 4 steps")]

    def run(shapes: list[bench.Shape]) -> dict[str, float]:
        return bench.step_times(pair, shapes, rounds)

    def layer(width: int) -> list[bench.Shape]:
        return [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]

    by_width = {width: run(layer(width)) for width in widths}
    by_depth = {count: run(layer(384) * count) for count in layers}
    for title, rows in (("width (1 layer)", by_width), ("layers (width 384)", by_depth)):
        both = {key: (times[peer], times["ScionC, 4 steps"]) for key, times in rows.items()}
        cells = [(key, f"{1e3 * a:.1f}", f"{1e3 * b:.1f}", f"{a / b:.2f}x") for key, (a, b) in both.items()]
        show(bench.markdown_table([title, f"{peer}, ms", "ScionC 4 steps, ms", "faster"], cells, left=()))
    return {"width": by_width, "layers": by_depth}


_shown: list[str] = []


def show(text: str) -> None:
    """Print a text and keep it for the page."""
    _shown.append(text)
    print(f"\n{text}", flush=True)


def write(part: str, results: Any, measured: str) -> None:
    """Write the results of a part for this kind of machine, and its section of docs/benchmarks.md."""
    kind = machine.kind()
    path = HERE / f"results-{kind}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept |= {part: results, "machine": kept.get("machine", {}) | {part: measured}}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    fill(PAGE, f"{kind} {part}", "\n\n".join(_shown))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds (at least 10); the median is reported")
    parser.add_argument(
        "--quick", action="store_true", help="check that everything runs: one round, small sizes, nothing written"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="measure these parts only; the others keep their results"
    )
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else max(10, arguments.rounds)
    warnings.simplefilter("ignore")  # of the peers
    measured = f"torch {torch.__version__}, {machine.describe()}, median of {rounds}, interleaved"
    wider = (1536, 2048) if machine.native_bf16() else ()  # in fp32 these two would take ten minutes
    parts: dict[str, Callable[[], Any]] = {
        "hidden_matrices": lambda: hidden_matrices(rounds),
        "whole_models": lambda: whole_models(rounds, quick=arguments.quick),
        "correct": lambda: correction_overhead(rounds),
        "memory": memory,
        "monitor": lambda: monitoring(rounds),
        "simulate": lambda: simulating(20 if arguments.quick else 300),
        "scaling": lambda: scaling(
            rounds if arguments.quick else 10,
            (256, 384) if arguments.quick else (256, 384, 512, 768, 1024, *wider),
            (1, 2) if arguments.quick else (1, 3, 6, 12, 24),
        ),
    }
    chosen = arguments.only or list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    for name in chosen:
        _shown[:] = []
        if name in HEADED or arguments.only:
            show(f"Measured with {measured}.")
        results = parts[name]()
        if not arguments.quick:
            write(name, results, measured)


if __name__ == "__main__":
    main()
