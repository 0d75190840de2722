"""A training loop as torchtitan has it, on every process: FSDP2 block by block, clipping on shards, a LambdaLR, and DCP
checkpoints of flattened optimizer state. Run by test_titan.py."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from following import MAKERS, Steps, warmup_linear
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import steadynorm as sn

TOTAL, WARMUP, STOP = 8, 3, 5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    def __init__(self, width: int = 12):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Transformer(nn.Module):
    """A transformer of odd sizes, so that shards are uneven."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.tok_embeddings = nn.Embedding(17, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, 17, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class Optimizer(Stateful):
    """torchtitan's container: the optimizer's state by parameter name, flat, so that it can be resharded."""

    def __init__(self, model: nn.Module, optimizer: Any):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=FLAT)


class Model(Stateful):
    def __init__(self, model: nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict)


class Run:
    def __init__(self, make: Callable[[nn.Module], Any], *, half: bool = False):
        torch.manual_seed(0)
        self.model = Transformer()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = make(self.model)
        ratio = functools.partial(warmup_linear, warmup=WARMUP, total=TOTAL)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, ratio)
        self.steps = Steps(self.optimizer)

    def parts(self) -> dict[str, Any]:
        return {
            "model": Model(self.model),
            "optimizer": Optimizer(self.model, self.optimizer),
            "lr_scheduler": self.scheduler,
        }

    def train(self, first: int, last: int) -> float:
        value = 0.0
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
            tokens = torch.randint(0, 17, (2, 6), generator=generator)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()
            )
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            value = loss.item()
        return value

    def weights(self) -> dict[str, Tensor]:
        return {name: p.full_tensor().detach().clone() for name, p in self.model.named_parameters()}


def titan(folder: Path) -> dict[str, Any]:
    """Run each optimizer unbroken, and stopped and resumed from DCP, checking lr and decay at every step.

    Failures raise.
    """
    report: dict[str, Any] = {}
    for name, make in MAKERS.items():
        whole, stopped, resumed = Run(make), Run(make), Run(make)
        report[f"{name}: loss"] = whole.train(0, TOTAL)
        stopped.train(0, STOP)
        dcp.save(stopped.parts(), checkpoint_id=str(folder / name))
        for p in resumed.model.parameters():
            nn.init.zeros_(p)
        dcp.load(resumed.parts(), checkpoint_id=str(folder / name))
        resumed.steps.rows.clear()  # DCP makes state by a step of torch's optimizers, with lr 0
        resumed.train(STOP, TOTAL)
        ratios = [warmup_linear(step, WARMUP, TOTAL) for step in range(TOTAL)]
        whole.steps.check(ratios)
        resumed.steps.check(ratios[STOP:])
        one, two = whole.weights(), resumed.weights()
        report[f"{name}: differing"] = [key for key in one if not torch.equal(one[key], two[key])]
    half = Run(lambda model: sn.ScionC(sn.param_groups(model)), half=True)
    report["bf16: loss"] = half.train(0, TOTAL)
    return report
