"""The library that the tests of this folder call."""

import pytest

from .library import build_saxpy


@pytest.fixture(scope="session", autouse=True)
def saxpy_library():
    build_saxpy()
