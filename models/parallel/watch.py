"""Connections by which processes see that another one is gone or silent, while their own devices wait for it."""

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping


# So many bytes are sent in the time after which a process counts as silent: one that is only slow sends some of them.
_BEATS = 10


class Watch:
    """Sends bytes to other processes, which do so too, all the time until a process ends.

    Threads send them, and so a process counts as silent when it is stopped, or cut off without its connections being closed, and
    not when it compiles or computes.

    **Arguments:**

    - `ends`: a connection to each of the other processes, as `models.parallel.meeting` returns them.
    - `seconds`: how long a process may be silent.
    - `lost`: called, in a thread, with a process and what is wrong with it: that it is gone, or was silent.
    """

    def __init__(self, ends: Mapping[int, socket.socket], seconds: float, lost: Callable[[int, str], None]):
        self._seconds, self._lost, self._is_watched = seconds, lost, True
        for process, end in ends.items():
            end.settimeout(seconds)
            has_ended = threading.Event()
            for target, arguments in ((self._beat, (end, has_ended)), (self._follow, (process, end, has_ended))):
                threading.Thread(target=target, args=arguments, daemon=True).start()

    def end_watch(self) -> None:
        """Let processes go from now on, as at the end of a program."""
        self._is_watched = False

    def _beat(self, end: socket.socket, has_ended: threading.Event) -> None:
        with contextlib.suppress(OSError):  # it is gone: the other thread sees that
            while not has_ended.wait(self._seconds / _BEATS):
                end.sendall(b".")

    def _follow(self, process: int, end: socket.socket, has_ended: threading.Event) -> None:
        what = "is gone"
        try:
            while end.recv(1 << 10):
                pass
        except TimeoutError:
            what = f"was silent for {self._seconds} seconds"
        except OSError:  # the connection is broken
            pass
        has_ended.set()
        if self._is_watched:
            self._lost(process, what)
        end.close()
