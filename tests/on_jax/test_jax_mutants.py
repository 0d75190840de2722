"""Formulas of `steadynorm.jax`, broken on purpose one at a time: the tests notice. See tests/mutants.py."""

import needs_jax  # noqa: F401  # isort: skip

import ast
import os

import pytest
from mutants import KILLED, attempt
from mutation import Mutant, in_module, module_path, mutate

DECAY, SCION = "on_jax/test_jax_decay.py", "on_jax/test_jax_scion.py"
POLAR, LABELS = "on_jax/test_jax_polar.py", "on_jax/test_jax_labels.py"
GOLDEN = "on_jax/test_jax_golden.py::test_scionc_equals_torchs_scionc[True-linear-float64]"
FACTOR, LMO = f"{POLAR}::test_the_factor_is_torchs", f"{POLAR}::test_every_lmo_is_torchs"
decay = in_module("jax.decay_schedule", DECAY)
factors = in_module("jax.factors", FACTOR)
oracles = in_module("jax.oracles", LMO)
labels = in_module("jax.labels", LABELS)
stacks = in_module("jax.stacks", GOLDEN)
transform = in_module("jax.scion_transform", GOLDEN)
chains = in_module("jax.chains", DECAY)
RELATIVE = f"{DECAY}::test_relative_decay_of_muon_follows_the_momentum"
EXACT = f"{DECAY}::test_exact_target_decay_is_the_theorys_from_tiny_to_huge_eta"
OUTPUT = f"{SCION}::test_the_output_weight_has_its_own_lr_and_a_constant_decay_that_matches_at_the_peak"

# fmt: off
MUTANTS = (
    decay("corrected_decay.follow", "momentum factor upside down", "_gain(family, now, nesterov) / _gain(family, start, nesterov)", "_gain(family, start, nesterov) / _gain(family, now, nesterov)", RELATIVE),
    decay("_gain", "momentum gain without Nesterov", "nesterov=nesterov", "nesterov=False", RELATIVE),
    decay("_gain", "Adam's decay follows momentum", "1.0", "2.0", f"{DECAY}::test_target_decay_of_adam_is_the_theorys"),
    decay("_exact_decay.miss", "gain of the limit at finite eta", "gain(eta)", "gain(0.0)", EXACT),
    decay("_exact_decay", "lr = 0 decays", "jnp.where(lr > 0, jnp.exp(log_eta) / positive_lr, 0.0)", "jnp.exp(log_eta) / positive_lr", f"{DECAY}::test_no_lr_means_no_decay"),
    decay("_log_correlation", "Lion's filter is an average's", "lion(*momentum)", "ema(1 - momentum[1])", f"{DECAY}::test_relative_decay_of_lion_follows_its_betas"),
    decay("tabulate", "tables off by one", "jnp.clip(count, 0, steps - 1)", "jnp.clip(count + 1, 0, steps - 1)", f"{DECAY}::test_a_tabulated_schedule_is_the_step_function_and_keeps_its_last_value"),
    factors("_first_polynomial", "Schatten-8 norm without its root", "jnp.sqrt(jnp.square(square.astype(exact)).sum((-2, -1))) ** 0.25", "jnp.sqrt(jnp.square(square.astype(exact)).sum((-2, -1))) ** 0.5"),
    factors("_first_polynomial", "Newton-Schulz scaled by another norm", "jnp.trace(gram.astype(exact), axis1=-2, axis2=-1)", "jnp.square(gram.astype(exact)).sum((-2, -1))"),
    factors("_steps_on_gram", "the odd step last", "left in (1, 3)", "left in (1,)", f"{POLAR}::test_no_direction_is_enlarged_in_the_gram_form"),
    factors("_steps_on_gram", "Gram matrix not advanced", "_product(_product(q, gram), q)", "gram"),
    factors("_scale", "matrices not scaled", "x * first * second", "x", f"{POLAR}::test_the_factor_does_not_depend_on_the_scale"),
    factors("_svd", "missing rank filled", "u * rank[..., None, :]", "u", f"{POLAR}::test_missing_rank_stays_missing_in_an_svd"),
    oracles("_spectral", "spectral update upside down", "x.shape[-2] / x.shape[-1]", "x.shape[-1] / x.shape[-2]"),
    oracles("_FUNCTIONS", "rows too long", "normalize(x, -1) / math.sqrt(x.shape[-1])", "normalize(x, -1) * math.sqrt(x.shape[-1])"),
    labels("Label.seen_shape", "inputs and outputs swapped", "(*lead, math.prod(self.shape[first:]), math.prod(self.shape[self.stack:first]))", "(*lead, math.prod(self.shape[self.stack:first]), math.prod(self.shape[first:]))"),
    labels("Label.to_seen", "kernels not transposed", "x.reshape(*lead, d_in, d_out).mT", "x.reshape(*lead, d_out, d_in)"),
    labels("path_leaves", "a field called value loses its name", "leaves_below[path[:-1]] == 1", "True"),
    decay("check_in_reach", "an unreachable target is accepted", "check_reachable(target, lr, decay)", "None"),
    stacks("accumulate", "momentum keeps too much", "(alpha if active is None else alpha * active) * (grad - before)", "alpha * alpha * (grad - before)"),
    stacks("accumulate", "Nesterov is plain momentum", "now + alpha * (grad - now)", "now"),
    stacks("accumulate", "updates do not fade", "left / FADES_BELOW", "left / left", f"{SCION}::test_updates_fade_once_the_momentum_is_gone"),
    stacks("decay_and_step", "waiting rows step", "delta * leaf.active", "delta"),
    stacks("decay_and_step", "decay has the wrong sign", "-(eta * leaf.theta.astype(u.dtype))", "eta * leaf.theta.astype(u.dtype)"),
    stacks("blocks_of", "blocks forgotten", "label.blocks", "1"),
    transform("scionc.decay", "the shorter updates of Newton-Schulz forgotten", "target / oracle.length_share(seen, blocks, *split_method(polar))", "target", f"{SCION}::test_exact_decay_allows_for_the_shorter_updates_of_newton_schulz"),
    transform("_Rates.lr_of", "the output has everybody's lr", "OUTPUT_LR_RATIO * lr if self.output_lr is None else value_at(self.output_lr, count)", "lr", OUTPUT),
    transform("_Rates.default_output_decay", "the output's decay does not match", "self.start_decay(peak) / OUTPUT_LR_RATIO", "self.start_decay(peak)", OUTPUT),
    transform("_Rates.at", "decay without its lr", "lrs[path] * decays[rules[path]]", "decays[rules[path]]"),
    chains("muonc", "alpha is beta", "1 - beta", "beta", f"{SCION}::test_muonc_follows_an_injected_beta"),
)
# fmt: on


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.place}: {mutant.breaks}")
def test_every_mutant_applies(mutant: Mutant):
    plain = module_path(mutant).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutate(mutant))) != ast.dump(ast.parse(plain))


def test_the_tests_pass_on_the_unbroken_copy():
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests if test != LABELS})
    assert attempt(None, tests, 1800).outcome == "survived"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.place}: {mutant.breaks}")
def test_a_broken_formula_is_noticed(mutant: Mutant):
    outcome = attempt(mutant, mutant.tests, float(os.environ.get("STEADYNORM_MUTANT_SECONDS", "900")))
    assert outcome.outcome == KILLED, outcome
