"""Other processes, for a time."""

import os
import pathlib
import signal
import subprocess
from collections.abc import Mapping, Sequence


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
    try:
        said, _ = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        code = None
    return code, said


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
