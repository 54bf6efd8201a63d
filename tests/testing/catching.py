"""Find the rows that say that a layer is wrong."""

import pytest

from eqxcallback.testing import CheckFailed, check
from eqxcallback.testing._check import ROWS


def failures(layer, *args, **options):
    with pytest.raises(CheckFailed) as caught:
        check(layer, *args, **options)
    return caught.value.report.failed


def caught_by(name, layer, *args, **options):
    """The row `name`, which is the first one that fails; later ones are not run."""
    names = list(ROWS)
    row = failures(layer, *args, only=names[: names.index(name) + 1], **options)[0]
    assert row.name == name
    return row


def failed_rows(layer, *args, **options):
    return [row.name for row in failures(layer, *args, **options)]
