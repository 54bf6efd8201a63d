"""XLA's plans for a GPU that is described, not there. tests/conftest.py sets JAX up for it."""

import pytest

from eqxcallback import xla


@pytest.fixture(scope="session", autouse=True)
def compiler():
    if (reason := xla.deviceless_unavailable()) is not None:
        pytest.skip(reason)
