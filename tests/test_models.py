"""Claims about the two models: they are the recipes' models, at any size, and `param_groups` knows their layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadynorm import AdamC, ScionC, param_groups
from steadynorm.lab.models import GPT, GPTConfig, SimpleViT, ViTConfig
from steadynorm.lab.models.gpt import norm, rotary_angles, rotate
from steadynorm.lab.models.loss import linear_cross_entropy
from steadynorm.lab.models.vit import position_table
from steadynorm.lmo import LMOS

SMALL_GPT = GPTConfig(layers=2, width=24, heads=3, vocab=32, context=12)
SIZES: dict[str, Any] = {"image": 12, "patch": 4, "width": 24, "depth": 2, "heads": 3, "mlp": 40, "classes": 7}
VARIANTS = ("adam", "scion")
MODELS = ("gpt", *VARIANTS)


def small(kind: str, seed: int = 0) -> GPT | SimpleViT:
    torch.manual_seed(seed)
    return GPT(SMALL_GPT) if kind == "gpt" else SimpleViT(ViTConfig(**SIZES, variant=kind))  # pyright: ignore


def batch(kind: str, size: int = 2, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "gpt":
        return torch.randint(SMALL_GPT.vocab, (size, SMALL_GPT.context), generator=generator)
    return torch.randn(size, 3, SIZES["image"], SIZES["image"], generator=generator)


@torch.no_grad()
def stirred(model: nn.Module, seed: int = 2) -> nn.Module:
    """Return a model in which no parameter is zero or one any more, so that every path counts."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Sizes


def test_the_full_size_gpt_has_the_papers_124m_parameters() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert count(model) == 123_568_128 == 50304 * 768 + 12 * 12 * 768**2
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {name for name, p in model.named_parameters() if p.ndim != 2} == set()  # no biases, norms without gains


@pytest.mark.parametrize(("variant", "total"), [("adam", 22_122_472), ("scion", 22_089_448)])
def test_the_full_size_vit_has_the_parameters_counted_by_hand(variant: Any, total: int) -> None:
    with torch.device("meta"):
        model = SimpleViT(ViTConfig(variant=variant))
    w, mlp, classes = 384, 1536, 1000
    matrices = 3 * 16 * 16 * w + 12 * (4 * w * w + 2 * w * mlp) + w * w + w * classes
    biases = w + 12 * (w + mlp + w) + w + classes  # patch, 12 of (out, up, down), pre-logits, head
    only_adam = 12 * 3 * w + 25 * 2 * w  # biases of q, k, v; gain and bias of 25 LayerNorms
    assert count(model) == total == matrices + biases + (only_adam if variant == "adam" else 0)
    # the author counts 21,974,632 with a linear head: without the tanh layer
    assert variant == "scion" or total - (w * w + w) == 21_974_632


# GPT against a twin in the recipe's notation


def rms(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).add(torch.finfo(torch.float32).eps).sqrt()


