"""Meshes of four of the eight devices that tests/conftest.py asks for. Those of all are in test_all_devices.py."""

import jax
import pytest
from jax.sharding import AxisType

from ..transform.library import build_saxpy
from .layers import LANES, calls, mesh_of


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8
    build_saxpy()


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


@pytest.fixture
def grid():
    return mesh_of(2, 2)


@pytest.fixture
def explicit():
    return mesh_of(2, 2, kind=AxisType.Explicit)


@pytest.fixture(params=LANES, ids=str)
def lane(request):
    return request.param
