"""The processes of a program meet before JAX connects them: JAX aborts a process, with a trace, when another one does not come.

They meet at the port at which JAX's own service listens afterwards. The connections stay, for `models.parallel.watch`.
"""

import contextlib
import re
import select
import socket
import time
from typing import NoReturn

from .._program import UsageError
from .relay import receive, wait_for


# A process says which one it is, in as many bytes. Process 0 answers with a line: this one, or why it ends.
_HELLO, _HELLO_SIZE, _PATIENCE = "process {} of {} processes of models.parallel", 64, 2.0
_ALL_HAVE_COME = b"all have come\n"
_REMEDY = "Start all of them again."


def listen(port: int) -> socket.socket:
    """Return a socket that listens at a port of all addresses of this machine. Raises `OSError`, or `OverflowError`."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def meet_others(listener: socket.socket, processes: int, seconds: float) -> dict[int, socket.socket]:
    """Wait, in process 0, until all others have come. Then the port is free.

    **Arguments:**

    - `listener`: of `listen`. It is closed.
    - `processes`: how many there are.
    - `seconds`: how long to wait.

    **Returns:** a connection to each of the others, by the number of the process.

    **Raises:** `UsageError` if one of them does not come, is gone before the others have come, or is not one of `processes`. The
    others are told so.
    """
    ends: dict[int, socket.socket] = {}
    last = time.monotonic() + seconds
    with listener:
        while len(ends) < processes - 1:
            ready, _, _ = select.select([listener, *ends.values()], [], [], max(0.0, last - time.monotonic()))
            if not ready:
                missing = [str(process) for process in range(1, processes) if process not in ends]
                _refuse(
                    ends, f"expected {processes} processes after {seconds} seconds at most", missing, "did not come"
                )
            gone = [str(process) for process, end in ends.items() if end in ready]
            if listener in ready:
                end, _ = listener.accept()
                process = _greet(end, processes, ends)
                if process is not None:
                    ends[process] = end
            if gone:  # it has nothing to say until all have come
                _refuse(ends, f"expected {processes} processes that run until all have come", gone, "ended")
    for end in ends.values():
        with contextlib.suppress(OSError):  # it is gone, which `models.parallel.watch` sees
            end.sendall(_ALL_HAVE_COME)
    return ends


def meet_process_0(coordinator: str, process: int, processes: int, seconds: float) -> socket.socket:
    """Wait, in another process than 0, until all have come.

    **Arguments:**

    - `coordinator`: where process 0 listens, as `HOST:PORT`.
    - `process`, `processes`: which one this is, and how many there are.
    - `seconds`: how long to wait for process 0, and then for the others.

    **Returns:** a connection to process 0.

    **Raises:** `UsageError` if process 0 does not come, if it says that another one does not, or if it ends.
    """
    try:
        end = wait_for(coordinator, seconds)
    except OSError as error:
        raise UsageError(
            f"process {process} expected process 0 to listen at {coordinator} after {seconds} seconds at most; got: {error}. "
            f"{_REMEDY}"
        ) from None
    end.settimeout(seconds + 2 * _PATIENCE)
    try:
        end.sendall(_HELLO.format(process, processes).ljust(_HELLO_SIZE).encode())
        with end.makefile("rb") as lines:
            answer = lines.readline(1000)
    except OSError as error:
        answer = str(error).encode()
    if answer != _ALL_HAVE_COME:
        end.close()
        reason = answer.decode(errors="replace").strip() or "the connection's end"
        raise UsageError(f"process {process} expected process 0 to say that all have come; got: {reason}. {_REMEDY}")
    end.settimeout(None)
    return end


def _greet(end: socket.socket, processes: int, ends: dict[int, socket.socket]) -> int | None:
    """Return which process has connected, or `None` for a stranger, such as a probe of the port."""
    end.settimeout(_PATIENCE)
    hello = receive(end, _HELLO_SIZE, socket.MSG_WAITALL).decode(errors="replace").rstrip()
    numbers = re.fullmatch(_HELLO.format("([0-9]+)", "([0-9]+)"), hello)
    if numbers is None:
        end.close()
        return None
    process = int(numbers[1])
    if int(numbers[2]) != processes or process in ends:
        again = "again" if process in ends else ""
        _refuse(
            {**ends, -1: end}, f"expected each of {processes} processes once", [f"{process} of {numbers[2]}"], again
        )
    end.settimeout(None)
    return process


def _refuse(ends: dict[int, socket.socket], expected: str, which: list[str], what: str) -> NoReturn:
    reason = f"{expected}; got: process {' and '.join(which)} {what}".rstrip()
    for end in ends.values():
        with end, contextlib.suppress(OSError):  # it is gone
            end.sendall(f"{reason}\n".encode())
    raise UsageError(f"process 0 {reason}. {_REMEDY}")
