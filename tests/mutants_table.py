"""What tests/mutants.py breaks: one formula per entry, and the tests that must notice.

This file covers theory, optimizers, monitor and training; mutants_recipes.py covers models, data and experiments.
"""

from mutation import Mutant, in_module

# fmt: off
momentum = in_module("theory.momentum", "test_theory_kernels.py", "test_theory_forecast.py")
kernels = in_module("theory.kernels", "test_theory_kernels.py")
steady = in_module("theory.equilibrium", "test_theory_steady.py")
trajectory = in_module("theory.trajectory", "test_theory_forecast.py")
correction = in_module("decay.correction", "test_decay.py", "test_decay_checkpoints.py", "test_decay_written.py")
rule = in_module("decay.rule", "test_decay.py", "test_decay_checkpoints.py")
foreign = in_module("decay.foreign", "test_decay_refusals.py", "test_decay_copies.py")
skip = in_module("decay.skip", "test_decay_skip.py")
recognition = in_module("decay.recognition", "test_decay_refusals.py", "test_decay_choices.py")
families = in_module("decay.families", "test_decay.py", "test_decay_refusals.py", "test_decay_choices.py")
lmo = in_module("lmo", "test_lmo.py")
idle = in_module("optim.idle", "test_idle.py")
updates = in_module("theory.updates", "test_lmo.py")
coefficients = in_module("polar.coefficients", "test_polar.py")
polar = in_module("polar.iteration", "test_polar.py")
TWIN = "test_optim_twins.py::test_scion_equals_its_twin"
buckets = in_module("optim.buckets", TWIN)
scion = in_module("optim.scion", TWIN)
lion = in_module("optim.lion", "test_optim_twins.py::test_lionc_equals_its_twin")
renormalized = in_module("optim.renormalized", "test_optim_twins.py::test_renormalized_adamw_equals_its_twin")
schedule = in_module("schedule", "test_schedule.py")
translation = in_module("conversion.translation", "test_predict.py")
scheduler = in_module("scheduler", "test_schedule.py")
roles = in_module("groups.roles", "test_groups.py")
builder = in_module("groups.builder", "test_groups.py", "test_groups_output.py", "test_explain.py")
SLOWLY = "test_monitor_norms.py::test_spectral_norm_within_a_percent_of_svd_on_a_slowly_changing_matrix"
FORECAST = "test_monitor_forecast.py::test_forecast_and_expected_alignment_are_the_theorys"
norms = in_module("monitor.norms", SLOWLY)
spectral = in_module("monitor.spectral", SLOWLY)
record = in_module("monitor.record", FORECAST)
track = in_module("monitor.track", FORECAST)
converter = in_module("conversion.converter")
STEPS = "test_distributed.py::test_every_layout_takes_the_steps_of_a_single_process[four-32]"
MOVED = "test_distributed.py::test_state_dicts_go_between_layouts_as_they_are"
strategy = in_module("optim.sharding.strategy", STEPS)
ownership = in_module("optim.sharding.ownership", STEPS)
layout = in_module("optim.sharding.layout", STEPS)

DIES = "test_train.py::test_killed_run_resumes_like_an_unbroken_one"

