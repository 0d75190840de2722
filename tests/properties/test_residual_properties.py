"""bf16 weights with their residual: exact for every bit pattern, and equal to fp32 training in random settings."""

import torch
from hypothesis import strategies as st
from recipes import OWN, recipes, set_lr
from strategies import LAYOUTS, Drawn, kernels, laid_out, matrices, seeds, stacks, vectors
from test_twin_properties import runs
from torch import Tensor, nn
from trying import prop

from steadynorm.optim import halves
from steadynorm.optim.residual import RESIDUAL

ENGINE = [name for name, entry in OWN.items() if entry.engine]
some_shapes = st.lists(st.one_of(vectors, matrices, stacks, kernels), min_size=1, max_size=3)
# exponents and mantissas at whose ends something happens: zeros, subnormal numbers, ties, infinities, NaN
ends = st.sampled_from([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
patterns = st.one_of(
    st.integers(0, 2**32 - 1),
    st.builds(
        lambda high, low: (high << 16) + low, st.sampled_from([0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000]), ends
    ),
    st.builds(
        lambda high, low: (high << 16) + low, st.sampled_from([0x8001, 0x807F, 0xFF7F, 0xFF80, 0xFF81, 0xFFFF]), ends
    ),
)


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.int32)


@prop(fast=500, numbers=st.lists(patterns, min_size=1, max_size=40), copies=st.integers(1, 20))
def test_every_fp32_number_is_a_bf16_number_and_a_residual(numbers, copies):
    """Several copies reach the vectorised part of a kernel and its remainder."""
    theta = torch.tensor(numbers * copies, dtype=torch.int64).to(torch.int32).view(torch.float32)
    weights, low = halves.split(theta.clone())
    again, is_nan = halves.merge(weights, low), theta.isnan()
    assert torch.equal(bits(again)[~is_nan], bits(theta)[~is_nan])
    assert again[is_nan].isnan().all()
    assert weights[is_nan].isnan().all()
    ties = bits(theta).bitwise_and(0xFFFF) == 0x8000  # torch rounds them to even
    assert torch.equal(weights[~ties & ~is_nan], theta.to(torch.bfloat16)[~ties & ~is_nan])
    even = theta.to(torch.bfloat16).double()[ties & ~is_nan]
    ours, exact = weights.double()[ties & ~is_nan], theta.double()[ties & ~is_nan]
    bounded = ours.isfinite()
    assert torch.equal((ours - exact)[bounded].abs(), (even - exact)[bounded].abs())


@prop(
    fast=80,
    slow=1_500,
    recipe=recipes(ENGINE),
    data=st.data(),
    shapes=some_shapes,
    seed=seeds,
    kind=st.sampled_from(["normal", "normal", "mixed", "sparse", "zeros"]),
    weight=st.integers(-3, 0),
    layout=st.sampled_from(LAYOUTS),
)
def test_training_bf16_weights_is_training_fp32_weights(recipe, data, shapes, seed, kind, weight, layout):
    """The fp32 twin starts from the same weights and gets the same gradients; after every step all bits are equal."""
    run = data.draw(runs(recipe))
    starts = [
        Drawn(shape, "normal", seed + 50 * k, weight).make(torch.bfloat16)
        for k, shape in enumerate([*shapes, shapes[0]])
    ]
    half = [nn.Parameter(laid_out(start, layout)[0]) for start in starts]
    single = [nn.Parameter(laid_out(start.float(), layout)[0]) for start in starts]
    optimizer, reference = recipe(half), recipe(single)
    for t, (ratio, momentum) in enumerate(run):
        for group in (*optimizer.param_groups, *reference.param_groups):
            set_lr(group, recipe.settings["lr"] * ratio)
            group.update({key: momentum for key in ("alpha", "betas") if key in group})
        for k, (p, q) in enumerate(zip(half, single, strict=True)):
            grad = Drawn(tuple(p.shape), kind, seed + 50 * k).make(torch.bfloat16, also=1 + t)
            p.grad, q.grad = torch.empty_like(p).copy_(grad), torch.empty_like(q).copy_(grad)
        optimizer.step()
        reference.step()
        for p, q in zip(half, single, strict=True):
            low = optimizer.state[p][RESIDUAL].view(torch.int16).squeeze(-1)
            assert torch.equal(bits(halves.merge(p.detach(), low)), bits(q)), (tuple(p.shape), t)
            for key, value in reference.state[q].items():
                assert torch.equal(optimizer.state[p][key], value), (tuple(p.shape), t, key)
