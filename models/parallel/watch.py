"""Connections by which process 0 sees that another process is gone, while its own devices wait for it."""

import socket
import threading
from collections.abc import Callable, Iterable

from .relay import receive


class Watch:
    """Follows connections to the other processes, which say nothing and stay until a process ends.

    **Arguments:**

    - `ends`: of `models.parallel.meeting.meet_others`.
    - `lost`: called, in a thread, when one of them is gone.
    """

    def __init__(self, ends: Iterable[socket.socket], lost: Callable[[], None]):
        self._lost, self._is_watched = lost, True
        for end in ends:
            threading.Thread(target=self._follow, args=(end,), daemon=True).start()

    def end_watch(self) -> None:
        """Let processes go from now on, as at the end of a program."""
        self._is_watched = False

    def _follow(self, end: socket.socket) -> None:
        with end:
            while receive(end):
                pass
            if self._is_watched:
                self._lost()