MUTANTS = (
    # theory
    momentum("ema", "Nesterov is plain momentum", "Filter(keep * keep, alpha * (2 - alpha), keep, alpha)", "Filter(keep, alpha, keep, alpha)"),
    momentum("trace", "trace Nesterov forgets a gradient", "1 + mu", "1.0"),
    momentum("lion", "Lion's betas swapped", "Filter(beta1, 1 - beta1, beta2, 1 - beta2)", "Filter(beta2, 1 - beta2, beta1, 1 - beta1)"),
    momentum("variance", "settled variance of the momentum doubled", "_gap(filter) * (1 + filter.r)", "_gap(filter)"),
    momentum("advance", "variance of the momentum not squared", "r * r * var", "r * var"),
    momentum("steady_correlation", "the gradient that update and buffer share is left out", "p * (p * r + h * w)", "p * p * r"),
    kernels("Overlap.gain_of", "gain without its factor 2", "2.0 * (1.0 - eta)", "1.0 - eta"),
    kernels("Overlap.gain_of", "gain without decay", "math.log1p(-eta) + self.n * _log(ratio, ratio_gap)", "self.n * _log(ratio, ratio_gap)"),
    updates("_element_row", "sign has the linear kernel", "vector_kernel(1)", "LINEAR", "test_theory_kernels.py"),
    updates("UPDATES", "column has the kernel of a row", "vector_kernel(m)", "vector_kernel(n)", "test_theory_kernels.py"),
    kernels("vector_kernel", "vector kernel off by one", "k + d / 2 + 1", "k + d / 2"),
    kernels("_polar_kernel", "square kernel: a term missing", "1 / n + 1 / (n + 2)", "1 / n"),
    kernels("_polar_kernel", "flat kernel: c for its square root", "2 * math.sqrt(c)", "2 * c"),
    kernels("_compress", "mass of the tail lost", "max(0.0, 1.0 - math.fsum(weights))", "0.0"),
    Mutant("views:MatrixView._block_size", "blocks do not divide the rows", "length // blocks", "length", ("test_theory_kernels.py",)),
    steady("momentum_gain", "momentum gain", "(2 - a) / denominator", "2 / denominator"),
    steady("momentum_gain", "the paper's Nesterov factor missing", "a * (1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else a", "a * (1 + 4 * a - 6 * a**2 + 2 * a**3) if False else a"),
    steady("effective_lr", "effective lr without its root", "math.sqrt(momentum_gain(alpha, nesterov=nesterov))", "momentum_gain(alpha, nesterov=nesterov)"),
    steady("_limit_decay", "factor 2 in the decay for a target", "2 * target", "target"),
    steady("weight_decay_for", "linear kernel where the exact one is asked for", "isinstance(overlap, Overlap)", "False"),
    steady("_norm_sq", "eta squared left out at finite eta", "eta * (2 - eta)", "2 * eta"),
    steady("half_life", "half-life by the first order", "-math.log1p(-eta)", "eta"),
    steady("adam_mean_square", "size of Adam's update", "(1 - beta1) / (1 + beta1)", "1 - beta1"),
    steady("adam_weight_decay_for", "factor 2 in Adam's decay for a target", '2 * _check_target("mean_square", mean_square)', '1 * _check_target("mean_square", mean_square)'),
    trajectory("steady_overlap", "steady overlap forgets the decay", "(1 - eta) * step.to_m**kernel.n", "step.to_m**kernel.n"),
    trajectory("advance_forecast", "overlap of past updates missing", "(1 - e) ** 2 * norm + g * g + 2 * g * (1 - e) * cross", "(1 - e) ** 2 * norm + g * g"),
    trajectory("advance_forecast", "recursion off by one: the new update ages at once", "overlaps *= keep[t]; overlaps += add[t]", "overlaps += add[t]; overlaps *= keep[t]"),
    trajectory("initial_state", "forgets where the weights start", "float(start)", "0.0"),
    trajectory("initial_state", "warm momentum starts cold", "1.0 if warm_momentum else 0.0", "0.0"),
    trajectory("advance_forecast", "sign of the expected alignment", "-cross", "cross"),
    trajectory("forecast_adam", "Adam's bias correction off by one", "start=1", "start=2"),
    trajectory("_forecast_linear", "linear forecast decays once, not squared", "(1 - e) ** 2", "1 - e"),
    # the correction
    rule("weight_decay_now", "current lr in place of the peak", "lr / peak", "lr / lr"),
    rule("weight_decay_now", "momentum factor missing", "rule.weight_decay * (lr / peak) * family.factor(group)", "rule.weight_decay * (lr / peak)"),
    rule("correction_keys", "peak not remembered", "{key: group[key] for key in KEYS if group.get(key) is not None}", '{key: group[key] for key in KEYS if group.get(key) is not None and key != "peak_lr"}'),
    rule("decay_rule", "decay of the decay: based on what was written last", 'group.get("base_weight_decay", group["weight_decay"])', 'group["weight_decay"]'),
    correction("Correction.after_load", "checkpoint without the keys loses the peak", '{**known, "base_weight_decay": float(group["weight_decay"]), **own, "corrected": both}', '{"base_weight_decay": float(group["weight_decay"]), **own, "corrected": both}'),
    foreign("correct", "skipped groups are corrected", 'groups[index]["corrected"] = False', 'groups[index]["corrected"] = True'),
    foreign("correct", "the reference momentum is not used", 'keys["initial_momentum"] = family.reference(group, reference_momentum)', 'keys["unused"] = family.reference(group, reference_momentum)', "test_decay_choices.py"),
    foreign("uncorrect", "uncorrecting keeps the momentary decay", 'group["base_weight_decay"]', 'group["weight_decay"]', "test_decay_choices.py"),
    skip("_parts", "skipped parameters have the corrected decay", 'group["base_weight_decay"]', 'group["weight_decay"]'),
    skip("StandIn.take_back", "what a step writes into a part is lost", "key not in _OF_A_PART", "False"),
    skip("unsplit", "split checkpoints are put together in the wrong order", "position in skipped", "position >= sizes[0]"),
    correction("Correction.after_load", "a checkpoint without a skip undoes it", "known.get(UNCORRECTED) and not group.get(UNCORRECTED)", "False", "test_decay_skip.py"),
    Mutant("decay.peak:PeakWatch.see", "a peak that is never approached goes unnoticed", '_FAR * group["peak_lr"]', '0.0 * group["peak_lr"]', ("test_decay_choices.py",)),
    correction("Correction._value", "OneCycle's own peak not taken", 'group["max_lr"]', 'group["peak_lr"]'),
    correction("Correction._value", "a base of zero leaves the decay as it was", "return 0.0", "return None"),
    foreign("_attach", "a copy loses its correction", "copyreg.dispatch_table.setdefault(type(optimizer), _reduce)", "_ = copyreg"),
    families("Family.factor", "momentum factor upside down", 'self.gain(now, group) / self.gain(group["initial_momentum"], group)', 'self.gain(group["initial_momentum"], group) / self.gain(now, group)'),
    families("_SGD.gain", "trace SGD's factor not squared", "check_alpha(momentum) ** -2", "check_alpha(momentum) ** -1", "test_optim_decay.py::test_trace_decay_goes_with_the_square_of_alpha"),
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
    lmo("_spectral", "spectral scaled by d_in/d_out", "x.shape[-2] / x.shape[-1]", "x.shape[-1] / x.shape[-2]"),
    lmo("_spectral_transposed", "stored transposed, scaled as if it were not", "x.shape[-1] / x.shape[-2]", "x.shape[-2] / x.shape[-1]"),
    lmo("LMOS", "column normalises rows", "_unit(x, -2)", "_unit(x, -1)"),
    lmo("Lmo.update", "taps of a convolution not counted", "u / divisor", "u"),
    lmo("Lmo.update", "fused q, k, v updated as one matrix", "view.to_matrices(x, blocks, batch_ndim)", "view.to_matrices(x, 1, batch_ndim)"),
    # gradients that are zero
    idle("fade", "stale updates do not fade", "(now / FADES_BELOW).clamp(max=1.0)", "torch.ones_like(now)"),
    idle("fade", "what is left of the momentum never comes back", "torch.where(nonzero, 1.0, left * keep.to(left.dtype))", "torch.where(nonzero, left, left * keep.to(left.dtype))"),
    idle("Extremes.nonzero", "slices without a gradient move on", "(self.largest != 0) | (self.smallest != 0)", "torch.ones_like(self.largest, dtype=torch.bool)"),
    idle("Extremes.finite", "gradients near the largest number are taken in", "torch.finfo(self.largest.dtype).max / 2", "torch.finfo(self.largest.dtype).max"),
    scion("Scion.slices", "an expert of a dense stack moves for ever", "Slices(waiting, len(p), 0)", "Slices(waiting)", "test_idle.py::test_expert_of_a_dense_stack_fades"),
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
    # the step
    buckets("decay_and_step_", "sign of the update", "-gamma", "gamma"),
    buckets("decay_and_step_", "factor 2 in the decay", "1 - eta", "1 - 2 * eta"),
    buckets("decay_and_step_", "no decay at all", "theta.mul_(1 - eta)", "theta"),
    buckets("decay_and_step_", "weights do not move, but for their decay: seen by the properties alone", "-gamma", "-0 * gamma", "properties/test_twin_properties.py"),
    buckets("decay_and_step_", "updates twice as long: seen by the properties alone", "-gamma", "-2 * gamma", "properties/test_bounded_properties.py"),
    buckets("decay_and_step_", "decay after the step", "theta.mul_(1 - eta).addcmul_(u, -gamma * step)", "theta.addcmul_(u, -gamma * step).mul_(1 - eta)"),
    buckets("SplitRule.rule", "coupled: decay added to the gradient", "x = self.accumulate(batch, scalars, settings)", 'batch = batch._replace(raw_grad=batch.raw_grad + scalars["eta"] / scalars["gamma"] * batch.theta); scalars = {**scalars, "eta": 0 * scalars["eta"]}; x = self.accumulate(batch, scalars, settings)'),
    buckets("_run_chunk", "state of one parameter goes to another", "batch.state[key]", "batch.state[key].flip(0)", "test_buckets.py"),
    buckets("_run_chunk", "weights of one parameter go to another", "batch.theta", "batch.theta.flip(0)", "test_buckets.py"),
    buckets("_run_chunk", "non-finite gradients not skipped", "finite.to(exact)", "torch.ones_like(finite).to(exact)", "test_buckets.py"),
    buckets("decay_and_step_", "alignment with the weights after the step", "theta.reshape(len(theta), -1)", "(theta - gamma * u).reshape(len(theta), -1)", "test_monitor_alignment.py::test_alignment_equals_copies_of_the_weights"),
    scion("_accumulate", "Nesterov missing", "grad.lerp_(m, 1 - alpha) if settings.nesterov else m", "m"),
    scion("_accumulate", "momentum keeps alpha instead of 1 - alpha", "m.lerp_(grad, alpha)", "m.lerp_(grad, 1 - alpha)"),
    scion("_from_kept", "Nesterov missing where momentum is kept in bf16", "torch.lerp(x, wide, 1 - a) if nesterov else wide", "wide", "test_buckets.py::test_bf16_momentum_is_the_rounded_momentum_of_its_formula"),
    scion("Scion._weight_decay", "alpha of construction, not the scheduled one", 'weight_decay_now(group, SCION)', 'weight_decay_now({**group, "alpha": self.defaults["alpha"]}, SCION)'),
    scion("Scion._weight_decay", "C^2 of construction, not the scheduled one", 'weight_decay_now(group, SCION)', 'weight_decay_now({**group, "steady_norm_sq": group["steady_norm_sq"] and self.defaults["steady_norm_sq"]} if "steady_norm_sq" in group else group, SCION)'),
    scion("Scion._weight_decay", "lr of construction in the decay", 'weight_decay_now(group, SCION)', 'weight_decay_now({**group, "lr": self.defaults["lr"]}, SCION)'),
    scion("Scion._weight_decay", "linear decay where exact is asked for", 'group.get("overlap") != "exact"', "True"),
    lion("LionC.scalars", "betas swapped", '{"gamma": lr, "eta": eta, "beta1": float(beta1), "beta2": float(beta2), "keep": float(beta2)}', '{"gamma": lr, "eta": eta, "beta1": float(beta2), "beta2": float(beta1), "keep": float(beta2)}'),
    lion("_accumulate", "the update sees the new momentum", 'x = torch.lerp(grad, m, scalars["beta1"] * ones); m.lerp_(grad, (1 - scalars["beta2"]) * batch.active)', 'm.lerp_(grad, (1 - scalars["beta2"]) * batch.active); x = torch.lerp(grad, m, scalars["beta1"] * ones)'),
    renormalized("renormalized_rule", "bias correction missing", "torch.where(bias > 0, bias, 1.0)", "1.0"),
    renormalized("renormalized_rule", "renormalisation skipped", "torch.where((size >= eps) & (gamma > 0), scale, 1.0)", "torch.where((size >= eps) & (gamma > 0), torch.ones_like(scale), 1.0)"),
    renormalized("renormalized_rule", "norm of the weights before their decay", "theta * ((1 - eta) / unit)", "theta / unit"),
    renormalized("renormalized_rule", "a step past zero is turned back", "(size - gamma * along).abs()", "size - gamma * along", "test_optim_twins.py::test_renormalized_adamw_steps_past_zero_as_adamw_does"),
    Mutant("optim.sgd:sgd_rule", "trace momentum damped", "batch.active if settings.trace else alpha", "alpha", ("test_optim_twins.py::test_sgdc_equals_its_twin",)),
    Mutant("optim.sgd:sgd_rule", "SGD's Nesterov missing", "share.addcmul_(m, 1 - alpha) if settings.nesterov else m", "m", ("test_optim_twins.py::test_sgdc_equals_its_twin",)),
    Mutant("optim.sgd:sgd_rule", "SGD's momentum never forgets", "m.mul_(1 - alpha)", "m", ("test_optim_twins.py::test_sgdc_equals_its_twin",)),
    Mutant("optim.adam:AdamC._prepare", "AdamC without its correction", "own_correction(self, ADAM)(self)", "own_correction(self, ADAM)", ("test_optim_twins.py::test_adamc_equals_its_twin",)),
    Mutant("optim.finite_guard:NonFiniteSkipper.withhold_non_finite", "AdamC steps along non-finite gradients", "p.grad = None", "p.grad = p.grad", ("test_contract.py::test_non_finite_gradient_skips_that_parameter_only",)),
    Mutant("optim.peak_relative:loading", "a plain checkpoint's decay is not the base", '"base_weight_decay" not in saved', "False", ("test_optim_checkpoints.py::test_plain_adamw_checkpoint_continues_in_adamc",)),
    Mutant("optim.state:load_exactly", "resuming loses the momentum", "_place_like(values[key], fresh) if key in values else fresh", "fresh", ("test_contract_checkpoints.py::test_resumed_run_equals_unbroken_run",)),
    Mutant("optim.state:load_exactly", "a checkpoint without the peak lr loses it", "group.setdefault(key, value)", "pass", ("test_optim_checkpoints.py::test_plain_adamw_checkpoint_continues_in_adamc",)),
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
    roles("param_sites", "tied weights counted twice", "[ParamSite(parameter, *zip(*holders, strict=True)) for parameter, holders in held.items()]", "[ParamSite(p, (name,), (module,)) for p, holders in held.items() for name, module in holders]"),
    roles("role_of", "output layer not found", "id(site.parameter) in outputs", "False"),
    roles("row_blocks", "fused q, k, v not split", '3, f"; fused q, k, v: 3 {side} blocks"', '1, f"; fused q, k, v: 3 {side} blocks"'),
    builder("_scion_rules", "output decay is the hidden layers'", "lr * decay_0 / output_lr", "decay_0"),
    builder("_adam_rules", "Adam decays vectors", '{"name": "vector", "lr": lr, "weight_decay": 0.0, "corrected": True}', '{"name": "vector", "lr": lr, "weight_decay": decay, "corrected": True}'),
    builder("from_radius", "radius left out of the lr", "lr * radius", "lr"),
    # monitor
    spectral("SpectralNorms.__call__", "a record starts from the first vector again", "self.vectors = torch.cat(vectors)", "_ = torch.cat(vectors)"),
    spectral("products_per_record", "one power iteration per record, however long ago the last one was", "min(16, 8 * every)", "1", "test_monitor_norms.py::test_spectral_norm_within_a_percent_of_svd_while_training"),
    spectral("_orthonormal", "directions that are in the Krylov space already", "torch.bmm(torch.bmm(r.unsqueeze(1), basis.mT), basis).squeeze(1)", "0 * torch.bmm(torch.bmm(r.unsqueeze(1), basis.mT), basis).squeeze(1)", "test_monitor_norms.py::test_spectral_norm_within_a_percent_of_svd_while_training"),
    spectral("SpectralNorms.__init__", "spectral norm over d_in/d_out", "self.columns / self.rows", "self.rows / self.columns"),
    norms("peak", "sign norm without d_in", "largest * layer.shape[-1]", "largest", "test_monitor_norms.py::test_role_norms_are_means_of_table_1"),
    record("compose", "sign of the excess alignment", "cosine - expected", "expected - cosine"),
    record("_cosine", "cosine over the squared norm", "math.sqrt(update * before)", "update * before", "test_monitor_forecast.py::test_random_gradients_have_no_excess_alignment"),
    track("ForecastTrack.norm", "forecast forgets the start", "unit * self.norms[at] + start.norm_sq * self.keeps[at]", "unit * self.norms[at]"),
    track("ForecastTrack.advance", "start decays once, not squared", "(1 - eta) ** 2", "1 - eta"),
    track("ForecastTrack.cosine", "expected alignment one step late", "self.norms[at - 1]", "self.norms[at]"),
    track("ForecastTrack._begin", "momentum under way taken for none", "not any(start.warm for start in starts) or params.filter.r >= 1", "True", "test_monitor_forecast.py::test_attached_to_a_run_under_way_momentum_is_taken_as_settled"),
    Mutant("decay.families:_Lion.effective_lr", "Lion's effective lr without its root", "math.sqrt(theory.lion_gain(*_betas(group)))", "theory.lion_gain(*_betas(group))", ("test_monitor_forecast.py::test_forecast_of_lion_and_adam_with_changing_betas",)),
    Mutant("decay.families:_Scion.effective_lr", "effective lr in records without Nesterov's factor", "self.is_nesterov(group)", "False", (FORECAST,)),
    Mutant("decay.families:_SGD.effective_lr", "effective lr of a trace is that of an average", 'float(group["lr"]) / (self.alpha(group) if group["trace"] else 1.0)', 'float(group["lr"])', ("test_monitor_forecast.py::test_effective_lr_of_sgd_with_and_without_a_trace",)),
    track("ForecastTrack._begin", "momentum of a young Adam taken for an old one's", "self.count if young else None", "None", "test_monitor_forecast.py::test_momentum_of_a_young_adam_holds_as_many_gradients_as_it_has_seen"),
    Mutant("theory.updates:muon_factor", "size of Muon's adjusted update", "math.sqrt(max(rows, columns))", "max(rows, columns)", ("test_monitor_forecast.py::test_size_of_muons_update_is_known",)),
    Mutant("monitor.probe:Probe._inner_products", "decay counted as update", "theta * (1 - eta)", "theta", ("test_monitor_alignment.py::test_alignment_equals_copies_of_the_weights",)),
    Mutant("monitor.monitor:Monitor.load_state_dict", "resumed monitor forgets its power vectors", 'self._probe.load_power_vectors(state["power"])', "self._probe.load_power_vectors({})", ("test_monitor_forecast.py::test_resumed_run_continues_as_the_unbroken",)),
    # many processes
    ownership("plan_exchange", "matrices come back in the order they had, not that of their owners", "sorted(owners, key=lambda entry: entry[:2])", "owners", "test_bench.py::test_matrices_are_put_in_the_order_of_their_owners"),
    strategy("exchange_chunk", "updates arrive as multiples of a unit", "u.to(exact).mul_(scale)", "u.to(exact)"),
    strategy("_active", "an infinity on one rank is written by the others", "step.finite[which]", "torch.ones_like(step.finite[which])"),
    ownership("_is_separable", "half a row taken for a row", "bucket.row_separable and layout_in(bucket).keeps_rows_whole", "bucket.row_separable"),
    ownership("plan_exchange", "all matrices on one process", "costs[k] if is_owned else 0.0", "0.0", "test_bench.py::test_cost_model_counts_what_moves"),
    strategy("takes_two_hops", "an owner sends its matrix to everyone", "layout.replicated and max(counts) * layout.ranks > 2 * sum(counts)", "False", "test_bench.py::test_few_matrices_are_gathered_from_shards"),
    layout("Layout.sum_over_shards", "sums of shards not added up", "dist.all_reduce(x, group=process_group(self.group))", "pass", STEPS.replace("four-32", "two-36")),
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
    converter("_take_over", "momentum not taken over", "new.state[source.parameter][key].copy_(old)", "new.state[source.parameter][key].copy_(0 * old)", "test_moving.py::test_adamc_continues_adamw_bit_for_bit_at_constant_lr"),
    Mutant("conversion.equivalents:from_muon", "Muon's lr without the ratio of sizes", "lr * muon_factor(adjust, shape) * math.sqrt(min(shape) / unit)", "lr * muon_factor(adjust, shape)", ("test_moving.py::test_scion_continues_from_muon",)),
    Mutant("conversion.equivalents:find_equivalents", "Muon's decay not by its own lr", "{'lr': lr, 'weight_decay': eta / lr, 'momentum': 1 - setting.alpha, 'nesterov': setting.nesterov}", "{'lr': lr, 'weight_decay': decay, 'momentum': 1 - setting.alpha, 'nesterov': setting.nesterov}", ("test_predict.py",)),
    Mutant("conversion.equivalents:find_equivalents", "AdamW's lr is not an RMS", "step * math.sqrt(setting.update_norm_sq / math.prod(setting.shape))", "step", ("test_predict.py",)),
    translation("Lion.effective_lr", "Lion's effective lr without its root", "math.sqrt(theory.lion_gain(*self.betas))", "theory.lion_gain(*self.betas)"),
    translation("Muon.scion_lr", "Muon's lr translated without its momentum", "same_step * self.effective_lr / ours", "same_step"),
    translation("to_scionc", "half-life lost in translation", "tuned.lr * tuned.weight_decay / lr", "tuned.weight_decay"),
    translation("Muon._element_norm_sq", "Muon's weights forecast by their norm", "muon_update_norm_sq(shape, self.adjust) / math.prod(shape)", "muon_update_norm_sq(shape, self.adjust)"),
    translation("forecast", "tuned run not corrected", "decay * ratios", "decay"),
    Mutant("theory.updates:muon_update_norm_sq", "Muon's updates as long as exact polar factors", "muon_factor(adjust, shape) ** 2 * min(shape) * newton_schulz_share(shape[0], shape[1], *iteration)", "muon_factor(adjust, shape) ** 2 * min(shape)", ("test_monitor_forecast.py::test_size_of_muons_update_is_known",)),
    Mutant("conversion.official_scion:_spectral_conv", "published convolution taken to be as large as ours", "math.sqrt(math.prod(shape[2:])) / taps", "1.0", ("test_moving.py::test_published_scion_continues_exactly",)),
    Mutant("lab.simulate:_run_batch", "simulated updates not of unit length", "-lr[step] / length", "-lr[step]", ("test_simulate.py",)),
    Mutant("lab.simulate:_run_batch", "simulated Nesterov is plain momentum", "torch.lerp(m, g.expand_as(m), a)", "m.clone()", ("test_simulate.py",)),
    Mutant("lab.simulate:_run_batch", "simulated trace is an average", "m.mul_(1 - a).add_(g)", "m.mul_(1 - a).add_(a * g)", ("test_simulate.py",)),
    Mutant("lab.simulate:random_system", "random system decays twice", "rate * weight_decay", "2 * rate * weight_decay", ("test_simulate.py",)),
    Mutant("lab.simulate:gradient_response", "response of a gradient without Nesterov", "(1 - alpha) * m + alpha * g", "m.clone()", ("test_simulate.py",)),
    # training
    Mutant("lab.train.run_state:restore", "resuming loses the random state", 'torch.set_rng_state(rest["rng"])', '_ = rest["rng"]', ("test_train_wiring.py",)),
    Mutant("lab.train.run_state:restore", "resuming starts the data again", 'parts.task.go_to(rest["data"])', '_ = rest["data"]', (DIES,)),
    Mutant("lab.train.run_state:restore", "resuming loses a step", 'rest["step"]', 'rest["step"] - 1', (DIES,)),
    Mutant("lab.train.run_state:restore", "resuming starts the schedule again", "scheduler.load_state_dict(state)", "_ = state", (DIES,)),
    Mutant("lab.train.loop:Trainer._update", "micro-batches add up instead of averaging", "self.parts.task.loss(self.called, part) / len(parts)", "self.parts.task.loss(self.called, part)", ("test_train_wiring.py",)),
    Mutant("lab.train.loop:Trainer._update", "gradient norm after clipping", 'extra["grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm', 'extra["clipped"] = norm.full_tensor() if isinstance(norm, DTensor) else norm', ("test_train.py::test_clipping_records_the_norm_before_it",)),
    Mutant("lab.train.optimizers:_scaled_by_gain.target", "the third arm's target upside down", "optim.steady_norm_sq * theory.momentum_gain(alpha(step), nesterov=optim.nesterov) / start", "optim.steady_norm_sq * start / theory.momentum_gain(alpha(step), nesterov=optim.nesterov)", ("test_train.py::test_third_arm_leaves_the_momentum_factor_out_of_the_decay",)),
    Mutant("lab.train.optimizers:_adam_family", "Lion's beta1 is not 1 - alpha", "(1 - optim.alpha, optim.betas[1])", "optim.betas", ("test_train_wiring.py",)),
    Mutant("lab.train.optimizers:_muon", "Muon's momentum is alpha", "1 - optim.alpha", "optim.alpha", ("test_train_wiring.py",)),
)
# fmt: on
