"""A model and data for loops that bring none: a classifier with a named output layer, and numbered batches."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution, a norm, a hidden layer and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.hidden = nn.Linear(64, 16)
        self.head = nn.Linear(16, 5)

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(torch.relu(self.norm(self.conv(x))).flatten(1))))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return the batch of this number, always the same."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 1, 4, 4, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def loss_of(model: nn.Module, step: int, size: int = 8) -> Tensor:
    x, y = batch(step, size)
    return nn.functional.cross_entropy(model(x), y)
