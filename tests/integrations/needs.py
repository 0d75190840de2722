"""Import libraries that a test module needs.

A missing one skips the module; under `make test-integrations` it fails.
"""

import importlib.util
import os

import pytest


def library(name: str) -> None:
    """Import a library, before the module does."""
    if importlib.util.find_spec(name) is not None:
        return
    if os.environ.get("STEADYNORM_REQUIRE_INTEGRATIONS"):
        raise RuntimeError(f"{name} is not installed, but STEADYNORM_REQUIRE_INTEGRATIONS says that it must be")
    pytest.skip(f"{name} is not installed; `make test-integrations` has it", allow_module_level=True)
