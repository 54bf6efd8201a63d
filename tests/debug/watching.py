"""Functions that record what taps see, for the tests of this folder."""

import threading

from eqxcallback import debug


class Seen:
    """A function for taps, which remembers its calls."""

    def __init__(self):
        self._calls = []

    def __call__(self, x, transforms, device=None):
        self._calls.append((x, transforms) if device is None else (x, transforms, device))

    def taken(self):
        """After all taps: the calls since the last time."""
        debug.barrier_wait()
        calls, self._calls = self._calls, []
        return calls

    def values(self):
        """Return the values of taps that no transformation has touched."""
        calls = self.taken()
        assert all(transforms == () for _, transforms, *_ in calls)
        return [x for x, *_ in calls]


class Gate:
    """A function for taps, which does not return before it is opened."""

    def __init__(self):
        self.began = threading.Event()
        self.opened = threading.Event()

    def __call__(self, x, transforms):
        self.began.set()
        assert self.opened.wait(30)


BATCH = ("batch", {"batch_dims": (0,)})
