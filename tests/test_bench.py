"""The benchmark's own arithmetic; times themselves are never asserted."""

import math

import pytest
import torch

import steadynorm as sn
from benchmarks import cost_model
from steadynorm import lmo as lmos
from steadynorm.cli import main
from steadynorm.lab import bench
from steadynorm.lab.models import GPT, SimpleViT
from steadynorm.lab.train import recipes
from steadynorm.optim.scion_rule import ScionSettings
from steadynorm.optim.sharding.ownership import plan_exchange
from steadynorm.polar import Polar
from steadynorm.views import BlockLayout


def test_every_contender_takes_a_step_and_every_error_is_small(capsys):
    contenders = bench.make_contenders()
    times = bench.step_times(contenders, [(32, 32), (16, 48)], rounds=1)
    errors = {each.name: bench.polar_errors(each.polar, [(48, 48)]) for each in contenders if each.polar is not None}
    text = bench.table(times, errors)
    assert text.count("\n") == len(contenders) + 1
    assert errors["ScionC, 5 steps"]["gaussian"] < errors["torch Muon"]["gaussian"]
    assert "1.00x" in text


def test_the_exact_polar_factor_has_no_error():
    assert max(bench.polar_errors(Polar("svd"), [(24, 24), (24, 60)]).values()) < 1e-4


def test_the_operations_of_the_peers_iteration_are_counted():
    assert bench.newton_schulz_operations([(4, 4)], steps=1) == 3 * 2 * 4**3
    assert bench.newton_schulz_operations([(8, 2)]) == bench.newton_schulz_operations([(2, 8)])


def test_gradients_are_given_back_to_optimizers_that_take_them():
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    assert p.grad is not None
                    p.grad = None

    bench.step_times([bench.Contender("greedy", lambda p: Greedy(p, lr=0.1))], [(4, 4)], rounds=3)


def test_the_command_line_prints_the_contenders(capsys, monkeypatch):
    monkeypatch.setitem(bench.MODELS, "vit-s16", ((16, 16), (16, 32)))
    monkeypatch.setattr(
        bench, "polar_errors", lambda polar: dict.fromkeys(("gaussian", "hard", "low rank + noise"), 0.5)
    )
    assert main(["bench", "--rounds", "0"]) == 2
    assert main(["bench", "--rounds", "1"]) == 0
    assert "ScionC, 4 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["nonsense"])
    assert stop.value.code == 2


def test_the_whole_models_are_those_of_the_recipes():
    """All parameters of them, the patch convolution flattened as Muon sees it."""
    with torch.device("meta"):
        models = {"gpt-124m": GPT(recipes.GPT_124M.task.model), "vit-s16": SimpleViT(recipes.VIT_S16.task.model)}
    for name, model in models.items():
        groups = sn.param_groups(model, kind="muon")
        shapes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
        for group in groups:
            for _, p in group["params"]:
                shape = tuple(p.shape)
                flat = (shape[0], math.prod(shape[1:])) if group["use_muon"] else shape
                shapes[group["use_muon"]].append(flat)
        assert (sorted(shapes[True]), sorted(shapes[False])) == tuple(sorted(own) for own in bench.WHOLE[name])


def test_a_step_over_a_whole_model_moves_every_parameter(monkeypatch):
    monkeypatch.setitem(bench.WHOLE, "small", (((8, 8), (8, 16)), ((5, 4), (4,))))
    own = []
    make = bench.parameters
    monkeypatch.setattr(bench, "parameters", lambda shapes: own.append(make(shapes)) or own[-1])
    steps = bench.whole_steps("small", skip=[bench.PAIR])
    assert set(steps) == {bench.PLAIN_PAIR, "MuonC, 5 steps", "MuonC, 4 steps"}
    before = [p.detach().clone() for params in own for p in params]
    for step in steps.values():
        step()
    after = [p.detach() for params in own for p in params]
    assert len(after) == 3 * 4 and not any(torch.equal(p, q) for p, q in zip(before, after, strict=True))


def test_the_cost_model_counts_what_moves():
    """There are as many square matrices as processes: rows go there and back, or back to everyone."""
    model = cost_model.Model("four", ((8, 8),) * 4, (), 1)
    sharded, replicated = (cost_model.cost(model, 4, replicated=how) for how in (False, True))
    assert sharded.sent == 2 * (4 - 1) * 16 + 2 * (4 - 1) * 16  # a quarter of three others', three quarters of its own
    assert replicated.sent == 2 * (4 - 1) * 16 + 2 * (4 - 1) * 64
    assert sharded.momentum == replicated.momentum == 4 * 64
    assert sharded.balance == 1 and sharded.operations == cost_model.alone(model) / 4


def test_matrices_are_put_in_the_order_of_their_owners():
    """Process 0 has the largest; two of the three others go to process 1, then one to process 0, which comes first."""
    settings = ScionSettings(lmos.get("spectral"), BlockLayout(), False, Polar())
    shapes = ((9, 8), (8, 8), (8, 8), (8, 8))
    found = cost_model._buckets(shapes, 2, False, settings)
    before = {bucket.shape: bucket.params for bucket in found}
    planned = {bucket.shape: bucket for bucket in plan_exchange(found)}
    assert planned[8, 8].plan == ((slice(0, 3), (1, 2)),)
    one, two, three = before[8, 8]
    assert all(p is q for p, q in zip(planned[8, 8].params, (three, one, two), strict=True))


def test_few_matrices_are_gathered_from_shards():
    """With one matrix for eight processes, its owner does not send it to all the others."""
    cost = cost_model.cost(cost_model.Model("one", ((8, 8),), (), 1), 8, replicated=True)
    assert cost.sent < 2 * (8 - 1) * 64 / 3
