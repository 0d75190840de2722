"""Every example runs unchanged for a few steps; those for Hugging Face and JAX are in tests/integrations and tests/on_jax."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steadynorm import records

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
STEPS = 8
ELSEWHERE = {"fsdp2", "huggingface_trainer", "jax_scionc"}  # many processes, other libraries


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(script: Path):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"examples/{script.name}" in text.split('"""')[1]


@pytest.mark.parametrize("script", [each for each in SCRIPTS if each.stem not in ELSEWHERE], ids=lambda path: path.stem)
def test_every_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), str(STEPS)])
    before = torch.random.get_rng_state()
    runpy.run_path(str(script), run_name="__main__")
    torch.random.set_rng_state(before)
    printed = capsys.readouterr().out
    assert printed and "nan" not in printed
    for run in tmp_path.glob("runs/*"):
        assert records.read(run).steps.tolist() == list(range(1, STEPS + 1))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.slow
def test_the_fsdp2_example_runs_under_torchrun(tmp_path: Path):
    """Both processes see the same weight norm, and each has half of the momentum."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, EXAMPLES / "fsdp2.py", str(STEPS)], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=900
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split("weight norm ")[1] for line in done.stdout.splitlines() if line.startswith("rank")]
    assert len(lines) == 2 and len(set(lines)) == 1
    assert lines[0].endswith("momentum (64, 128)")