def twin_rotary(x: Tensor, position: int) -> Tensor:
    """Rotate pair by pair."""
    d = len(x)
    y = torch.empty_like(x)
    for i in range(d // 2):
        angle = position * 10000 ** (-2 * i / d)
        y[i] = x[i] * math.cos(angle) + x[i + d // 2] * math.sin(angle)
        y[i + d // 2] = -x[i] * math.sin(angle) + x[i + d // 2] * math.cos(angle)
    return y


def twin_gpt(model: GPT, tokens: list[int]) -> Tensor:
    """Compute token by token and head by head in fp64; every position looks at itself and those before."""
    p = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    d, heads = model.config.width // model.config.heads, model.config.heads
    x = p["embedding.weight"][tokens]
    for layer in range(model.config.layers):
        at = f"blocks.{layer}."
        y = rms(x)
        q, k, v = (y @ p[f"{at}attention.{name}.weight"].T for name in "qkv")
        mixed = torch.zeros_like(x)
        for h in (slice(i * d, (i + 1) * d) for i in range(heads)):
            for t in range(len(tokens)):
                score = [
                    twin_rotary(rms(q[t, h]), t) @ twin_rotary(rms(k[s, h]), s) / math.sqrt(d) for s in range(t + 1)
                ]
                mixed[t, h] = torch.stack(score).softmax(0) @ v[: t + 1, h]
        x = x + mixed @ p[f"{at}attention.out.weight"].T
        hidden = (math.sqrt(2) * (rms(x) @ p[f"{at}mlp.up.weight"].T).clamp(min=0)) ** 2
        x = x + hidden @ p[f"{at}mlp.down.weight"].T
    return rms(x) @ p["embedding.weight"].T


def test_the_gpt_equals_its_slow_twin() -> None:
    model, tokens = stirred(small("gpt")), batch("gpt", 1)[:, :7]
    torch.testing.assert_close(model(tokens)[0].double(), twin_gpt(model, tokens[0].tolist()), rtol=1e-4, atol=1e-4)  # pyright: ignore


def test_the_gpts_norm_has_torchs_default_eps() -> None:
    x = torch.tensor([3e-4, -1e-4])  # mean square 5e-8, eps 1.2e-7
    torch.testing.assert_close(norm(x), rms(x))


def test_rotary_scores_depend_on_distance_only() -> None:
    angles = rotary_angles(30, 4)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = (rotate(x.expand(30, 8), angles.cos(), angles.sin()) for x in (q, k))
    score = q @ k.T  # (query position, key position)
    for distance in (0, 1, 7):
        along = score.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert (score.diagonal(-7)[0] - score.diagonal(-1)[0]).abs() > 1e-3


def test_a_later_token_changes_nothing_before_it() -> None:
    model, tokens = stirred(small("gpt")), batch("gpt")
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % SMALL_GPT.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert (before[:, 8:] != after[:, 8:]).any(-1).all()  # and all from there on see it


def test_shorter_sequences_use_the_start_of_the_rotary_table() -> None:
    model, tokens = stirred(small("gpt")), batch("gpt")
    torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5])


# GPT's start and its loss


def test_the_gpt_starts_uniform_with_silent_blocks() -> None:
    model = GPT(GPTConfig(layers=2, width=64, heads=2, vocab=500, context=4))
    for name, p in model.named_parameters():
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            assert not p.any(), name
        else:  # uniform within 1/8: the bound is nearly reached, the variance is bound^2 / 3
            assert 0.99 / 8 < p.max() <= 1 / 8 and -1 / 8 <= p.min() < -0.99 / 8, name
            assert p.var().item() == pytest.approx(1 / 64 / 3, rel=0.05), name


def test_the_first_loss_is_far_above_log_vocab_because_the_table_is_tied() -> None:
    """Blocks are silent, so each token predicts itself with logit |e| sqrt(width), about width / sqrt(3 width)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=768, heads=6, vocab=300, context=64))
    tokens = torch.randint(300, (4, 64))
    targets = (tokens + 1) % 300
    e = model.embedding.weight.detach()
    twin = nn.functional.cross_entropy((rms(e[tokens]) @ e.T).flatten(0, 1), targets.flatten())
    loss = model(tokens, targets)
    assert loss.item() == pytest.approx(twin.item(), rel=1e-5)
    assert loss.item() == pytest.approx(math.sqrt(768 / 3), abs=0.5) and loss.item() > 2 * math.log(300)


def test_the_loss_is_the_mean_over_every_target() -> None:
    model, tokens, targets = stirred(small("gpt")), batch("gpt"), batch("gpt", seed=5)
    chosen = model(tokens).log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model(tokens, targets), -chosen.mean())
    with pytest.raises((IndexError, RuntimeError)):
        model(tokens, targets.index_fill(1, torch.tensor(3), -100))  # torch would leave these out


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_in_pieces_equals_the_whole(autocast: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 8, generator=generator, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, requires_grad=True)
    targets = torch.randint(50, (23,), generator=generator)
    found = []
    for at_once in (10**6, 50 * 5, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = linear_cross_entropy(x, weight, targets, at_once=at_once)
        assert loss.dtype == torch.float32
        found.append([loss.detach(), *torch.autograd.grad(3 * loss, (x, weight))])
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    for pieces in found[1:]:
        torch.testing.assert_close(pieces, found[0], **tolerance)


def test_the_loss_in_pieces_needs_no_gradient_and_refuses_a_second() -> None:
    x, weight, targets = torch.eye(4), torch.eye(4, requires_grad=True), torch.arange(4)
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets, at_once=4).requires_grad
    loss = linear_cross_entropy(x, weight, targets, at_once=4)
    (slope,) = torch.autograd.grad(loss.square(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(x, weight, targets - 100, at_once=4)


# ViT


def twin_vit(model: SimpleViT, image: Tensor) -> Tensor:
    """Compute one image patch by patch and head by head in fp64."""
    p = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    config, scion = model.config, model.config.variant == "scion"
    d, w, side = config.width // config.heads, config.width, config.image // config.patch

    def norm(x: Tensor, name: str) -> Tensor:
        if scion:
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    places = [(row, column) for row in range(side) for column in range(side)]
    size, tokens = config.patch, []
    for row, column in places:
        pixels = image.double()[:, row * size : (row + 1) * size, column * size : (column + 1) * size]
        token = p["patch.weight"].flatten(1) @ pixels.flatten() + p["patch.bias"]
        omega = [10000 ** (-i / (w / 4 - 1)) for i in range(w // 4)]
        table = [f(place * o) for place in (column, row) for f in (math.sin, math.cos) for o in omega]
        tokens.append(token + torch.tensor(table, dtype=torch.float64))
    x = torch.stack(tokens)
    for layer in range(config.depth):
        at = f"blocks.{layer}."
        q, k, v = linear(norm(x, f"{at}attention_norm"), f"{at}attention.qkv").split(w, dim=1)
        heads = [slice(i * d, (i + 1) * d) for i in range(config.heads)]
        mixed = [(q[:, h] @ k[:, h].T / math.sqrt(d)).softmax(1) @ v[:, h] for h in heads]
        x = x + linear(torch.cat(mixed, 1), f"{at}attention.out")
        y = linear(norm(x, f"{at}mlp_norm"), f"{at}mlp.up")
        y = y * (1 + torch.erf(y / math.sqrt(2))) / 2 * (math.sqrt(2) if scion else 1)
        x = x + linear(y, f"{at}mlp.down")
    return linear(torch.tanh(linear(norm(x, "norm").mean(0), "pre_logits")), "head")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_vit_equals_its_slow_twin(variant: str) -> None:
    model, images = stirred(small(variant)).double(), batch(variant).double()
    twin = torch.stack([twin_vit(model, image) for image in images])  # pyright: ignore
    torch.testing.assert_close(model(images).double(), twin, rtol=1e-6, atol=1e-6)  # so near only by the exact GELU


def test_the_position_table_tells_row_from_column_at_s16() -> None:
    table = position_table(14, 14, 384)
    omega = 10000 ** (-torch.arange(96, dtype=torch.float64) / 95)
    row, column = 3, 11
    expected = torch.cat([f(place * omega) for place in (column, row) for f in (torch.sin, torch.cos)])
    torch.testing.assert_close(table[14 * row + column], expected)
    assert omega[-1].item() == pytest.approx(1e-4)  # divided by w/4 - 1: the last frequency is reached
    assert torch.cdist(table, table).fill_diagonal_(1).min() > 0.1  # every place has its own


def test_the_adam_variant_starts_as_in_big_vision() -> None:
    model = SimpleViT(ViTConfig(image=16, patch=8, width=96, depth=1, heads=3, mlp=384, classes=10))
    p = dict(model.named_parameters())
    for name, fan_in in (("patch.weight", 192), ("pre_logits.weight", 96)):
        std = fan_in**-0.5 / 0.87962566
        assert 1.9 * std < p[name].abs().max() <= 2 * std, name  # cut at 2 sigma
        assert p[name].std().item() == pytest.approx(fan_in**-0.5, rel=0.04), name  # and yet of this size
    bounds = {"attention.qkv": (3 / 96) ** 0.5, "attention.out": (3 / 96) ** 0.5}
    bounds |= dict.fromkeys(("mlp.up", "mlp.down"), (6 / 480) ** 0.5)
    for name, bound in bounds.items():
        weight, bias = p[f"blocks.0.{name}.weight"], p[f"blocks.0.{name}.bias"]
        assert 0.99 * bound < weight.abs().max() <= bound, name
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03), name
        assert 0.7e-6 < bias.std() < 1.3e-6 if "mlp" in name else not bias.any(), name
    assert not any(p[name].any() for name in ("head.weight", "head.bias", "patch.bias", "pre_logits.bias"))
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 3 and all((n.weight == 1).all() and not n.bias.any() and n.eps == 1e-6 for n in norms)


def test_the_scion_variant_starts_on_the_spectral_sphere() -> None:
    """Every block of every matrix has all singular values sqrt(d_out / d_in): norm 1 in the paper's Table 1."""
    model = small("scion")
    for name, p in model.named_parameters():
        if p.ndim == 1 or name == "head.weight":
            assert not p.any(), name
            continue
        for block in p.detach().flatten(1).chunk(3 if "qkv" in name else 1):
            values = torch.linalg.svdvals(block)
            expected = torch.full_like(values, math.sqrt(block.shape[0] / block.shape[1]))
            torch.testing.assert_close(values, expected, msg=name)
            assert LMOS["spectral"].norm(block).item() == pytest.approx(1, rel=1e-5)
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert len(norms) == 5 and all(module.eps == 1e-6 for module in norms)
    assert not any("norm" in name or name.endswith("qkv.bias") for name in dict(model.named_parameters()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_vit_starts_undecided(variant: str) -> None:
    assert not small(variant)(batch(variant)).any()  # so the first loss is log(classes)


# Roles


def roles(model: nn.Module, **options: Any) -> dict[str, tuple[str, int]]:
    groups = param_groups(model, **options)
    return {name: (group["lmo"], group["blocks"]) for group in groups for name, _ in group["params"]}


def test_param_groups_gives_gpt_the_papers_roles() -> None:
    found = roles(small("gpt"))
    assert found.pop("embedding.weight") == ("sign", 1)
    assert len(found) == 2 * 6 and set(found.values()) == {("spectral", 1)}  # q, k, v a matrix each


@pytest.mark.parametrize("variant", VARIANTS)
def test_param_groups_gives_vit_the_papers_roles(variant: str) -> None:
    model = small(variant)
    found = roles(model)
    assert found["head.weight"] == ("sign", 1) and found["patch.weight"] == ("conv", 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert found[name] == ("bias", 1), name
        elif name not in ("head.weight", "patch.weight"):
            assert found[name] == ("spectral", 3 if name.endswith("qkv.weight") else 1), name


@pytest.mark.parametrize("kind", MODELS)
def test_adam_groups_keep_the_output_weight_constant(kind: str) -> None:
    groups = {group["name"]: group for group in param_groups(small(kind), kind="adam")}
    name = "embedding.weight" if kind == "gpt" else "head.weight"
    assert [entry[0] for entry in groups["output"]["params"]] == [name] and not groups["output"]["corrected"]


@pytest.mark.parametrize("kind", MODELS)
def test_a_few_steps_learn_a_batch_by_heart(kind: str) -> None:
    model, data = small(kind), batch(kind, 4)
    optimizer = AdamC(param_groups(model, kind="adam", lr=1e-2)) if kind == "adam" else ScionC(param_groups(model))
    labels = data.roll(-1, 1) if kind == "gpt" else torch.arange(4)

    def loss() -> Tensor:
        return model(data, labels) if kind == "gpt" else nn.functional.cross_entropy(model(data), labels)

    first = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert loss().item() < 0.7 * first


# Precision, devices, compilation


@pytest.mark.parametrize("kind", MODELS)
def test_bf16_autocast_gives_fp32_logits_near_the_fp32_ones(kind: str) -> None:
    model, data = stirred(small(kind)), batch(kind)
    exact = model(data)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(data)
        loss = model(data, data) if kind == "gpt" else nn.functional.cross_entropy(logits, torch.zeros(2).long())
    assert logits.dtype == loss.dtype == torch.float32
    assert 0 < (logits - exact).norm() / exact.norm() < 0.05
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kind", MODELS)
def test_a_seed_gives_the_same_model_directly_and_via_meta(kind: str) -> None:
    direct = small(kind, seed=3)
    with torch.device("meta"):
        model = small(kind)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, math.nan)  # what is not filled shows
    model.init_weights(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), model.parameters(), strict=True))
    assert torch.equal(direct(batch(kind)), model(batch(kind)))
    other = small(kind, seed=4)
    assert not all(torch.equal(a, b) for a, b in zip(direct.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_tables_are_not_saved_and_not_needed_to_load(kind: str) -> None:
    model, data = stirred(small(kind)), batch(kind)
    saved = model.state_dict()
    assert saved.keys() == dict(model.named_parameters()).keys()
    other = small(kind, seed=9)
    other.load_state_dict(saved)
    assert torch.equal(other(data), model(data)) and torch.equal(copy.deepcopy(model)(data), model(data))


@pytest.mark.parametrize("kind", MODELS)
def test_the_models_compile_without_graph_breaks(kind: str) -> None:
    model, data = stirred(small(kind)), batch(kind)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = (data, data) if kind == "gpt" else (data,)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch._dynamo does it
def test_the_loss_in_pieces_compiles_without_graph_breaks() -> None:
    x, weight, targets = torch.eye(6), torch.eye(6, requires_grad=True), torch.arange(6)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    found = [torch.autograd.grad(f(x, weight, targets, at_once=12), weight) for f in (compiled, linear_cross_entropy)]
    torch.testing.assert_close(*found)


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTConfig(width=100, heads=6), "heads=6 do not divide width=100"),
        (lambda: GPTConfig(width=18, heads=6), "heads of 3.*even"),
        (lambda: GPTConfig(layers=0), "layers=0 must be an int"),
        (lambda: GPTConfig(vocab=2.5), "vocab=2.5 must be"),  # pyright: ignore
        (lambda: ViTConfig(image=225), "patch=16 does not divide image=225; use image=224 or image=240"),
        (lambda: ViTConfig(width=378, heads=6), "width=378 cannot hold sine and cosine"),
        (lambda: ViTConfig(width=4, heads=1), "width=4 cannot hold"),
        (lambda: ViTConfig(heads=5), "heads=5 do not divide width=384"),
        (lambda: ViTConfig(variant="muon"), "variant='muon' is unknown; choose from adam, scion"),  # pyright: ignore
        (lambda: small("gpt")(torch.zeros(1, 13).long()), r"tokens \(1, 13\).*context=12.*longer context"),
        (lambda: small("gpt")(torch.zeros(5).long()), r"tokens \(5,\): pass \(batch, length\)"),
        (lambda: small("gpt")(batch("gpt"), batch("gpt")[:, 1:]), r"targets \(2, 11\) must have the shape"),
        (lambda: small("adam")(torch.zeros(1, 3, 16, 16)), r"images \(1, 3, 16, 16\): pass \(batch, 3, 12, 12\)"),
        (lambda: linear_cross_entropy(torch.eye(3), torch.eye(3), torch.arange(2)), "one target per row"),
    ],
)
def test_bad_sizes_are_refused_with_the_remedy(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
