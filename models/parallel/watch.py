"""Connections by which process 0 sees that another process is gone, while its own devices wait for it."""

import contextlib
import socket
import threading
from collections.abc import Callable

from .relay import receive


_HELLO = b"a process of this program"


class Watch:
    """A port at which the other processes show that they are there.

    **Arguments:**

    - `lost`: called, in a thread, when one of them is gone.

    **Attributes:**

    - `port`: of all addresses of this machine.
    """

    def __init__(self, lost: Callable[[], None]):
        self._lost, self._is_watched = lost, True
        if socket.has_dualstack_ipv6():
            self._listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def end_watch(self) -> None:
        """Let processes go from now on, as at the end of a program."""
        self._is_watched = False

    def _accept(self) -> None:
        while True:
            end, _ = self._listener.accept()
            threading.Thread(target=self._follow, args=(end,), daemon=True).start()

    def _follow(self, end: socket.socket) -> None:
        with end:
            if receive(end, len(_HELLO), socket.MSG_WAITALL) != _HELLO:  # a stranger
                return
            while receive(end):
                pass
            if self._is_watched:
                self._lost()


def show_presence(host: str, port: int) -> socket.socket | None:
    """Connect to the `Watch` of process 0, which counts on this process until the connection closes.

    **Returns:** the connection, or `None` if it cannot be made.
    """
    with contextlib.suppress(OSError):
        end = socket.create_connection((host, port))
        end.sendall(_HELLO)
        return end
    return None
