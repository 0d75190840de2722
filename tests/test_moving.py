"""`convert`: the new optimizer continues where the old one was, as exactly as the two can agree."""

import copy
import math
from typing import Any

import pytest
import torch
import twins_moving as twin
from torch import Tensor, nn

import steadynorm as sn
from steadynorm import theory


class Net(nn.Module):
    """Embedding, fused q, k, v, a wide and a tall matrix, a convolution, vectors, a scalar and an output layer."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.wide = nn.Linear(16, 8)
        self.tall = nn.Linear(8, 16, bias=False)
        self.conv = nn.Conv2d(2, 4, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.to(dtype)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def set_gradients(model: nn.Module, t: int) -> None:
    for k, p in enumerate(model.parameters()):
        g = torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * t + k))
        p.grad = g.to(p.dtype)


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for t in range(first, last):
        set_gradients(model, t)
        for each in optimizer if isinstance(optimizer, list) else [optimizer]:
            each.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


def assert_close(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(
            value, other.state_dict()[name], **tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def values_of(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return {parameter name: the values of its group}."""
    return {name: group for group in optimizer.param_groups for name in group["param_names"]}


# --- AdamW to AdamC


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.95), eps=1e-6)


def test_adamc_continues_adamw_bit_for_bit_at_constant_lr():
    model, reference = Net(), Net()
    old, unchanged = adamw(model), adamw(reference)
    train(model, old, 0, 5)
    train(reference, unchanged, 0, 10)
    new, table = sn.convert(old, model)
    assert type(new) is sn.AdamC
    train(model, new, 5, 10)
    assert_close(model, reference, rtol=0, atol=0)
    assert "AdamW -> AdamC" in table
    assert "all" in table


def test_a_capturable_adamw_becomes_a_plain_adamc():
    model = Net()
    new, _ = sn.convert(torch.optim.AdamW(model.parameters(), capturable=True), model)
    assert not any(group["capturable"] for group in new.param_groups)


def test_adamc_takes_the_peak_of_a_running_schedule():
    model = Net()
    old = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(old, lambda t: 1 - t / 10)
    for t in range(5):
        train(model, old, t, t + 1)
        scheduler.step()
    new, _ = sn.convert(old, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(new, lambda t: 1 - t / 10, last_epoch=scheduler.last_epoch - 1)
    train(model, new, 5, 6)
    values = values_of(new)
    assert values["tall.weight"]["lr"] == pytest.approx(5e-3)
    assert values["tall.weight"]["peak_lr"] == 1e-2
    assert values["tall.weight"]["weight_decay"] == pytest.approx(0.15)  # corrected
    assert values["lm_head.weight"]["weight_decay"] == 0.3  # the output layer's is constant
    assert values["wide.bias"]["weight_decay"] == 0.0


def test_a_corrected_adamw_keeps_its_base_decay():
    model = Net()
    old = sn.correct(adamw(model))
    for group in old.param_groups:
        group["lr"] = 5e-3
    train(model, old, 0, 2)
    new, _ = sn.convert(old, model)
    group = values_of(new)["tall.weight"]
    assert (group["base_weight_decay"], group["peak_lr"], group["lr"]) == (0.3, 1e-2, 5e-3)


def test_a_conversion_leaves_the_old_optimizer_unchanged():
    model = Net()
    old = adamw(model)
    train(model, old, 0, 3)
    before, settings = copy.deepcopy(old.state_dict()), copy.deepcopy(old.param_groups)
    new, _ = sn.convert(old, model, to=sn.ScionC)
    train(model, new, 3, 5)
    for index, state in before["state"].items():
        assert all(torch.equal(old.state_dict()["state"][index][key], value) for key, value in state.items())
    assert [group["lr"] for group in old.param_groups] == [group["lr"] for group in settings]


# --- AdamW to ScionC


def test_scionc_from_adamw_keeps_half_life_effective_lr_and_steady_rms():
    """AdamW's steady mean square is lr / (2 decay), and a gradient moves an element by lr in the end."""
    model = Net()
    new, table = sn.convert(adamw(model), model, to=sn.ScionC)
    named = dict(model.named_parameters())
    for name, group in values_of(new).items():
        p = named[name]
        entry = new.settings(group, p)[0]
        unit = entry.lmo.update_norm_sq(p.shape, blocks=entry.blocks) / max(p.numel(), 1)
        effective = theory.effective_lr(group["lr"], group["alpha"]) * math.sqrt(unit)
        assert effective == pytest.approx(1e-2)
        decay = new.weight_decay_of(p)
        if p.ndim <= 1:
            assert decay == 0
            continue
        assert group["lr"] * decay == pytest.approx(1e-2 * 0.3)
        rms_sq = theory.steady_norm_sq(group["lr"], decay, group["alpha"], limit=True) * unit
        assert rms_sq == pytest.approx(1e-2 / (2 * 0.3))
    assert "0.129 -> 0.129" in table


def test_scionc_from_adamw_takes_the_momentum_and_says_what_it_drops():
    model = Net(torch.bfloat16)
    old = adamw(model)
    train(model, old, 0, 3)
    new, table = sn.convert(old, model, to=sn.ScionC)
    for p in model.parameters():
        buffer = new.state[p]["momentum_buffer"]
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, old.state[p]["exp_avg"].float())
        assert new.param_groups[0]["alpha"] == pytest.approx(0.2)
    assert table.count("exp_avg -> momentum_buffer; exp_avg_sq, step dropped") == len(list(model.parameters()))


