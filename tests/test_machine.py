"""Which path a machine takes, and the override that applies everywhere."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_no_sync import OPTIMIZERS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import steadynorm as sn
from steadynorm import machine
from steadynorm.lab.train import tasks
from steadynorm.lab.train.config import Config
from steadynorm.lab.train.loop import train
from steadynorm.lab.train.recipes import RECIPES
from steadynorm.monitor.norms import l2_norms
from steadynorm.polar import Polar, accelerator

CPU = torch.device("cpu")


def tiny(out) -> Config:
    recipe = RECIPES["gpt"]
    task = replace(recipe.task, model=replace(recipe.task.model, layers=1, width=16, heads=2), eval_tokens=1536)
    return replace(recipe, task=task, out=out, steps=2, batch=2, eval_every=2, save_every=1, tensorboard=False)


@pytest.mark.parametrize(("variable", "dtype"), [("0", torch.float32), ("1", torch.bfloat16)])
def test_the_override_decides_dtype_autocast_and_kind(variable, dtype, monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, variable)
    assert machine.matmul_dtype(CPU) == Polar().working_dtype(torch.float32, CPU, (4, 4)) == dtype
    assert machine.autocast_bf16(CPU) == (dtype == torch.bfloat16)
    assert machine.kind() == {"0": "fp32", "1": "native-bf16"}[variable]
    assert f"{machine.VARIABLE}={variable}" in machine.describe()


def test_the_error_for_an_unknown_override_names_its_values(monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"STEADYNORM_NATIVE_BF16='yes'.*0 or 1"):
        machine.native_bf16()


@pytest.mark.parametrize(("variable", "bf16"), [("0", False), ("1", True)])
def test_bf16_auto_is_decided_by_the_machine_and_written_into_the_run(variable, bf16, tmp_path, monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, variable)
    seen, loss = set(), tasks.GptTask.loss

    def spy(self, model, batch):
        seen.add(torch.is_autocast_enabled("cpu"))
        return loss(self, model, batch)

    monkeypatch.setattr(tasks.GptTask, "loss", spy)
    train(tiny(tmp_path / "run"), quiet=True)
    assert seen == {bf16}
    assert json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["bf16"] is bf16


def test_a_run_resumed_on_another_kind_of_machine_stays_as_it_began(tmp_path, monkeypatch):
    monkeypatch.setenv(machine.VARIABLE, "1")
    train(tiny(tmp_path), quiet=True)
    monkeypatch.setenv(machine.VARIABLE, "0")
    assert train(tiny(tmp_path), quiet=True).finished
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["bf16"] is True


def test_every_recipe_leaves_bf16_to_the_machine_or_turns_it_off():
    assert {name: recipe.bf16 for name, recipe in RECIPES.items() if recipe.bf16 is not False} == dict.fromkeys(
        ("gpt", "gpt-124m-fineweb-edu", "vit-s16-imagenet"), "auto"
    )


# --- devices without fp64


class NoFp64(TorchDispatchMode):
    """Fail on any fp64 tensor on MPS, as that device does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            assert not (isinstance(t, torch.Tensor) and t.device.type == "mps" and t.dtype == torch.float64), func
        return out


@pytest.mark.parametrize("name", ["ScionC balance cautious", "LionC", "RenormalizedAdamW", "AdamC balance"])
def test_a_monitored_step_on_fake_mps_tensors_makes_none_in_fp64(name):
    with FakeTensorMode(allow_non_fake_inputs=True), NoFp64():
        params = [torch.nn.Parameter(torch.empty(4, 4, device="mps")), torch.nn.Parameter(torch.empty(4, device="mps"))]
        optimizer = OPTIMIZERS[name](params)
        sn.Monitor(optimizer, alignment=True)
        for capturable in (False, True):
            for group in optimizer.param_groups:
                group["capturable"] = capturable
            for p in params:
                p.grad = torch.empty_like(p)
            optimizer.step()


def test_norms_of_shards_on_fake_mps_tensors_are_summed_in_fp32():
    shard = SimpleNamespace(group="a process group", sum_over_shards=lambda x: x)
    with FakeTensorMode(), NoFp64():
        l2_norms([torch.empty(4, 4, device="mps")], [shard])  # pyright: ignore[reportArgumentType]


def test_the_check_itself_catches_fp64():
    with FakeTensorMode(), NoFp64(), pytest.raises(AssertionError):
        torch.empty(3, device="mps").double()


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1.0, 1e30])
def test_without_fp64_matrices_of_any_size_are_scaled_alike(scale, monkeypatch):
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).mul_(scale)
    expected = accelerator.scale_and_round([x], torch.float16)
    monkeypatch.setattr(accelerator, "widest_dtype", lambda device: torch.float32)
    torch.testing.assert_close(accelerator.scale_and_round([x], torch.float16), expected)
