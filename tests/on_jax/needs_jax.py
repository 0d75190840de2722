"""Look for jax and optax before a test module imports them.

If they are missing, the module is skipped; under `make test-jax` it fails.
"""

import importlib.util
import os

import pytest

if importlib.util.find_spec("jax") is None or importlib.util.find_spec("optax") is None:
    if os.environ.get("STEADYNORM_REQUIRE_JAX"):
        raise RuntimeError("jax or optax is not installed, but STEADYNORM_REQUIRE_JAX says that it must be")
    pytest.skip("jax and optax are not installed; `make test-jax` has them", allow_module_level=True)
