"""A single-process step enters no distributed code of ours, and only the files that CONTRIBUTING lists."""

import re
import subprocess
import sys
from pathlib import Path

import torch

import steadynorm as sn

ROOT = Path(__file__).parent.parent
PACKAGE = Path(sn.__file__).parent

STEP = """
import torch, steadynorm as sn
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = sn.ScionC(sn.param_groups(model, output="2"))
before = model[0].weight.detach().clone()
for _ in range(2):
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
assert not torch.equal(before, model[0].weight)
"""
BLOCKED = f"""
import sys

class Blocked:
    asked = []
    def find_spec(self, name, path=None, target=None):
        if name.startswith("steadynorm.optim.sharding"):
            self.asked.append(name)
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
{STEP}
print(*Blocked.asked)
"""


def test_a_plain_step_runs_where_sharding_cannot_be_imported_and_never_asks_for_it():
    finished = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, encoding="utf-8", timeout=900)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == ""


def files_entered(call) -> set[str]:
    """Return the files of the package in which a call runs code."""
    files, before = set(), sys.getprofile()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        call()
    finally:
        sys.setprofile(before)
    inside = (Path(file) for file in files if Path(file).is_relative_to(PACKAGE))
    return {path.relative_to(PACKAGE).as_posix() for path in inside}


def test_a_warm_step_enters_the_files_that_contributing_lists():
    weight = torch.nn.Parameter(torch.randn(8, 8))
    weight.grad = torch.randn(8, 8)
    optimizer = sn.ScionC([weight], lmo="spectral")
    optimizer.step()
    section = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## One step, file by file")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert files_entered(optimizer.step) == {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
