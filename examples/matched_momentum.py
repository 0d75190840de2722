"""Anneal by momentum: alpha rises so that the effective lr follows a cosine, and lr falls only once alpha has reached 1.

python examples/matched_momentum.py [steps]
"""

import sys

import torch
from torch import nn

import steadynorm as sn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
cosine = sn.schedule.cosine(steps)
matched = sn.schedule.MatchedMomentum(0.1, 1.0, cosine)  # alpha rises from 0.1 to 1, and then lr takes over
SCHEDULES = {
    "cosine of lr": {"scale": {"lr": cosine}},
    "matched momentum": {"scale": {"lr": matched.lr}, "value": {"alpha": matched.alpha}},
}


def train(schedule: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128, bias=False), nn.GELU(), nn.Linear(128, 10, bias=False))
    teacher = torch.randn(32, 10)
    optimizer = sn.ScionC(sn.param_groups(model, lr=0.02, output="2"))
    scheduler = sn.Scheduler(optimizer, **schedule)
    hidden = optimizer.param_groups[0]
    for step in range(steps):
        if step % (steps // 4) == 0:
            effective = sn.theory.effective_lr(hidden["lr"], hidden["alpha"])
            decay, norm = optimizer.weight_decay_of(model[0].weight), model[0].weight.norm().item()
            values = (step, hidden["lr"], hidden["alpha"], effective, decay, norm)
            print("step {:>4}  lr {:.4f}  alpha {:.3f}  effective lr {:.4f}  decay {:.4f}  norm {:.2f}".format(*values))
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x @ teacher + torch.randn(64, 10)).argmax(1))
        loss.backward()
        optimizer.step()
        scheduler.step()
    print(f"loss {loss.item():.3f}\n")


for name, schedule in SCHEDULES.items():
    print(name)
    train(schedule)
