"""Work out the step time that counted work implies on three GPUs, from their published peaks (docs/roofline.md).

Nothing here is measured. The counts come from `steadynorm.lab.launch_counter`, and the model is

    device = sum over kernels of max(operations / peak, bytes / bandwidth)
    host   = kernels x LAUNCH_SECONDS
    step   = max(device, host), because the host runs ahead of the device

python -m benchmarks.roofline           # count everything, write benchmarks/roofline.json, fill the page
python -m benchmarks.roofline --page    # only fill the page, from that file
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launches import HIDDEN
from benchmarks.pages import filled
from steadynorm.lab.bench import markdown_table
from steadynorm.lab.launch_counter import CONTENDERS, LAUNCH_SECONDS, LaunchCounter, Shape, Work, count_step

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "roofline.md"
RESULTS = HERE / "roofline.json"


class Gpu(NamedTuple):
    """Published peaks of a GPU: dense fp16 products on tensor cores, and memory bandwidth."""

    tflop_per_second: float
    gigabytes_per_second: float


GPUS = {
    "A100": Gpu(312, 2039),  # SXM, 80 GB
    "H100": Gpu(989, 3350),  # SXM
    "B200": Gpu(2250, 8000),
}


def llama_layer(width: int, mlp: int, kv: int) -> tuple[Shape, ...]:
    """Return the matrices of one layer: queries, keys, values, output, and the three of a gated MLP.

    >>> llama_layer(4, 8, 2)
    ((4, 4), (2, 4), (2, 4), (4, 4), (8, 4), (8, 4), (4, 8))
    """
    return ((width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width), (width, mlp))


MODELS: dict[str, tuple[Shape, ...]] = {
    "GPT-124M": HIDDEN,
    "1B": llama_layer(2048, 8192, 512) * 16,
    "7B": llama_layer(4096, 11008, 4096) * 32,
}


@dataclass(frozen=True)
class Record:
    """What one step of one optimizer asks for on one model's hidden matrices, and how long the devices need at least."""

    model: str
    optimizer: str
    parameters: int
    kernels: int
    tflop: float
    gigabytes: float
    temporary_mebibytes: float
    device_ms: dict[str, float]

    @property
    def host_ms(self) -> float:
        """The host's time to launch all kernels."""
        return 1e3 * LAUNCH_SECONDS * self.kernels

    def step_ms(self, gpu: str) -> float:
        """Return the time of a step: that of the device, or of the host where launching takes longer."""
        return max(self.host_ms, self.device_ms[gpu])


def device_seconds(work: Iterable[Work], gpu: Gpu) -> float:
    """Return the time of all kernels at peak: each as long as its operations or its bytes take, whichever is longer.

    >>> device_seconds([Work("product", 1, 624.0, 1.0), Work("copy", 1, 0.0, 2039.0)], GPUS["A100"])
    3.0
    """
    return sum(max(entry.tflop / gpu.tflop_per_second, entry.gigabytes / gpu.gigabytes_per_second) for entry in work)


def record(model: str, optimizer: str, shapes: Sequence[Shape], counter: LaunchCounter) -> Record:
    """Return the record of one counted step."""
    return Record(
        model,
        optimizer,
        sum(math.prod(shape) for shape in shapes),
        **asdict(counter.counts),
        device_ms={name: 1e3 * device_seconds(counter.work, gpu) for name, gpu in GPUS.items()},
    )


def count(models: Mapping[str, Sequence[Shape]] = MODELS) -> list[Record]:
    """Return the records of every optimizer on every model."""
    records = []
    for model, shapes in models.items():
        for optimizer, make in CONTENDERS.items():
            records.append(record(model, optimizer, shapes, count_step(make, shapes)))
            print(records[-1], flush=True)
    return records


def counts_table(records: Sequence[Record]) -> str:
    """Return what was counted as a Markdown table."""
    columns = ["hidden matrices", "optimizer", "kernels", "TFLOP", "GB", "bytes per parameter", "temporaries, MiB"]
    rows = []
    for entry in records:
        counts = f"{entry.kernels:,}", f"{entry.tflop:.2f}", f"{entry.gigabytes:.1f}"
        sizes = f"{1e9 * entry.gigabytes / entry.parameters:.0f}", f"{entry.temporary_mebibytes:.0f}"
        rows.append([entry.model, entry.optimizer, *counts, *sizes])
    return markdown_table(columns, rows, left=(0, 1))


def times_table(records: Sequence[Record]) -> str:
    """Return the computed times as a Markdown table; a step that the host bounds is marked."""
    columns = ["hidden matrices", "optimizer", "launches, ms"]
    columns += [f"{name} {part}, ms" for part in ("device", "step") for name in GPUS]
    rows = []
    for entry in records:
        device = [f"{entry.device_ms[name]:.1f}" for name in GPUS]
        marks = [" (host)" if entry.host_ms > entry.device_ms[name] else "" for name in GPUS]
        step = [f"{entry.step_ms(name):.1f}{mark}" for name, mark in zip(GPUS, marks, strict=True)]
        rows.append([entry.model, entry.optimizer, f"{entry.host_ms:.1f}", *device, *step])
    return markdown_table(columns, rows, left=(0, 1))


def peaks_table() -> str:
    """Return the assumed peaks as a Markdown table."""
    rows = [[name, f"{gpu.tflop_per_second:g}", f"{gpu.gigabytes_per_second:g}"] for name, gpu in GPUS.items()]
    return markdown_table(["GPU", "fp16 products, dense, TFLOP/s", "memory, GB/s"], rows)


def shapes_table() -> str:
    """Return the shapes of every model as a Markdown table."""
    rows = []
    for model, shapes in MODELS.items():
        layers = next(n for n in range(len(shapes), 0, -1) if shapes == shapes[: len(shapes) // n] * n)
        layer = ", ".join(f"{height} x {width}" for height, width in shapes[: len(shapes) // layers])
        size = sum(math.prod(shape) for shape in shapes)
        rows.append([model, f"{size / 1e6:,.0f} M", layer, layers])
    return markdown_table(["hidden matrices", "parameters", "one layer, d_out x d_in", "layers"], rows, left=(0, 2))


def page(text: str, records: Sequence[Record]) -> str:
    """Return the text of the page with its tables filled."""
    tables = {
        "shapes": shapes_table(),
        "counts": counts_table(records),
        "peaks": peaks_table(),
        "times": times_table(records),
    }
    for marker, body in tables.items():
        text = filled(text, marker, body)
    return text


def read() -> list[Record]:
    """Return the recorded counts."""
    entries: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [Record(**entry) for entry in entries]


def main() -> None:
    """Count, write, and fill the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", action="store_true", help="count nothing, and fill the page from the recorded counts")
    if not parser.parse_args().page:
        RESULTS.write_text(json.dumps([asdict(entry) for entry in count()], indent=1) + "\n", encoding="utf-8")
    records = read()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    print(times_table(records))


if __name__ == "__main__":
    main()
