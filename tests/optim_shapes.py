"""Shapes that the tests of our own optimizers share."""

import torch

FP64 = torch.float64


SHAPES = {"matrix": (6, 4), "mate": (6, 4), "vector": (7,), "conv": (4, 2, 3, 3), "stack": (3, 4, 5), "scalar": ()}


MATRIX = (4, 3)
