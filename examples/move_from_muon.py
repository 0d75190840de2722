"""Let one ScionC continue a run that Muon (for matrices) and AdamW (for the rest) began.

python examples/move_from_muon.py [steps]
"""

import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import steadynorm as sn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
torch.manual_seed(0)
teacher = torch.randn(16, 10)
model = nn.Sequential(
    nn.Embedding(100, 16), nn.Flatten(), nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 10)
)
ratio = sn.schedule.cosine(steps)


def train(optimizers: list, schedulers: list, first: int, last: int) -> None:
    for _ in range(first, last):
        words = torch.randint(100, (64, 4))
        loss = nn.functional.cross_entropy(model(words), teacher[words % 16].sum(1).argmax(1))
        loss.backward()
        for stepped in (*optimizers, *schedulers):
            stepped.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    print(f"step {last}: loss {loss.item():.3f}")


# The first half has two optimizers and two schedulers.
muon = torch.optim.Muon([("2.weight", model[2].weight)], lr=0.02, weight_decay=0.1)
rest = [(name, p) for name, p in model.named_parameters() if name != "2.weight"]
adamw = torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.1)
train([muon, adamw], [LambdaLR(muon, ratio), LambdaLR(adamw, ratio)], 0, steps // 2)

# The second half has one. Effective lr, steady norm and momentum are kept, and the decay is corrected from now on.
optimizer, table = sn.convert([muon, adamw], model, output="4")
print(table)
train([optimizer], [LambdaLR(optimizer, ratio, last_epoch=steps // 2 - 1)], steps // 2, steps)
