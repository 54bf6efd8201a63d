"""The library is there before the first test that calls it."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def library():
    from .library import build

    build()
