"""Moving over: `convert` an optimizer you train with into one of ours."""

from steadynorm.moving.convert import Converted, convert

__all__ = ["Converted", "convert"]
