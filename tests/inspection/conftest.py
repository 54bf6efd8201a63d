"""A machine without what compiles for a GPU."""

import pytest

from eqxcallback import xla


@pytest.fixture
def without_plugin(monkeypatch):
    """A machine that cannot compile for a GPU."""
    monkeypatch.setattr(xla, "deviceless_unavailable", lambda: "JAX's CUDA plugin is not installed")
