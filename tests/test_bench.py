"""The benchmark's own arithmetic; times themselves are never asserted."""

import pytest
import torch

from benchmarks import cost_model
from steadynorm import lmo as lmos
from steadynorm.cli import main
from steadynorm.lab import bench
from steadynorm.optim.scion import SCION_RULE, ScionSettings
from steadynorm.optim.sharding.ownership import plan_exchange
from steadynorm.polar import Polar


def test_every_contender_takes_a_step_and_every_error_is_small(capsys):
    contenders = bench.make_contenders()
    times = bench.step_times(contenders, [(32, 32), (16, 48)], rounds=1)
    errors = {each.name: bench.polar_errors(each.polar, [(48, 48)]) for each in contenders if each.polar is not None}
    text = bench.table(contenders, times, errors)
    assert text.count("\n") == len(contenders) + 1
    assert errors["ScionC, 5 steps"]["gaussian"] < errors["torch Muon"]["gaussian"]
    assert "1.00x" in text


def test_exact_polar_has_no_error():
    assert max(bench.polar_errors(Polar("svd"), [(24, 24), (24, 60)]).values()) < 1e-4


def test_operations_of_the_peers_iteration():
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


def test_command_line(capsys, monkeypatch):
    monkeypatch.setitem(bench.MODELS, "vit-s16", ((16, 16), (16, 32)))
    monkeypatch.setattr(
        bench, "polar_errors", lambda polar: dict.fromkeys(("gaussian", "hard", "low rank + noise"), 0.5)
    )
    assert main(["bench", "--rounds", "1"]) == 0
    assert "ScionC, 4 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["nonsense"])
    assert stop.value.code == 2


def test_cost_model_counts_what_moves():
    """Square matrices, as many as processes: rows there and back, or back to everyone."""
    model = cost_model.Model("four", ((8, 8),) * 4, (), 1)
    sharded, replicated = (cost_model.cost(model, 4, replicated=how) for how in (False, True))
    assert sharded.sent == 2 * (4 - 1) * 16 + 2 * (4 - 1) * 16  # a quarter of three others', three quarters of its own
    assert replicated.sent == 2 * (4 - 1) * 16 + 2 * (4 - 1) * 64
    assert sharded.momentum == replicated.momentum == 4 * 64
    assert sharded.balance == 1 and sharded.operations == cost_model.alone(model) / 4


def test_matrices_are_put_in_the_order_of_their_owners():
    """Process 0 has the largest; two of the three others go to process 1, then one to process 0, which comes first."""
    settings = ScionSettings(lmos.get("spectral"), 1, False, Polar())
    shapes = ((9, 8), (8, 8), (8, 8), (8, 8))
    found = cost_model._buckets(shapes, 2, False, settings)
    before = {bucket.shape: bucket.params for bucket in found}
    planned = {bucket.shape: bucket for bucket in plan_exchange(found, SCION_RULE, False)}
    assert planned[8, 8].plan == ((slice(0, 3), (1, 2)),)
    one, two, three = before[8, 8]
    assert all(p is q for p, q in zip(planned[8, 8].params, (three, one, two), strict=True))


def test_few_matrices_are_gathered_from_shards():
    """One matrix for eight processes: its owner does not send it to all the others."""
    cost = cost_model.cost(cost_model.Model("one", ((8, 8),), (), 1), 8, replicated=True)
    assert cost.sent < 2 * (8 - 1) * 64 / 3
