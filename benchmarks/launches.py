"""Count what a GPU would be asked to do in one optimizer step on GPT-124M, ours beside torch's Muon.

`steadynorm.lab.launch_counter` says what is counted, and how.

python -m benchmarks.launches [--ops]
"""

import argparse

from steadynorm.lab.device_bench import GPT_124M as HIDDEN
from steadynorm.lab.launch_counter import CONTENDERS, Shape, count_step, table

EMBEDDINGS: tuple[Shape, ...] = ((50304, 768), (1024, 768))
VECTORS: tuple[Shape, ...] = ((768,),) * 25
MODELS = {"GPT-124M, hidden matrices": HIDDEN, "GPT-124M, all parameters": HIDDEN + EMBEDDINGS + VECTORS}


def main() -> None:
    """Print a table per set of parameters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", action="store_true", help="print which operations launch how many kernels")
    show_operations = parser.parse_args().ops
    for model, shapes in MODELS.items():
        counters = {name: count_step(make, shapes) for name, make in CONTENDERS.items()}
        counts = table({name: counter.counts for name, counter in counters.items()})
        print(f"{model}, one step\n\n{counts}\n")
        for name, counter in counters.items() if show_operations else ():
            print(name, *(f"{count:6} {operation}" for operation, count in counter.by_name.most_common()), sep="\n")


if __name__ == "__main__":
    main()
