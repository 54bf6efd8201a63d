"""A list of what a test's taps have seen, and a check that it leaves nothing to the next test."""

import pytest

from eqxcallback import debug

from .watching import Seen


@pytest.fixture
def seen():
    return Seen()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a failure, a call or a thread to the next one."""
    yield
    debug.barrier_wait(timeout=60)
    debug.shutdown()
