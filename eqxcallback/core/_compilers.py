"""Running the compilers of the machine, for a limited time."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


# A compiler takes seconds. One that takes so many waits for something that does not come, such as a licence or a folder.
_MOST_SECONDS = 600


def run_compiler(
    command: Sequence[str], text: str = "", *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler, which has the text as its input. When it takes too long, and when this process is interrupted, it is killed
    with all that it has started.

    **Raises:** `subprocess.TimeoutExpired`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    ) as process:
        try:
            out, log = process.communicate(text.encode(), timeout=_MOST_SECONDS)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, log)
