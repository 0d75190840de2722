"""More of what tests/mutants.py breaks: models, data and the statistics of experiments."""

from mutation import Mutant, in_module

# fmt: off
gpt = in_module("lab.models.gpt", "test_models.py")
vit = in_module("lab.models.vit", "test_models.py")
loss = in_module("lab.models.loss", "test_models.py")
augment = in_module("lab.data.augment", "test_augment.py")
randaugment = in_module("lab.data.randaugment", "test_augment.py")
token_loader = in_module("lab.data.token_loader", "test_shards.py")
recipes = in_module("lab.train.recipes", "test_recipes.py")
statistics = in_module("lab.paper.statistics", "test_paper_statistics.py")
metrics = in_module("lab.paper.metrics", "test_paper_statistics.py")
BYTES = "test_launches.py::test_every_operand_is_read_once_and_every_result_written_once"
CHUNKS = "test_launches.py::test_two_lists_are_launched_64_tensors_and_320_blocks_at_a_time"
launches = in_module("lab.launch_counter", BYTES)
device_bench = in_module("lab.device_bench", "test_device_bench.py")
device_report = in_module("lab.device_report", "test_device_bench.py")
accelerator = in_module("polar.accelerator", "properties/test_half_precision_properties.py")
winners = in_module("lab.paper.winners", "test_paper_winners.py")
MACHINES = "test_paper_provenance.py::test_runs_of_different_machines_are_not_judged_together"
SCORED = "test_paper_provenance.py::test_no_worse_follows_the_direction_and_the_margin_of_a_score"
ENDS = "test_paper_provenance.py::test_what_the_ends_of_a_sweep_cost_is_above_zero_where_the_middle_is_best"
TOLD = "test_paper_null.py::test_best_lrs_are_distinguished_from_best_effective_lrs"

