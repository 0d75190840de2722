"""Define `steadynorm train`."""

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from tyro.conf import AvoidSubcommands

from steadynorm.cli.subcommands import one_of
from steadynorm.lab.train.config import Config, OptimizerName
from steadynorm.lab.train.recipes import RECIPES, with_optimizer
from steadynorm.signals import exit_code

_ABOUT = {
    "gpt": "Small NanoGPT for a desktop CPU, on the embedded texts.",
    "vit": "Small Simple ViT for a desktop CPU, on CIFAR-10.",
    "gpt-124m-fineweb-edu": "The paper's NanoGPT: 124M parameters, 100B tokens of FineWeb-Edu.",
    "vit-s16-imagenet": "The paper's Simple ViT-S/16 on ImageNet-1k, 90 epochs; --optim.name adamw or adamc: its other arms.",
}


def recipes_for(argv: Sequence[str]) -> Any:
    """Return the recipes as commands, with the defaults of the optimizer that the command line names."""
    name = _optimizer_of(argv)
    recipes = RECIPES if name is None else {key: with_optimizer(key, name) for key in RECIPES}
    return one_of(dict.fromkeys(recipes, AvoidSubcommands[Config]), _ABOUT, recipes)


def _optimizer_of(argv: Sequence[str]) -> OptimizerName | None:
    """Return the last --optim.name, or None if there is none or one that the parser will refuse.

    >>> _optimizer_of(["gpt", "--optim.name", "adamw", "--steps", "3"]), _optimizer_of(["gpt", "--optim.name=muon"])
    ('adamw', 'muon')
    """
    words = [word for argument in argv for word in argument.split("=", 1)]
    named = [value for option, value in pairwise(words) if option == "--optim.name"]
    return next((name for name in get_args(OptimizerName) if named and name == named[-1]), None)


def run_training(config: Config) -> int:
    """Train, print how it ended and return the exit code."""
    from steadynorm import records
    from steadynorm.lab.train.loop import train
    from steadynorm.lab.train.unused import refuse_unused

    config.check()
    refuse_unused(config)
    result = train(config)
    code = exit_code(result.stopped_by)
    if os.environ.get("RANK", "0") != "0":  # of several processes only the first prints
        return code
    final = ", ".join(f"{key} {value:.4f}" for key, value in result.final.items())
    ended = f"{'finished' if result.finished else 'stopped'} at step {result.steps}"
    print(f"{config.out}: " + "; ".join(filter(None, (ended, final))))
    for sentence in records.advise(records.read(config.out, max_points=2000)) if result.finished else ():
        print(sentence)
    return code
