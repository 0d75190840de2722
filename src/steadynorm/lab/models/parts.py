"""Layers without initial values, and the check of a configuration's sizes, for both models."""

from dataclasses import fields
from typing import Any

from torch import nn


class _Unfilled:
    """Leave memory uninitialized for `init_weights`, so that a seed gives the same weights via the meta device."""

    def reset_parameters(self) -> None:
        pass


class Linear(_Unfilled, nn.Linear):
    pass


class Conv2d(_Unfilled, nn.Conv2d):
    pass


class Embedding(_Unfilled, nn.Embedding):
    pass


def check_sizes(config: Any) -> None:
    """Raise ValueError unless every int field is a positive int and the heads divide the width."""
    where = type(config).__name__
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in (int, "int") and (type(value) is not int or value < 1):
            raise ValueError(f"{where}: {field.name}={value!r} must be an int of at least 1")
    if config.width % config.heads:
        near = config.heads * max(1, round(config.width / config.heads))
        raise ValueError(
            f"{where}: heads={config.heads} do not divide width={config.width}; use for example width={near}"
        )
