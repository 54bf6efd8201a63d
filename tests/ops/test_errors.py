"""The calls that the functions of `ops` refuse, and what they say: the lists of all families, in <family>/refused.py."""

import importlib

import pytest

from .families import FAMILIES


REFUSED = {family: importlib.import_module(f"{__package__}.{family}.refused").REFUSED for family in FAMILIES}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(call, message, id=f"{family}-{i}-{message}")
        for family, calls in REFUSED.items()
        for i, (call, message) in enumerate(calls)
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
