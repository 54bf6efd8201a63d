"""Each instruction set that this machine runs."""

import pytest

from eqxcallback import _ext


@pytest.fixture(params=_ext.available_isas())
def isa(request):
    before = _ext.isa()
    _ext.set_isa(request.param)
    yield request.param
    _ext.set_isa(before)
