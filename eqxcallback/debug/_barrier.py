"""Waiting for what kernels did, and for what watches them."""

import atexit
import logging
import time

from .. import xla
from ..core import AnyNumber, number, raise_poisoned
from ._deliveries import deliveries
from ._failures import raise_kept


_logger = logging.getLogger("eqxcallback")


def barrier_wait(name: str | None = None, *, timeout: AnyNumber | None = None) -> None:
    """Wait for all effects of programs that were started, and for all calls of tap functions, and raise what failed.

    Those are the programs that this thread started, and, of other threads, those that have begun to call tap functions. It is
    called when Python exits, too.

    **Arguments:**

    - `name`: of this call, for the log and the error.
    - `timeout`: in seconds. `None` waits for ever.

    **Raises:**

    - [`eqxcallback.debug.CallbackException`][], an `ExceptionGroup` of all that tap functions raised since the last call.
    - Without those, [`eqxcallback.KernelError`][], for the first kernel that poisoned its results since the last call or the end
        of the last [`eqxcallback.raising`][].
    - `TimeoutError`, which says what has not come to its end. Then nothing else is raised, or forgotten.
    - `RuntimeError` when a tap function calls it.
    """
    who = "eqxcallback.debug.barrier_wait" + (f"({name})" if name else "")
    _logger.debug("%s: begins", who)
    seconds = None if timeout is None else number(who, "timeout to be a number of seconds, or None", timeout)
    end = None if seconds is None else time.monotonic() + seconds
    if deliveries().is_inside():
        raise RuntimeError(
            f"{who}: called by a tap function, it would wait for itself. Call it from the program that is watched."
        )
    if not xla.wait_for_effects(seconds):
        pending = deliveries().wait(0.0) or "no call of a tap function"
        raise TimeoutError(f"{who}: after {timeout} s programs are running; pending: {pending}.")
    pending = deliveries().wait(None if end is None else max(0.0, end - time.monotonic()))
    if pending is not None:
        raise TimeoutError(f"{who}: after {timeout} s pending: {pending}.")
    _logger.debug("%s: ends", who)
    raise_kept()
    raise_poisoned()


def shutdown() -> None:
    """End the thread that calls tap functions with `mode="async"`, when it has called them all. The next such tap starts it
    again.

    It raises nothing that they raised: [`eqxcallback.debug.barrier_wait`][] does.
    """
    xla.wait_for_effects(None)
    deliveries().stop()


@atexit.register
def _at_exit() -> None:
    try:
        barrier_wait("at_exit")
    finally:
        deliveries().close()
