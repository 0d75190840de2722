"""What a monitor costs: a training step of the desk GPT with and without one, interleaved.

python -m benchmarks.monitor [--rounds 60] [--threads 1]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import steadynorm as sn
from steadynorm.lab.models.gpt import GPT, GPTConfig

DESK = GPTConfig(layers=4, width=128, heads=4, vocab=256, context=256)
BATCH = 8  # sequences: 2048 bytes a step
MEASURE = 50  # steps between calls of measure()


def trainer(*, monitored: bool, config: GPTConfig = DESK) -> Callable[[], tuple[float, float]]:
    """A function that takes one training step of ScionC and returns (seconds of all of it, of the optimizer's part).

    The optimizer's part holds all that the monitor does: its hooks, logging the loss, and fetching the records.
    """
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = sn.ScionC(sn.param_groups(model, lr=0.02, output_lr=0.3), polar_steps=5)
    monitor = sn.Monitor(optimizer, model, flush=MEASURE) if monitored else None
    tokens = torch.randint(0, config.vocab, (BATCH, config.context))
    steps = 0

    def step() -> tuple[float, float]:
        nonlocal steps
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens, targets=tokens)
        loss.backward()
        middle = time.perf_counter()
        if monitor is not None:
            monitor.log(loss=loss)
        optimizer.step()
        steps += 1
        if monitor is not None and steps % MEASURE == 0:
            monitor.measure()
        end = time.perf_counter()
        return end - start, end - middle

    return step


def overhead(rounds: int = 60) -> dict[str, float]:
    """Seconds of a step, and what a monitor with alignment and forecast at every step adds to it.

    `overhead` is the difference of the optimizers' parts over the time of a whole step: forward and backward, the same in
    both, would only add their noise. `overhead_of_whole_steps` has them in. Medians of pairs run one after the other;
    the mean cost of measure() is added, for a median would not see it.
    """
    plain, watched = trainer(monitored=False), trainer(monitored=True)
    for each in (plain, watched) * 3:
        each()
    whole, parts, both = [], [], []
    for k in range(rounds):
        first, second = (plain, watched) if k % 2 else (watched, plain)
        times = {each: each() for each in (first, second)}
        whole.append(times[plain][0])
        both.append(times[watched][0] / times[plain][0])
        parts.append(times[watched][1] - times[plain][1])
    step, added = statistics.median(whole), statistics.median(parts) + cost_of_measure() / MEASURE
    return {
        "step_seconds": step,
        "added_seconds": added,
        "overhead": added / step,
        "overhead_of_whole_steps": statistics.median(both) - 1,
    }


def cost_of_measure() -> float:
    """Seconds of one measure() of MEASURE records."""
    torch.manual_seed(0)
    model = GPT(DESK)
    optimizer = sn.ScionC(sn.param_groups(model), polar_steps=5)
    monitor = sn.Monitor(optimizer, model, flush=MEASURE)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for _ in range(MEASURE):
        optimizer.step()
    start = time.perf_counter()
    monitor.measure()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(json.dumps(overhead(given.rounds), indent=2))


if __name__ == "__main__":
    main()