def test_the_simulated_norms_are_the_same_under_both():
    """On random gradients of a vector of 512, AdamW and the converted ScionC settle at the same RMS."""
    found = {}
    for kind in ("AdamW", "ScionC"):
        model = nn.ParameterList([torch.zeros(512)])
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1.0)
        if kind == "ScionC":
            optimizer, _ = sn.convert(optimizer, model, to=sn.ScionC, output=False)
        squares = []
        for t in range(900):
            set_gradients(model, t)
            optimizer.step()
            squares.append(model[0].detach().square().mean().item())
        found[kind] = math.sqrt(sum(squares[400:]) / 500)
    assert found["ScionC"] == pytest.approx(found["AdamW"], rel=0.05)
    assert found["AdamW"] == pytest.approx(math.sqrt(0.01 / 2), rel=0.1)


# --- Muon


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [model.qkv.weight, model.wide.weight, model.tall.weight]


def muon(model: nn.Module, **settings: Any) -> torch.optim.Muon:
    return torch.optim.Muon(matrices(model), lr=0.02, weight_decay=0.5, momentum=0.9, **settings)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_scion_continues_from_muon(adjust: str, nesterov: bool):
    """Muon's polar factors are rough (bf16, Newton-Schulz), so step size, direction and decay are compared."""
    model, reference = Net(), Net()
    blocks = {"qkv.weight": 1}  # as Muon has it
    old, unchanged = (muon(each, adjust_lr_fn=adjust, nesterov=nesterov) for each in (model, reference))
    train(model, old, 0, 4)
    train(reference, unchanged, 0, 4)
    new, table = sn.convert(old, model, to=sn.Scion, blocks=blocks, polar="svd")
    before = weights(model)
    train(model, new, 4, 5)
    train(reference, unchanged, 4, 5)
    for name in ("qkv.weight", "wide.weight", "tall.weight"):
        shrunk = (1 - 0.02 * 0.5) * before[name]
        ours, theirs = shrunk - model.state_dict()[name], shrunk - reference.state_dict()[name]
        assert (ours.norm() / theirs.norm()).item() == pytest.approx(1, abs=0.2)
        assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), 0) > 0.95
    for name, group in values_of(new).items():
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.01), name
        assert group["alpha"] == pytest.approx(0.1)
        assert group["nesterov"] is nesterov
    assert "Muon -> Scion, spectral" in table


