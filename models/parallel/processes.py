"""The devices of a program: some of this process, or of several processes that run the same program."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._program import UsageError, report
from . import tensor_parallel
from .meeting import listen, meet_others, meet_process_0
from .relay import Relay, host_and_port, wait_for
from .watch import Watch


# In seconds. A process may be silent for so long: of one that is killed the connections close at once. Then JAX would abort the
# others with a trace, and so it waits for longer. The last is how long a process that has lost another one may take to say so
# itself.
_SILENCE, _HEARTBEAT, _START, _END, _LAST_WORDS = 30, 60, 60, 20, 5

# Held by the thread that ends this process, which has one reason.
_ending = threading.Lock()

_config: Any = jax.config  # type checkers do not know its options


@contextlib.contextmanager
def joined(devices: int, coordinator: str | None, processes: int, process: int) -> Iterator[jax.sharding.Mesh]:
    """Run what is inside on the devices of all processes. They wait for each other at the start and at the end.

    **Arguments:**

    - `devices`: how many of each process. A CPU is as many as there should be, if JAX has not started yet.
    - `coordinator`: where process 0 listens, as `HOST:PORT`; `None` if there is one process.
    - `processes`, `process`: how many there are, and which one this is, from 0 on.

    **Returns:** a mesh of the devices.

    **Raises:** `UsageError` if there are fewer devices, or if another process does not come or is gone. A process that does not
    notice that another one is gone, or was silent for 30 seconds, is ended.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started, with the devices that it has
        _config.update("jax_num_cpu_devices", devices)
    if coordinator is None:
        yield _mesh(devices)
        return
    try:
        report(f"process {process} of {processes} waits for the others at {coordinator}, for {_START} seconds at most")
        with _no_stdout():
            watches = _join(coordinator, processes, process)
            mesh = _mesh(devices)
            total(mesh, 0)  # a first program, which connects them
        yield mesh
        for watch in watches:
            watch.end_watch()
        jax.distributed.shutdown()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)) is None:
            raise  # it is not a failed program's, which becomes one where NumPy takes the result
        raise UsageError(
            f"process {process} expected the programs of {processes} processes to run until all have ended; got: "
            f"{str(error).splitlines()[0]}. See what another process says, and start all of them again."
        ) from None


def total(mesh: jax.sharding.Mesh, number: int) -> int:
    """Return the sum of the numbers of all processes, each of which waits for the others here.

    **Arguments:**

    - `mesh`: of `joined`.
    - `number`: this process's.
    """
    if jax.process_count() == 1:
        return number
    sharding, whole = NamedSharding(mesh, PartitionSpec(tensor_parallel.AXIS)), NamedSharding(mesh, PartitionSpec())
    mine = jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.asarray([number], np.int32))
    per_process = mesh.size // jax.process_count()
    return int(jax.jit(jnp.sum, out_shardings=whole)(mine)) // per_process


def leave(code: int) -> None:
    """End this process, if it is one of several and has not come to the end of `joined`.

    JAX would wait for the others, who wait for this one. That it is gone makes them end too.
    """
    if not jax.distributed.is_initialized():
        return
    if jax.process_index() == 0:
        time.sleep(1)  # the others say first why they end
    _exit(code)


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            if stream is not None:
                stream.flush()
    os._exit(code)


def _join(coordinator: str, processes: int, process: int) -> Sequence[Relay | Watch]:
    """Join the other processes, and return what watches them."""

    def lost(other: int, what: str) -> None:
        _end(process, f"process {other} {what}")

    address = coordinator
    if process == 0:
        watches = [Watch(meet_others(_listen(coordinator), processes, _START), _SILENCE, lost)]
    else:
        watch = Watch({0: meet_process_0(coordinator, process, processes, _START)}, _SILENCE, lost)
        relay = _reach(coordinator, process)
        watches, address = [watch, relay], relay.address
    _config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        num_processes=processes,
        process_id=process,
        initialization_timeout=_START,
        heartbeat_timeout_seconds=_HEARTBEAT,
        shutdown_timeout_seconds=_END,
    )
    return watches


def _reach(coordinator: str, process: int) -> Relay:
    """Wait for JAX's service in process 0, and return the way to it."""
    try:
        wait_for(coordinator, _START).close()
    except OSError as error:
        raise UsageError(
            f"process {process} expected the service of process 0 at {coordinator} after {_START} seconds at most; got: {error}. "
            "See what process 0 says, and start all of them again."
        ) from None
    return Relay(coordinator, lambda: _end(process, "process 0 is gone"))


def _end(process: int, reason: str) -> None:
    """End this process, if it does not do so itself because it waits for the other one."""
    with _ending:
        time.sleep(_LAST_WORDS)
        with contextlib.suppress(OSError, ValueError):
            report(f"process {process} ends, because {reason}. See what it says, and start all of them again.")
        _exit(2)


def _listen(coordinator: str) -> socket.socket:
    port = host_and_port(coordinator)[1]
    try:
        return listen(port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"expected --coordinator with a port that process 0 can listen at; got {port}: {error}"
        ) from None


@contextlib.contextmanager
def _no_stdout() -> Iterator[None]:
    """Keep stdout, which is for results, from what libraries say of their connections."""
    if sys.stdout is None:  # it is closed
        yield
        return
    sys.stdout.flush()
    number, kept = sys.stdout.fileno(), os.dup(sys.stdout.fileno())
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), number)
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _mesh(count: int) -> jax.sharding.Mesh:
    devices: list[Any] = []
    for process in range(jax.process_count()):
        local = [device for device in jax.devices() if device.process_index == process]
        if len(local) < count:
            raise UsageError(f"expected --devices of at most {len(local)}, which is what JAX has; got {count}")
        devices += local[:count]
    return tensor_parallel.mesh_of(devices)
