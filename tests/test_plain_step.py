"""A single-process step enters no distributed code of ours: placement is chosen when buckets are made."""

import subprocess
import sys

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
sys.modules["steadynorm.optim.sharding"] = None
{STEP}
"""
LOADED = f"""
import sys
{STEP}
print(*sorted(name for name in sys.modules if name.startswith("steadynorm.optim.sharding")))
"""


def run(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=900)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_a_plain_step_runs_where_sharding_cannot_be_imported():
    run(BLOCKED)


def test_a_plain_step_loads_no_sharding_code():
    assert run(LOADED) == ""