def test_zero_gradients_decay_exactly_as_under_muon():
    model = Net()
    new, _ = sn.convert(muon(model), model)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    new.step()
    for name in ("qkv.weight", "wide.weight", "tall.weight"):
        torch.testing.assert_close(model.state_dict()[name], (1 - 0.01) * before[name])


def test_blocks_and_transposed_weights_move_as_far_as_under_muon():
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 24, dtype=torch.float64))

    model = nn.ModuleDict({"qkv": nn.Linear(8, 24, bias=False).double(), "c_attn": Conv1D()})
    new, table = sn.convert(torch.optim.Muon(model.parameters(), lr=0.02), model, output=False)
    for (name, group), factor_sq in zip(values_of(new).items(), (3.0, 1.0), strict=True):
        p = dict(model.named_parameters())[name]
        entry = new.settings(group, p)[0]
        theirs = 0.02 * math.sqrt(factor_sq * 8)  # lr sqrt(max(1, rows/columns)) |polar|
        assert group["lr"] * math.sqrt(entry.lmo.update_norm_sq(p.shape, blocks=3)) == pytest.approx(theirs)
    assert "spectral-transposed, 3 blocks" in table


def test_muon_and_its_adamw_become_one_optimizer():
    model = Net()
    hidden = {id(p) for p in matrices(model)}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in hidden], lr=1e-3, weight_decay=0.1)
    old = [muon(model), rest]
    train(model, old, 0, 3)
    new, table = sn.convert(old, model)
    assert type(new) is sn.ScionC
    grouped = [id(p) for group in new.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    for p in model.parameters():
        kept = old[0].state[p]["momentum_buffer"] if id(p) in hidden else rest.state[p]["exp_avg"]
        assert torch.equal(new.state[p]["momentum_buffer"], kept)
    values = values_of(new)
    assert values["lm_head.weight"]["lmo"] == "sign"
    assert values["lm_head.weight"]["lr"] * values["lm_head.weight"]["weight_decay"] == pytest.approx(1e-4)
    assert "Muon -> ScionC" in table
    assert "AdamW -> ScionC" in table
    train(model, new, 3, 5)


# --- the published Scion


CASES = {
    "Spectral": [("tall", {}), ("wide", {}), ("wide", {"max": True}), ("wide", {"normalized": False})],
    "SpectralConv": [("conv", {})],
    "Sign": [("lm_head", {}), ("embed", {"normalized": False})],
    "ColNorm": [("tall", {}), ("tall", {"normalized": True}), ("embed", {"transpose": True}),
                ("embed", {"transpose": True, "normalized": True})],
    "RowNorm": [("tall", {}), ("tall", {"normalized": False}), ("embed", {"transpose": True}),
                ("embed", {"transpose": True, "normalized": False})],
    "Auto": [("tall", {}), ("conv", {})],
}  # fmt: skip


@pytest.mark.parametrize("to", [sn.Scion, sn.ScionC])
@pytest.mark.parametrize("unconstrained", [False, True])
@pytest.mark.parametrize(("norm", "layer", "options"), [(n, *case) for n, cases in CASES.items() for case in cases])
def test_the_published_scion_continues_exactly(
    norm: str, layer: str, options: dict[str, Any], unconstrained: bool, to: Any
):
    """With constant decay, and corrected at constant lr, the weights are the same after five more steps."""
    model, reference = Net(), Net()
    old, unchanged = (
        twin.Scion(
            [{"params": [getattr(each, layer).weight], "norm": norm, "norm_kwargs": options, "scale": 3.0}],
            lr=0.01,
            momentum=0.2,
            unconstrained=unconstrained,
        )
        for each in (model, reference)
    )
    train(model, old, 0, 5)
    train(reference, unchanged, 0, 10)
    new, _ = sn.convert(old, model, to=to, polar="svd")
    train(model, new, 5, 10)
    assert_close(model, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_newton_schulz_takes_the_steps_of_the_published_scion(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """It takes 200 steps of its own iteration in fp32: Schatten-8 scaling left the weights 12 to 15 % apart."""
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "0")

    def published(g: torch.Tensor, **_: Any) -> torch.Tensor:
        y = g.T if g.shape[0] > g.shape[1] else g
        y = y / y.norm()
        for _ in range(5):
            gram = y @ y.T
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
        return (shape[0] / shape[1]) ** 0.5 * (y.T if g.shape[0] > g.shape[1] else y)

    monkeypatch.setitem(twin.NORMS, "Spectral", published)
    one, two = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    theirs = twin.Scion([one], lr=0.01, momentum=0.1, norm="Spectral", scale=5.0)
    ours = sn.Scion([two], **sn.from_radius(0.01, 5.0), alpha=0.1, lmo="spectral", polar="newton-schulz")
    for t in range(200):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(t))
        for p, optimizer in ((one, theirs), (two, ours)):
            p.grad = gradient.clone()
            optimizer.step()
    assert (one - two).norm() < 1e-4 * one.norm()


def test_vectors_and_scalars_of_the_published_scion_continue_exactly():
    model, reference = Net(), Net()
    old, unchanged = (twin.Scion([each.wide.bias, each.scale], lr=0.01, momentum=0.2) for each in (model, reference))
    train(reference, unchanged, 0, 6)
    new, table = sn.convert(old, model)
    train(model, new, 0, 6)
    assert_close(model, reference, rtol=1e-9, atol=1e-11)
    assert "none yet" in table


def test_scionc_from_the_published_scion_corrects_where_lr_falls():
    model = Net()
    hidden, head = model.tall.weight, model.lm_head.weight
    groups = [
        {"params": [hidden], "norm": "Spectral", "scale": 50.0},
        {"params": [head], "norm": "Sign", "scale": 3000.0},
    ]
    new, table = sn.convert(twin.Scion(groups, lr=2**-12, momentum=0.1), model)
    for group in new.param_groups:
        assert group["lr"] * new.weight_decay_of(group["params"][0]) == pytest.approx(2**-12)
        group["lr"] /= 2
    assert new.weight_decay_of(hidden) == pytest.approx(0.02 / 2)
    assert new.weight_decay_of(head) == pytest.approx(1 / 3000)  # the output layer's is constant
    assert "1 -> corrected, C^2 = " in table  # their decay is lr itself, once


# --- what is kept, what is changed


def test_another_momentum_keeps_effective_lr_and_norm():
    model = Net()
    new, table = sn.convert(muon(model, nesterov=True), model, alpha=0.5, nesterov=False)
    same, _ = sn.convert(muon(model, nesterov=True), model)
    for name, group in values_of(new).items():
        before = values_of(same)[name]
        effective = [theory.effective_lr(g["lr"], g["alpha"], nesterov=g["nesterov"]) for g in (group, before)]
        assert effective[0] == pytest.approx(effective[1])
        assert group["lr"] > 2 * before["lr"]
        assert group["steady_norm_sq"] == pytest.approx(before["steady_norm_sq"])
        assert (group["alpha"], group["nesterov"]) == (0.5, False)
    rms = [line.split(" -> ")[-2:] for line in table.splitlines()[1:]]
    assert all(was.split()[-1] == now.split()[0] for was, now in rms)


def test_converting_without_keeping_the_lr_keeps_the_norm():
    model = Net()
    kept, _ = sn.convert(adamw(model), model, to=sn.ScionC)
    new, _ = sn.convert(adamw(model), model, to=sn.ScionC, keep_lr=False, lr=0.003)
    values, before = values_of(new), values_of(kept)
    assert values["tall.weight"]["lr"] == pytest.approx(0.003)
    assert values["lm_head.weight"]["lr"] == pytest.approx(0.06)
    assert values["tall.weight"]["steady_norm_sq"] == pytest.approx(before["tall.weight"]["steady_norm_sq"])
    rms = [theory.steady_norm_sq(g["lr"], g["weight_decay"], g["alpha"], limit=True)
           for g in (values["lm_head.weight"], before["lm_head.weight"])]  # fmt: skip
    assert rms[0] == pytest.approx(rms[1])


def test_converting_without_keeping_the_norm_takes_the_one_passed():
    model = Net()
    new, table = sn.convert(adamw(model), model, to=sn.ScionC, keep_norm=False, steady_norm_sq=2.0)
    kept, _ = sn.convert(adamw(model), model, to=sn.ScionC)
    values = values_of(new)
    assert values["tall.weight"]["steady_norm_sq"] == 2.0
    assert values["tall.weight"]["lr"] == values_of(kept)["tall.weight"]["lr"]
    assert "corrected, C^2 = 2 " in table
    assert values["wide.bias"]["weight_decay"] == 0.0


def test_with_the_exact_kernel_the_decay_at_the_peak_is_what_it_was():
    model = Net()
    new, _ = sn.convert(muon(model), model, overlap="exact")
    for p in matrices(model):
        group = next(g for g in new.param_groups if any(p is q for q in g["params"]))
        assert group["lr"] * new.weight_decay_of(p) == pytest.approx(0.01)


def test_schedules_map_with_the_lr():
    model = Net()
    old = muon(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(old, lambda t: 1 / (1 + t))
    train(model, old, 0, 1)
    scheduler.step()
    new, _ = sn.convert(old, model)
    fresh, _ = sn.convert(muon(model), model)
    for name, group in values_of(new).items():
        assert group["initial_lr"] == pytest.approx(values_of(fresh)[name]["lr"])
        assert group["lr"] == pytest.approx(group["initial_lr"] / 2)
        assert group["steady_norm_sq"] == pytest.approx(values_of(fresh)[name]["steady_norm_sq"])


def test_groups_hold_plain_values_and_load():
    model = Net()
    new, _ = sn.convert(adamw(model), model, to=sn.ScionC)
    for group in new.param_groups:
        for key, value in group.items():
            assert key in ("params", "param_names") or type(value) in (float, int, str, bool, type(None)), key
    names = [group["name"] for group in new.param_groups]
    assert len(set(names)) == len(names)
    new.load_state_dict(new.state_dict())


# --- bad input


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), {}, r"SGD is none of torch's AdamW, torch's Muon"),
        (lambda m: torch.optim.Adam(m.parameters(), weight_decay=0.1), {}, r"Adam is none of"),
        (
            lambda m: torch.optim.AdamW([nn.Parameter(torch.ones(3))]),
            {},
            r"AdamW, group 0: parameter 0 .* not in the model",
        ),
        (adamw, {"to": sn.LionC}, r"to=LionC is none of AdamC, MuonC, ScionC, Scion and, from MuonC, torch.optim.Muon"),
        (muon, {"to": sn.AdamC}, r"AdamC takes over only from AdamW, not from Muon; use ScionC"),
        (lambda m: twin.Scion([m.tall.weight], norm="Nuclear"), {}, r"tall\.weight: norm 'Nuclear' is unknown"),
        (lambda m: twin.Scion([m.conv.weight], norm="Sign"), {}, r"conv\.weight: norm 'Sign' is for 2 to 2 dimensions"),
        (lambda m: adamw(m, lr=0.0), {"to": sn.ScionC}, r"peak lr of embed\.weight is 0; pass peak_lr="),
        (adamw, {"to": sn.ScionC, "momentum": 0.9}, r"momentum.*opposite"),
        (
            adamw,
            {"to": sn.ScionC, "keep_lr": False, "lr": 1.0},
            r"embed\.weight: C\^2 = .* unreachable at lr=1: .*keep_norm",
        ),
    ],
)
def test_errors_say_what_and_where(make: Any, options: dict[str, Any], message: str):
    model = Net()
    with pytest.raises((ValueError, TypeError), match=message):
        sn.convert(make(model), model, **options)


def test_a_frozen_parameter_is_named():
    model = Net()
    old = muon(model)
    model.tall.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"tall\.weight is frozen; unfreeze it"):
        sn.convert(old, model)
