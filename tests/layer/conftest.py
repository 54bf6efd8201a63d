"""The libraries that the tests of this folder call."""

import pytest

from ..transform.library import build_saxpy
from .layers import build_native, calls


@pytest.fixture(scope="session", autouse=True)
def libraries():
    build_saxpy()
    build_native()


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()
