"""The JAX twin as others meet it: without torch, on many devices, its doctests, its example and its page."""

import needs_jax  # noqa: F401  # isort: skip

import doctest
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (ROOT / "src" / "steadynorm" / "jax").glob("*.py") if path.stem != "__init__")
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
import jax.numpy as jnp
import steadynorm.jax as sj
params = {"up": {"kernel": jnp.ones((4, 8))}, "head": {"kernel": jnp.ones((8, 2))}}
for tx in (sj.scionc(0.01), sj.scionc(0.01, overlap="exact"), sj.scion(0.01), sj.adamc(1e-3), sj.lionc(1e-4), sj.muonc(0.02)):
    tx.update(params, tx.init(params), params)
print(sj.explain(sj.label_params(params)).count("kernel"), sys.modules["torch"])
"""


def python(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, encoding="utf-8", timeout=900, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_works_where_torch_is_not_installed():
    assert python("-c", WITHOUT_TORCH) == "3 None"


def test_importing_steadynorm_does_not_import_jax():
    assert python("-c", "import sys, steadynorm, steadynorm.theory; print('jax' in sys.modules)") == "False"


@pytest.mark.parametrize("axes", ["automatic", "explicit"])
def test_four_devices_end_where_one_does_and_the_state_follows_the_parameters(axes):
    flags = "--xla_force_host_platform_device_count=4"
    printed = python(Path(__file__).with_name("sharded_jobs.py"), axes, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    lines = [line.split() for line in printed.splitlines()]
    assert [line[0] for line in lines] == ["scionc", "injected", "adamc", "mesh-not-set"]
    for name, devices, apart, follows, stays in lines:
        assert devices == "4" and float(apart) < 1e-5, (name, apart)
        assert (follows, stays) == ("True", "True"), name


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    module = importlib.import_module(f"steadynorm.jax.{name}")
    assert doctest.testmod(module).failed == 0


def test_the_example_holds_the_hidden_norm_while_the_lr_vanishes(monkeypatch, capsys):
    script = ROOT / "examples" / "jax_scionc.py"
    monkeypatch.setattr(sys, "argv", [str(script), "240"])
    runpy.run_path(str(script), run_name="__main__")
    norms = [float(norm) for norm in re.findall(r"norm of Dense_1 ([\d.]+)", capsys.readouterr().out)]
    assert len(norms) == 8 and norms[-1] > 0.9 * norms[3]


def test_the_code_of_the_page_runs():
    page = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    names: dict = {}
    blocks = re.findall(r"<!-- not run: needs jax.*? -->\n+```python\n(.*?)```", page, re.S)
    assert len(blocks) >= 3
    for code in blocks:
        exec(compile(code, "docs/jax.md", "exec"), names)
