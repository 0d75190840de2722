"""Sharded bf16 weights with their residual are sharded fp32 weights, bit for bit, on two gloo processes."""

from typing import Any

import distributed_worker as worker
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict[str, Any]]:
    return worker.run(2, "residual_jobs:two", tmp_path_factory.mktemp("residual"))


def test_sharded_steps_on_bf16_weights_are_those_of_fp32_weights_bit_for_bit(reports):
    for report in reports:
        assert len(report["followed"]) == 16
        assert not any(report["followed"].values()), report["followed"]


def test_residuals_are_sharded_as_the_weights_are(reports):
    """With mesh= every rank writes whole weights, and so it keeps whole residuals."""
    for report in reports:
        assert 0.3 < report["shares"]["fsdp"] < 0.7
        assert report["shares"]["ddp"] == 1.0


@pytest.mark.parametrize("key", ["resumed", "resharded", "handed over", "gathered"])
def test_checkpoints_keep_every_bit(key, reports):
    """Saved and loaded by DCP, in the same layout and another, as plain state dicts, and gathered on one rank."""
    for report in reports:
        assert report[key]
        assert not any(report[key].values()), report[key]
