"""What a user wants to know of the experiments, in sentences that follow from the verdicts, for docs/experiments.py.

A sentence is declared as what it says where its claim holds and what it says where it does not. Where the claim is open, or
its runs are missing, the page says that instead, so no sentence outlives its evidence.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from steadynorm.lab import paper
from steadynorm.lab.paper.runs import NOT_RUN
from steadynorm.lab.paper.statistics import VERDICTS

HOLDS, FAILS, OPEN = VERDICTS


class Sentence(NamedTuple):
    """A sentence about one claim."""

    folder: str  # of the experiment, in results/
    claim: str  # how its text begins
    says: str  # the sentence if the claim holds, as a clause
    denies: str  # the sentence if it does not


ANSWERS: Mapping[str, Sequence[Sequence[Sentence]]] = {  # question -> points, each of sentences that follow each other
    "Does correcting the decay change the loss?": ((
        Sentence("fig-nanogpt", "The final loss of ScionC is no worse", "in a small GPT, ScionC ends at a loss no worse than Scion's",
                 "in a small GPT, ScionC ends at a worse loss than Scion"),
        Sentence("fig-nanogpt-wide", "The final loss of ScionC is no worse", "in a GPT of 6 layers of width 256, ScionC ends at a loss no worse than Scion's",
                 "in a GPT of 6 layers of width 256, ScionC ends at a worse loss than Scion"),
        Sentence("fig-muon", "The final loss, Muon's with `correct`", "torch's Muon with `correct` ends at a loss no worse than without",
                 "torch's Muon with `correct` ends at a worse loss than without"),
        Sentence("fig-hold-vit", "Corrected decay is no worse", "a small ViT reaches an accuracy with ScionC that is no worse than with Scion",
                 "a small ViT reaches a worse accuracy with ScionC than with Scion"),
        Sentence("table-vit", "AdamC is behind AdamW", "AdamC's accuracy is below AdamW's",
                 "AdamC's accuracy is not below AdamW's"),
        Sentence("table-vit", "AdamC performs as AdamW does", "it is within 1 point of AdamW's",
                 "it is not within 1 point of AdamW's"),
    ),),
    "Does it hold the norm?": ((
        Sentence("fig-nanogpt", "ScionC keeps the hidden norm stable", "ScionC at least halves the drift of a GPT's hidden norm",
                 "ScionC does not halve the drift of a GPT's hidden norm"),
        Sentence("fig-muon", "`correct` keeps the hidden norm", "`correct` at least halves it for torch's Muon",
                 "`correct` does not halve it for torch's Muon"),
        Sentence("fig-adamc", "AdamC against AdamW: the hidden norm", "AdamC at least halves that of a ViT",
                 "AdamC does not halve that of a ViT"),
        Sentence("fig-scionc", "ScionC (cosine) against Scion: the hidden norm",
                 "ScionC with a target on a cosine does so as well, at two and a half times the decay",
                 "ScionC with a target on a cosine does not, at two and a half times the decay"),
        Sentence("fig-scionc-constant", "ScionC (constant) against Scion: the hidden norm", "with a constant target it does",
                 "with a constant target it does not"),
        Sentence("fig-hold", "Corrected decay ends at its target", "on the GPT, corrected decay ends within a tenth of the norm that you ask for",
                 "on the GPT, corrected decay keeps the norm stable, but more than a tenth away from the one that you ask for"),
        Sentence("fig-hold-vit", "Corrected decay ends at its target", "on the ViT, it ends within a tenth of it",
                 "on the ViT, it ends more than a tenth away from it"),
        Sentence("fig-hold", "Balanced decay, T = 20 and 200, ends", "balanced decay ends at the norm that you ask for",
                 "balanced decay misses the norm that you ask for"),
        Sentence("fig-hold", "A fixed norm at the lr", "on the GPT, a fixed norm trains as corrected decay does, at the lr of the same angle per step",
                 "on the GPT, a fixed norm does not train as corrected decay does, even at the lr of the same angle per step"),
    ),),
    "Which optimizer should you try first?": ((
        Sentence("fig-muon", "The final loss of MuonC is no worse than Muon's", "for the GPT, MuonC is as good as torch's Muon",
                 "for the GPT, MuonC is worse than torch's Muon"),
        Sentence("fig-muon", "The final loss of MuonC is no worse than ScionC's", "it is no worse than ScionC",
                 "ScionC is better than MuonC"),
        Sentence("fig-nanogpt-wide", "The final loss of MuonC is no worse", "in a GPT of 6 layers of width 256 it is no worse either",
                 "in a GPT of 6 layers of width 256, ScionC is better than MuonC"),
        Sentence("table-vit", "Scion is ahead of AdamW", "for the ViT, Scion with its variant of the model is ahead of AdamW",
                 "for the ViT, Scion is not ahead of AdamW"),
        Sentence("fig-polar-steps", "4 steps may replace 5", "four polar steps, our default, are as good as five",
                 "four polar steps are not as good as five"),
    ),),
    "Where does it fail?": (
        (
            Sentence("fig-hold-vit", "Balanced decay, T = 20 and 200, is no worse", "on the ViT, balanced decay is as accurate as corrected decay",
                     "on the ViT, balanced decay of all layers but the output costs accuracy"),
            Sentence("fig-hold-vit", "A fixed norm at the lr", "on the ViT, a fixed norm is as accurate", "a fixed norm does so as well"),
        ),
        (
            Sentence("fig-hold", "Cautious decay ends at its target", "on the GPT, cautious decay ends within a tenth of the norm that you ask for",
                     "on the GPT, cautious decay misses the norm that you ask for by more than a tenth, as corrected decay does"),
        ),
        (
            Sentence("fig-nanogpt", "The final loss of ScionC is lower", "in the small GPT, ScionC ends at a lower loss than Scion",
                     "in the small GPT, ScionC ends at a higher loss than Scion"),
            Sentence("fig-nanogpt-wide", "The final loss of ScionC is lower", "in the wider GPT it does so as well",
                     "in the wider GPT it ends at a higher one"),
        ),
        (
            Sentence("fig-nanogpt", "ScionC keeps the gradient norm stable", "ScionC halves the drift of the gradient norm in the small GPT",
                     "ScionC does not halve the drift of the gradient norm in the small GPT"),
            Sentence("fig-nanogpt-wide", "ScionC keeps the gradient norm stable", "it does so in the wider GPT", "in the wider GPT it does not"),
            Sentence("fig-scionc", "ScionC (cosine) against Scion: the gradient norm", "it does so in the ViT", "in the ViT it does not"),
            Sentence("fig-adamc", "AdamC against AdamW: the gradient norm", "AdamC does so in the ViT", "in the ViT, AdamC does not halve it either"),
        ),
        (
            Sentence("fig-nanogpt", "ScionC keeps the weight norm stable", "ScionC halves the drift of the norm of all weights in the GPT",
                     "ScionC does not halve the drift of the norm of all weights, the output layer's included, in the GPT"),
            Sentence("fig-muon", "`correct` keeps the weight norm", "`correct` does so for torch's Muon", "`correct` does not do so for torch's Muon"),
            Sentence("fig-adamc", "AdamC against AdamW: the weight norm", "AdamC does so in the ViT", "AdamC does not do so in the ViT"),
            Sentence("fig-scionc-constant", "ScionC (constant) against Scion: the weight norm", "ScionC with a constant target does so there",
                     "ScionC with a constant target does not do so there"),
        ),
        (
            Sentence("fig-adamc", "Ours, five times the decay: the hidden norm", "at five times the decay, AdamC halves the drift of the hidden norm",
                     "at five times the decay, AdamC does not halve the drift of the hidden norm"),
            Sentence("fig-adamc", "Ours, five times the decay: the weight norm", "it halves the drift of the norm of all weights",
                     "nor does it for the norm of all weights"),
            Sentence("fig-adamc", "Ours, five times the decay: accuracy", "it costs no accuracy there", "it costs accuracy there"),
            Sentence("fig-adamc", "Ours, why: updates independent of each other",
                     "updates that are independent of the weights would have kept the norm, but real ones are not",
                     "updates that are independent of the weights would not have kept the norm"),
        ),
        (
            Sentence("fig-forecast", "Scion's biases", "forecasts meet the norms of biases", "forecasts miss the norms of biases"),
            Sentence("fig-forecast", "Why not theirs", "a bias has its place by the loss, and updates step over it",
                     "the first updates of biases do not step over their place"),
        ),
        (
            Sentence("fig-exact-target", "The exact decay brings the hidden matrices closer to the asked norm than the linear formula at alpha 0.1",
                     "the exact decay brings norms closer to the one you ask for at alpha 0.1",
                     "the exact decay does not bring norms closer to the one you ask for at alpha 0.1"),
            Sentence("fig-exact-target", "Why: these runs start above", "the forecast expects that, because these runs are too short to settle",
                     "the forecast did not expect that"),
        ),
        (
            Sentence("fig-alignment", "The output layer's updates push it outward", "the output layer's updates push it outward",
                     "the output layer's updates push it outward less than we had expected"),
        ),
    ),
}  # fmt: skip


def answers(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return every question with its points, by the summaries of the folders."""
    parts = []
    for question, points in ANSWERS.items():
        said = [" ".join(_sentence(sentence, summaries) for sentence in point) for point in points]
        parts.append(f"**{question}** {said[0]}" if len(said) == 1 else f"**{question}**\n\n{_listed(said)}")
    return "\n\n".join(parts)


