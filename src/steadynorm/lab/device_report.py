"""Say in tables and words what `device_bench` measured."""

from dataclasses import asdict
from typing import Any

from steadynorm.lab.bench import markdown_table
from steadynorm.lab.device_bench import GRAPH, KERNELS, MUON, OURS, Result
from steadynorm.lab.launch_counter import LAUNCH_SECONDS
from steadynorm.lab.launch_counter import table as launches_table


def to_json(result: Result) -> dict[str, Any]:
    """Return plain values, the verdict included."""
    return {**asdict(result), "verdict": verdict(result)}


def verdict(result: Result) -> str:
    """Return what came out, in sentences to paste into an issue."""
    ours, theirs, kernels = result.step_ms[OURS], result.step_ms[MUON], result.launches[OURS].kernels
    lines = [
        f"{result.model} ({result.parameters / 1e6:.0f} M parameters in hidden matrices), {result.device}, "
        f"torch {result.torch}, median of {result.rounds}.",
        f"{OURS}: {ours:.2f} ms per step; torch's Muon: {theirs:.2f} ms. {compare(ours, theirs)}",
    ]
    if result.is_gpu:
        host = 1e3 * LAUNCH_SECONDS * kernels
        bound = "launches take most of it" if host > ours / 2 else "launches do not bound it"
        lines.append(
            f"{kernels:,} kernels at {1e6 * LAUNCH_SECONDS:g} us take the host {host:.2f} ms, {100 * host / ours:.0f} % of the step: {bound}."
        )
    for name, label in ((KERNELS, "Triton kernels"), (GRAPH, "CUDA graph")):
        if name in result.step_ms:
            lines.append(f"{label}: {result.step_ms[name]:.2f} ms. {compare(result.step_ms[name], ours)}")
        else:
            lines.append(f"{label}: not available ({result.not_available[name]}).")
    if not result.is_gpu:
        lines.append("A CPU was timed, which says nothing about GPUs.")
    return "\n".join(lines)


def compare(milliseconds: float, reference: float) -> str:
    """Say how two times compare.

    >>> compare(2.0, 3.0), compare(3.0, 2.0), compare(1.0, 1.01)
    ('That is 1.50 times as fast.', 'That is 1.50 times as slow.', 'That is about the same.')
    """
    ratio = reference / milliseconds
    if 0.97 < ratio < 1.03:
        return "That is about the same."
    return f"That is {ratio:.2f} times as fast." if ratio > 1 else f"That is {1 / ratio:.2f} times as slow."


def report(result: Result) -> str:
    """Return everything as Markdown, the verdict last."""
    sections = {
        "What a step asks of a GPU, counted": launches_table(result.launches),
        "Time of a step": markdown_table(("optimizer", "ms", "faster than torch's Muon"), [
            *((name, f"{value:.2f}", f"{result.step_ms[MUON] / value:.2f}x") for name, value in result.step_ms.items()),
            *((name, "not available", reason) for name, reason in result.not_available.items()),
        ]),
        f"Phases of {OURS}" + ("" if result.is_gpu else ", on one thread"): markdown_table(
            ("phase", "ms", "share"),
            [
                (name, f"{value:.2f}", f"{100 * value / result.phases_ms['whole step']:.0f} %")
                for name, value in result.phases_ms.items()
            ],
        ),
        "Polar error": markdown_table(
            ("dtype", *next(iter(result.errors.values()))),
            [(dtype, *(f"{value:.3f}" for value in errors.values())) for dtype, errors in result.errors.items()],
        ),
        "Verdict, to paste into an issue": verdict(result),
    }  # fmt: skip
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in sections.items())
