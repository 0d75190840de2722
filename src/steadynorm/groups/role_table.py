"""The roles that parameters can have, and what their names say about them. Nothing here needs torch or JAX.

`groups.roles` decides the roles of a torch model's parameters, `steadynorm.jax` those of a tree of arrays.
"""

import math
import re

# role: (lmo, least dimensions, most dimensions)
ROLES = {
    "hidden": ("spectral", 2, 2),
    "hidden-transposed": ("spectral-transposed", 2, 2),
    "stacked": ("spectral", 3, 5),
    "stacked-transposed": ("spectral-transposed", 3, 5),
    "conv": ("conv", 3, 5),
    "vector": ("bias", 0, math.inf),
    "embedding": ("embedding", 2, 5),
    "output": ("sign", 2, 2),
    "output-bias": ("bias", 0, 1),
}
OUTPUT_LR_RATIO = 20  # the output weight's lr over everybody else's, by default
BLOCKED = ("spectral", "spectral-transposed", "conv")  # lmos whose parameters may hold several matrices
HEADS = ("lm_head", "classifier", "score", "qa_outputs")  # Hugging Face's names for an output layer
NORM_CLASS = re.compile(r"norm(\d?d)?$", re.I)
TABLE_NAME = re.compile(r"(^|[._])(pos|position\w*|tokens?|embed|embeddings?)(_\w*|\d*)(\.\d+)?$", re.I)
BIAS_NAME = re.compile(r"bias\w*(\.\d+)?$", re.I)
EXPERT_NAME = re.compile(r"expert|gate_up|(gate|up|down)_proj|(^|[._])(moe|w[123])([._]|$)", re.I)
FUSED_NAME = re.compile(r"(qkv|c_attn|in_proj|query_key_value)[^.]*(\.weight)?$", re.I)
GATE_UP_NAME = re.compile(r"gate_up_proj(\.weight)?$", re.I)
SWIGLU_NAME = re.compile(r"(^|[._])w1[23](\.weight)?$", re.I)  # DINOv2's SwiGLU, and experts


def fused_blocks(name: str, d_out: int, d_in: int, side: str = "row", *, halves: bool = True) -> tuple[int, str]:
    """Return how many matrices a weight holds by its dotted name and sides, and a note for people ("" if it is one).

    Outputs are rows or columns of the stored array, as `side` says; `halves` says whether fused gate and up are two halves
    of them.

    >>> fused_blocks("h.0.attn.qkv.weight", 12, 4)
    (3, '; fused q, k, v: 3 row blocks')
    """
    if GATE_UP_NAME.search(name):
        if not halves or d_out % 2:
            return 1, f"; gate and up are not two halves of the {side}s: one matrix"
        return 2, f"; fused gate, up: 2 {side} blocks"
    if SWIGLU_NAME.search(name):  # only the model's forward knows which rows are the gate's
        return 1, "; by its name gate and up fused: one matrix unless blocks= says more"
    fused = FUSED_NAME.search(name)
    if fused is None:
        return 1, ""
    if d_out == 2 * d_in and side == "column":  # GPT-2's cross-attention: the query is a layer of its own
        return 2, "; fused k, v: 2 column blocks"
    if d_out != 3 * d_in:
        return 1, f"; fused, but {d_out} {side}s are not 3 x {d_in}: one matrix unless blocks= says more"
    if fused[1].lower() == "query_key_value":  # GPT-NeoX, BLOOM, Falcon: the rows go head by head
        return 1, "; fused, but by this name usually head by head: one matrix unless blocks= says more"
    return 3, f"; fused q, k, v: 3 {side} blocks"


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")
