"""Where kept results come from, what the index says of them, and what the newer experiments share."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pages import filled
from steadynorm import records
from steadynorm.files import read_json
from steadynorm.lab import origin, paper
from steadynorm.lab.paper import provenance, runner
from steadynorm.lab.paper.baselines import GPT, GPT_WIDE, Baseline
from steadynorm.lab.paper.claims import no_worse, same
from steadynorm.lab.paper.experiment import Context, TrainedExperiment
from steadynorm.lab.paper.experiments.muon_sweep import SWEPT
from steadynorm.lab.paper.experiments.swept_lr import LRS, loss_at_ends, settings, swept_arm
from steadynorm.lab.paper.metrics import BY_ACCURACY, BY_LOSS, Metric
from steadynorm.lab.paper.provenance import Provenance
from steadynorm.lab.paper.runs import slug
from steadynorm.lab.paper.winners import WAYS
from steadynorm.lab.train.config import Gpt, plain, training_part

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(filter(runner.is_kept, ROOT.glob("results/*")))
TINY = "fig-embedding"


def keep_runs(folder: Path, machines: dict[tuple[str, int], str | None], commit: str = "c0ffee") -> TrainedExperiment:
    """Write records of the two arms of an experiment, as if these kinds of machines had trained them."""
    experiment = paper.get(TINY)
    assert isinstance(experiment, TrainedExperiment)
    for key, config in experiment.plan(Context(folder, seeds=2)).configs.items():
        made = {"commit": commit, "machine": machines.get((key[0], key[2]), "fp32")}
        path = folder / "records" / slug(key) / records.FILE
        header = {"name": slug(key), "config": training_part(plain(config)), "created": "2026-01-01"}
        with records.Recorder(path, **header, origin={k: v for k, v in made.items() if v}) as recorder:
            values = {"val_loss": 1.0 + 0.01 * key[2], "row_rms/rare": 1.0, "row_rms/frequent": 1.0, "seconds": 1.0}
            recorder.write({"step": config.steps, **values, "row_rms/occasional": 1.0 + 0.1 * key[2]})
    return experiment


def test_a_run_says_which_commit_and_machine_made_it(tmp_path: Path):
    experiment = keep_runs(tmp_path, {})
    run = next(iter(runner.read(experiment, Context(tmp_path, seeds=2)).finished.values()))
    assert run.origin == {"commit": "c0ffee", "machine": "fp32"}
    assert set(origin.describe()) == {"commit", "machine"}
    _, facts = runner.judge(experiment, Context(tmp_path, seeds=2))
    assert (facts["machine"], facts["run_commits"]) == ("fp32", ["c0ffee"])


@pytest.mark.parametrize("other", ["native-bf16", None])
def test_runs_of_different_machines_are_not_judged_together(tmp_path: Path, other: str | None):
    """The smaller part counts as missing, and claims that need it stay open and say why."""
    experiment = keep_runs(tmp_path, {("dense", 1): other})
    runs = runner.read(experiment, Context(tmp_path, seeds=2))
    [(arm, _, seed)] = runs.missing
    assert (arm, seed) == ("dense", 1)
    verdicts = {claim[:20]: finding for claim, finding in experiment.judge(runs).claims.items()}
    assert "another kind of machine" in verdicts["Updated in every ste"].figure
    assert "missing" not in verdicts["In their own time, r"].figure


def test_the_pool_has_a_folder_for_each_kind_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    experiment = paper.get(TINY)
    assert isinstance(experiment, TrainedExperiment)
    plan, parents = experiment.plan(Context(tmp_path)), set()
    for value in ("0", "1"):
        monkeypatch.setenv("STEADYNORM_NATIVE_BF16", value)
        parents |= {config.out.parent.name for config in plan.in_pool(tmp_path).values()}
    assert parents == {"fp32", "native-bf16"}


def made(name: str, commit: str, created: str) -> Provenance:
    return Provenance(name, frozenset([commit]), frozenset(), created)


def test_the_statement_names_every_experiment_of_an_older_commit():
    same = [made("a", "1" * 40, "2026-01"), made("b", "1" * 40, "2026-02")]
    assert provenance.describe(same) == "All 2 experiments come from one commit, `111111111`."
    text = provenance.describe([*same, made("c", "2" * 40, "2026-03")])
    assert "The newest is `222222222` (c); 2 of 3 are of older commits" in text
    assert "- `111111111`: a, b" in text


def test_the_records_of_a_folder_say_where_its_runs_come_from(tmp_path: Path):
    keep_runs(tmp_path / TINY, {})
    assert provenance.trace(tmp_path / TINY) == Provenance(
        TINY, frozenset(["c0ffee"]), frozenset(["fp32"]), "2026-01-01"
    )


def test_all_results_come_from_one_commit():
    """Also the sweeps behind the baselines and the demo. The runs of one experiment are of one kind of machine."""
    traces = [provenance.trace(folder) for folder in FOLDERS]
    others = [read_json(ROOT / "results" / path)["commit"] for path in ("calibration.json", "demo/summary.json")]
    assert len(set(others).union(*(found.commits for found in traces))) == 1
    assert all(len(found.machines) <= 1 for found in traces)


def test_the_readme_and_the_index_name_the_commit():
    """`docs/experiments.py` writes what they say."""
    said = provenance.describe(map(provenance.trace, FOLDERS))
    stated, index = ((ROOT / path).read_text(encoding="utf-8") for path in ("results/README.md", "docs/paper/index.md"))
    assert stated == filled(stated, "commits", said), "run docs/experiments.py"
    assert said in index, "run docs/experiments.py"


# Answers on the index page


@pytest.fixture(scope="module")
def answers():
    return importlib.import_module("docs.experiment_answers")


def all_sentences(answers):
    return [sentence for points in answers.ANSWERS.values() for point in points for sentence in point]


def test_every_sentence_is_about_a_declared_claim(answers):
    for sentence in all_sentences(answers):
        experiment = paper.get(sentence.folder)
        assert isinstance(experiment, TrainedExperiment)
        texts = experiment.claims_about(experiment.plan(Context(Path())))
        assert sum(text.startswith(sentence.claim) for text in texts) == 1, sentence


@pytest.mark.parametrize(
    ("verdict", "figure", "words"),
    [
        ("holds", "", "It holds ([fig-x](fig-x.md#claim-2))."),
        ("does not hold", "", "It does not ([fig-x](fig-x.md#claim-2))."),
        ("open", "open, 9 seeds would settle it", "Open: whether it holds ([fig-x](fig-x.md#claim-2))."),
        ("open", "3 runs are missing: not run yet", "Not run yet: whether it holds ([fig-x](fig-x.md#claim-2))."),
    ],
)  # fmt: skip
def test_a_sentence_follows_the_verdict_of_its_claim(answers, verdict: str, figure: str, words: str):
    sentence = answers.Sentence("fig-x", "The claim", "it holds", "it does not")
    claims = [{"text": "Other", "verdict": "holds"}, {"text": "The claim (x)", "verdict": verdict, "figure": figure}]
    assert answers._sentence(sentence, {"fig-x": {"claims": claims}}) == words
    assert answers._sentence(sentence, {}) == "Not run yet: whether it holds (`fig-x`)."


def test_the_index_says_every_refuted_claim_in_words_and_lists_it_with_its_numbers(answers):
    summaries = {folder.name: json.loads((folder / runner.SUMMARY).read_text(encoding="utf-8")) for folder in FOLDERS}
    refuted, undecided = answers.list_refuted(summaries), answers.list_open(summaries)
    sentences = all_sentences(answers)
    for name, held in summaries.items():
        for number, claim in enumerate(held["claims"], 1):
            line = f"- {claim['text']} ([{name}]({name}.md#claim-{number})).<br>{claim['figure']}."
            assert (line in refuted, line in undecided) == (
                claim["verdict"] == "does not hold",
                claim["verdict"] == "open",
            )
            if line in refuted:
                about = [each for each in sentences if each.folder == name and claim["text"].startswith(each.claim)]
                assert about, f"docs/experiment_answers.py has no sentence about {line}"


# One size up


def test_the_wide_gpt_takes_at_least_eight_times_the_arithmetic():
    def arithmetic(baseline: Baseline) -> float:
        """Parameters in matrix products, tokens per step, steps; attention left out, which is small in both."""
        task = baseline.base.task
        assert isinstance(task, Gpt)
        model = task.model
        weights = model.layers * (4 + 2 * model.mlp_ratio) * model.width**2 + model.vocab * model.width
        return weights * baseline.base.batch * task.length * baseline.steps(100)

    wide, small = GPT_WIDE["desk"], GPT["desk"]
    assert arithmetic(wide) > 8 * arithmetic(small)
    assert replace(wide.base, task=small.base.task, batch=small.base.batch) == small.base  # nothing else differs


# Scores and sweeps


class Fixed:
    """Outcomes with the same value for every seed, by arm."""

    def __init__(self, **values: float):
        self.by_arm = values

    def values(self, metric: Metric, arm: str, budget: int | None = None) -> list[float]:
        return [self.by_arm[arm]] * 3


@pytest.mark.parametrize(
    ("score", "better", "slightly_worse", "worse"),
    [(BY_ACCURACY, 52.0, 49.5, 48.0), (BY_LOSS, 49.0, 50.01, 50.03)],
    ids=lambda each: getattr(each, "name", None),
)
def test_no_worse_follows_the_direction_and_the_margin_of_a_score(score, better, slightly_worse, worse):
    for ours, verdict in ((better, True), (slightly_worse, True), (worse, False)):
        assert no_worse(score, "a", "b")(Fixed(a=ours, b=50.0)).holds is verdict
    assert no_worse(score, "a", "b", margin=0.0)(Fixed(a=slightly_worse, b=50.0)).holds is False
    assert same(score, "a", "b")(Fixed(a=better, b=50.0)).holds is False


def test_what_the_ends_of_a_sweep_cost_is_above_zero_where_the_middle_is_best():
    halves = {swept_arm("x", ratio): value for ratio, value in ((0.5, 49.0), (1.0, 50.0), (2.0, 47.0))}
    assert loss_at_ends(BY_ACCURACY, "x").by_seed(Fixed(**halves)) == [2.0] * 3
    assert loss_at_ends(BY_LOSS, "x").by_seed(Fixed(**halves)) == [-2.0] * 3


def test_every_swept_arm_has_the_same_number_of_settings():
    for name in ("fig-muon", "fig-hold"):
        experiment = paper.get(name)
        assert isinstance(experiment, TrainedExperiment)
        arms = experiment.arms(GPT["desk"])
        for arm in (*SWEPT,) if name == "fig-muon" else WAYS:
            names = settings(arm, tuple(LRS) if name == "fig-muon" else ("lr",))
            assert len(names) == (5 if name == "fig-muon" else 3) and names.keys() <= arms.keys()
            for other, (ratio, field) in names.items():
                base, lr = arms[arm].optim, getattr(arms[arm].optim, field)
                assert arms[other].optim == replace(base, **{field: pytest.approx(ratio * lr)})
