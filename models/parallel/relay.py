"""A connection to process 0 that does not close when process 0 is gone.

JAX connects each process to process 0. When that connection closes, JAX aborts the process at once, with a trace. So it leads to
a port of the process itself, where threads pass on what JAX sends and gets. They see the end, and JAX does not.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of `HOST:PORT`; an IPv6 address may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Relay:
    """A port of this process that stands for another one.

    **Arguments:**

    - `target`: where that is, as `HOST:PORT`. It has to listen by now.
    - `lost`: called, in a thread, when the other side has closed a connection, which stays open on this side until it returns, or
        listens no more.

    **Attributes:**

    - `address`: the port, as `HOST:PORT`.
    """

    def __init__(self, target: str, lost: Callable[[], None]):
        self._target, self._lost = host_and_port(target), lost
        self._is_watched = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def end_watch(self) -> None:
        """Let connections close from now on, as at the end of a program."""
        self._is_watched = False

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                if self._is_watched:
                    self._lost()
                near.close()
                continue
            has_ended = threading.Event()
            for passes in (self._pass_out, self._pass_in):
                threading.Thread(target=passes, args=(near, far, has_ended), daemon=True).start()

    def _pass_out(self, near: socket.socket, far: socket.socket, has_ended: threading.Event) -> None:
        while data := receive(near):
            with contextlib.suppress(OSError):  # it is gone: the other thread sees that
                far.sendall(data)
        has_ended.set()
        _close(near, far)

    def _pass_in(self, near: socket.socket, far: socket.socket, has_ended: threading.Event) -> None:
        while data := receive(far):
            try:
                near.sendall(data)
            except OSError:  # JAX has ended
                break
        else:
            if self._is_watched and not has_ended.is_set():
                self._lost()
        _close(near, far)


def receive(end: socket.socket, size: int = 1 << 16, flags: int = 0) -> bytes:
    """Return what comes next, as `socket.recv` does, or nothing if the connection is at its end or broken."""
    try:
        return end.recv(size, flags)
    except OSError:
        return b""


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):  # it is closed
            end.shutdown(socket.SHUT_RDWR)  # for the thread that receives, too
        end.close()


def wait_for(target: str, seconds: float) -> socket.socket:
    """Return a connection once somebody listens at `HOST:PORT`. Raises `OSError` after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(host_and_port(target), timeout=max(1.0, seconds))
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)
