"""Count what a GPU would be asked to do in one optimizer step on GPT-124M, ours beside torch's Muon.

`steadynorm.lab.launch_counter` says what is counted, and how.

python -m benchmarks.launches [--json] [--ops]
"""

import argparse
import json
from dataclasses import asdict

from steadynorm.lab.device_bench import GPT_124M as HIDDEN
from steadynorm.lab.launch_counter import CONTENDERS, Counts, Shape, count_step, table

EMBEDDINGS: tuple[Shape, ...] = ((50304, 768), (1024, 768))
VECTORS: tuple[Shape, ...] = ((768,),) * 25
MODELS = {"GPT-124M, hidden matrices": HIDDEN, "GPT-124M, all parameters": HIDDEN + EMBEDDINGS + VECTORS}


def main() -> None:
    """Print a table per set of parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--ops", action="store_true", help="print which operations launch how many kernels")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Counts]] = {}
    for model, shapes in MODELS.items():
        counters = {name: count_step(make, shapes) for name, make in CONTENDERS.items()}
        results[model] = {name: counter.counts for name, counter in counters.items()}
        if not arguments.json:
            print(f"{model}, one step\n\n{table(results[model])}\n")
        if arguments.ops:
            for name, counter in counters.items():
                print(name, *(f"{count:6} {operation}" for operation, count in counter.by_name.most_common()), sep="\n")
    if arguments.json:
        print(json.dumps(results, default=asdict))


if __name__ == "__main__":
    main()
