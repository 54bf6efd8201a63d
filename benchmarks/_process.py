"""Other processes, for a time."""

import contextlib
import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping, Sequence


_running: set[int] = set()  # what `run_for` has started, in any thread


def run_for(
    command: Sequence[str], seconds: float, environment: Mapping[str, str], folder: pathlib.Path
) -> tuple[int | None, str]:
    """Run a command and keep what it says. After `seconds` it is ended, with all that it has started.

    **Returns:** its exit code, or `None` if it was ended; and what it has said.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    _running.add(process.pid)
    try:
        said, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        _end(process.pid)
        said, _ = process.communicate()
        code = None
    except BaseException:
        # A terminal's Ctrl-C does not reach what has a session of its own: it would go on, and use the GPU.
        _end(process.pid)
        process.communicate()
        raise
    finally:
        _running.discard(process.pid)
    return code, said


def end_all() -> None:
    """End what `run_for` runs, in threads too: Ctrl-C interrupts only the main thread, and that waits for the others."""
    for pid in tuple(_running):
        _end(pid)


def _end(pid: int) -> None:
    """Kill the group of a process, and the groups of what it has started: `run_for` there makes new ones."""
    for member in (pid, *_below(pid)):
        with contextlib.suppress(ProcessLookupError):  # it has ended, or is in the group of another
            os.killpg(member, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have. Linux tells them; elsewhere there are none."""
    children: list[int] = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children += map(int, path.read_text().split())
    return children + [other for child in children for other in _below(child)]


def last_line(said: str) -> str:
    """The line that an error ends with."""
    return (said.strip().splitlines() or ["nothing was said"])[-1][:300]


def compiling_quickly() -> dict[str, str]:
    """The environment of tiny measurements, where compiling takes most of the time: beside the flags that are set."""
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"}


def keeping_modules(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The environment of processes whose start is measured, beside what is set: Python keeps the modules that it compiles, as it
    does by default, here in a folder of their own. Else each start might compile those of a checkout, which pip has not.
    """
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": os.fspath(folder)}


def run_on(cores: set[int], command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a command on these cores alone: XLA has a thread for each core that it may use. What it says of errors is shown.

    **Returns:** what it has said otherwise. Raises if it fails.
    """
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=None if environment is None else {**os.environ, **environment},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ).stdout
