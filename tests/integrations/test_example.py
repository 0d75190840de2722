"""examples/huggingface_trainer.py runs as it is."""

import runpy
import sys
from pathlib import Path

import pytest
from needs import library

from steadynorm import records

library("transformers")
library("accelerate")

SCRIPT = Path(__file__).parents[2] / "examples" / "huggingface_trainer.py"


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")
def test_the_hugging_face_example_trains_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "8", str(tmp_path)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    run = records.read(tmp_path / "monitor")
    assert run.steps.tolist() == list(range(1, 9))
    assert run.columns["lr"][-1] < run.columns["lr"].max()
