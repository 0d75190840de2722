"""What tests/mutants.py breaks: one formula per entry, and the tests that must notice.

This file covers theory, optimizers, monitor and training; mutants_recipes.py covers models, data and experiments.
"""

from mutation import Mutant, in_module

# fmt: off
lengths = in_module("lengths", "test_lengths.py")
momentum = in_module("theory.momentum", "test_theory_kernels.py", "test_theory_forecast.py")
kernels = in_module("theory.kernels", "test_theory_kernels.py")
steady = in_module("theory.equilibrium", "test_theory_steady.py")
BALANCE = "test_cautious.py::test_steady_norm_equals_its_slow_twin"
cautious = in_module("theory.cautious", BALANCE)
trajectory = in_module("theory.trajectory", "test_theory_forecast.py")
rotation = in_module("theory.rotation", "test_theory_rotation.py")
balance = in_module("theory.balance", "test_theory_rotation.py")
correction = in_module("decay.correction", "test_decay.py", "test_decay_checkpoints.py", "test_decay_written.py")
rule = in_module("decay.rule", "test_decay.py", "test_decay_checkpoints.py")
foreign = in_module("decay.foreign", "test_decay_refusals.py", "test_decay_copies.py")
skip = in_module("decay.skip", "test_decay_skip.py")
rescale = in_module("decay.rescale", "test_hold_foreign.py")
TWIN_HELD = "test_hold_foreign.py::test_held_step_equals_its_twin"
recognition = in_module("decay.recognition", "test_decay_refusals.py", "test_decay_choices.py")
families = in_module("decay.families", "test_decay.py", "test_decay_refusals.py", "test_decay_choices.py")
lmo = in_module("lmo", "test_lmo.py")
idle = in_module("optim.idle", "test_idle.py")
updates = in_module("theory.updates", "test_lmo.py")
coefficients = in_module("polar.coefficients", "test_polar.py")
polar = in_module("polar.iteration", "test_polar.py")
accelerator = in_module("polar.accelerator", "test_accelerator.py")
FAKE_CUDA = "test_symmetric_kernels.py::test_polar_factors_on_cuda_leave_no_symmetric_product_to_torch"
symmetric = in_module("polar.symmetric_kernels", "test_symmetric_kernels.py")
triton = in_module("polar.triton_kernels", "test_symmetric_kernels.py")
TWIN = "test_optim_twins.py::test_scion_equals_its_twin"
hold = in_module("decay.hold", "test_hold.py")
batch = in_module("optim.batch", TWIN)
buckets = in_module("optim.buckets", TWIN)
scion = in_module("optim.scion", TWIN)
scion_rule = in_module("optim.scion_rule", TWIN)
lion = in_module("optim.lion", "test_optim_twins.py::test_lionc_equals_its_twin")
renormalized = in_module("optim.renormalized", "test_optim_twins.py::test_renormalized_adamw_equals_its_twin")
adam_rule = in_module("optim.adam_rule", "test_optim_twins.py::test_renormalized_adamw_equals_its_twin")
MUONC = "test_muon.py::test_muonc_equals_its_twin"
muon = in_module("optim.muon", MUONC)
schedule = in_module("schedule", "test_schedule.py")
translation = in_module("conversion.translation", "test_predict.py")
scheduler = in_module("scheduler", "test_schedule.py")
roles = in_module("groups.roles", "test_groups.py")
fusion = in_module("groups.fusion", "test_groups_blocks.py")
role_table = in_module("groups.role_table", "test_groups.py")
builder = in_module("groups.builder", "test_groups.py", "test_groups_output.py", "test_explain.py")
SLOWLY = "test_monitor_norms.py::test_the_spectral_norm_of_a_slowly_changing_matrix_is_within_a_percent_of_its_svd"
FORECAST = "test_monitor_forecast.py::test_the_forecast_and_the_expected_alignment_are_the_theorys"
UPDATES = "test_monitor_updates.py::test_length_size_and_angle_of_updates_equal_copies_of_the_weights"
norms = in_module("monitor.norms", SLOWLY)
spectral = in_module("monitor.spectral", SLOWLY)
record = in_module("monitor.record", FORECAST)
track = in_module("monitor.track", FORECAST)
advice = in_module("records.advice", "test_advice.py")
converter = in_module("conversion.converter")
changes = in_module("conversion.changes")
STEPS = "test_distributed.py::test_every_layout_takes_the_steps_of_a_single_process[four]"
MOVED = "test_distributed.py::test_state_dicts_go_between_layouts_unchanged"
strategy = in_module("optim.sharding.strategy", STEPS)
ownership = in_module("optim.sharding.ownership", STEPS)
layout = in_module("optim.sharding.layout", STEPS)
BIT_FOR_BIT = "test_residual.py::test_steps_on_bf16_weights_are_those_of_fp32_weights_bit_for_bit"
LEFT_BEHIND = "test_residual.py::test_a_residual_left_behind_moves_a_weight_by_at_most_half_a_bf16_step"
BITS = "properties/test_residual_properties.py::test_every_fp32_number_is_a_bf16_number_and_a_residual"
halves = in_module("optim.halves", BIT_FOR_BIT)
residual = in_module("optim.residual", "test_residual.py")

DIES = "test_train.py::test_a_resumed_run_equals_an_unbroken_one"

