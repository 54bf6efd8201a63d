"""The place that the tests of this folder print to, and whether what they call is compiled."""

import functools

import jax
import pytest

from eqxcallback.compat import host_callback as hcb

from .printed import Stream


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def show(stream):
    """`id_print` to the stream."""
    return functools.partial(hcb.id_print, output_stream=stream)


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def compiled(request):
    return jax.jit if request.param else lambda f: f
