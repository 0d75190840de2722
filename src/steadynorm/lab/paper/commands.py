"""A run as a command line: the recipe's name, and the options that differ from it."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from steadynorm.lab.train.config import Config
from steadynorm.lab.train.recipes import RECIPES, with_optimizer


def train_command(config: Config, recipe: str, processes: int = 0) -> list[str]:
    """`steadynorm train RECIPE ...`, or the same on so many processes by torchrun."""
    start = ["steadynorm"]
    if processes:
        start = ["torchrun", "--standalone", "--nproc-per-node", str(processes), "-m", "steadynorm.cli"]
    return [*start, "train", recipe, *options(config, recipe)]


def options(config: Config, recipe: str) -> list[str]:
    """What must be given so that the command line makes this configuration.

    >>> from dataclasses import replace
    >>> base = RECIPES["gpt"]
    >>> options(replace(base, steps=5, clip=1.0, bf16=False, optim=replace(base.optim, betas=(0.9, 0.95))), "gpt")
    ['--steps', '5', '--optim.betas', '0.9', '0.95', '--clip', '1.0', '--bf16', 'False']
    """
    start = with_optimizer(recipe, config.optim.name)
    named = [["--optim.name", config.optim.name]] if config.optim.name != RECIPES[recipe].optim.name else []
    return [word for option in (*named, *_differing(config, start, "")) for word in option]


def _differing(new: Any, old: Any, prefix: str) -> Iterator[list[str]]:
    if type(new) is not type(old):
        raise ValueError(
            f"{prefix.rstrip('.') or 'config'}: a {type(new).__name__} where the recipe has {type(old).__name__}"
        )
    for field in fields(new):
        value, default = getattr(new, field.name), getattr(old, field.name)
        name = prefix + field.name.replace("_", "-")
        if is_dataclass(value):
            yield from _differing(value, default, f"{name}.")
        elif value != default:
            yield _option(name, value, is_flag=field.type is bool)


def _option(name: str, value: Any, *, is_flag: bool) -> list[str]:
    if is_flag:
        head, _, last = name.rpartition(".")
        return [f"--{name}" if value else f"--{head + '.' if head else ''}no-{last}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{name}", *(str(each) if isinstance(each, str | Path) else repr(each) for each in values)]
