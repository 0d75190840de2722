"""Tests with other people's libraries. Nothing is downloaded: models come from configuration."""

import importlib.util
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # distributed_worker and others

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "ACCELERATE_USE_CPU": "true",
    "TOKENIZERS_PARALLELISM": "false",
}

# Registries offer torchvision built for CUDA only. Beside a CPU torch its operators do not load, and importing it fails
# on the two that it describes unconditionally; with these declared the rest, which timm and transformers use, works.
if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
