"""ScionC in JAX: steady norms, decay without gradients, compilation, injected values, refusals."""

import needs_jax  # noqa: F401  # isort: skip

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import steadynorm as sn
import steadynorm.jax as sj

LR = optax.warmup_cosine_decay_schedule(0.002, 0.02, 10, 50)


def steady_norm_ratio(shape, lmo: str, *, seeds: int, steps: int, lr: float, alpha: float) -> float:
    """Return the mean |theta|^2 / U^2 of arrays under random gradients, over the second half of the steps, over C^2."""
    tx = sj.scionc(lr, lmo, alpha=alpha, steady_norm_sq=1.1875, overlap="exact")
    params = {str(k): jnp.zeros(shape) for k in range(seeds)}
    norm_sq = sn.theory.updates.UPDATES[lmo].update_norm_sq(shape)

    def advance(carry, key):
        params, state = carry
        keys = jax.random.split(key, seeds)
        grads = {str(k): jax.random.normal(keys[k], shape) for k in range(seeds)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), jnp.stack([jnp.sum(x * x) for x in params.values()]).mean()

    keys = jax.random.split(jax.random.key(0), steps)
    _, squares = jax.lax.scan(advance, (params, tx.init(params)), keys)
    return float(squares[steps // 2 :].mean()) / norm_sq / 1.1875


@pytest.mark.parametrize(
    ("shape", "lmo", "seeds"), [((64,), "bias", 16), ((24, 24), "spectral", 4), ((16, 64), "spectral", 4)], ids=str
)
def test_the_norm_settles_within_2_percent_of_its_target(shape, lmo, seeds):
    """eta is about 0.01, so that 100 half-lives pass."""
    ratio = steady_norm_ratio(shape, lmo, seeds=seeds, steps=8000, lr=0.05, alpha=0.2)
    assert ratio == pytest.approx(1.0, abs=0.02)


def run(tx, params, gradient_at, steps: int):
    """Return the parameters and the state after some compiled steps, and how often the step was traced."""
    traces = []

    @jax.jit
    def advance(params, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for step in range(steps):
        params, state = advance(params, state, gradient_at(step))
    return params, state, len(traces)


def test_without_gradients_the_weights_shrink_by_the_product_of_the_factors():
    with jax.enable_x64(True):
        lr, alpha = sj.tabulate(lambda t: 0.1 * (t + 1) / 50, 50), sj.tabulate(lambda t: 0.1 + 0.01 * t, 50)
        tx = sj.scionc(lr, "by-shape", alpha=alpha)
        params = {"w": jnp.full((3, 4), 2.0, jnp.float64), "b": jnp.full(5, 2.0, jnp.float64)}
        params, _, _ = run(tx, params, lambda step: jax.tree.map(jnp.zeros_like, params), 50)
    decays = [sn.theory.weight_decay_for(1.1875, 0.1 * (t + 1) / 50, 0.1 + 0.01 * t) for t in range(50)]
    expected = 2 * math.prod(1 - 0.1 * (t + 1) / 50 * decay for t, decay in enumerate(decays))
    for leaf in jax.tree.leaves(params):
        np.testing.assert_allclose(leaf, expected, rtol=1e-13)


def test_rows_of_an_embedding_and_experts_wait_for_their_gradients():
    table, experts = jnp.ones((4, 3)), jnp.ones((2, 3, 3))
    labels = {
        "experts": sj.Label("stacked", "spectral", (2, 3, 3), stack=1),
        "table": sj.Label("embedding", "embedding", (4, 3)),
    }
    grads = {"table": jnp.zeros((4, 3)).at[1].set(1.0), "experts": jnp.zeros((2, 3, 3)).at[0].set(jnp.eye(3))}
    for own_time, moves in ((True, False), (False, True)):
        tx = sj.scionc(0.1, labels, own_time=own_time)
        params, state, _ = run(tx, {"table": table, "experts": experts}, lambda step: grads, 3)
        assert (params["table"][1] != 1).all() and (params["experts"][0] != 1).any()
        assert bool((params["table"][0] != 1).all()) is moves and bool((params["experts"][1] != 1).all()) is moves
        assert state.left.shape == ((0,) if own_time else (2 + 1,))


def test_updates_fade_once_the_momentum_is_gone():
    tx = sj.scion(0.1, "spectral", alpha=0.5, polar="svd")
    grads = [jnp.eye(2)] + 40 * [jnp.zeros((2, 2))]
    _, state, _ = run(tx, jnp.zeros((2, 2)), lambda step: grads[step], 30)
    later, _, _ = run(tx, jnp.zeros((2, 2)), lambda step: grads[step], 41)
    counted = sum(min(1.0, 0.5**t / 1e-5) for t in range(41))  # 17 whole updates, then the fading ones
    np.testing.assert_allclose(later, -0.1 * counted * np.eye(2), rtol=1e-5, atol=1e-6)
    assert 0 < float(state.left[0]) < 1e-5


def test_one_compilation_serves_every_step_of_a_schedule():
    params = {"up": {"kernel": jnp.ones((4, 6))}, "embed": {"embedding": jnp.ones((5, 4))}}
    labels = sj.label_params(params, output=False)
    for tx in (
        sj.scionc(LR, labels, alpha=optax.linear_schedule(0.1, 0.9, 50), overlap="exact"),
        sj.adamc(LR, peak_lr=0.02),
        sj.lionc(LR, peak_lr=0.02),
        sj.muonc(LR, peak_lr=0.02),
    ):
        _, _, traces = run(tx, params, lambda step: jax.tree.map(lambda x: jnp.cos(x + step), params), 50)
        assert traces == 1


def test_injected_values_move_lr_momentum_and_target_without_compiling_again():
    params = jnp.arange(12.0).reshape(3, 4) / 10
    injected = optax.inject_hyperparams(sj.scionc)(0.01, "spectral", alpha=0.1, steady_norm_sq=1.0)
    traces = []

    @jax.jit
    def advance(params, state):
        traces.append(1)
        updates, state = injected.update(jnp.cos(params), state, params)
        return optax.apply_updates(params, updates), state

    state, expected, plain_state = injected.init(params), params, None
    for lr, alpha, target in ((0.01, 0.1, 1.0), (0.02, 0.3, 0.5), (0.005, 1.0, 2.0)):
        state.hyperparams.update(learning_rate=lr, alpha=alpha, steady_norm_sq=target)
        state = jax.tree.map(jnp.asarray, state)
        plain = sj.scionc(lr, "spectral", alpha=alpha, steady_norm_sq=target)
        plain_state = plain.init(expected) if plain_state is None else plain_state
        updates, plain_state = plain.update(jnp.cos(expected), plain_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state = advance(params, state)
        np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
    assert len(traces) == 1
    assert {"learning_rate", "alpha", "steady_norm_sq"} <= set(state.hyperparams)


def test_injected_adamc_and_muonc_follow_the_injected_lr():
    for make in (
        lambda: optax.inject_hyperparams(sj.adamc)(LR, weight_decay=0.5, peak_lr=0.02),
        lambda: optax.inject_hyperparams(sj.muonc)(LR, weight_decay=0.5, peak_lr=0.02, reference_beta=0.95),
    ):
        tx, params = make(), {"w": jnp.ones((2, 3))}
        state, update = tx.init(params), jax.jit(tx.update)
        for step in range(12):
            updates, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
            lr = float(LR(step))
            np.testing.assert_allclose(updates["w"], -lr * 0.5 * lr / 0.02, rtol=1e-4)


def test_muonc_follows_an_injected_beta():
    tx = optax.inject_hyperparams(sj.muonc)(0.02, 0.5, beta=0.95, peak_lr=0.02, reference_beta=0.95)
    params = {"w": jnp.ones((2, 3))}
    state, update = tx.init(params), jax.jit(tx.update)
    for beta in (0.95, 0.8):
        state.hyperparams["beta"] = jnp.float32(beta)
        updates, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
        gains = [sn.theory.momentum_gain(1 - b, nesterov=True) for b in (beta, 0.95)]
        np.testing.assert_allclose(updates["w"], -0.02 * 0.5 * gains[0] / gains[1], rtol=1e-4)


def test_exact_decay_allows_for_the_shorter_updates_of_newton_schulz():
    """The norm is measured in updates of full length, so that shorter ones need less decay."""
    theta, shrinks = jnp.ones((8, 8)), {}
    for polar in ("svd", "newton-schulz"):
        tx = sj.scionc(0.01, "spectral", overlap="exact", polar=polar)
        shrinks[polar] = -float(tx.update(jnp.zeros((8, 8)), tx.init(theta), theta)[0][0, 0])
    share = sn.theory.updates.UPDATES["spectral"].length_share((8, 8), 1, "newton-schulz", 5)
    kernel = sn.theory.overlap("spectral", (8, 8))
    for polar, target in (("svd", 1.1875), ("newton-schulz", 1.1875 / share)):
        expected = 0.01 * sn.theory.weight_decay_for(target, 0.01, 0.1, overlap=kernel)
        assert shrinks[polar] == pytest.approx(expected, rel=1e-4)


def test_equal_shapes_share_one_product():
    """Eight layers compile to as many matrix products as one."""

    def products(layers: int) -> int:
        params = {f"layer_{k}": {"kernel": jnp.ones((8, 8))} for k in range(layers)}
        tx = sj.scionc(0.01, sj.label_params(params, output=False))
        text = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
        return text.count("dot_general[")

    assert products(8) == products(1) > 0


def test_bf16_parameters_keep_fp32_momentum_and_asked_for_bf16_halves_it():
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    for asked, kept in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        tx = sj.scionc(0.01, "spectral", momentum_dtype=asked)
        params_after, state, _ = run(tx, params, lambda step: {"w": jnp.eye(4, dtype=jnp.bfloat16)}, 2)
        assert state.momentum["w"].dtype == kept and params_after["w"].dtype == jnp.bfloat16


def test_masked_and_partitioned_trees_find_their_labels():
    params = {"up": {"kernel": jnp.ones((4, 6))}, "norm": {"scale": jnp.ones(4)}}
    labels = sj.label_params(params, output=False)
    tx = optax.partition({"ours": sj.scionc(0.01, labels), "theirs": optax.sgd(0.1)}, {"up": "ours", "norm": "theirs"})
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(updates["norm"]["scale"], -0.1 * np.ones(4), rtol=1e-6)
    assert (updates["up"]["kernel"] < 0).all()


def test_optax_maps_the_state_of_scionc_as_that_of_its_own_optimizers():
    """`optax.tree_map_params` places a state as the parameters are; it asks for the state of a tree without arrays."""
    params = {"up": {"kernel": jnp.ones((4, 6))}, "embed": {"embedding": jnp.ones((5, 4))}}
    specs = jax.tree.map(lambda p: p.ndim, params)
    plain = sj.scionc(0.01, lambda params: sj.label_params(params, output=False))
    masked = optax.partition({"a": plain, "b": optax.sgd(0.1), "idle": sj.scionc(0.1)}, {"up": "a", "embed": "b"})
    for tx in (plain, masked):
        state = optax.tree_map_params(
            tx,
            lambda _, spec: spec,
            tx.init(params),
            specs,
            transform_non_params=lambda _: "other",
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
        momentum = optax.tree.get(state.inner_states["a"] if tx is masked else state, "momentum")
        assert momentum["up"]["kernel"] == 2
        assert optax.tree.get_all_with_path(state, "left")[0][1] == "other"


@pytest.mark.parametrize(("options", "lr"), [({}, 20 * 0.002), ({"output_lr": 0.1}, 0.1)], ids=str)
def test_the_output_weight_has_its_own_lr_and_a_constant_decay_that_matches_at_the_peak(options, lr):
    params = {"head": {"kernel": jnp.ones((4, 2))}}
    tx = sj.scionc(LR, peak_lr=0.02, **options)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    eta_at_peak = 0.02 * sn.theory.weight_decay_for(1.1875, 0.02, 0.1)
    decay = eta_at_peak / options.get("output_lr", 20 * 0.02)
    np.testing.assert_allclose(updates["head"]["kernel"], -lr * decay, rtol=1e-5)


MATRIX = {"up": {"kernel": jnp.ones((2, 2))}}
HEAD = {"head": {"kernel": jnp.ones((2, 2))}}
REFUSED = {
    "no params": (lambda: sj.scionc(0.1, "spectral").update(MATRIX, None), "call update\\(gradients, state, params\\)"),
    "unknown overlap": (lambda: sj.scionc(0.1, overlap="round"), "choose 'linear' or 'exact'"),
    "negative lr": (lambda: sj.scionc(-0.1), "lr=-0.1"),
    "alpha 0": (lambda: sj.scion(0.1, alpha=0.0), "alpha=0.0 is outside"),
    "target 0": (lambda: sj.scionc(0.1, steady_norm_sq=0.0), "steady_norm_sq=0.0 must be positive"),
    "lr lambda above 1": (lambda: sj.scion(2.0, weight_decay=1.0), "lr \\* weight_decay = 2 exceeds 1"),
    "no way to the target": (lambda: sj.scionc(1.0), "steady_norm_sq=1.1875 is unreachable at lr=1"),
    "no exact way to it": (lambda: sj.scionc(2.0, overlap="exact"), "steady_norm_sq=1.1875 is unreachable at lr=2"),
    "output's above 1": (
        lambda: sj.scionc(0.01, output_lr=10.0, output_weight_decay=1.0),
        "lr \\* weight_decay = 10 exceeds 1",
    ),
    "default output's above 1": (lambda: sj.scionc(0.01, output_weight_decay=6.0), "lr \\* weight_decay = 1.2 exceeds 1"),
    "negative decay": (lambda: sj.scion(0.1, weight_decay=-1.0), "weight_decay=-1.0"),
    "unknown dtype": (lambda: sj.scion(0.1, momentum_dtype="int8"), "choose 'bfloat16' or 'float32'"),
    "unknown lmo": (lambda: sj.scion(0.1, "spectrum").init(MATRIX), "unknown lmo 'spectrum'"),
    "no label": (lambda: sj.scion(0.1, {}).init(MATRIX), "up/kernel has no label; label the tree"),
    "other shape": (
        lambda: sj.scion(0.1, {"up/kernel": sj.Label("hidden", "spectral", (3, 2))}).init(MATRIX),
        "its label is for \\(3, 2\\)",
    ),
    "unknown peak": (lambda: sj.scionc(LR).init(HEAD), "pass peak_lr="),
    "injected alpha": (lambda: sj.scionc(0.1, alpha=jnp.float32(0.1)).init(HEAD), "a known alpha; pass output_weight"),
    "scheduled output": (lambda: sj.scionc(0.1, output_lr=LR).init(HEAD), "an output_lr that is a number"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_a_remedy(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()
