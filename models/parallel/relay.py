"""A connection to process 0 that does not close when process 0 is gone.

JAX connects each process to process 0. When that connection closes, JAX aborts the process at once, with a trace. So the connection
leads to a port of the process itself, where threads pass on what JAX sends and gets: they see the end first, and JAX does not.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable


_CHUNK = 1 << 16


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of `HOST:PORT`; an IPv6 address may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class Relay:
    """A port of this process that stands for another one.

    **Arguments:**

    - `target`: where that is, as `HOST:PORT`. It has to listen by now.
    - `lost`: called, in a thread, when the other side has closed a connection, which is left open on this side.

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
                near.close()  # JAX tries again
                continue
            has_ended = threading.Event()
            for source, sink in ((near, far), (far, near)):
                arguments = source, sink, source is far, has_ended
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_far: bool, has_ended: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                sink.sendall(data)
        if is_far and self._is_watched and not has_ended.is_set():
            self._lost()
            return
        has_ended.set()
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def wait_for(target: str, seconds: float) -> None:
    """Return when somebody listens at `HOST:PORT`. Raises `OSError` after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(host_and_port(target), timeout=max(1.0, seconds)).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)
