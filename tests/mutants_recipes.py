"""More of what tests/mutants.py breaks: models, data and the statistics of experiments."""

from mutants_table import Mutant, of_file

# fmt: off
gpt = of_file("lab/models/gpt.py", "test_models.py")
vit = of_file("lab/models/vit.py", "test_models.py")
loss = of_file("lab/models/loss.py", "test_models.py")
augment = of_file("lab/data/augment.py", "test_augment.py")
randaugment = of_file("lab/data/randaugment.py", "test_augment.py")
shards = of_file("lab/data/shards.py", "test_shards.py")
recipes = of_file("lab/train/recipes.py", "test_recipes.py")
statistics = of_file("lab/paper/statistics.py", "test_paper_statistics.py")
measures = of_file("lab/paper/metrics.py", "test_paper_statistics.py")
comparison = of_file("lab/paper/comparison.py", "test_paper_comparison.py")
TOLD = "test_paper_null.py::test_best_lrs_are_told_from_best_effective_lrs"

MUTANTS: tuple[Mutant, ...] = (
    # models
    gpt("activation without its factor of 2", "2 * self.down(relu(self.up(x)).square())", "self.down(relu(self.up(x)).square())"),
    gpt("q is not normalised", "rotate(norm(q), cos, sin), rotate(norm(k)", "rotate(q, cos, sin), rotate(norm(k)"),
    gpt("attention sees what is to come", "is_causal=True", "is_causal=False"),
    gpt("rotation stretches", "x2 * cos - x1 * sin", "x2 * cos + x1 * sin"),
    gpt("frequencies of the whole head, not of its half", "base ** (-i / half)", "base ** (-i / (2 * half))"),
    gpt("start uniform within the square of its bound", "bound = 1 / math.sqrt(self.config.width)", "bound = 1 / self.config.width"),
    gpt("blocks speak from the start", '.endswith(("out.weight", "down.weight"))', '.endswith(("out.weight",))'),
    gpt("no last norm", "x, weight = norm(x), self.embedding.weight", "x, weight = x, self.embedding.weight"),
    gpt("attention's branch in place of the sum", "x = x + self.attention(norm(x), cos, sin)", "x = self.attention(norm(x), cos, sin)"),
    vit("activation without sqrt(2)", "math.sqrt(2) * x if self.scaled", "x if self.scaled"),
    vit("x and y exchanged in the position table", "(x.sin(), x.cos(), y.sin(), y.cos())", "(y.sin(), y.cos(), x.sin(), x.cos())"),
    vit("last frequency is not 1/10000", "10000.0 ** (-i / (width // 4 - 1))", "10000.0 ** (-i / (width // 4))"),
    vit("no tanh in the head", "torch.tanh(self.pre_logits(x))", "self.pre_logits(x)"),
    vit("no last norm", "x = self.norm(x).mean(dim=1)", "x = x.mean(dim=1)"),
    vit("orthogonal start without its scale", "math.sqrt(block.shape[0] / block.shape[1])", "1.0"),
    vit("q, k, v orthogonal as one matrix", '3 if layer == "qkv" else 1', "1"),
    vit("Xavier of q, k, v as one matrix", "math.sqrt(3 / self.config.width)", "math.sqrt(1.5 / self.config.width)"),
    vit("cut normal without its correction", "parameter[0].numel()) / CUT_STD", "parameter[0].numel())"),
    vit("head starts with an opinion", 'elif layer == "head" or kind == "bias":', 'elif kind == "bias":'),
    loss("slope of the loss summed, not averaged", "scale = grad / len(x_grad)", "scale = grad"),
    loss("loss summed, not averaged", "return total / len(x)", "return total"),
    loss("slope without the target", "torch.full_like(log_sum, -1.0)", "torch.full_like(log_sum, 0.0)"),
    # data
    augment("mixup keeps the smaller part", "weight = max(weight, 1 - weight)", "weight = min(weight, 1 - weight)"),
    augment("mixup with the image after", "x.roll(1, 0)", "x.roll(-1, 0)"),
    augment("mixup of labels forgotten", "_mix(labels, weight, lead)", "labels"),
    augment("crop's ratio uniform, not log-uniform", "logs = math.log(ratio[0]), math.log(ratio[1])", "logs = ratio[0] - 1, ratio[1] - 1"),
    augment("crop's side in proportion to the area", "round(math.sqrt(area * shape)), round(math.sqrt(area / shape))", "round(area * shape / height), round(area / shape / width)"),
    augment("images in [0, 1]", "mul_(2 / 255).sub_(1)", "mul_(1 / 255)"),
    augment("evaluation without 256/224", "round(self.size * 256 / 224)", "self.size"),
    augment("always flipped", "if self.flip and generator.integers(2)", "if self.flip"),
    randaugment("enhancing from 0", "level * 1.8 + 0.1", "level * 1.9"),
    randaugment("pixels that do not follow the side", "pixels * side / REFERENCE_SIDE", "pixels"),
    randaugment("rotation clockwise", "(cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y)", "(cos, sin, x - cos * x - sin * y), (-sin, cos, y + sin * x - cos * y)"),
    randaugment("contrast about black", "_blended(_CONTRAST_GREY, factor)", "_blended(0, factor)"),
    randaugment("solarising of the dark", "np.where(threshold % 256 > _RAMP, _RAMP, 255 - _RAMP)", "np.where(threshold % 256 > _RAMP, 255 - _RAMP, _RAMP)"),
    randaugment("equalising without rounding", "(below + step // 2) // step", "below // step"),
    randaugment("blur with a heavier centre", "(1, 1, 1, 1, 5, 1, 1, 1, 1), 13", "(1, 1, 1, 1, 9, 1, 1, 1, 1), 17"),
    randaugment("one operation for all layers", "size=self.layers)", "size=min(self.layers, 1))"),
    shards("a sequence without its last target", "self.sequences = (self.tokens - 1) // length", "self.sequences = self.tokens // length"),
    # recipes
    recipes("NanoGPT's target of another alpha", "steady_norm_sq=9.5 * 2**-12 * 50**2", "steady_norm_sq=19 * 2**-12 * 50**2"),
    recipes("ViT without its constant decay of the output", "output_weight_decay=0.004", "output_weight_decay=0.08"),
    recipes("Muon's weights with Adam's lr", '_MUON = Optim("muon", lr=0.02,', '_MUON = Optim("muon", lr=1e-3,', "test_recipes.py::test_where_other_optimizers_begin_is_what_their_authors_published"),
    # experiments
    statistics("standard deviation in place of the error", "sample_sd(values) / math.sqrt(len(values))", "sample_sd(values)"),
    statistics("arms compared across seeds", "estimate(combined((1.0, ones), (-1.0, others)))", "estimate(combined((1.0, ones), (-1.0, others[::-1])))"),
    statistics("two standard errors of any number of seeds", "self.inside >= student_quantile(self.found.seeds - 1)", "self.inside >= 2.0"),
    statistics("a degree of freedom too many", "freedom = self.found.seeds - 1", "freedom = self.found.seeds"),
    statistics("Student's t without its last term", "range(freedom // 2)", "range((freedom - 1) // 2)"),
    statistics("Student's t of odd freedom without a cosine", "(math.cos(angle) if odd else 1.0)", "1.0"),
    statistics("at most is at least", "return -self.found.t_above(self.bound)", "return self.found.t_above(self.bound)"),
    statistics("within looks at one side", "value=abs(self.found.value)", "value=self.found.value"),
    statistics("one seed refutes", "return 1.0, 1.0", "return 1.0, 0.0"),
    statistics("seeds without the square root", "each * math.sqrt(seeds) <", "each * seeds <"),
    statistics("one bound of many refutes as if alone", "len(outside) * min(outside)", "min(outside)"),
    statistics("open claims hold together", "all(bound.kept for", "any(bound.kept for"),
    statistics("Holm's correction left out", "level / (len(chances) - rank)", "level"),
    statistics("top of the parabola at the best point", "return middle_left + left / (left - right) * (middle_right - middle_left), True", "return b, True"),
    Mutant("lab/paper/null.py", "noise.value + bound.bound", "noise.value", "noise around a truth that keeps the bound", ("test_paper_null.py::test_noise_supports_no_claim[fig-adamc-betas]",)),
    Mutant("lab/paper/experiments/learning_rates.py", "(-2 * (1 - least), found.bend)", "(2 * (1 - least), found.bend)", "the exponent of the best lr upside down", (TOLD,)),
    Mutant("lab/paper/experiments/learning_rates.py", "(2 * math.log(2), found.bend)", "(-2 * math.log(2), found.bend)", "any effective lr is within a factor of 2", (TOLD,)),
    comparison("the larger loss wins", "self.measure.sign * self.gap.value > 0", "self.gap.value > 0"),
    comparison("any difference is a victory", "not abs(self.gap.value) > self.reach", "not abs(self.gap.value) > 0"),
    comparison("worse taken for no worse", "better - self.reach > -measure.margin", "better + self.reach > -measure.margin"),
    measures("growth upside down", "100 * math.log(end(run) / middle(run))", "100 * math.log(middle(run) / end(run))"),
    measures("swing of the last value", "values.max() / values.min()", "values.max() / values[-1]"),
    measures("measured over forecast upside down", "one(run) / other(run)", "other(run) / one(run)"),
    measures("mean over the whole run", "(at >= part[0]) & (at <= part[1])", "at >= 0"),
)
# fmt: on