def list_refuted(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the claims that do not hold, the paper's and our own."""
    failed = _claims_with(FAILS, summaries)
    parts = [
        f"{words}, {len(lines)}:\n\n{_listed(lines)}"
        for is_ours, words in {False: "Of the paper's claims", True: "Of our own"}.items()
        if (lines := [line for ours, line in failed if ours == is_ours])
    ]
    return "**What does not hold.** " + ("\n\n".join(parts) or "No claim is refuted.")


def list_open(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the claims that are open."""
    return _listed([line for _, line in _claims_with(OPEN, summaries)])


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _claims_with(verdict: str, summaries: Mapping[str, Mapping[str, Any]]) -> list[tuple[bool, str]]:
    """Return every claim with this verdict: whether it is ours, and its text with a link and its numbers."""
    return [
        (
            claim["text"].startswith("Ours") or paper.get(held["experiment"]).paper_finding.startswith("ours"),
            f"{claim['text']} ({claim_link(folder, number)}).<br>{claim['figure']}.",
        )
        for folder, held in summaries.items()
        for number, claim in enumerate(held["claims"], 1)
        if claim["verdict"] == verdict
    ]


def claim_link(folder: str, number: int, words: str = "") -> str:
    """Return the link to a claim on the page of its experiment, by default with the folder's name."""
    return f"[{words or folder}]({folder}.md#claim-{number})"


def _sentence(sentence: Sentence, summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sentence that the verdict allows, with a link to its claim."""
    if sentence.folder not in summaries:
        return f"Not run yet: whether {sentence.says} (`{sentence.folder}`)."
    claims = summaries[sentence.folder]["claims"]
    number, claim = next((k, claim) for k, claim in enumerate(claims, 1) if claim["text"].startswith(sentence.claim))
    waits = NOT_RUN in claim["figure"] or "are missing" in claim["figure"]
    text = {
        HOLDS: capitalized(sentence.says),
        FAILS: capitalized(sentence.denies),
        OPEN: f"{'Not run yet' if waits else 'Open'}: whether {sentence.says}",
    }[claim["verdict"]]
    return f"{text} ({claim_link(sentence.folder, number)})."


def capitalized(text: str) -> str:
    """Return the text with a capital letter first, and the rest as it is."""
    return text[:1].upper() + text[1:]
