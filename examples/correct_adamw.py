"""Correct AdamW with one line: the decay follows the learning rate, so the weight norm does not sink with it.

python examples/correct_adamw.py [steps]
"""

import sys
from statistics import fmean, stdev

import torch
from torch import nn

import steadynorm as sn
from steadynorm.lab.data.sotu import read_addresses

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
text = torch.frombuffer(
    bytearray("".join(address.text for address in read_addresses()[-40:]).encode()), dtype=torch.uint8
).long()


def train(corrected: bool, seed: int) -> tuple[float, float, float]:
    """Predict the next byte from eight; return a hidden layer's norm half-way and at the end, and the final mean loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(),
        nn.Linear(128, 128, bias=False), nn.LayerNorm(128), nn.GELU(),
        nn.Linear(128, 128, bias=False), nn.LayerNorm(128), nn.GELU(),
        nn.Linear(128, 256),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1.0)
    if corrected:
        sn.correct(optimizer, skip=[model[8].weight])  # the output layer keeps constant decay
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    norms, losses = [], []
    for _ in range(steps):
        sample = text[torch.randint(len(text) - 9, (32, 1)) + torch.arange(9)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(sample[:, :8]), sample[:, 8])
        loss.backward()
        optimizer.step()
        scheduler.step()
        norms.append(model[5].weight.norm().item())
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return norms[steps // 2], norms[-1], fmean(last)


print("hidden layer's norm  half-way  at the end  loss, 3 seeds")
for corrected in (False, True):
    middle, end, loss = zip(*(train(corrected, seed) for seed in range(3)), strict=True)
    name = "corrected" if corrected else "AdamW"
    print(f"{name:<19} {fmean(middle):>9.2f} {fmean(end):>11.2f} {fmean(loss):>5.2f} ± {stdev(loss):.2f}")
