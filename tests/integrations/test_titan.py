"""FSDP2 as torchtitan uses it, on two processes."""

import math
from pathlib import Path

import distributed_worker as worker
import pytest
import torch
from following import MAKERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package"),
]


def test_a_torchtitan_loop_resumes_from_dcp_as_if_unbroken(tmp_path: Path):
    for report in worker.run(2, "titan_jobs:titan", tmp_path):
        for name in MAKERS:
            assert report[f"{name}: differing"] == []
            assert math.isfinite(report[f"{name}: loss"])
        assert math.isfinite(report["bf16: loss"])
