"""What tests/mutants.py breaks: one formula each, and the tests that must notice. The text to replace occurs once.

Here: theory, optimizers, monitor, training. mutants_recipes.py: models, data, experiments.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """In src/steadynorm/<file>, `old` becomes `new`; `tests` are files or test ids under tests/."""

    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]


def of_file(file: str, *tests: str) -> "Maker":
    return Maker(file, tests)


class Maker(NamedTuple):
    """Mutants of one file, caught by the same tests unless they name their own."""

    file: str
    tests: tuple[str, ...]

    def __call__(self, breaks: str, old: str, new: str, *tests: str) -> Mutant:
        return Mutant(self.file, old, new, breaks, tests or self.tests)


# fmt: off
momentum = of_file("theory/momentum.py", "test_theory_kernels.py", "test_theory_forecast.py")
kernels = of_file("theory/kernels.py", "test_theory_kernels.py")
steady = of_file("theory/steady.py", "test_theory_steady.py")
forecast = of_file("theory/trajectory.py", "test_theory_forecast.py")
decay = of_file("decay/correction.py", "test_decay.py")
external = of_file("decay/foreign.py", "test_decay.py")
skipping = of_file("decay/skip.py", "test_decay_skip.py")
families = of_file("decay/families.py", "test_decay.py", "test_decay_choices.py")
lmo = of_file("lmo.py", "test_lmo.py")
idle = of_file("optim/idle.py", "test_idle.py")
updates = of_file("theory/updates.py", "test_lmo.py")
polar = of_file("polar.py", "test_polar.py")
TWIN = "test_optim.py::test_scion_equals_its_twin"
buckets = of_file("optim/buckets.py", TWIN)
scion = of_file("optim/scion.py", TWIN)
lion = of_file("optim/lion.py", "test_optim.py::test_lionc_equals_its_twin")
renormalized = of_file("optim/renormalized.py", "test_optim.py::test_renormalized_adamw_equals_its_twin")
schedule = of_file("schedule.py", "test_schedule.py")
translation = of_file("conversion/translation.py", "test_predict.py")
scheduler = of_file("scheduler.py", "test_schedule.py")
roles = of_file("groups/roles.py", "test_groups.py")
groups = of_file("groups/builder.py", "test_groups.py")
SLOWLY = "test_monitor.py::test_spectral_norm_within_a_percent_of_svd_on_a_slowly_changing_matrix"
FORECAST = "test_monitor_forecast.py::test_forecast_and_expected_alignment_are_the_theorys"
measures = of_file("monitor/norms.py", SLOWLY)
spectral = of_file("monitor/spectral.py", SLOWLY)
record = of_file("monitor/record.py", FORECAST)
course = of_file("monitor/track.py", FORECAST)
convert = of_file("conversion/converter.py")
STEPS = "test_distributed.py::test_every_layout_takes_the_steps_of_a_single_process[four-32]"
MOVED = "test_distributed.py::test_state_dicts_go_between_layouts_as_they_are"
shards = of_file("optim/sharding/exchange.py", STEPS)
layout = of_file("optim/sharding/layout.py", STEPS)

DIES = "test_train.py::test_a_run_that_dies_goes_on_as_if_it_had_not"

MUTANTS = (
    # theory
    momentum("Nesterov is plain momentum", "Filter(keep * keep, alpha * (2 - alpha), keep, alpha)", "Filter(keep, alpha, keep, alpha)"),
    momentum("trace Nesterov forgets a gradient", "Filter(mu * mu, 1 + mu, mu, 1.0)", "Filter(mu * mu, 1.0, mu, 1.0)"),
    momentum("Lion's betas swapped", "Filter(beta1, 1 - beta1, beta2, 1 - beta2)", "Filter(beta2, 1 - beta2, beta1, 1 - beta1)"),
    momentum("settled variance of the momentum doubled", "(_gap(filter) * (1 + filter.r))", "_gap(filter)"),
    momentum("variance of the momentum not squared", "var_m = r * r * var + s * s", "var_m = r * var + s * s"),
    momentum("the gradient that update and buffer share is left out", "Correlation(p * (p * r + h * w) / var_x, r,", "Correlation(p * p * r / var_x, r,"),
    kernels("gain without its factor 2", "return 1.0 + 2.0 * (1.0 - eta)", "return 1.0 + (1.0 - eta)"),
    kernels("gain without decay", "log_q = math.log1p(-eta) + self.n", "log_q = self.n"),
    kernels("sign has the linear kernel", "        return _vector(1)\n", "        return _LINEAR\n"),
    kernels("column has the kernel of a row", "        return _vector(rows)", "        return _vector(columns)"),
    kernels("vector kernel off by one", "(k + d / 2 + 1) * (k + 1)", "(k + d / 2) * (k + 1)"),
    kernels("square kernel: a term missing", "(1 / n + 1 / (n + 2)) ** 2", "(1 / n) ** 2"),
    kernels("flat kernel: c for its square root", "np.sqrt(1 + c + 2 * math.sqrt(c) * np.cos(phi))", "np.sqrt(1 + c + 2 * c * np.cos(phi))"),
    kernels("mass of the tail lost", "weights[-1] += max(0.0, 1.0 - math.fsum(weights))", "weights[-1] += 0.0"),
    kernels("blocks do not divide the rows", "return _divided(rows, blocks, shape), columns", "return rows, columns"),
    steady("momentum gain", "return (2 - a) / denominator", "return 2 / denominator"),
    steady("the paper's Nesterov factor missing", "if nesterov else a\n", "if False else a\n"),
    steady("effective lr without its root", "check_lr(lr) * math.sqrt(momentum_gain(alpha, nesterov=nesterov))", "check_lr(lr) * (momentum_gain(alpha, nesterov=nesterov))"),
    steady("factor 2 in the decay for a target", "gain / (2 * target) * lr", "gain / target * lr"),
    steady("linear kernel where the exact one is asked for", "    if isinstance(overlap, Overlap):\n        return _decay_for", "    if False:\n        return _decay_for"),
    steady("eta squared left out at finite eta", "lr / (eta * (2 - eta)) * lr", "lr / (2 * eta) * lr"),
    steady("half-life by the first order", "math.log(2) / -math.log1p(-eta)", "math.log(2) / eta"),
    steady("size of Adam's update", "update_sq = (1 - beta1) / (1 + beta1)", "update_sq = 1 - beta1"),
    steady("factor 2 in Adam's decay for a target", "return check_lr(lr) / (2 * ", "return check_lr(lr) / (1 * "),
    forecast("settled past forgets the decay", "(1 - (1 - eta) * step.to_m**kernel.n)", "(1 - step.to_m**kernel.n)"),
    forecast("overlap of past updates missing", "+ g * g + 2 * g * (1 - e) * cross", "+ g * g"),
    forecast("recursion off by one: the new update ages at once", "        past *= keep[t]\n        past += add[t]", "        past += add[t]\n        past *= keep[t]"),
    forecast("forgets where the weights start", "return Walk(float(start),", "return Walk(0.0,"),
    forecast("warm momentum starts cold", "1.0 if warm_momentum else 0.0", "0.0"),
    forecast("sign of the expected alignment", "cosines[t] = -cross", "cosines[t] = cross"),
    forecast("Adam's bias correction off by one", "in enumerate(b1.tolist(), start=1)]", "in enumerate(b1.tolist(), start=2)]"),
    forecast("linear walk decays once, not squared", "norm = (1 - e) ** 2 * norm + g * g * step.var_x", "norm = (1 - e) * norm + g * g * step.var_x"),
    # the correction
    decay("current lr in place of the peak", "(lr / peak) * family.factor(group)", "(lr / lr) * family.factor(group)"),
    decay("momentum factor missing", "(lr / peak) * family.factor(group)", "(lr / peak)"),
    decay("peak not remembered", "if group.get(key) is not None}\n    keys.setdefault", 'if group.get(key) is not None and key != "peak_lr"}\n    keys.setdefault'),
    decay("decay of the decay: based on what was written last", 'decay = group["base_weight_decay"] *', 'decay = group["weight_decay"] *'),
    decay("checkpoint without the keys loses the peak", 'group.update({**known, "base_weight_decay"', 'group.update({"base_weight_decay"'),
    external("skipped groups are corrected", 'groups[index]["corrected"] = False', 'groups[index]["corrected"] = True'),
    external("the reference momentum is not used", 'keys["initial_momentum"] = family.reference(', 'keys["unused"] = family.reference(', "test_decay_choices.py"),
    external("uncorrecting keeps the momentary decay", 'group["weight_decay"] = group["base_weight_decay"]', 'group["weight_decay"] = group["weight_decay"]', "test_decay_choices.py"),
    skipping("skipped parameters have the corrected decay", '(True, group["base_weight_decay"])', '(True, group["weight_decay"])'),
    skipping("what a step writes into a part is lost", "for key in changed if key not in _OF_A_PART", "for key in changed if False"),
    skipping("split checkpoints are put together in the wrong order", "ids[position in skipped]", "ids[position >= sizes[0]]"),
    decay("a checkpoint without a skip undoes it", "known.get(UNCORRECTED) and not group.get(UNCORRECTED)", "False", "test_decay_skip.py"),
    Mutant("decay/peak.py", '_FAR * group["peak_lr"]', '0.0 * group["peak_lr"]', "a peak that is never approached goes unnoticed", ("test_decay_choices.py",)),
    decay("OneCycle's own peak not taken", 'group["peak_lr"] = float(group["max_lr"])', 'group["peak_lr"] = float(group["peak_lr"])'),
    decay("a base of zero leaves the decay as it was", "        if group[\"base_weight_decay\"] == 0:\n            return 0.0\n", "        if group[\"base_weight_decay\"] == 0:\n            return None\n"),
    external("a copy loses its correction", "copyreg.dispatch_table.setdefault(type(optimizer), _apart)", "_ = copyreg"),
    families("momentum factor upside down", "self.gain(now, group) / self.gain(initial, group)", "self.gain(initial, group) / self.gain(now, group)"),
    families("trace SGD's factor not squared", "check_alpha(alpha) ** -2 if", "check_alpha(alpha) ** -1 if", "test_optim.py::test_trace_decay_goes_with_the_square_of_alpha"),
    families("Muon's momentum taken for alpha", 'return 1 - float(group.get("momentum", 0.0))', 'return float(group.get("momentum", 0.0))'),
    families("decay that a flag makes coupled is accepted", "if group.get(flag) is False:", "if False:"),
    families("decay that does not scale with lr is accepted", 'if group.get("fixed_decay"):', "if False:"),
    families("decay that is corrected already is corrected twice", 'if group.get("corrected_weight_decay"):', "if False:"),
    families("coupled decay accepted", "if any(name in _COUPLED for name in names):", "if False:"),
    # lmo
    updates("U^2 of spectral", "return d_out / d_in * min(d_out, d_in)", "return float(min(d_out, d_in))"),
    updates("U^2 of sign", '"sign", 2, lambda m, n: m / n', '"sign", 2, lambda m, n: float(m * n)'),
    updates("U^2 of embedding", '"embedding", 2, lambda m, n: float(m * n)', '"embedding", 2, lambda m, n: m / n'),
    updates("U^2 of bias", 'if self.name == "bias":\n            return float(math.prod(shape))', 'if self.name == "bias":\n            return 1.0'),
    updates("U^2 of row", '"row", 2, lambda m, n: m / n', '"row", 2, lambda m, n: float(m)'),
    updates("U^2 of column", '"column", 2, lambda m, n: float(m * n)', '"column", 2, lambda m, n: float(n)'),
    updates("Newton-Schulz taken to be exact", "2 / grid * np.sin(phi) ** 2 / x @ s**2", "2 / grid * np.sin(phi) ** 2 / x @ s**0"),
    lmo("spectral norm over d_in/d_out", "torch.linalg.matrix_norm(x, 2) * math.sqrt(x.shape[-1] / x.shape[-2])", "torch.linalg.matrix_norm(x, 2) * math.sqrt(x.shape[-2] / x.shape[-1])"),
    lmo("norm of a bias not an RMS", "lambda x: _length(x, -1) / math.sqrt(x.shape[-1]),", "lambda x: _length(x, -1),"),
    lmo("norm of an embedding a mean", "lambda x: x.abs().amax((-2, -1)),", "lambda x: x.abs().mean((-2, -1)),"),
    lmo("spectral scaled by d_in/d_out", "mul_(math.sqrt(x.shape[-2] / x.shape[-1]))", "mul_(math.sqrt(x.shape[-1] / x.shape[-2]))  #"),
    lmo("stored transposed, scaled as if it were not", '"""\n    return polar(x, out=out).mul_(math.sqrt(x.shape[-1] / x.shape[-2]))', '"""\n    return polar(x, out=out).mul_(math.sqrt(x.shape[-2] / x.shape[-1]))'),
    lmo("column normalises rows", "lambda x, *_: _unit(x, -2)", "lambda x, *_: _unit(x, -1)"),
    lmo("taps of a convolution not counted", "(self._update(matrices, polar, None) / _taps(shape))", "(self._update(matrices, polar, None) / 1)"),
    lmo("fused q, k, v updated as one matrix", "matrices = _matrices(x, self.name, blocks, batch_ndim)", "matrices = _matrices(x, self.name, 1, batch_ndim)"),
    # gradients that are zero
    idle("stale updates do not fade", "(now / FADES_BELOW).clamp(max=1.0)", "torch.ones_like(now)"),
    idle("what is left of the momentum never comes back", "torch.where(nonzero, 1.0, left * keep", "torch.where(nonzero, left, left * keep"),
    idle("slices without a gradient move on", "return (self.largest != 0) | (self.smallest != 0)", "return torch.ones_like(self.largest, dtype=torch.bool)"),
    idle("gradients near the largest number are taken in", "max / 2\n", "max\n"),
    scion("an expert of a dense stack moves for ever", "return Slices(waiting, len(p), 0)", "return Slices(waiting)", "test_idle.py::test_an_expert_of_a_dense_stack_fades"),
    Mutant("optim/peak_relative.py", "        watch(self.param_groups[-1])\n", "", "an own optimizer's guessed peak is not watched", ("test_decay_choices.py",)),
    Mutant("optim/peak_relative.py", "    correction.warn_of_replaced(optimizer)\n", "", "a replaced peak is not reported", ("test_decay_choices.py",)),
    Mutant("optim/peak_relative.py", "        if LARGEST not in saved:\n", "        if False:\n", "a run that is joined late is judged", ("test_decay_choices.py",)),
    # polar
    polar("no restart in the Gram form", "        gram = _symmetric(y, y.mT)\n        q = _first", "        gram = start = _symmetric(y, y.mT) if k == 0 else _symmetric(_symmetric(q, start), q)\n        q = _first"),
    polar("an odd step of the Gram form goes last", "alone = left in (1, 3)", "alone = left == 1"),
    polar("polar factors are zero: seen by the properties alone", "    if not quintics:\n        return _svd(x)\n", "    return torch.zeros_like(x)\n", "properties/test_lmo_properties.py"),
    polar("Frobenius norm in place of Schatten-8", "quintics[0], _schatten8) if k == 0", "quintics[0], _frobenius) if k == 0"),
    polar("Schatten-8 norm without its root", "dtype=exact).pow(0.25)", "dtype=exact).pow(0.5)"),
    polar("Newton-Schulz scaled by Schatten-8", "_frobenius if published", "_schatten8 if published"),
    polar("denormals scaled by one factor", "(x * first).to(working).mul_(second.to(working))", "x.to(working, copy=True).mul_((first * second).to(working))"),
    polar("cubic term scaled wrongly", "b * inverse**3", "b * inverse**2"),
    polar("intervals of the composition not followed", "high = 2 - low\n", "high = 1.0\n"),
    polar("half of a symmetric product not mirrored", "out[:low, low:high] = out[low:high, :low].mT", "out[:low, low:high] = 0"),
    polar("directions of no size get one", "(u * rank.unsqueeze(-2)) @ vh", "u @ vh"),
    polar("fifth power scaled as the fourth", "(c * inverse**5)", "(c * inverse**4)"),
    # the step
    buckets("sign of the update", "addcmul_(u, -gamma * step)", "addcmul_(u, gamma * step)"),
    buckets("factor 2 in the decay", "theta.mul_(1 - eta)", "theta.mul_(1 - 2 * eta)"),
    buckets("no decay at all", "theta.mul_(1 - eta).addcmul_", "theta.addcmul_"),
    buckets("weights do not move, but for their decay: seen by the properties alone", ".addcmul_(u, -gamma * step)", ".addcmul_(u, -0 * gamma * step)", "properties/test_twin_properties.py"),
    buckets("updates twice as long: seen by the properties alone", ".addcmul_(u, -gamma * step)", ".addcmul_(u, -2 * gamma * step)", "properties/test_bounded_properties.py"),
    buckets("decay after the step", "theta.mul_(1 - eta).addcmul_(u, -gamma * step)", "theta.addcmul_(u, -gamma * step).mul_(1 - eta)"),
    buckets("coupled: decay added to the gradient", "        x = self.direction(batch, scalars, settings)", '        batch = batch._replace(raw_grad=batch.raw_grad + scalars["eta"] / scalars["gamma"] * batch.theta)\n        scalars = {**scalars, "eta": 0 * scalars["eta"]}\n        x = self.direction(batch, scalars, settings)'),
    buckets("state of one parameter goes to another", "write_back(tensors, batch.state[key])", "write_back(tensors, batch.state[key].flip(0))", "test_buckets.py"),
    buckets("weights of one parameter go to another", "write_back(params, batch.theta)", "write_back(params, batch.theta.flip(0))", "test_buckets.py"),
    buckets("non-finite gradients not skipped", "finite.to(exact).view(", "torch.ones_like(finite).to(exact).view(", "test_buckets.py"),
    buckets("alignment with the weights after the step", "    if products is not None:\n        before, along", "    theta.mul_(1 - eta).addcmul_(u, -gamma)\n    eta, gamma = 0 * eta, 0 * gamma\n    if products is not None:\n        before, along", "test_monitor.py::test_alignment_equals_copies_of_the_weights"),
    scion("Nesterov missing", "return grad.lerp_(m, 1 - alpha) if settings.nesterov else m", "return m"),
    scion("momentum keeps alpha instead of 1 - alpha", "m.lerp_(grad, alpha)", "m.lerp_(grad, 1 - alpha)"),
    scion("Nesterov missing where momentum is kept in bf16", "torch.lerp(x, wide, 1 - a) if nesterov else wide", "wide", "test_buckets.py::test_bf16_momentum_is_the_rounded_momentum_of_its_formula"),
    scion("alpha of construction, not the scheduled one", 'float(group["steady_norm_sq"]), float(group["alpha"])', 'float(group["steady_norm_sq"]), float(self.defaults["alpha"])'),
    scion("C^2 of construction, not the scheduled one", 'alpha = float(group["steady_norm_sq"]), float(group["alpha"])', 'alpha = float(self.defaults["steady_norm_sq"]), float(group["alpha"])'),
    scion("lr of construction in the decay", "return self._weight_decay(group, lr, bucket.settings", 'return self._weight_decay(group, float(self.defaults["lr"]), bucket.settings'),
    scion("linear decay where exact is asked for", 'exact = group["overlap"] == "exact"', "exact = False"),
    lion("betas swapped", '"beta1": float(beta1), "beta2": float(beta2)', '"beta1": float(beta2), "beta2": float(beta1)'),
    lion("the update sees the new momentum", "    x = torch.lerp(grad, m, scalars[\"beta1\"] * ones)\n    m.lerp_(grad, (1 - scalars[\"beta2\"]) * batch.live)", "    m.lerp_(grad, (1 - scalars[\"beta2\"]) * batch.live)\n    x = torch.lerp(grad, m, scalars[\"beta1\"] * ones)"),
    renormalized("bias correction missing", "state[key] / torch.where(bias > 0, bias, 1.0)", "state[key] / 1.0"),
    renormalized("renormalisation skipped", "(gamma > 0), scale, 1.0)", "(gamma > 0), torch.ones_like(scale), 1.0)"),
    renormalized("norm of the weights before their decay", "decayed = theta * ((1 - eta) / unit)", "decayed = theta / unit"),
    renormalized("a step past zero is turned back", "(size - gamma * along).abs()", "(size - gamma * along)", "test_optim.py::test_renormalized_adamw_steps_past_zero_as_adamw_does"),
    Mutant("optim/sgd.py", "batch.live if settings.trace else alpha", "alpha", "trace momentum damped", ("test_optim.py::test_sgdc_equals_its_twin",)),
    Mutant("optim/sgd.py", "share.addcmul_(m, 1 - alpha) if settings.nesterov else m", "m", "SGD's Nesterov missing", ("test_optim.py::test_sgdc_equals_its_twin",)),
    Mutant("optim/sgd.py", "m.mul_(1 - alpha).add_(share)", "m.add_(share)", "SGD's momentum never forgets", ("test_optim.py::test_sgdc_equals_its_twin",)),
    Mutant("optim/adam.py", "        own_correction(self, ADAM)(self)", "        own_correction(self, ADAM)", "AdamC without its correction", ("test_optim.py::test_adamc_equals_its_twin",)),
    Mutant("optim/adam.py", "        for p, _ in withheld:\n            p.grad = None", "        for p, _ in withheld:\n            p.grad = p.grad", "AdamC steps along non-finite gradients", ("test_contract.py::test_non_finite_gradient_skips_that_parameter_only",)),
    Mutant("optim/peak_relative.py", 'if "base_weight_decay" not in saved:', "if False:", "a plain checkpoint's decay is not the base", ("test_optim.py::test_plain_adamw_checkpoint_continues_in_adamc",)),
    Mutant("optim/loading.py", "placed_like(values[key], fresh) if key in values else fresh", "fresh", "resuming loses the momentum", ("test_contract.py::test_resumed_run_equals_unbroken_run",)),
    Mutant("optim/loading.py", "            group.setdefault(key, value)", "            pass", "a checkpoint without the peak lr loses it", ("test_optim.py::test_plain_adamw_checkpoint_continues_in_adamc",)),
    # schedules
    schedule("warmup off by one", "            return (step + 1) / self.warmup", "            return step / self.warmup"),
    schedule("end of the cosine off by one", "min(since / self.decay, 1.0)", "min((since + 1) / self.decay, 1.0)"),
    schedule("cosine not halved", "(1 + math.cos(math.pi * done)) / 2", "math.cos(math.pi * done / 2)"),
    schedule("momentum matched without the root", '{"gamma-eff": 0.5,', '{"gamma-eff": 1.0,'),
    schedule("lr does not take over at alpha_max", "return self.alpha_max, ratio * (start / least) ** power", "return self.alpha_max, ratio"),
    schedule("matched ratio counts the warmup", "self.ratio(step - self.warmup)", "self.ratio(step)"),
    schedule("start and end swapped", "ratio * self.start + (1 - ratio) * self.end", "ratio * self.end + (1 - ratio) * self.start", "test_schedule.py"),
    schedule("momentum matched by the plain gain under Nesterov", "theory.momentum_gain(self.alpha_0, nesterov=self.nesterov)", "theory.momentum_gain(self.alpha_0)"),
    schedule("alpha for a gain off by one", "2 / (1 + gain), low)", "2 / gain, low)"),
    scheduler("base is the value written last", 'float(group.setdefault(f"initial_{key}", _copy(group[key])))', "float(group[key])"),
    scheduler("resuming is a step ahead", 'self._step_count = state_dict["last_epoch"],', 'self._step_count = state_dict["last_epoch"] + 1,'),
    # groups
    roles("tied weights counted twice", "[Placed(parameter, *zip(*places, strict=True)) for parameter, places in held.items()]", "[Placed(p, (name,), (module,)) for p, places in held.items() for name, module in places]"),
    roles("output layer not found", "elif id(placed.parameter) in outputs:", "elif False:"),
    roles("fused q, k, v not split", 'return 3, f"; fused q, k, v', 'return 1, f"; fused q, k, v'),
    groups("output decay is the hidden layers'", "output_decay = lr * decay_0 / output_lr if", "output_decay = decay_0 if"),
    groups("Adam decays vectors", '"weight_decay": 0.0, "corrected": True', '"weight_decay": decay, "corrected": True'),
    groups("radius left out of the lr", '{"lr": lr * radius,', '{"lr": lr,'),
    # monitor
    spectral("a record starts from the first vector again", "self.vectors = torch.cat(vectors)", "_ = torch.cat(vectors)"),
    spectral("one power iteration per record, however long ago the last one was", "return min(16, 8 * every)", "return 1", "test_monitor.py::test_spectral_norm_within_a_percent_of_svd_while_training"),
    spectral("directions that are in the Krylov space already", "r = r - torch.bmm(", "r = r - 0 * torch.bmm(", "test_monitor.py::test_spectral_norm_within_a_percent_of_svd_while_training"),
    spectral("spectral norm over d_in/d_out", "math.sqrt(self.columns / self.rows)", "math.sqrt(self.rows / self.columns)"),
    measures("sign norm without d_in", 'largest * layer.shape[-1] if', "largest if", "test_monitor.py::test_role_norms_are_means_of_table_1"),
    record("sign of the excess alignment", "cosine - expected,", "expected - cosine,"),
    record("cosine over the squared norm", "along / math.sqrt(update * before)", "along / (update * before)", "test_monitor_forecast.py::test_random_gradients_have_no_excess_alignment"),
    course("forecast forgets the start", "unit * self.norms[at] + start.norm_sq * self.keeps[at])", "unit * self.norms[at])"),
    course("start decays once, not squared", "np.cumprod((1 - eta) ** 2)", "np.cumprod(1 - eta)"),
    course("expected alignment one step late", "norm_sq = self.norms[at - 1] +", "norm_sq = self.norms[at] +"),
    course("momentum under way taken for none", "if not any(start.warm for start in starts) or stride.filter.r >= 1:", "if True:", "test_monitor_forecast.py::test_attached_to_a_run_under_way_momentum_is_taken_as_settled"),
    Mutant("monitor/motion.py", "_lr(group) * math.sqrt(theory.lion_gain(*betas_of(group)))", "_lr(group) * theory.lion_gain(*betas_of(group))", "Lion's effective lr without its root", ("test_monitor_forecast.py::test_forecast_of_lion_and_adam_with_changing_betas",)),
    Mutant("monitor/motion.py", "_lr(group), alpha(group), nesterov=nesterov_of(group))", "_lr(group), alpha(group))", "effective lr in records without Nesterov's factor", (FORECAST,)),
    Mutant("monitor/motion.py", '_lr(group) / (alpha_of(group) if group["trace"] else 1.0)', "_lr(group)", "effective lr of a trace is that of an average", ("test_monitor_forecast.py::test_effective_lr_of_sgd_with_and_without_a_trace",)),
    course("momentum of a young Adam taken for an old one's", "self.count if young else None", "None", "test_monitor_forecast.py::test_momentum_of_a_young_adam_holds_as_many_gradients_as_it_has_seen"),
    Mutant("conversion/equivalents.py", "0.2 * math.sqrt(max(rows, columns))", "0.2 * max(rows, columns)", "size of Muon's adjusted update", ("test_monitor_forecast.py::test_size_of_muons_update_is_known",)),
    Mutant("monitor/monitor.py", "u = theta * (1 - eta) - after", "u = theta - after", "decay counted as update", ("test_monitor.py::test_alignment_equals_copies_of_the_weights",)),
    Mutant("monitor/monitor.py", '            each.load(state["power"])', "            each.load({})", "resumed monitor forgets its power vectors", ("test_monitor_forecast.py::test_resumed_run_continues_as_the_unbroken",)),
    # many processes
    shards("matrices come back in the order they had, not that of their owners", "params += [p for _, _, p in sorted(owners, key=lambda entry: entry[:2])]", "params += [p for _, _, p in owners]", "test_bench.py::test_matrices_are_put_in_the_order_of_their_owners"),
    shards("updates arrive as multiples of a unit", "u = u.to(live.dtype).mul_(stage.unit)", "u = u.to(live.dtype)"),
    shards("an infinity on one rank is written by the others", 'live = work.finite[which].to(exact).view(', "live = torch.ones_like(work.finite[which]).to(exact).view("),
    shards("half a row taken for a row", "(bucket.by_rows and bucket.layout is not None and bucket.layout.keeps_rows_whole)", "bucket.by_rows"),
    shards("all matrices on one process", "load[owner] += costs[k] if owned else 0.0", "load[owner] += 0.0", "test_bench.py::test_cost_model_counts_what_moves"),
    shards("an owner sends its matrix to everyone", "return layout.replicated and max(counts) * layout.ranks > 2 * sum(counts)", "return False", "test_bench.py::test_few_matrices_are_gathered_from_shards"),
    layout("sums of shards not added up", "            dist.all_reduce(x, group=process_group(self.group))\n", "            pass\n", STEPS.replace("four-32", "two-36")),
    layout("FSDP2 over tensor parallel cut in the wrong order", 'key=lambda k: "Strided" in type(placements[k]).__name__)', "key=lambda k: 0)"),
    Mutant("optim/sharding/consensus.py", "            agreed |= {id(member.p): flag.bool() for member, flag", "            agreed |= {id(member.p): found.get(id(member.p), flag).bool() for member, flag", "each rank judges its own shard alone", (STEPS,)),
    Mutant("optim/sharding/placement.py", "return (given.full_tensor() if is_dtensor(value) else value).to(", "return (0 * given.full_tensor() if is_dtensor(value) else value).to(", "sharded momentum lost where it is loaded whole", (MOVED,)),
    Mutant("optim/sharding/placement.py", "local(fresh).copy_(layout.mine.of(value))", "local(fresh).copy_(0 * layout.mine.of(value))", "whole momentum lost where it is loaded in shards", (MOVED,)),
    # planning, moving over, simulation
    Mutant("prediction.py", "square = exact * setting.update_norm_sq", "square = exact", "predicted norm without U^2", ("test_predict.py",)),
    Mutant("prediction.py", "math.sqrt(square / math.prod(setting.shape))", "math.sqrt(square)", "predicted RMS is the norm", ("test_predict.py",)),
    Mutant("prediction.py", "for each in (decay, decay * ratios)", "for each in (decay, decay)", "planned run not corrected", ("test_predict.py",)),
    Mutant("prediction.py", "before.paper.formula_norm_sq, lr, alpha", "before.exact.steady_norm_sq, lr, alpha", "paper's matching decay keeps another norm", ("test_predict.py",)),
    convert("lr taken over as it is", "same = source.factor(setting) * source.peak", "same = source.peak", "test_moving.py::test_scionc_from_adamw_keeps_half_life_effective_lr_and_steady_rms"),
    convert("momentum not taken over", "new.state[source.parameter][key].copy_(old)", "new.state[source.parameter][key].copy_(0 * old)", "test_moving.py::test_adamc_goes_on_from_adamw_bit_for_bit_while_lr_is_constant"),
    Mutant("conversion/equivalents.py", "ours = lr * muon_factor(adjust, shape) * math.sqrt(min(shape) / unit)", "ours = lr * muon_factor(adjust, shape)", "Muon's lr without the ratio of sizes", ("test_moving.py::test_scion_goes_on_from_muon",)),
    Mutant("conversion/equivalents.py", '"weight_decay": eta / lr,\n', '"weight_decay": decay,\n', "Muon's decay not by its own lr", ("test_predict.py",)),
    Mutant("conversion/equivalents.py", "lr = step * math.sqrt(setting.update_norm_sq / math.prod(setting.shape))", "lr = step", "AdamW's lr is not an RMS", ("test_predict.py",)),
    translation("Lion's effective lr without its root", "self.lr * math.sqrt(theory.lion_gain(*self.betas))", "self.lr * theory.lion_gain(*self.betas)"),
    translation("Muon's lr translated without its momentum", "return same_step * self.effective_lr / ours", "return same_step"),
    translation("half-life lost in translation", "decay = tuned.lr * tuned.weight_decay / lr", "decay = tuned.weight_decay"),
    translation("Muon's weights forecast by their norm", "muon_update_norm_sq(shape, self.adjust) / math.prod(shape)", "muon_update_norm_sq(shape, self.adjust)"),
    translation("tuned run not corrected", "for each in (decay, decay * ratios)", "for each in (decay, decay)"),
    Mutant("conversion/equivalents.py", " * newton_schulz_share(shape[0], shape[1], *iteration)", "", "Muon's updates as long as exact polar factors", ("test_monitor_forecast.py::test_size_of_muons_update_is_known",)),
    Mutant("conversion/official_scion.py", "math.sqrt(math.prod(shape[2:])) / taps)", "1.0)", "published convolution taken to be as large as ours", ("test_moving.py::test_the_published_scion_goes_on_exactly",)),
    Mutant("lab/simulate.py", "addcmul_(u, -lr[step] / length)", "addcmul_(u, -lr[step])", "simulated updates not of unit length", ("test_simulate.py",)),
    Mutant("lab/simulate.py", "torch.lerp(m, g.expand_as(m), a) if first", "m.clone() if first", "simulated Nesterov is plain momentum", ("test_simulate.py",)),
    Mutant("lab/simulate.py", "m.mul_(1 - a).add_(g) if", "m.mul_(1 - a).add_(a * g) if", "simulated trace is an average", ("test_simulate.py",)),
    Mutant("lab/simulate.py", "theta *= 1 - rate * weight_decay", "theta *= 1 - 2 * rate * weight_decay", "random system decays twice", ("test_simulate.py",)),
    Mutant("lab/simulate.py", "(1 - alpha) * m + alpha * g if momentum", "m.clone() if momentum", "response of a gradient without Nesterov", ("test_simulate.py",)),
    # training
    Mutant("lab/train/run_state.py", '    torch.set_rng_state(rest["rng"])', '    _ = rest["rng"]', "resuming loses the random state", ("test_train_wiring.py",)),
    Mutant("lab/train/run_state.py", '    parts.task.go_to(rest["data"])', '    _ = rest["data"]', "resuming starts the data again", (DIES,)),
    Mutant("lab/train/run_state.py", 'return Progress(rest["step"],', 'return Progress(rest["step"] - 1,', "resuming loses a step", (DIES,)),
    Mutant("lab/train/run_state.py", "        scheduler.load_state_dict(state)", "        _ = state", "resuming starts the schedule again", (DIES,)),
    Mutant("lab/train/loop.py", "part) / len(parts)", "part)", "micro-batches add up instead of averaging", ("test_train_wiring.py",)),
    Mutant("lab/train/loop.py", 'extra["grad_norm"] = ', 'extra["clipped"] = ', "gradient norm after clipping", ("test_train.py::test_clipping_records_the_norm_before_it",)),
    Mutant("lab/train/optimizers.py", "theory.momentum_gain(alpha(step), nesterov=optim.nesterov) / start", "start / theory.momentum_gain(alpha(step), nesterov=optim.nesterov)", "the third arm's target upside down", ("test_train.py::test_the_third_arm_leaves_the_momentum_factor_out_of_the_decay",)),
    Mutant("lab/train/optimizers.py", "betas = (1 - optim.alpha, optim.betas[1])", "betas = optim.betas", "Lion's beta1 is not 1 - alpha", ("test_train_wiring.py",)),
    Mutant("lab/train/optimizers.py", "momentum=1 - optim.alpha", "momentum=optim.alpha", "Muon's momentum is alpha", ("test_train_wiring.py",)),
)
# fmt: on
