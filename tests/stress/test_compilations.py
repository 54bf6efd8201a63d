"""Nothing stays of programs that are gone, but for what caches with a limit hold."""

import pathlib
import subprocess
import sys

import pytest

from .. import one_device
from .compilations import KINDS


PROGRAMS = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_programs(kind):
    """Each with a kernel of its own. A program that stayed would be thousands of bytes."""
    if kind in ("numba", "tvm_ffi", "triton"):  # named as their packages, which are optional
        pytest.importorskip(kind, reason=f"{kind} is not installed")
    command = [sys.executable, "-m", "tests.stress.compilations", kind, str(PROGRAMS)]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=one_device.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) < 500