MUTANTS: tuple[Mutant, ...] = (
    # models
    gpt("Mlp.forward", "activation without its factor of 2", "2 * self.down(relu(self.up(x)).square())", "self.down(relu(self.up(x)).square())"),
    gpt("Attention.forward", "q is not normalised", "norm(q)", "q"),
    gpt("Attention.forward", "attention sees what is to come", "is_causal=True", "is_causal=False"),
    gpt("rotate", "rotation stretches", "x2 * cos - x1 * sin", "x2 * cos + x1 * sin"),
    gpt("rotary_angles", "frequencies of the whole head, not of its half", "-i / half", "-i / (2 * half)"),
    gpt("GPT.init_weights", "start uniform within the square of its bound", "math.sqrt(self.config.width)", "self.config.width"),
    gpt("GPT.init_weights", "blocks speak from the start", '("out.weight", "down.weight")', '("out.weight",)'),
    gpt("GPT.forward", "no last norm", "norm(x)", "x"),
    gpt("Block.forward", "attention's branch in place of the sum", "x + self.attention(norm(x), cos, sin)", "self.attention(norm(x), cos, sin)"),
    vit("Mlp.forward", "activation without sqrt(2)", "math.sqrt(2) * x", "x"),
    vit("position_table", "x and y exchanged in the position table", "(x.sin(), x.cos(), y.sin(), y.cos())", "(y.sin(), y.cos(), x.sin(), x.cos())"),
    vit("position_table", "last frequency is not 1/10000", "width // 4 - 1", "width // 4"),
    vit("SimpleViT.forward", "no tanh in the head", "torch.tanh(self.pre_logits(x))", "self.pre_logits(x)"),
    vit("SimpleViT.forward", "no last norm", "self.norm(x)", "x"),
    vit("_orthogonal", "orthogonal start without its scale", "math.sqrt(block.shape[0] / block.shape[1])", "1.0"),
    vit("SimpleViT.init_weights", "q, k, v orthogonal as one matrix", '3 if layer == "qkv" else 1', "1"),
    vit("SimpleViT.init_weights", "Xavier of q, k, v as one matrix", "3 / self.config.width", "1.5 / self.config.width"),
    vit("SimpleViT.init_weights", "cut normal without its correction", "1 / math.sqrt(parameter[0].numel()) / CUT_STD", "1 / math.sqrt(parameter[0].numel())"),
    vit("SimpleViT.init_weights", "head starts with an opinion", 'layer == "head" or kind == "bias"', 'kind == "bias"'),
    loss("_InPieces.backward", "slope of the loss summed, not averaged", "grad / len(x_grad)", "grad"),
    loss("_InPieces.forward", "loss summed, not averaged", "total / len(x)", "total"),
    loss("_InPieces.forward", "slope without the target", "torch.full_like(log_sum, -1.0)", "torch.full_like(log_sum, 0.0)"),
    # data
    augment("mixup", "mixup keeps the smaller part", "max(weight, 1 - weight)", "min(weight, 1 - weight)"),
    augment("_mix", "mixup with the image after", "x.roll(1, 0)", "x.roll(-1, 0)"),
    augment("mixup", "mixup of labels forgotten", "_mix(labels, weight, lead)", "labels"),
    augment("crop_box", "crop's ratio uniform, not log-uniform", "math.log(ratio[0]), math.log(ratio[1])", "ratio[0] - 1, ratio[1] - 1"),
    augment("crop_box", "crop's side in proportion to the area", "round(math.sqrt(area * shape)), round(math.sqrt(area / shape))", "round(area * shape / height), round(area / shape / width)"),
    augment("normalize", "images in [0, 1]", "images.float().mul_(2 / 255).sub_(1)", "images.float().mul_(1 / 255)"),
    augment("Evaluate.__call__", "evaluation without 256/224", "round(self.size * 256 / 224)", "self.size"),
    augment("Augment.__call__", "always flipped", "self.flip and generator.integers(2)", "self.flip"),
    randaugment("_enhance", "enhancing from 0", "level * 1.8 + 0.1", "level * 1.9"),
    randaugment("_scaled", "pixels that do not follow the side", "pixels * side / REFERENCE_SIDE", "pixels"),
    randaugment("rotate", "rotation clockwise", "_affine(image, (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y))", "_affine(image, (cos, sin, x - cos * x - sin * y), (-sin, cos, y + sin * x - cos * y))"),
    randaugment("contrast", "contrast about black", "_blended(_CONTRAST_GREY, factor)", "_blended(0, factor)"),
    randaugment("solarize", "solarising of the dark", "np.where(threshold % 256 > _RAMP, _RAMP, 255 - _RAMP)", "np.where(threshold % 256 > _RAMP, 255 - _RAMP, _RAMP)"),
    randaugment("equalize", "equalising without rounding", "below + step // 2", "below"),
    randaugment("sharpness", "blur with a heavier centre", "ImageFilter.Kernel((3, 3), (1, 1, 1, 1, 5, 1, 1, 1, 1), 13, offset=0.5 / 13 - 0.5)", "ImageFilter.Kernel((3, 3), (1, 1, 1, 1, 9, 1, 1, 1, 1), 17, offset=0.5 / 13 - 0.5)"),
    randaugment("RandAugment.__call__", "one operation for all layers", "self.layers", "min(self.layers, 1)"),
    token_loader("TokenLoader.__init__", "a sequence without its last target", "self.tokens - 1", "self.tokens"),
    # recipes
    recipes("GPT_124M", "NanoGPT's target of another alpha", "9.5 * 2**-12", "19 * 2**-12"),
    recipes("VIT_S16", "ViT without its constant decay of the output", "output_weight_decay=0.004", "output_weight_decay=0.08"),
    recipes("_MUON", "Muon's weights with Adam's lr", "lr=0.02", "lr=1e-3", "test_recipes.py::test_baseline_settings_are_their_authors_published_ones"),
    # experiments
    statistics("estimate", "standard deviation in place of the error", "sample_sd(values) / math.sqrt(len(values))", "sample_sd(values)"),
    statistics("difference", "arms compared across seeds", "(-1.0, others)", "(-1.0, others[::-1])"),
    statistics("Bound.kept", "two standard errors of any number of seeds", "student_quantile(self.estimate.seeds - 1)", "2.0"),
    statistics("Bound.p", "a degree of freedom too many", "self.estimate.seeds - 1", "self.estimate.seeds"),
    statistics("student_tail", "Student's t without its last term", "freedom // 2", "(freedom - 1) // 2"),
    statistics("student_tail", "Student's t of odd freedom without a cosine", "math.cos(angle) if odd else 1.0", "1.0"),
    statistics("Bound.inside", "at most is at least", "-self.estimate.t_above(self.bound)", "self.estimate.t_above(self.bound)"),
    statistics("Bound.inside", "within looks at one side", "abs(self.estimate.value)", "self.estimate.value"),
    statistics("Bound.p", "one seed refutes", "1.0, 1.0", "1.0, 0.0"),
    statistics("Bound.seeds_needed", "seeds without the square root", "math.sqrt(seeds)", "seeds"),
    statistics("Finding.p", "one bound of many refutes as if alone", "len(outside) * min(outside)", "min(outside)"),
    statistics("Finding.holds", "open claims hold together", "all(bound.kept for bound in self.tested)", "any(bound.kept for bound in self.tested)"),
    statistics("holm", "Holm's correction left out", "level / (len(chances) - rank)", "level"),
    statistics("parabola_peak", "top of the parabola at the best point", "middle_left + left / (left - right) * (middle_right - middle_left)", "b"),
    Mutant("lab.paper.null:at_its_bound", "noise around a truth that keeps the bound", "noise.value + bound.bound", "noise.value", ("test_paper_null.py::test_noise_supports_no_claim[fig-adamc-betas]",)),
    Mutant("lab.paper.experiments.learning_rates:exponent_above", "the exponent of the best lr upside down", "TILT - 2 * (1 - least) * BEND", "TILT + 2 * (1 - least) * BEND", (TOLD,)),
    Mutant("lab.paper.experiments.learning_rates:within_factor_two", "any effective lr is within a factor of 2", "2 * math.log(2)", "-2 * math.log(2)", (TOLD,)),
    Mutant("lab.train.token_rows:visit_chances", "rare tokens visited in every step", "(1 - counts / counts.sum()) ** tokens_per_step", "0.0 * counts", ("test_train_options.py::test_chances_of_a_visit_follow_from_the_text",)),
    Mutant("lab.paper.claims:no_worse", "a larger loss taken for better", "score.sign > 0", "score.sign < 0", (SCORED,)),
    Mutant("lab.paper.experiments.swept_lr:loss_at_ends", "a sweep's ends reward what they cost", "-score.sign", "score.sign", (ENDS,)),
    Mutant("lab.paper.runner:read", "runs of two kinds of machines in one claim", "machine_of(run) != kinds[0]", "False", (MACHINES,)),
    winners("Pair.winner", "the larger loss wins", "self.score.sign * self.gap.value", "self.gap.value"),
    winners("Pair.winner", "any difference is a victory", "self.reach", "0"),
    winners("Pair.verdict", "the best end of an interval taken for the worst", "(-1, 1)", "(1, -1)"),
    metrics("growth", "growth upside down", "end(run) / middle(run)", "middle(run) / end(run)"),
    metrics("swing.metric", "swing of the last value", "values.min()", "values[-1]"),
    metrics("log_ratio", "measured over forecast upside down", "one(run) / other(run)", "other(run) / one(run)"),
    metrics("mean_over.metric", "mean over the whole run", "(at >= part[0]) & (at <= part[1])", "at >= 0"),
    # what a GPU would be asked to do, and measuring one
    launches("_read", "what is written by out= counted as read", "key != 'out'", "True"),
    launches("_read", "overwritten memory counted as read", "func._schema.name in _OVERWRITES", "False"),
    launches("_written", "writes of in-place operations on lists left out", "slot.alias_info.is_write", "not slot.alias_info.is_write"),
    launches("_written", "gradients counted as written by fused optimizers", "slot.name != 'grads'", "True", "test_launches.py::test_fused_adamw_reads_four_tensors_and_writes_three"),
    launches("_bytes", "expanded operands counted at full size", "math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)", "x.numel()", "test_launches.py::test_expanded_operands_are_read_as_what_they_are"),
    launches("_multi_tensor_launches", "lists of unlike tensors counted as one launch", "not is_uniform or len({x.dtype for x in first}) > 1", "False", "test_launches.py::test_lists_that_differ_in_shape_dtype_or_layout_launch_a_kernel_per_tensor"),
    launches("_chunked_launches", "any number of blocks in a launch", "min(left, BLOCKS_PER_LAUNCH - blocks)", "left", CHUNKS),
    launches("_chunked_launches", "any number of tensors in a launch", "not left and tensors == most_tensors", "False", CHUNKS),
    launches("LaunchCounter._watch", "memory that is free again counted", "not entry[0].expired()", "True", "test_launches.py::test_temporaries_are_what_is_alive_at_one_time"),
    device_bench("PhaseTimer.take", "only the last chunk of a phase counted", "sums.get(name, 0.0)", "0.0"),
    device_bench("time_phases", "the rest of a step is all of it", "2 * seconds[whole] - sum(seconds.values())", "seconds[whole]"),
    device_bench("captured_step.replay", "a graph replayed with old numbers", "optimizer.fill_scalars()", ""),
    device_bench("Clock.between", "an event read before it happened", "end.synchronize()", ""),
    device_report("compare", "faster and slower exchanged", "reference / milliseconds", "milliseconds / reference"),
    device_report("verdict", "launches counted in seconds", "1e3 * LAUNCH_SECONDS * kernels", "LAUNCH_SECONDS * kernels"),
    accelerator("_SIZE", "fp16 Gram powers may overflow", "8.0", "32.0"),
    accelerator("find_factors", "the rounded matrices held through the iteration", "return _steps_on_x(_wide(scale_and_round(batches, working)), quintics, tall, scale, published)", "y = _wide(scale_and_round(batches, working)); return _steps_on_x(y, quintics, tall, scale, published)", "test_launches.py::test_temporaries_of_a_square_factor_are_three_matrices"),
)
# fmt: on
