"""lambda_t in JAX is the theory's, whatever moves; what cannot be known is refused."""

import needs_jax  # noqa: F401  # isort: skip

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import steadynorm as sn
import steadynorm.jax as sj

COUNTS = range(0, 40, 3)
LR = optax.warmup_cosine_decay_schedule(0.002, 0.02, 8, 40)
ALPHA = optax.linear_schedule(0.05, 0.8, 40)


def at(schedule, count: int) -> float:
    return float(jax.jit(schedule)(count))


def test_relative_decay_follows_the_lr():
    decay = sj.corrected_decay(LR, 0.3, peak_lr=0.02)
    assert [at(decay, t) for t in COUNTS] == pytest.approx([0.3 * at(LR, t) / 0.02 for t in COUNTS], rel=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_relative_decay_of_muon_follows_the_momentum(nesterov):
    decay = sj.corrected_decay(LR, 0.3, peak_lr=0.02, family="muon", alpha=ALPHA, nesterov=nesterov)
    gains = [sn.theory.momentum_gain(at(ALPHA, t), nesterov=nesterov) for t in (0, *COUNTS)]
    expected = [0.3 * at(LR, t) / 0.02 * gain / gains[0] for t, gain in zip(COUNTS, gains[1:], strict=True)]
    assert [at(decay, t) for t in COUNTS] == pytest.approx(expected, rel=1e-5)


def test_relative_decay_of_lion_follows_its_betas():
    decay = sj.corrected_decay(LR, 1.0, peak_lr=0.02, family="lion", betas=(ALPHA, 0.95), reference=(0.9, 0.99))
    start = sn.theory.lion_gain(0.9, 0.99)
    expected = [at(LR, t) / 0.02 * sn.theory.lion_gain(at(ALPHA, t), 0.95) / start for t in COUNTS]
    assert [at(decay, t) for t in COUNTS] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_target_decay_is_the_papers(nesterov):
    decay = sj.corrected_decay(LR, family="scion", alpha=ALPHA, steady_norm_sq=0.7, nesterov=nesterov)
    expected = [sn.theory.weight_decay_for(0.7, at(LR, t), at(ALPHA, t), nesterov=nesterov) for t in COUNTS]
    assert [at(decay, t) for t in COUNTS] == pytest.approx(expected, rel=1e-5)


def test_target_decay_of_adam_is_the_theorys():
    decay = sj.corrected_decay(LR, steady_norm_sq=0.01)
    assert [at(decay, t) for t in COUNTS] == pytest.approx(
        [sn.theory.adam_weight_decay_for(0.01, at(LR, t)) for t in COUNTS], rel=1e-5
    )


@pytest.mark.parametrize("shape", [(64, 64), (64, 256)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_exact_target_decay_is_the_theorys_from_tiny_to_huge_eta(shape, nesterov):
    kernel = sn.theory.overlap("spectral", shape)
    for lr in (1e-6, 1e-4, 1e-2, 0.3, 0.9):
        for alpha in (1e-3, 0.1, 0.9, 1.0):
            decay = sj.corrected_decay(
                lambda count, lr=lr: jnp.float32(lr), family="scion", alpha=lambda count, alpha=alpha: jnp.float32(alpha),
                steady_norm_sq=1.1875, nesterov=nesterov, overlap=kernel,
            )  # fmt: skip
            expected = sn.theory.weight_decay_for(1.1875, lr, alpha, nesterov=nesterov, overlap=kernel)
            assert at(decay, 0) == pytest.approx(expected, rel=2e-5), (lr, alpha)


def test_target_decay_of_lion_is_the_theorys():
    decay = sj.corrected_decay(LR, family="lion", betas=(0.9, 0.99), steady_norm_sq=0.02)
    expected = [sn.theory.lion_weight_decay_for(0.02, at(LR, t), 0.9, 0.99) for t in COUNTS]
    assert [at(decay, t) for t in COUNTS] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("overlap", ["linear", sn.theory.overlap("sign", None)])
def test_no_lr_means_no_decay(overlap):
    decay = sj.corrected_decay(
        lambda count: 0.0 * count, family="scion", alpha=0.1, steady_norm_sq=1.0, overlap=overlap
    )
    assert at(decay, 3) == 0.0


def test_a_tabulated_schedule_is_the_step_function_and_keeps_its_last_value():
    matched = sn.schedule.MatchedMomentum(0.1, 1.0, sn.schedule.cosine(30))
    alpha = sj.tabulate(matched.alpha, 30)
    assert [at(alpha, t) for t in (0, 7, 29)] == pytest.approx([matched.alpha(t) for t in (0, 7, 29)], rel=1e-6)
    assert at(alpha, 99) == pytest.approx(matched.alpha(29), rel=1e-6)


@pytest.mark.parametrize("rule", [{"weight_decay": 0.5, "peak_lr": 0.02}, {"steady_norm_sq": 0.1}], ids=str)
def test_adamc_without_gradients_decays_by_the_product_of_its_factors(rule):
    with jax.enable_x64(True):
        tx = sj.adamc(sj.tabulate(lambda step: 0.02 * (step + 1) / 50, 50), **rule)
        decay = sj.corrected_decay(lambda step: 0.02 * (step + 1) / 50, **rule)
        params = {"w": jnp.ones((3, 2), jnp.float64)}
        state = tx.init(params)
        for _ in range(50):
            updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
            params = optax.apply_updates(params, updates)
        expected = np.prod([1 - 0.02 * (t + 1) / 50 * float(decay(t)) for t in range(50)])
    np.testing.assert_allclose(params["w"], expected, rtol=1e-13)


def test_add_corrected_decay_leaves_masked_weights_alone():
    tx = sj.add_corrected_decay(0.1, 0.5, mask={"w": True, "b": False})
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert updates["w"].tolist() == [0.5, 0.5] and updates["b"].tolist() == [0.0, 0.0]


def test_a_constant_lr_leaves_optaxs_own_optimizers():
    params = {"w": jnp.arange(6.0).reshape(2, 3) / 10 - 0.2, "b": jnp.ones(3)}
    pairs = (
        (sj.adamc(1e-2, weight_decay=0.3), optax.adamw(1e-2, weight_decay=0.3)),
        (sj.lionc(1e-2, weight_decay=0.3), optax.lion(1e-2, weight_decay=0.3)),
        (
            sj.muonc(1e-2, 0.3, adam_weight_decay=0.2, options={"ns_steps": 4}),
            optax.contrib.muon(1e-2, weight_decay=0.3, adam_weight_decay=0.2, ns_steps=4),
        ),
    )
    for ours, theirs in pairs:
        results = []
        for tx in (ours, theirs):
            p, state = params, tx.init(params)
            for _ in range(3):
                updates, state = tx.update(jax.tree.map(jnp.cos, p), state, p)
                p = optax.apply_updates(p, updates)
            results.append(p)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *results)


@pytest.mark.parametrize(("x64", "dtype"), [(False, jnp.bfloat16), (True, jnp.float32)], ids=str)
@pytest.mark.parametrize("make", [sj.adamc, sj.lionc, sj.muonc])
def test_a_scheduled_decay_leaves_the_dtype_of_the_updates(make, x64, dtype):
    """`optax.apply_if_finite` refuses updates of another dtype than the gradients."""
    with jax.enable_x64(x64):
        tx = optax.apply_if_finite(make(sj.tabulate(lambda step: 0.01, 3), peak_lr=0.01), 2)
        params = {"w": jnp.ones((3, 2), dtype)}
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert updates["w"].dtype == dtype


def test_muonc_halves_the_decay_at_half_the_lr_for_matrices_and_for_its_adam():
    lr = sj.tabulate(lambda step: 0.02 if step == 0 else 0.01, 2)
    tx = sj.muonc(lr, 0.4, peak_lr=0.02, adam_weight_decay=0.2)
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    state, shares = tx.init(params), []
    for _ in range(2):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        shares.append([-float(updates["w"][0, 0]), -float(updates["b"][0])])
    np.testing.assert_allclose(shares, [[0.02 * 0.4, 0.02 * 0.2], [0.01 * 0.2, 0.01 * 0.1]], rtol=1e-5)


REFUSED = {
    "no peak": (lambda: sj.corrected_decay(LR, 0.1), "pass peak_lr="),
    "nothing asked": (lambda: sj.corrected_decay(0.1), "either weight_decay"),
    "both asked": (lambda: sj.corrected_decay(0.1, 0.1, steady_norm_sq=1.0), "either weight_decay"),
    "unknown family": (lambda: sj.corrected_decay(0.1, 0.1, family="sgd"), "choose one of adam, lion, muon, scion"),
    "Adam's alpha": (lambda: sj.corrected_decay(0.1, 0.1, alpha=0.1), "does not follow it; leave it out"),
    "Scion's betas": (lambda: sj.corrected_decay(0.1, 0.1, family="scion", betas=(0.9, 0.9)), "leave them out"),
    "target, no alpha": (lambda: sj.corrected_decay(0.1, family="muon", steady_norm_sq=1.0), "pass alpha="),
    "target, no betas": (lambda: sj.corrected_decay(0.1, family="lion", steady_norm_sq=1.0), "pass betas="),
    "negative lr": (lambda: sj.corrected_decay(-0.1, 0.1), "lr=-0.1 must be finite and not negative"),
    "negative decay": (lambda: sj.corrected_decay(0.1, -0.1), "weight_decay=-0.1 must be finite and not negative"),
    "alpha 2": (lambda: sj.corrected_decay(0.1, 0.1, family="scion", alpha=2), "outside \\(0, 1\\]"),
    "beta 1": (lambda: sj.lionc(0.1, b1=1.0), "betas\\[0\\]=1.0 is outside"),
    "injected momentum": (lambda: sj.muonc(0.1, beta=jnp.float32(0.9)), "muonc: reference_beta="),
    "lr lambda above 1": (lambda: sj.adamc(20.0, weight_decay=0.1), "lr \\* weight_decay = 2 exceeds 1"),
    "above 1 at the peak": (lambda: sj.lionc(LR, weight_decay=100.0, peak_lr=0.02), "lr \\* weight_decay = 2 exceeds 1"),
    "above 1 above the peak": (lambda: sj.adamc(2.0, weight_decay=0.1, peak_lr=0.1), "lr \\* weight_decay = 4 exceeds 1"),
    "no way to the target": (lambda: sj.corrected_decay(2.0, steady_norm_sq=1.0), "steady_norm_sq=1 is unreachable"),
    "no way to Lion's target": (lambda: sj.lionc(2.0, steady_norm_sq=1e-3), "steady_norm_sq=0.001 is unreachable"),
    "no overlap": (
        lambda: sj.corrected_decay(0.1, family="scion", alpha=0.1, steady_norm_sq=1.0, overlap="round"),
        "overlap='round'",
    ),
    "options twice": (lambda: sj.muonc(0.1, options={"beta": 0.9}), "options has beta; pass it to muonc itself"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_known_is_refused_with_a_remedy(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_an_lr_above_the_peak_that_was_passed_has_more_decay_as_in_torch():
    assert float(sj.corrected_decay(0.2, 0.1, peak_lr=0.1)(0)) == pytest.approx(0.2)


def test_optimizers_are_made_before_a_backend_is_started():
    """`jax.distributed.initialize` has to come before the backend, and optimizers may be made before it."""
    program = """
import steadynorm.jax as sj
sj.lionc(1e-3, steady_norm_sq=0.01), sj.scionc(0.01, overlap="exact"), sj.adamc(1e-3), sj.muonc(0.02)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
