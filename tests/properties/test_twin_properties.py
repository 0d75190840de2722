"""Our own optimizers in random settings equal their fp64 twins, and move as far as their formulas say.

What an invariance cannot see: no update, a wrong sign, a factor.
"""

import torch
from hypothesis import assume
from hypothesis import strategies as st
from models import with_dtype
from recipes import Recipe, alphas, betas, recipes, set_lr
from strategies import Drawn, kernels, matrices, seeds, stacks, vectors
from torch import Tensor, nn
from trying import prop

FP64 = torch.float64
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-4}  # of the arithmetic
ADAM_IN_BF16 = 0.05  # its moments are kept in the weights' dtype
some_shapes = st.lists(st.one_of(vectors, matrices, stacks, kernels), min_size=1, max_size=3)


@st.composite
def runs(draw, recipe: Recipe) -> list[tuple[float, object]]:
    """Draw (lr over its peak, momentum) of one to four steps; the first is at the peak, where most is visible."""
    momenta = {"alpha": alphas, "betas": betas}["alpha" if "alpha" in recipe.settings else "betas"]
    fixed = recipe.name.startswith(("AdamC", "Renormalized"))  # torch's Adam divides by powers of today's betas
    start = recipe.settings.get("alpha", recipe.settings.get("betas"))
    later = st.tuples(st.floats(0.05, 1), st.just(start) if fixed else momenta)
    return [(1.0, start), *draw(st.lists(later, max_size=3))]


def gradients(
    shape: tuple[int, ...], kind: str, seed: int, exponent: int, dtype: torch.dtype, steps: int
) -> list[Tensor]:
    return [Drawn(shape, kind, seed, exponent).make(dtype, also=1 + t) for t in range(steps)]


def train(recipe: Recipe, starts: list[Tensor], grads: list[list[Tensor]], run: list) -> list[list[Tensor]]:
    """Return the weights of each parameter after every step, all in one optimizer."""
    params = [nn.Parameter(start.clone()) for start in starts]
    optimizer, out = recipe(params), [[] for _ in params]
    for t, (ratio, momentum) in enumerate(run):
        for group in optimizer.param_groups:
            set_lr(group, recipe.settings["lr"] * ratio)
            group.update({key: momentum for key in ("alpha", "betas") if key in group})
        for k, p in enumerate(params):
            p.grad = grads[k][t].clone()
        optimizer.step()
        for k, p in enumerate(params):
            out[k].append(p.detach().double().clone())
    return out


@prop(
    fast=120,
    slow=1_500,
    of=with_dtype(recipes(polar=("svd",))),
    data=st.data(),
    shapes=some_shapes,
    seed=seeds,
    kind=st.sampled_from(["normal", "normal", "mixed"]),
    weight=st.integers(-3, 0),
    exponent=st.integers(-3, 2),
)
def test_every_optimizer_equals_its_twin(of, data, shapes, seed, kind, weight, exponent):
    """They agree up to rounding, and up to what a gradient a hundred roundings away would change: a sign, a weak
    singular value.
    """
    recipe, dtype = of
    run = data.draw(runs(recipe))
    lrs, momenta = [recipe.settings["lr"] * ratio for ratio, _ in run], [momentum for _, momentum in run]
    shapes = [*shapes, shapes[0]]  # something to stack
    starts = [Drawn(shape, "normal", seed + 50 * k, weight).make(dtype) for k, shape in enumerate(shapes)]
    grads = [gradients(shape, kind, seed + 50 * k, exponent, dtype, len(run)) for k, shape in enumerate(shapes)]
    assume(all(g.all() for each in grads for g in each))  # the twin divides by rows and columns
    found = train(recipe, starts, grads, run)
    rounding = ROUNDING[dtype] + (ADAM_IN_BF16 if recipe.name.startswith("AdamC") and dtype == torch.bfloat16 else 0)
    roundings = 2 if recipe.name.startswith("AdamC") else 1  # torch's writes the weights after their decay, and again
    kept, computed = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    for k, start in enumerate(starts):
        near = 100 * computed.eps * max(g.abs().max().item() for g in grads[k])
        expected, above, below = (
            recipe.twin(start.double(), lambda t, _, k=k, by=by: grads[k][t].double() + by, lrs, momenta)
            for by in (0.0, near, -near)
        )
        before, size, allowed = start.double(), start.double().abs(), 0.0
        for t, (mine, its) in enumerate(zip(found[k], expected, strict=True)):
            size = torch.maximum(size, its.abs())
            allowed += (
                roundings * kept.eps * (size + kept.tiny) + 4 * computed.eps * size
            )  # as kept; 1 - eta, and two operations
            allowed += rounding * (its - before).abs().max()
            unsure = torch.maximum((above[t] - its).abs(), (below[t] - its).abs())
            off = (mine - its).abs() - allowed - 2 * unsure
            assert (off <= 0).all(), f"{tuple(start.shape)}, step {t}: off by {off.max().item():.3g} more than allowed"
            before = its
