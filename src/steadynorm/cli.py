"""The command line: parse, call, print."""

import argparse
import sys

from steadynorm import __version__, bench, simulate, theory

_SYSTEMS = (
    ("vector of 512", "bias", (512,)),
    ("square, 32 x 32", "spectral", (32, 32)),
    ("1:4, 16 x 64", "spectral", (16, 64)),
)


def demo() -> None:
    """Predicted against simulated steady-state norm, for the paper's three kinds of parameter."""
    lr, weight_decay, alpha = 0.05, 0.1, 0.1
    print(
        f"theta <- (1 - lr*decay) theta + lr lmo(m): lr {lr}, decay {weight_decay}, alpha {alpha}, random gradients.\n"
        "Where does |theta|^2 / |update|^2 settle? The paper's formula takes updates to overlap as their inputs do;\n"
        "the overlap kernel knows that an lmo bends them, most of all for square matrices.\n"
    )
    print(f"{'':18}{'paper':>8}{'exact':>8}{'simulated':>18}{'paper/sim.':>12}{'exact/sim.':>12}")
    for label, lmo, shape in _SYSTEMS:
        paper = theory.steady_norm_sq(lr, weight_decay, alpha, limit=True)
        exact = theory.steady_norm_sq(lr, weight_decay, alpha, overlap=theory.overlap(lmo, shape))
        seen = simulate.steady_norm_sq(lmo, shape, lr=lr, weight_decay=weight_decay, alpha=alpha, half_lives=16)
        measured = f"{seen.mean:.4f} ± {seen.error:.4f}"
        print(
            f"{label:18}{paper:8.4f}{exact:8.4f}{measured:>18}{paper / seen.mean:12.3f}{exact / seen.mean:12.3f}",
            flush=True,
        )
    half_life = theory.half_life(lr, weight_decay)
    print(
        f"\nHalf-life of a weight: {half_life:.0f} steps. Simulated: 16 seeds, 16 half-lives, mean over the last 8, ± one "
        "standard error.\nScionC(overlap='exact') sets the decay from the exact column, at every step of any schedule."
    )


def run_bench(model: str, rounds: int) -> None:
    """Step times of ours and torch's optimizers on the hidden matrices of a model."""
    contenders = bench.own_and_torch()
    times = bench.step_times(contenders, bench.MODELS[model], rounds)
    errors = {each.name: bench.polar_errors(each.polar) for each in contenders if each.polar is not None}
    print(f"{model}, hidden matrices, median of {rounds} interleaved rounds\n")
    print(bench.table(contenders, times, errors))


def main(argv: list[str] | None = None) -> int:
    """Entry point of `steadynorm`."""
    parser = argparse.ArgumentParser(
        prog="steadynorm", description="Corrected decoupled weight decay: the norm stays where you put it."
    )
    parser.add_argument("--version", action="version", version=f"steadynorm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("demo", help="predicted against simulated steady-state norm, in half a minute")
    timing = commands.add_parser("bench", help="step time of these optimizers and torch's, side by side")
    timing.add_argument("--model", choices=sorted(bench.MODELS), default="vit-s16")
    timing.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args(argv)
    if arguments.command == "bench":
        run_bench(arguments.model, max(1, arguments.rounds))
    else:
        demo()
    return 0


if __name__ == "__main__":
    sys.exit(main())
