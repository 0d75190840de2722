"""One thread: the tensors here are small, and two busy test runs on two cores would wait for each other."""

import torch

torch.set_num_threads(1)
