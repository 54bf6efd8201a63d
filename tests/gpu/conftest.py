"""Tools that the tests on a real GPU have in common. They run with `python -m pytest -m gpu tests/gpu`."""

import jax
import pytest


def require_gpu() -> None:
    """At the top of a module, before it imports what only a machine with a GPU has: skips the module elsewhere."""
    try:
        jax.devices("gpu")
    except RuntimeError:
        pytest.skip("this machine has no GPU that JAX can see", allow_module_level=True)