MUTANTS = (
    # theory
    momentum("ema", "Nesterov is plain momentum", "Filter(keep * keep, alpha * (2 - alpha), keep, alpha)", "Filter(keep, alpha, keep, alpha)"),
    momentum("trace", "trace Nesterov forgets a gradient", "1 + mu", "1.0"),
    momentum("lion", "Lion's betas swapped", "Filter(beta1, 1 - beta1, beta2, 1 - beta2)", "Filter(beta2, 1 - beta2, beta1, 1 - beta1)"),
    momentum("variance", "settled variance of the momentum doubled", "_gap(filter) * (1 + filter.r)", "_gap(filter)"),
    momentum("advance", "variance of the momentum not squared", "r * r * var", "r * var"),
    momentum("mixed_correlation", "the gradient that update and buffer share is left out", "p * (p * r + h * w)", "p * p * r"),
    kernels("sum_gain", "gain without its factor 2", "2.0 * (1.0 - eta)", "1.0 - eta"),
    kernels("sum_gain", "gain without decay", "numbers.log1p(-eta) + n * log_ratio", "n * log_ratio"),
    updates("_element_row", "sign has the linear kernel", "vector_kernel(1)", "LINEAR", "test_theory_kernels.py"),
    updates("UPDATES", "column has the kernel of a row", "vector_kernel(m)", "vector_kernel(n)", "test_theory_kernels.py"),
    kernels("vector_kernel", "vector kernel off by one", "k + d / 2 + 1", "k + d / 2"),
    kernels("_polar_kernel", "square kernel: a term missing", "1 / n + 1 / (n + 2)", "1 / n"),
    kernels("_polar_kernel", "flat kernel: c for its square root", "2 * math.sqrt(c)", "2 * c"),
    kernels("_compress", "mass of the tail lost", "max(0.0, 1.0 - math.fsum(weights))", "0.0"),
    Mutant("views:MatrixView.runs", "blocks do not divide the rows", "length // layout.count", "length", ("test_theory_kernels.py",)),
    Mutant("views:MatrixView.runs", "blocks of inputs do not share the norm", "length / size if layout.side == INPUTS and size else 1", "1", ("test_lmo.py",)),
    Mutant("views:_merge_equal", "neighbours of any size go together", "merged[-1][0] == size", "True", ("test_lmo.py",)),
    Mutant("views:BlockLayout.mismatch", "rows may be left over", "sum(self.parts) == length", "sum(self.parts) <= length", ("test_bad_input.py",)),
    kernels("mean_kernel", "kernels of blocks weighted alike", "weight / math.fsum(weights)", "1 / len(weights)"),
    kernels("mean_kernel", "elements of blocks weighted alike", "share * kernel.mean_abs", "kernel.mean_abs"),
    updates("Update._run_norm_sq", "blocks that share the norm are counted in full", "run.divisor**2", "1", "test_lmo.py"),
    updates("Update.length_share", "blocks fall short alike", "[self._run_norm_sq(run) for run in self.view.runs(shape, blocks)]", "None", "test_lmo.py"),
    steady("linear_gain", "momentum gain", "(2 - a) / denominator", "2 / denominator"),
    steady("linear_gain", "the paper's Nesterov factor missing", "a * (1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else a", "a * (1 + 4 * a - 6 * a**2 + 2 * a**3) if False else a"),
    steady("effective_lr", "effective lr without its root", "math.sqrt(momentum_gain(alpha, nesterov=nesterov))", "momentum_gain(alpha, nesterov=nesterov)"),
    steady("limit_decay", "factor 2 in the decay for a target", "2 * target", "target"),
    steady("weight_decay_for", "linear kernel where the exact one is asked for", "isinstance(overlap, Overlap)", "False"),
    steady("norm_sq_from_gain", "eta squared left out at finite eta", "eta * (2 - eta)", "2 * eta"),
    steady("half_life", "half-life by the first order", "-math.log1p(-eta)", "eta"),
    steady("adam_update_sq", "size of Adam's update", "(1 - beta1) / (1 + beta1)", "1 - beta1"),
    steady("adam_weight_decay_for", "factor 2 in Adam's decay for a target", '2 * check_target("mean_square", mean_square)', '1 * check_target("mean_square", mean_square)'),
    rotation("fixed_norm_lr", "relative lr without its root", 'math.sqrt(check_target("steady_norm_sq", steady_norm_sq))', 'check_target("steady_norm_sq", steady_norm_sq)'),
    rotation("lr_of_fixed_norm", "lr of a fixed norm without its root", 'math.sqrt(check_target("steady_norm_sq", steady_norm_sq))', 'check_target("steady_norm_sq", steady_norm_sq)'),
    rotation("angle_per_step", "angle of a step without its decay", "(relative_update - eta) * (relative_update + eta)", "relative_update * relative_update"),
    balance("forecast_balance", "balance returns twice as fast", "error / (2 * balance_steps)", "error / balance_steps"),
    balance("forecast_balance", "balance moves a norm that is on target", "(2 - drift) * drift * target", "2 * drift * target"),
    balance("forecast_balance", "balance corrects without bound", "min(1.0, max(-1.0, norm / target - 1))", "norm / target - 1"),
    balance("balance_keep", "error under balance falls without the decay itself", "(1 - eta) * (1 - eta - 1 / balance_steps)", "1 - 1 / balance_steps"),
    Mutant("monitor.track:_hold", "a held norm is forecast above its target", "(1 - params.keep) * params.held_at", "params.held_at", ("test_monitor_forecast.py::test_forecast_of_a_balanced_norm_returns_to_its_target_as_the_norm_does",)),
    Mutant("conversion.knobs:find_knobs", "lr for a half-life without its root", "math.sqrt(norm_sq / _norm_sq(setting, lr, eta))", "(norm_sq / _norm_sq(setting, lr, eta))", ("test_knobs.py",)),
    Mutant("conversion.knobs:find_knobs", "norm for a relative update not squared", "(lr / relative_update) ** 2", "lr / relative_update", ("test_knobs.py",)),
    Mutant("conversion.equivalents:from_fixed_norm", "fixed norm not in units of the update", "rms ** 2 * math.prod(shape) / unit_setting.update_norm_sq", "rms ** 2 * math.prod(shape)", ("test_knobs.py",)),
    Mutant("lab.holds:_run", "simulated balance forgets the alignment", "lr * lr * size_sq - 2 * lr * along", "lr * lr * size_sq", ("test_holds.py",)),
    trajectory("steady_overlap", "steady overlap forgets the decay", "(1 - eta) * step.to_m**kernel.n", "step.to_m**kernel.n"),
    trajectory("advance_forecast", "overlap of past updates missing", "(1 - e) ** 2 * norm + g * g + 2 * g * (1 - e) * cross", "(1 - e) ** 2 * norm + g * g"),
    trajectory("advance_forecast", "recursion off by one: the new update ages at once", "overlaps *= (kept * keep[t])[per_mode]; overlaps += push * reach[t][per_mode]", "overlaps += push * reach[t][per_mode]; overlaps *= (kept * keep[t])[per_mode]"),
    trajectory("initial_state", "forgets where the weights start", "check_start(start)", "0.0"),
    trajectory("initial_state", "warm momentum starts cold", "1.0 if warm_momentum else 0.0", "0.0"),
    trajectory("advance_forecast", "sign of the expected alignment", "-crosses", "crosses"),
    cautious("_share", "share of the mask without its second term", "np.arcsin(c) + c * np.sqrt(1 - c * c)", "np.arcsin(c)"),
    cautious("_push", "the mask's second update twice as long", "eta / 2 * kernel.mean_abs", "eta * kernel.mean_abs"),
    cautious("_push", "weight and update independent in size", "kernel.spread * (np.sqrt(1 - c * c) + c * np.arcsin(c) - 1)", "0.0"),
    cautious("_correlation", "correlation with the update, not with its input", "kernel.mean_abs / GAUSSIAN_MEAN_ABS * cross", "cross"),
    cautious("_surplus", "memory decays as if there were no mask", "kernel.gain_of(correlation, eta / 2)", "kernel.gain_of(correlation, eta)"),
    cautious("cautious_change", "cautious forecast: memory decays as if there were no mask", "1 - eta / 2", "1 - eta", "test_cautious.py::test_forecast_ends_at_the_steady_norm"),
    cautious("cautious_change", "cautious forecast: the masked decay of an update left out", "2 * push - lr", "lr", "test_cautious.py::test_forecast_ends_at_the_steady_norm"),
    cautious("_decay_for", "limit of cautious decay without its factor", "limit_decay(target, lr, kernel.gain_of(correlation)) / cautious_share(0.0)", "limit_decay(target, lr, kernel.gain_of(correlation))", "test_cautious.py::test_cautious_decay_is_twice_the_plain_one_as_eta_vanishes"),
    cautious("cautious_adam_weight_decay_for", "cautious Adam's target in the wrong unit", 'check_target("mean_square", mean_square) / adam_update_sq(check_beta("beta1", beta1))', 'check_target("mean_square", mean_square)', "test_cautious.py::test_decays_for_lion_and_adam_are_those_of_their_kernels"),
    kernels("vector_kernel", "elements of a short vector spread like Gaussian ones", "(d - 1) / (d + 1)", "1.0", "test_cautious.py::test_elements_of_normalised_vectors_have_the_kernels_moments"),
    kernels("vector_kernel", "elements of a short vector as large as Gaussian ones", "GAUSSIAN_MEAN_ABS / math.sqrt(lead)", "GAUSSIAN_MEAN_ABS", "test_cautious.py::test_elements_of_normalised_vectors_have_the_kernels_moments"),
    trajectory("forecast_adam", "Adam's bias correction off by one", "start=1", "start=2"),
    trajectory("_forecast_linear", "linear forecast decays once, not squared", "(1 - e) ** 2", "1 - e"),
    # the correction
    steady("relative_decay", "current lr in place of the peak", "lr / peak_lr", "lr / lr", "test_decay.py"),
    rule("weight_decay_now", "momentum factor missing", "relative_decay(rule.weight_decay, lr, peak, family.factor(group))", "relative_decay(rule.weight_decay, lr, peak)"),
    rule("correction_keys", "peak not remembered", "{key: group[key] for key in KEYS if group.get(key) is not None}", '{key: group[key] for key in KEYS if group.get(key) is not None and key != "peak_lr"}'),
    rule("decay_rule", "decay of the decay: based on what was written last", 'group.get("base_weight_decay", group["weight_decay"])', 'group["weight_decay"]'),
    correction("Correction.after_load", "checkpoint without the keys loses the peak", '{**known, "base_weight_decay": float(group["weight_decay"]), **own, "corrected": both}', '{"base_weight_decay": float(group["weight_decay"]), **own, "corrected": both}'),
    foreign("correct", "skipped groups are corrected", 'groups[index]["corrected"] = False', 'groups[index]["corrected"] = True'),
    foreign("correct", "the reference momentum is not used", 'keys["initial_momentum"] = family.reference(group, reference_momentum)', 'keys["unused"] = family.reference(group, reference_momentum)', "test_decay_choices.py"),
    foreign("uncorrect", "uncorrecting keeps the momentary decay", 'group["base_weight_decay"]', 'group["weight_decay"]', "test_decay_choices.py"),
    skip("_parts", "skipped parameters have the corrected decay", 'group["base_weight_decay"]', 'group["weight_decay"]'),
    skip("_parts", "a part of Scion's group still looks corrected", '{**group, "weight_decay": decay, "corrected": False}', '{**group, "weight_decay": decay}', "test_decay_skip.py::test_skipping_a_parameter_of_scion_leaves_its_decay_constant"),
    skip("StandIn.take_back", "what a step writes into a part is lost", "key not in _OF_A_PART", "False"),
    skip("unsplit", "split checkpoints are put together in the wrong order", "position in uncorrected", "position >= sizes[0]"),
    skip("_is_decayed_elsewhere", "held weights decay in the step as well", "is_rescaled(group)", "False", TWIN_HELD),
    skip("_is_decayed_elsewhere", "a captured step decays twice", "is_live(group)", "False", "test_capture.py"),
    rescale("_factors", "factor 2 in balanced decay after a step", "2 * held.norm_sq * share", "held.norm_sq * share", TWIN_HELD),
    rescale("_factors", "fixed norm scaled to its square", "goal.sqrt()", "goal", TWIN_HELD),
    rescale("_factors", "a norm that starts at zero is held there", "means < 0", "means > 0", "test_hold_foreign.py::test_zero_weights_are_free_of_a_fixed_norm_and_decay"),
    rescale("_drift_means", "drift per square of the lr", "(after + before) / held.gamma", "(after + before) / held.gamma**2", TWIN_HELD),
    rescale("_drift_means", "the first step does not set the mean drift", "measured == _MEASURED", "measured >= 0", TWIN_HELD),
    rescale("_drift_means", "means of old checkpoints are kept", "measured == _MEASURED", "measured > 0", "test_hold_foreign.py::test_means_of_an_old_checkpoint_are_measured_again"),
    rescale("_decayed_share", "cautious balance forgets what it leaves out", "torch.where(share > 0, share, 1.0)", "torch.ones_like(share)", TWIN_HELD),
    rescale("_same_sign_mask", "cautious where signs differ", "theta * moment.sign() > 0", "theta * moment.sign() < 0", TWIN_HELD),
    rescale("_same_sign_mask", "signs of tiny moments are lost", "moment.sign()", "moment", "test_hold_foreign.py::test_cautious_decay_sees_signs_of_tiny_moments"),
    rescale("took_step", "a step that a loss scaler skips is held", "found_inf.to(like.device).reshape(()) == 0", "found_inf.to(like.device).reshape(()) >= 0", "test_hold_foreign.py::test_step_that_a_loss_scaler_skips_on_the_device_holds_nothing"),
    rescale("_HeldParams.with_gradient", "parameters without a gradient are scaled", "p.grad is not None", "True", "test_hold_foreign.py::test_parameter_without_gradient_is_not_touched"),
    rescale("Rescaler.apply", "weights are scaled at lr 0", "held.gamma > 0", "True", "test_hold_foreign.py::test_zero_lr_changes_no_bit"),
    rescale("_over_shards", "norm of a strided shard taken for the whole", "placement.is_replicate()", "not placement.is_shard()", STEPS),
    correction("Correction._load_held", "a held norm rounded to the weights' dtype", "exact_dtype(p)", "p.dtype", "test_hold_foreign.py::test_resumed_run_is_the_unbroken_one"),
    foreign("correct", "groups that are added are not held", "optimizer.defaults.update(held)", "", "test_contract.py::test_an_added_group_trains_as_an_optimizer_of_its_own"),
    correction("Correction.after_load", "a checkpoint without a skip undoes it", "known.get(UNCORRECTED) and not group.get(UNCORRECTED)", "False", "test_decay_skip.py"),
    Mutant("decay.peak:PeakWatch.see", "a peak that is never approached goes unnoticed", '_FAR * group["peak_lr"]', '0.0 * group["peak_lr"]', ("test_decay_choices.py",)),
    correction("Correction._value", "OneCycle's own peak not taken", 'group["max_lr"]', 'group["peak_lr"]'),
    correction("Correction._value", "a base of zero leaves the decay as it was", "return 0.0", "return None"),
    foreign("_attach", "a copy loses its correction", "copyreg.dispatch_table.setdefault(type(optimizer), _reduce)", "_ = copyreg"),
    families("Family.factor", "momentum factor upside down", 'self.gain(now, group) / self.gain(group["initial_momentum"], group)', 'self.gain(group["initial_momentum"], group) / self.gain(now, group)'),
    families("_SGD.gain", "trace SGD's factor not squared", "check_alpha(momentum) ** -2", "check_alpha(momentum) ** -1", "test_optim_decay.py::test_the_trace_decay_goes_with_the_square_of_alpha"),
    families("_Muon.alpha", "Muon's momentum taken for alpha", '1 - float(group.get("momentum", 0.0))', 'float(group.get("momentum", 0.0))'),
    recognition("flag_against", "decay that a flag makes coupled is accepted", "group.get(flag) is False", "False"),
    recognition("flag_against", "decay that does not scale with lr is accepted", 'group.get("fixed_decay")', "False"),
    recognition("flag_against", "decay that is corrected already is corrected twice", 'group.get("corrected_weight_decay")', "False"),
    recognition("_refusal_reason", "coupled decay accepted", "any(name in _COUPLED for name in names)", "False"),
    # lmo
    updates("_polar_row", "U^2 of spectral", "m / n * min(m, n)", "float(min(m, n))"),
    updates("UPDATES", "U^2 of sign", '_element_row("sign", lambda m, n: m / n)', '_element_row("sign", lambda m, n: float(m * n))'),
    updates("UPDATES", "U^2 of embedding", '_element_row("embedding", lambda m, n: float(m * n))', '_element_row("embedding", lambda m, n: m / n)'),
    updates("UPDATES", "U^2 of bias", "lambda m, n: float(n)", "lambda m, n: 1.0"),
    updates("UPDATES", "U^2 of row", 'Update("row", views.MATRIX, lambda m, n: m / n, lambda m, n: vector_kernel(n), row_separable=True)', 'Update("row", views.MATRIX, lambda m, n: float(m), lambda m, n: vector_kernel(n), row_separable=True)'),
    updates("UPDATES", "U^2 of column", 'Update("column", views.MATRIX, lambda m, n: float(m * n), lambda m, n: vector_kernel(m))', 'Update("column", views.MATRIX, lambda m, n: float(n), lambda m, n: vector_kernel(m))'),
    updates("newton_schulz_share", "Newton-Schulz taken to be exact", "s**2", "s**0"),
    lmo("_spectral_norm", "spectral norm over d_in/d_out", "x.shape[-1] / x.shape[-2]", "x.shape[-2] / x.shape[-1]"),
    lmo("LMOS", "norm of a bias not an RMS", "_length(x, -1) / math.sqrt(x.shape[-1])", "_length(x, -1)"),
    lmo("LMOS", "norm of an embedding a mean", "lambda x: x.abs().amax((-2, -1))", "lambda x: x.abs().mean((-2, -1))"),
    lmo("_rms_to_rms", "spectral scaled by d_in/d_out", "d_out / d_in", "d_in / d_out"),
    lmo("Lmo._update_run", "stored transposed, scaled as if it were not", "self.polar_scale(run.d_out, run.d_in)", "self.polar_scale(*matrices.shape[-2:])"),
    lmo("LMOS", "column normalises rows", "_unit(x, -2)", "_unit(x, -1)"),
    lmo("Lmo._update_run", "taps of a convolution not counted", "u.div_(run.divisor)", "u"),
    lmo("Lmo._update_run", "fused q, k, v updated as one matrix", "self.view.to_matrices(x, run.blocks, side, batch_ndim)", "self.view.to_matrices(x, 1, side, batch_ndim)"),
    lmo("Lmo.checked_update", "every run of blocks is the first", "whole.narrow(dim, run.start, run.length)", "whole.narrow(dim, 0, run.length)"),
    lmo("Lmo.checked_update", "blocks that are not direct are left unwritten", "target.copy_(updated)", "updated"),
    # gradients that are zero
    idle("block_of", "unequal blocks begin a row early", "at >= end", "at > end - 2"),
    idle("fade_", "stale updates do not fade", "(left / FADES_BELOW).clamp_(max=1.0)", "torch.ones_like(left)"),
    idle("fade_", "what is left of the momentum never comes back", "(left * momentum_keep.to(left.dtype)).masked_fill_(nonzero, 1.0)", "(left * momentum_keep.to(left.dtype)).masked_fill_(nonzero, 0.0)"),
    buckets("split", "a stack of experts is never cut, whatever the budget", "bucket.slices.blocks > 1 and not bucket.slices.waiting_ndim", "bucket.slices.blocks > 1", "test_accelerator.py::test_a_stack_of_experts_is_cut_to_the_budget_and_takes_the_same_steps"),
    buckets("split", "a stack that fades is cut", "not fades_in_blocks", "True", "test_accelerator.py::test_a_stack_of_experts_is_cut_to_the_budget_and_takes_the_same_steps"),
    buckets("_batches", "slices without a gradient move on", "largest[k] != 0", "largest[k] >= 0", "test_idle.py"),
    idle("is_finite", "gradients near the largest number are taken in", "torch.finfo(largest.dtype).max / 2", "torch.finfo(largest.dtype).max"),
    scion_rule("ScionSettings.slices", "an expert of a dense stack moves for ever", "Slices(waiting, shape[0], 0)", "Slices(waiting)", "test_idle.py::test_an_expert_of_a_dense_stack_fades"),
    Mutant("optim.peak_relative:PeakRelativeOptimizer.add_param_group", "an own optimizer's guessed peak is not watched", "watch(self.param_groups[-1])", "", ("test_decay_choices.py",)),
    Mutant("optim.peak_relative:loading", "a replaced peak is not reported", "correction.warn_of_replaced(optimizer)", "", ("test_decay_choices.py",)),
    Mutant("optim.peak_relative:loading", "a run that is joined late is judged", "LARGEST not in saved", "False", ("test_decay_choices.py",)),
    # polar
    polar("_steps_on_gram", "no restart in the Gram form", "gram = _symmetric(y, y.mT)", "gram = start = _symmetric(y, y.mT) if k == 0 else _symmetric(_symmetric(q, start), q)"),
    polar("_steps_on_gram", "an odd step of the Gram form goes last", "left in (1, 3)", "left == 1"),
    polar("_factor", "polar factors are zero: seen by the properties alone", 'if not quintics:\n    return _svd(x)', "return torch.zeros_like(x)", "properties/test_lmo_properties.py"),
    polar("_steps_on_gram", "Frobenius norm in place of Schatten-8", "_first_polynomial(gram, quintics[0], _schatten8)", "_first_polynomial(gram, quintics[0], _frobenius)"),
    polar("_schatten8", "Schatten-8 norm without its root", "torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=exact).pow(0.25)", "torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=exact).pow(0.5)"),
    polar("_factor", "Newton-Schulz scaled by Schatten-8", "_frobenius if published else _schatten8", "_schatten8 if published else _schatten8"),
    polar("_scaled", "denormals scaled by one factor", "(x * first).to(working).mul_(second.to(working))", "x.to(working, copy=True).mul_((first * second).to(working))"),
    polar("_first_polynomial", "cubic term scaled wrongly", "inverse**3", "inverse**2"),
    coefficients("_compose", "intervals of the composition not followed", "2 - low", "1.0"),
    polar("_symmetric", "half of a symmetric product not mirrored", "out[low:high, :low].mT", "0"),
    polar("_svd", "directions of no size get one", "u * rank.unsqueeze(-2)", "u"),
    polar("_first_polynomial", "fifth power scaled as the fourth", "inverse**5", "inverse**4"),
    accelerator("_runs", "a step of the Gram form too many", "left < 3 or (left == 3 and runs and dtype != torch.bfloat16)", "True"),
    accelerator("scale_and_round", "matrices are not scaled to their norm", "torch.rsub(norm, tiny, alpha=-1 / _SIZE)", "torch.ones_like(norm)"),
    accelerator("_apply", "scale left out", "alpha=scale", "alpha=1.0"),
    accelerator("_first_polynomial", "Schatten-8 norm without its root", "torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=exact).pow_(-0.25)", "torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=exact).pow_(-0.5)"),
    accelerator("polynomial", "no identity in the polynomial", "out.diagonal(dim1=-2, dim2=-1).add_(a)", "out.diagonal(dim1=-2, dim2=-1).add_(0 * a)"),
    Mutant("optim.state:pack", "state of one parameter goes to another", "torch.stack([state[key] for state in owners]).unbind(0)", "torch.stack([state[key] for state in owners]).flip(0).unbind(0)", ("test_accelerator.py",)),
    batch("decay_and_step_", "weights in place are not decayed", "torch.addcmul(moved, p, kept, out=p)", "torch.add(moved, p, out=p)", "test_accelerator.py"),
    batch("lie_side_by_side", "tensors further apart are taken for neighbours", "start + k * size", "x.storage_offset()", "test_accelerator.py"),
    batch("Batch.take_grad", "gradients of the model are overwritten", "self.owns_gradient", "True", "test_accelerator.py"),
    batch("stack_finite", "a gradient that is not finite is taken for zero", "0.75 * torch.finfo(dtype).max", "0.0", "test_accelerator.py"),
    Mutant("optim.companions:find_companions", "matrices of several buckets share without regard to the budget", "sum(map(_budget_share, (*group, chunk))) <= 1", "True", ("test_accelerator.py::test_other_settings_and_a_small_budget_keep_iterations_apart",)),
    Mutant("optim.companions:find_companions", "blocks and whole matrices are not iterated together", "common & kinds", "False", ("test_accelerator.py::test_blocks_and_whole_matrices_of_one_size_share_an_iteration",)),
    scion_rule("ScionSettings.scale_of", "blocks of the inputs do not share the norm on an accelerator", "self.lmo.polar_scale(run.d_out, run.d_in) / run.divisor", "self.lmo.polar_scale(run.d_out, run.d_in)", "test_accelerator.py"),
    scion_rule("with_polar_steps", "Newton-Schulz takes the steps of PolarExpress", 'group.get("polar", defaults["polar"])', '"express"', "test_polar.py::test_four_steps_are_the_default_and_newton_schulz_takes_five"),
    scion_rule("_normalize_all", "runs of blocks change places", "sorted(u)", "sorted(u, reverse=True)", "test_accelerator.py"),
    Mutant("optim.base:SteadyOptimizer.fill_scalars", "scalars keep the numbers of the captured step", "bucket.fill(self._numbers(group, bucket, f\"{type(self).__name__}, {group_label(bucket.group, group)}\"))", "None", ("test_capture.py",)),
    Mutant("decay.live:LiveDecay.fill", "a captured step keeps its decay", "self._factors[index, kind].fill_(value)", "self._factors[index, kind].fill_(1.0)", ("test_capture.py",)),
    accelerator("symmetric", "symmetric products left to torch although kernels were asked for", "if symmetric_kernels.is_enabled(a.device, a.dtype):\n    return symmetric_kernels.symmetric_product(a, b)", "", FAKE_CUDA),
    symmetric("is_enabled", "kernels for fp32", "device.type != 'cuda' or dtype not in DTYPES", "device.type != 'cuda'"),
    symmetric("is_enabled", "kernels on by default", "os.environ.get(VARIABLE, '')", "os.environ.get(VARIABLE, '') or '1'"),
    symmetric("_missing", "kernels on devices without bf16 tensor cores", "torch.cuda.get_device_capability(device)", "_MIN_CAPABILITY"),
    symmetric("_check_coefficients", "one coefficient read for several matrices", "value.numel() != matrices", "value.numel() > matrices"),
    triton("choose_tiling", "large tiles although most of the device idles", "matrices * _lower_tiles(side, LARGE)", "_lower_tiles(side, LARGE) * _MIN_PROGRAMS"),
    triton("choose_tiling", "large tiles whatever they pad", "fills and computed[LARGE] <= _MAX_PADDING * computed[SMALL]", "fills"),
    triton("are_aligned", "a gap between rows taken for vectors", "stride == 1 or stride % _ALIGNMENT == 0", "stride > 0"),
    triton("are_aligned", "an odd start taken for vectors", "x.data_ptr() % _ALIGNMENT == 0", "True"),
    triton("_lower_tiles", "tiles above the diagonal have programs", "tiles * (tiles + 1) // 2", "tiles * tiles"),
    triton("_place", "a square root rounded up misplaces its tile", "row -= (row * (row + 1) // 2 > t).to(tl.int32)", ""),
    triton("_place", "rows of the triangle counted as of a square", "t - row * (row + 1) // 2", "t - row * row"),
    triton("_multiply", "the edge of the inner dimension read from beyond", "row_inside & (k < length - low)[None, :]", "row_inside"),
    triton("_multiply", "rows beyond the matrix read", "tl.arange(0, BLOCK) < side - row * BLOCK", "tl.arange(0, BLOCK) < BLOCK"),
    triton("_multiply", "columns beyond the matrix read", "tl.arange(0, BLOCK) < side - column * BLOCK", "tl.arange(0, BLOCK) < BLOCK"),
    triton("polynomial_kernel", "entries beyond the matrix read", "(i < side) & (j < side)", "i >= 0"),
    triton("_multiply", "every pass of the loop forgets the last", "tl.dot(a, b, total)", "tl.dot(a, b)"),
    triton("_multiply", "the right operand stays where it is", "right_tile += DEPTH * right_row_stride", ""),
    triton("_store_twice", "tiles on the diagonal are not mirrored", "tl.where(i >= j, tile, tl.trans(tile))", "tile"),
    triton("_store_twice", "the upper half of a diagonal tile counts", "i >= j", "i <= j"),
    triton("_store_twice", "the mirror tile is not transposed", "tl.store(mirror, tl.trans(tile), mask=inside)", "tl.store(mirror, tile, mask=inside)"),
    triton("_store_twice", "only the lower half is written", "tl.store(mirror, tl.trans(tile), mask=inside)", ""),
    triton("_store_twice", "the edge of the mirror tile is written beyond", "(i < side - column * BLOCK) & (j < side - row * BLOCK)", "i < side - column * BLOCK"),
    triton("product_kernel", "every matrix is multiplied by the first", "right + matrix * right_stride", "right"),
    triton("polynomial_kernel", "the identity is added to every entry", "tl.where(i == j, a, 0.0)", "a"),
    triton("polynomial_kernel", "coefficients of R and R^2 exchanged", "c * square + b * linear", "b * square + c * linear"),
    triton("polynomial_kernel", "the first matrix's coefficient for all", "tl.load(b + matrix)", "tl.load(b)"),
    # the step
    hold("target_norm_sq", "the target of a fixed shape, not of its update", "rule.steady_norm_sq * update_sq", "rule.steady_norm_sq"),
    hold("held_target", "a fixed norm jumps to the one that the peak gives", 'hold_of(group) == "fixed"', 'hold_of(group) == "pinned"'),
    hold("hold_of", "balance without a target", "isinstance(decay_rule(group), Constant)", "False"),
    hold("update_means", "means over T steps, which trail a falling lr", "max(1.0, steps / 10)", "max(1.0, steps)"),
    hold("update_means", "the first step is averaged with zero", "torch.where(started, means + (now - means) / max(1.0, steps / 10), now)", "means + (now - means) / max(1.0, steps / 10)"),
    hold("update_means", "a skipped step is measured", "took_step", "took_step | True"),
    hold("update_means", "waiting rows count as if they had moved", "torch.where(share > 0, share, 1.0)", "torch.ones_like(share)"),
    hold("balanced_eta", "the alignment is left out: open loop with a measured length", "2 * gamma * along", "0 * gamma * along"),
    hold("balanced_eta", "factor 2 in the drift", "2 * norm_sq", "norm_sq"),
    hold("bounded_eta", "a norm that is off does not return", "error / (2 * steps)", "0 * error"),
    hold("bounded_eta", "no layer may grow", "_MOST_GROWTH", "0.0"),
    hold("bounded_eta", "lr = 0 moves the weights", "gamma > 0", "gamma >= 0"),
    hold("Hold.rates", "the lr of each parameter is on the CPU", "gamma * ones", "gamma.expand(len(ones))", "test_no_sync.py"),
    hold("held_norms", "the norm of every step is held", "held == 0", "held < torch.inf"),
    hold("fixed_scale", "the update is not part of the norm", "sums.update_sq", "0 * sums.update_sq"),
    hold("fixed_scale", "waiting rows are scaled as well", "norm_sq * share", "norm_sq"),
    lengths("l2_lengths", "squares of a large tensor are added one after another", "_adds_one_by_one(x)", "False"),
    batch("same_sign_mask", "cautious decay acts where weight and update differ in sign", "(u * theta).gt_(0)", "(u * theta).lt_(0)", "test_hold.py"),
    batch("decay_and_step_", "sign of the update", "-gamma", "gamma"),
    batch("kept_share", "factor 2 in the decay", "1 - eta * decayed", "1 - 2 * eta * decayed"),
    batch("Batch.descend", "cautious decay is none", "same_sign_mask(weights, update)", "torch.zeros_like(weights)", "test_hold.py"),
    batch("decay_and_step_", "no decay at all", "theta.mul_(keep)", "theta"),
    batch("decay_and_step_", "weights do not move, but for their decay: seen by the properties alone", "-gamma", "-0 * gamma", "properties/test_twin_properties.py"),
    batch("decay_and_step_", "updates twice as long: seen by the properties alone", "-gamma", "-2 * gamma", "properties/test_bounded_properties.py"),
    batch("decay_and_step_", "decay after the step", "theta.mul_(keep).addcmul_(u, move)", "theta.addcmul_(u, move).mul_(keep)"),
    batch("SplitRule.rule", "coupled: decay added to the gradient", "x = self.accumulate(batch, scalars, settings)", 'batch.gradient[0] = batch.gradient[0] + scalars["eta"] / scalars["gamma"] * batch.weights(); scalars = {**scalars, "eta": 0 * scalars["eta"]}; x = self.accumulate(batch, scalars, settings)'),
    buckets("_batches", "state of one parameter goes to another", "batch.state[key]", "batch.state[key].flip(0)", "test_buckets.py"),
    batch("Batch.descend", "weights of one parameter go to another", "self.write(theta)", "self.write(theta.flip(0))", "test_buckets.py"),
    halves("split", "bf16 weights cut off, not rounded: the residual overflows", "bits + (1 << 15)", "bits + 0"),
    halves("split", "ties rounded towards zero: the residual overflows", "bits + (1 << 15)", "bits + (1 << 15) - 1", BITS),
    halves("split", "some NaN become infinities or zeros", "theta.view(torch.int32).masked_fill_(theta.isnan(), _NAN_BITS)", "theta.view(torch.int32)", "test_residual.py::test_nan_stays_nan_in_weight_and_pair"),
    halves("merge", "the residual is not added", "bits = weights.view(torch.int16).to(torch.int32).mul_(1 << 16).add_(residual)", "bits = weights.view(torch.int16).to(torch.int32).mul_(1 << 16)"),
    halves("merge", "a residual that was left behind turns 0 into NaN", "torch.where(theta.isnan(), weights, theta, out=theta)", "theta", LEFT_BEHIND),
    batch("Batch.write", "the residual is not written", "[*self.params, *residuals]", "[*self.params, *[r.clone() for r in residuals]]", BIT_FOR_BIT),
    batch("Batch.write", "residuals of one parameter go to another", "[*rounded.unbind(0), *low.unbind(0)]", "[*rounded.unbind(0), *low.flip(0).unbind(0)]", BIT_FOR_BIT),
    batch("Descent.part", "a large parameter's residual is that of its first rows", "cut(self.residuals[which], rows)", "cut(self.residuals[which], rows and slice(0, rows.stop - rows.start))", "test_residual.py::test_large_matrices_that_are_cut_by_rows_equal_fp32_ones"),
    strategy("_write", "sharded bf16 weights lose their residual", "descent.part(some)", "descent.part(some)._replace(residuals=None)", "test_residual_sharded.py::test_sharded_steps_on_bf16_weights_are_those_of_fp32_weights_bit_for_bit"),
    residual("is_kept", "a residual for every dtype", "p.dtype == torch.bfloat16", "p.dtype != torch.float64"),
    residual("is_kept", "weight_residual=False is not heard", "group.get(RESIDUAL) is not False", "True"),
    residual("check_residual", "True is taken for other dtypes", "wanted and p.dtype != torch.bfloat16", "False"),
    buckets("_batches", "non-finite gradients not skipped", "finite.to(exact)", "torch.ones_like(finite).to(exact)", "test_buckets.py"),
    batch("Batch.descend", "alignment with the weights after the step", "inner_products(theta, u, update_share)", "inner_products(theta - gamma * u, u, update_share)", "test_monitor_alignment.py::test_the_alignment_equals_that_of_copies_of_the_weights"),
    scion_rule("_accumulate", "Nesterov missing", "grad.lerp_(m, 1 - alpha) if settings.nesterov else m", "m"),
    scion_rule("_accumulate", "momentum keeps alpha instead of 1 - alpha", "m.lerp_(grad, alpha)", "m.lerp_(grad, 1 - alpha)"),
    scion_rule("_from_kept", "Nesterov missing where momentum is kept in bf16", "torch.lerp(x, wide, 1 - a) if nesterov else wide", "wide", "test_buckets.py::test_bf16_momentum_is_the_rounded_momentum_of_its_formula"),
    scion("Scion._weight_decay", "alpha of construction, not the scheduled one", 'weight_decay_now(group, SCION)', 'weight_decay_now({**group, "alpha": self.defaults["alpha"]}, SCION)'),
    scion("Scion._weight_decay", "C^2 of construction, not the scheduled one", 'weight_decay_now(group, SCION)', 'weight_decay_now({**group, "steady_norm_sq": group["steady_norm_sq"] and self.defaults["steady_norm_sq"]} if "steady_norm_sq" in group else group, SCION)'),
    scion("Scion._weight_decay", "lr of construction in the decay", 'weight_decay_now(group, SCION)', 'weight_decay_now({**group, "lr": self.defaults["lr"]}, SCION)'),
    scion("Scion._weight_decay", "linear decay where exact is asked for", 'group.get("overlap") != "exact"', "True"),
    lion("LionC.scalars", "betas swapped", '{"gamma": lr, "eta": eta, "beta1": float(beta1), "beta2": float(beta2), "momentum_keep": float(beta2)}', '{"gamma": lr, "eta": eta, "beta1": float(beta2), "beta2": float(beta1), "momentum_keep": float(beta2)}'),
    lion("_accumulate", "the update sees the new momentum", 'x = torch.lerp(grad, m, scalars["beta1"] * ones); m.lerp_(grad, (1 - scalars["beta2"]) * batch.active)', 'm.lerp_(grad, (1 - scalars["beta2"]) * batch.active); x = torch.lerp(grad, m, scalars["beta1"] * ones)'),
    adam_rule("adam_update", "Adam's betas swapped", '(scalars["beta1"], scalars["beta2"], batch.counts.to(grad.dtype))', '(scalars["beta2"], scalars["beta1"], batch.counts.to(grad.dtype))', MUONC),
    muon("muon_lmo", "Muon's factor of the other side ratio", "muon_factor(adjust, (d_out, d_in))", "muon_factor(adjust, (d_in, d_out))"),
    muon("MuonC.scalars", "Muon's alpha is its momentum", "1 - momentum", "momentum"),
    muon("MuonC.scalars", "Muon's momentum of construction, not the scheduled one", 'group["momentum"]', 'self.defaults["momentum"]'),
    muon("MuonC.add_param_group", "Adam's lr is Muon's", "self._adam_lr()", 'self.defaults["lr"]', "test_muon.py::test_adam_groups_take_their_own_lr_and_no_target"),
    scion_rule("encode", "Muon's updates sent in units of Scion's", "{settings.scale_of(run) for run in runs}", "{(run.d_out / run.d_in) ** 0.5 / run.divisor for run in runs}", "test_muon.py::test_bf16_transfers_are_lossless"),
    updates("muon_adam_lr", "Adam's lr beside Muon is Muon's", "lr / 20", "lr", "test_muon.py::test_adam_groups_take_their_own_lr_and_no_target"),
    families("_OwnMuon.update_norm_sq", "a stack of Muon's counted as one matrix", "row.update_norm_sq(shape, blocks=blocks) * share", "row.update_norm_sq(shape[-2:], blocks=blocks) * share", "test_muon.py::test_the_size_of_updates_is_known"),
    families("_OwnMuon.kernel", "Muon's kernel of the fused matrix, not of its blocks", 'group["blocks"]', "1", "test_muon.py::test_the_kernel_is_that_of_the_blocks"),
    families("_MuonAndAdam.of", "Adam groups corrected as Muon's", "OWN_MUON if group['use_muon'] else ADAM", "OWN_MUON", MUONC),
    builder("_muon_rules", "MuonC corrects the output layer", '{"name": "output", **rest, "lr": output_lr, "corrected": False}', '{"name": "output", **rest, "lr": output_lr}', "test_groups_muon.py"),
    buckets("count_updates", "skipped updates are counted", "now.add_(finite)", "now.add_(1)", "test_contract.py::test_a_non_finite_gradient_skips_that_parameter_only"),
    strategy("_count_without_part", "a rank without rows does not count", "buckets.count_updates(step.counts, step.finite)", "None"),
    strategy("_accumulate", "Adam's bias of the step before, where data moves", "buckets.count_updates(step.counts[which], step.finite[which])", "torch.stack(step.counts[which]) + buckets.count_updates(step.counts[which], step.finite[which]) * 0", STEPS),
    polar("_symmetric", "A^2 rounded before b A is added", "(torch.addmm if a.ndim == 2 else torch.baddbmm)(a, a, b, beta=plus)", "torch.add(a @ b, a, alpha=plus)", "test_muon.py::test_newton_schulz_in_bf16_is_as_accurate_as_torchs"),
    polar("_symmetric", "A^2 rounded before b A is added, in blocks", "torch.addmm(a[low:high, :high], a[low:high], b[:, :high], beta=plus, out=part)", "part.copy_(torch.add(a[low:high] @ b[:, :high], a[low:high, :high], alpha=plus))", "test_muon.py::test_newton_schulz_in_bf16_is_as_accurate_as_torchs"),
    adam_rule("_bias", "bias correction missing", "torch.where(bias > 0, bias, 1.0)", "torch.ones_like(bias)"),
    renormalized("renormalized_rule", "renormalisation skipped", "torch.where((size >= eps) & (gamma > 0), scale, 1.0)", "torch.where((size >= eps) & (gamma > 0), torch.ones_like(scale), 1.0)"),
    renormalized("renormalized_rule", "norm of the weights before their decay", "theta * (keep / weight_scale)", "theta / weight_scale"),
    renormalized("renormalized_rule", "a step past zero is turned back", "(size - gamma * along).abs()", "size - gamma * along", "test_optim_twins.py::test_renormalized_adamw_steps_past_zero_as_adamw_does"),
    Mutant("optim.sgd:sgd_rule", "trace momentum damped", "batch.active if settings.trace else alpha", "alpha", ("test_optim_twins.py::test_sgdc_equals_its_twin",)),
    Mutant("optim.sgd:sgd_rule", "SGD's Nesterov missing", "share.addcmul_(m, 1 - alpha) if settings.nesterov else m", "m", ("test_optim_twins.py::test_sgdc_equals_its_twin",)),
    Mutant("optim.sgd:sgd_rule", "SGD's momentum never forgets", "m.mul_(1 - alpha)", "m", ("test_optim_twins.py::test_sgdc_equals_its_twin",)),
    Mutant("optim.adam:AdamC._prepare", "AdamC without its correction", "own_correction(self, ADAM)(self)", "own_correction(self, ADAM)", ("test_optim_twins.py::test_adamc_equals_its_twin",)),
    Mutant("optim.finite_guard:NonFiniteSkipper.withhold_non_finite", "AdamC steps along non-finite gradients", "p.grad = None", "p.grad = p.grad", ("test_contract.py::test_a_non_finite_gradient_skips_that_parameter_only",)),
    Mutant("optim.peak_relative:loading", "a plain checkpoint's decay is not the base", '"base_weight_decay" not in saved', "False", ("test_optim_checkpoints.py::test_a_plain_adamw_checkpoint_continues_in_adamc",)),
    Mutant("optim.state:StateKeeper.load_state_dict", "resuming loses the momentum", "_place_like(values[key], fresh) if key in values else fresh", "fresh", ("test_contract_checkpoints.py::test_a_resumed_run_equals_an_unbroken_one",)),
    Mutant("optim.state:StateKeeper.load_state_dict", "a checkpoint without the peak lr loses it", "group.setdefault(key, value)", "pass", ("test_optim_checkpoints.py::test_a_plain_adamw_checkpoint_continues_in_adamc",)),
    # schedules
    schedule("Ratio.__call__", "warmup off by one", "step + 1", "step"),
    schedule("Ratio.__call__", "end of the cosine off by one", "since / self.decay", "(since + 1) / self.decay"),
    schedule("_SHAPES", "cosine not halved", "(1 + math.cos(math.pi * x)) / 2", "math.cos(math.pi * x / 2)"),
    schedule("_GAIN_POWER", "momentum matched without the root", '{"gamma-eff": 0.5, "gamma-prime": 1.0}', '{"gamma-eff": 1.0, "gamma-prime": 1.0}'),
    schedule("MatchedMomentum.at", "lr does not take over at alpha_max", "ratio * (start / least) ** power", "ratio"),
    schedule("MatchedMomentum.at", "matched ratio counts the warmup", "step - self.warmup", "step"),
    schedule("Between.__call__", "start and end swapped", "ratio * self.start + (1 - ratio) * self.end", "ratio * self.end + (1 - ratio) * self.start", "test_schedule.py"),
    schedule("MatchedMomentum.at", "momentum matched by the plain gain under Nesterov", "theory.momentum_gain(self.alpha_0, nesterov=self.nesterov)", "theory.momentum_gain(self.alpha_0)"),
    schedule("alpha_for_gain", "alpha for a gain off by one", "1 + gain", "gain"),
    scheduler("Scheduler._value", "base is the value written last", 'group.setdefault(f"initial_{key}", _copy(group[key]))', "group[key]"),
    scheduler("Scheduler.load_state_dict", "resuming is a step ahead", 'state_dict["last_epoch"]', 'state_dict["last_epoch"] + 1'),
    # groups
    roles("param_sites", "tied weights counted twice", "[ParamSite(parameter, *zip(*holders, strict=True)) for parameter, holders in held.items()]", "[ParamSite(p, (name,), (module,)) for p, holders in held.items() for name, module, _ in holders]"),
    roles("role_of", "output layer not found", "id(site.parameter) in outputs", "False"),
    role_table("fused_blocks", "fused q, k, v not split", '3, f"; fused q, k, v: 3 {side} blocks"', '1, f"; fused q, k, v: 3 {side} blocks"'),
    fusion("_fused_by_heads", "shapes decide before the attention", "len(set(sizes)) == 1 and d_out == 3 * d_in", "d_out == 3 * d_in"),
    fusion("_fused_by_heads", "an order that is unknown is taken for granted", "_IN_ORDER_NAME.search(site.plain_name)", "True"),
    fusion("_by_head", "heads of the output projection are its rows", "BlockLayout(attention.heads, INPUTS)", "BlockLayout(attention.heads)"),
    fusion("_attention_of", "keys have the heads of queries", "_number(module, _KEY_HEAD_COUNTS) or heads", "heads"),
    builder("_scion_rules", "output decay is the hidden layers'", "lr * decay_0 / output_lr", "decay_0"),
    builder("_adam_rules", "Adam decays vectors", '{"name": "vector", "lr": lr, "weight_decay": 0.0, "corrected": True}', '{"name": "vector", "lr": lr, "weight_decay": decay, "corrected": True}'),
    builder("from_radius", "radius left out of the lr", "lr * radius", "lr"),
    # monitor
    spectral("SpectralNorms.__call__", "a record starts from the first vector again", "self.vectors = torch.cat(vectors)", "_ = torch.cat(vectors)"),
    spectral("products_per_record", "one power iteration per record, however long ago the last one was", "min(16, 8 * every)", "1", "test_monitor_norms.py::test_the_spectral_norm_while_training_is_within_a_percent_of_the_svd"),
    spectral("_orthonormal", "directions that are in the Krylov space already", "torch.bmm(torch.bmm(r.unsqueeze(1), basis.mT), basis).squeeze(1)", "0 * torch.bmm(torch.bmm(r.unsqueeze(1), basis.mT), basis).squeeze(1)", "test_monitor_norms.py::test_the_spectral_norm_while_training_is_within_a_percent_of_the_svd"),
    spectral("SpectralNorms.__init__", "spectral norm over d_in/d_out", "self.columns / self.rows", "self.rows / self.columns"),
    norms("max_entry_norm", "sign norm without d_in", "largest * layer.shape[-1]", "largest", "test_monitor_norms.py::test_role_norms_are_means_of_table_1"),
    record("compose", "sign of the excess alignment", "cosine - expected", "expected - cosine"),
    record("_motion", "cosine over the squared norm", "math.sqrt(update * before)", "update * before", "test_monitor_forecast.py::test_random_gradients_have_no_excess_alignment"),
    record("_update_norm", "length of an update squared", "math.sqrt(values.get((UPDATE, layer), math.nan) / forecasts.nominal_norms_sq[layer])", "values.get((UPDATE, layer), math.nan) / forecasts.nominal_norms_sq[layer]", UPDATES),
    record("_update_norm", "Adam's updates beside those of unit size", "length / forecasts.advanced[layer].gains[mark.at - 1]", "length", UPDATES),
    record("_motion", "relative update without the lr", "lr * math.sqrt(update / before)", "math.sqrt(update / before)", UPDATES),
    record("_motion", "updates along the weights turn them", "update - along**2 / before", "update", UPDATES),
    record("_motion", "angle beside the weights before the step", "max(after_sq - across**2, 0.0)", "before", UPDATES),
    record("_motion", "no angle beyond a right one", "math.copysign(kept, before - lr * along)", "kept", "test_monitor_updates.py::test_angle_beyond_a_right_one_is_seen"),
    record("_motion", "fixed norm scales the update twice", "before - 2 * lr * along + lr**2 * update if is_fixed else after**2", "after**2", "test_monitor_updates.py::test_angle_does_not_depend_on_how_the_norm_is_held"),
    advice("_reasons", "outward push taken for updates undone", "(excess.mean < 0) == above", "(excess.mean > 0) == above"),
    advice("_reasons", "too short taken for an aim elsewhere", "figures.half_lives < HALF_LIVES", "figures.half_lives > HALF_LIVES"),
    advice("_figure", "scatter of records taken for their standard error", "np.std(blocks, ddof=1) / math.sqrt(len(blocks))", "0.0"),
    advice("_half_lives", "half-lives in units of 1/eta", "eta.mean() * run.steps[-1] / math.log(2)", "eta.mean() * run.steps[-1]"),
    advice("Figure.is_clear", "noise is a reason", "abs(self.mean) > 2 * self.margin", "True"),
    track("ForecastTrack._advance_measured", "measured lengths are not used", "lr[:, None] * ratios", "lr[:, None] + 0 * ratios", "test_monitor_updates.py::test_forecast_with_measured_updates_is_the_theorys_with_their_length"),
    track("ForecastTrack._advance_measured", "a measured length holds for one step only", "ratios[k:, column] = length / self.gains[k]", "ratios[k, column] = length / self.gains[k]", "test_monitor_updates.py::test_between_records_updates_are_as_long_as_in_the_last"),
    track("ForecastTrack._advance_measured", "Adam's expected length counted twice", "length / self.gains[k]", "length", "test_monitor_updates.py::test_adam_is_forecast_with_the_length_that_its_updates_had"),
    track("ForecastTrack.norm", "forecast forgets the start", "update_norm_sq * norms[at] + start.norm_sq * self.keeps[at]", "update_norm_sq * norms[at]"),
    Mutant("monitor.forecasts:Forecasts._step_params", "start decays once, not squared", "(1 - eta) ** 2", "1 - eta", (FORECAST,)),
    track("ForecastTrack.cosine", "expected alignment one step late", "self.norms[at - 1]", "self.norms[at]"),
    track("ForecastTrack._begin", "momentum under way taken for none", "not any(start.warm for start in starts) or params.filter.r >= 1", "True", "test_monitor_forecast.py::test_a_monitor_attached_to_a_running_optimizer_takes_its_momentum_as_settled"),
    Mutant("decay.families:Family.effective_lr", "Lion's effective lr without its root", "math.sqrt(self.gain(self.momentum(group), group))", "self.gain(self.momentum(group), group)", ("test_monitor_forecast.py::test_the_forecast_holds_for_lion_and_adam_with_changing_betas",)),
    Mutant("decay.families:_Scion.gain", "effective lr in records without Nesterov's factor", "self.is_nesterov(group)", "False", (FORECAST,)),
    Mutant("decay.families:_SGD.effective_lr", "effective lr of a trace is that of an average", 'float(group["lr"]) / (self.alpha(group) if group["trace"] else 1.0)', 'float(group["lr"])', ("test_monitor_forecast.py::test_the_effective_lr_of_sgd_is_right_with_and_without_a_trace",)),
    track("ForecastTrack._begin", "momentum of a young Adam taken for an old one's", "self.count if young else None", "None", "test_monitor_forecast.py::test_the_momentum_of_a_young_adam_holds_as_many_gradients_as_it_has_seen"),
    Mutant("theory.updates:muon_factor", "size of Muon's adjusted update", "math.sqrt(max(rows, columns))", "max(rows, columns)", ("test_monitor_forecast.py::test_the_size_of_muons_update_is_known",)),
    Mutant("monitor.probe:Probe._inner_products", "updates of others come with the lr", "(lr or 1.0)", "1.0", (UPDATES,)),
    Mutant("monitor.probe:Probe._inner_products", "decay counted as update", "theta * (1 - lr * decay)", "theta", ("test_monitor_alignment.py::test_the_alignment_equals_that_of_copies_of_the_weights",)),
    Mutant("monitor.monitor:Monitor.load_state_dict", "resumed monitor forgets its power vectors", 'self._probe.load_power_vectors(state["power"])', "self._probe.load_power_vectors({})", ("test_monitor_forecast.py::test_a_resumed_monitor_continues_as_the_unbroken_one_does",)),
    # many processes
    ownership("plan_exchange", "matrices come back in the order they had, not that of their owners", "sorted(owners, key=lambda entry: entry[:2])", "owners", "test_bench.py::test_matrices_are_put_in_the_order_of_their_owners"),
    strategy("exchange_chunk", "updates arrive as multiples of a unit", "u.mul_(encoding.scale)", "u"),
    strategy("_active", "an infinity on one rank is written by the others", "step.finite[which]", "torch.ones_like(step.finite[which])"),
    ownership("_is_separable", "half a row taken for a row", "bucket.row_separable and layout_in(bucket).keeps_rows_whole", "bucket.row_separable"),
    ownership("plan_exchange", "all matrices on one process", "costs[k] if is_owned else 0.0", "0.0", "test_bench.py::test_the_cost_model_counts_what_moves"),
    strategy("takes_two_hops", "an owner sends its matrix to everyone", "layout.replicated and max(counts) * layout.ranks > 2 * sum(counts)", "False", "test_bench.py::test_few_matrices_are_gathered_from_shards"),
    layout("Layout.sum_over_shards", "sums of shards not added up", "dist.all_reduce(x, group=process_group(self.group))", "pass", STEPS.replace("four", "two")),
    layout("_box", "FSDP2 over tensor parallel cut in the wrong order", '"Strided" in type(placements[k]).__name__', "0"),
    Mutant("optim.sharding.consensus:Consensus.min_over_shards", "each rank judges its own shard alone", "flag.bool()", "own.get(id(member.p), flag).bool()", (STEPS,)),
    Mutant("optim.sharding.mesh:place_like", "sharded momentum lost where it is loaded whole", "source.full_tensor() if is_dtensor(value) else value", "0 * source.full_tensor() if is_dtensor(value) else value", (MOVED,)),
    Mutant("optim.sharding.mesh:place_like", "whole momentum lost where it is loaded in shards", "layout.mine.slice(value)", "0 * layout.mine.slice(value)", (MOVED,)),
    # planning, moving over, simulation
    Mutant("prediction:_level", "predicted norm without U^2", "exact * setting.update_norm_sq", "exact", ("test_predict.py",)),
    Mutant("prediction:_level", "predicted RMS is the norm", "square / math.prod(setting.shape)", "square", ("test_predict.py",)),
    Mutant("prediction:forecast", "planned run not corrected", "decay * ratios", "decay", ("test_predict.py",)),
    Mutant("prediction:matches", "paper's matching decay keeps another norm", "before.paper.formula_norm_sq", "before.exact.steady_norm_sq", ("test_predict.py",)),
    converter("_to_scion", "lr taken over as it is", "source.factor(setting) * source.peak", "source.peak", "test_moving.py::test_scionc_from_adamw_keeps_half_life_effective_lr_and_steady_rms"),
    changes("take_over", "momentum not taken over", "new.state[source.parameter][key].copy_(old)", "new.state[source.parameter][key].copy_(0 * old)", "test_moving.py::test_adamc_continues_adamw_bit_for_bit_at_constant_lr"),
    Mutant("conversion.equivalents:from_muon", "Muon's lr without the ratio of sizes", "lr * muon_factor(adjust, setting.shape) * math.sqrt(min(setting.shape) / setting.update_norm_sq)", "lr * muon_factor(adjust, setting.shape)", ("test_predict.py",)),
    Mutant("conversion.source:Source.factor", "Muon's lr converted without the ratio of sizes", "math.sqrt(self.update_norm_sq / setting.update_norm_sq) * theirs / ours", "theirs / ours", ("test_moving.py::test_scion_continues_from_muon",)),
    Mutant("conversion.source:Source.nesterov", "Adam groups of MuonC taken for Nesterov's", "self.kind != 'AdamW' and bool(self.group.get('nesterov', False))", "bool(self.group.get('nesterov', False))", ("test_moving_muon.py",)),
    Mutant("conversion.same_steps:to_torch.values", "torch's Muon gets the decay of the moment", "source.eta / source.peak", "source.group['weight_decay']", ("test_moving_muon.py",)),
    Mutant("conversion.equivalents:find_equivalents", "Muon's decay not by its own lr", "{'lr': lr, 'weight_decay': eta / lr, 'momentum': 1 - setting.alpha, 'nesterov': setting.nesterov}", "{'lr': lr, 'weight_decay': decay, 'momentum': 1 - setting.alpha, 'nesterov': setting.nesterov}", ("test_predict.py",)),
    Mutant("conversion.equivalents:find_equivalents", "AdamW's lr is not an RMS", "step * math.sqrt(setting.update_norm_sq / math.prod(setting.shape))", "step", ("test_predict.py",)),
    translation("Muon.scion_lr", "Muon's lr translated without its momentum", "same_step * self.effective_lr / ours", "same_step"),
    translation("to_scionc", "half-life lost in translation", "tuned.lr * tuned.weight_decay / lr", "tuned.weight_decay"),
    translation("Muon._element_norm_sq", "Muon's weights forecast by their norm", "muon_update_norm_sq(shape, self.adjust) / math.prod(shape)", "muon_update_norm_sq(shape, self.adjust)"),
    translation("forecast", "tuned run not corrected", "decay * ratios", "decay"),
    Mutant("theory.updates:muon_update_norm_sq", "Muon's updates as long as exact polar factors", "muon_factor(adjust, shape) ** 2 * min(shape) * newton_schulz_share(shape[0], shape[1], *iteration)", "muon_factor(adjust, shape) ** 2 * min(shape)", ("test_monitor_forecast.py::test_the_size_of_muons_update_is_known",)),
    Mutant("conversion.official_scion:_spectral_conv", "published convolution taken to be as large as ours", "math.sqrt(math.prod(shape[2:])) / taps", "1.0", ("test_moving.py::test_the_published_scion_continues_exactly",)),
    Mutant("lab.simulate:_run_batch", "simulated updates not of unit length", "-lr[step] / length", "-lr[step]", ("test_simulate.py",)),
    Mutant("lab.simulate:_run_batch", "simulated Nesterov is plain momentum", "torch.lerp(m, g.expand_as(m), a)", "m.clone()", ("test_simulate.py",)),
    Mutant("lab.simulate:_run_batch", "simulated trace is an average", "m.mul_(1 - a).add_(g)", "m.mul_(1 - a).add_(a * g)", ("test_simulate.py",)),
    Mutant("lab.simulate:random_system", "random system decays twice", "rate * weight_decay", "2 * rate * weight_decay", ("test_simulate.py",)),
    Mutant("lab.simulate:gradient_response", "response of a gradient without Nesterov", "(1 - alpha) * m + alpha * g", "m.clone()", ("test_simulate.py",)),
    # training
    Mutant("lab.train.run_state:restore", "resuming loses the random state", 'torch.set_rng_state(rest["rng"])', '_ = rest["rng"]', ("test_train_wiring.py",)),
    Mutant("lab.train.run_state:restore", "resuming starts the data again", 'parts.task.loader.load_state_dict(rest["data"])', '_ = rest["data"]', (DIES,)),
    Mutant("lab.train.run_state:restore", "resuming loses a step", 'rest["step"]', 'rest["step"] - 1', (DIES,)),
    Mutant("lab.train.run_state:restore", "resuming starts the schedule again", "scheduler.load_state_dict(state)", "_ = state", (DIES,)),
    Mutant("lab.train.loop:Trainer._update", "micro-batches add up instead of averaging", "self.parts.task.loss(self.called, part) / len(parts)", "self.parts.task.loss(self.called, part)", ("test_train_wiring.py",)),
    Mutant("lab.train.loop:Trainer._update", "gradient norm after clipping", 'extra["grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm', 'extra["clipped"] = norm.full_tensor() if isinstance(norm, DTensor) else norm', ("test_train.py::test_clipping_records_the_norm_before_it",)),
    Mutant("lab.train.optimizers:_scaled_by_gain.target", "the third arm's target upside down", "optim.steady_norm_sq * theory.momentum_gain(alpha(step), nesterov=optim.nesterov) / start", "optim.steady_norm_sq * start / theory.momentum_gain(alpha(step), nesterov=optim.nesterov)", ("test_train.py::test_the_third_arm_leaves_the_momentum_factor_out_of_the_decay",)),
    Mutant("lab.train.optimizers:_adam_family", "Lion's beta1 is not 1 - alpha", "(1 - optim.alpha, optim.betas[1])", "optim.betas", ("test_train_wiring.py",)),
    Mutant("lab.train.optimizers:_muon", "Muon's momentum is alpha", "1 - optim.alpha", "optim.alpha", ("test_train_wiring.py",)),
)
# fmt: on
