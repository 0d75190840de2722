"""Train a small convolutional network with ScionC to tell the direction of stripes, on generated images.

python examples/scionc_vision.py [steps]
"""

import math
import sys

import torch
from torch import nn

import steadynorm as sn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
CLASSES, SIZE = 8, 16


def batch(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stripes of random width, position and colour under noise, and their direction as the class."""
    label = torch.randint(CLASSES, (count,))
    angle = math.pi * (label + 0.3 * torch.rand(count)) / CLASSES
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    waves = torch.sin((0.6 + torch.rand(count, 1, 1)) * along + 2 * math.pi * torch.rand(count, 1, 1))
    return waves[:, None] * torch.randn(count, 3, 1, 1) + torch.randn(count, 3, SIZE, SIZE), label


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.GELU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    nn.Linear(64, CLASSES),
)  # fmt: skip
groups = sn.param_groups(model, lr=0.01, output="9")  # "9" is the name of the last layer
print(sn.explain(groups))  # convolutions are matrices of d_out x (d_in k k)
optimizer = sn.ScionC(groups)
scheduler = sn.Scheduler(optimizer, scale={"lr": sn.schedule.cosine(steps, warmup=steps // 20)})
for step in range(1, steps + 1):
    images, labels = batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 50 == 0 or step == steps:
        print(f"step {step}: loss {loss.item():.3f}")
images, labels = batch(512)
print(f"accuracy {(model(images).argmax(1) == labels).float().mean().item():.3f} (chance {1 / CLASSES})")
