"""Processes that scripts start: none is left when its time is over, or when a user or a caller ends the script."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks._process import end_all, run_for


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[1]
# It runs in the folder of the test, where it leaves its number.
SLEEPER = "import os, time; open('number', 'w').write(f'{os.getpid()} '); print('begun', flush=True); time.sleep(60)"
CALLER = f"""
import os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import _process
run = _process.run_for
def sleep(*_):
    return run([sys.executable, "-c", {SLEEPER!r}], 60, os.environ, pathlib.Path.cwd())
"""
# The script as it is, but for the processes: pytest sleeps in a thread, and nothing else can be run.
GPU_CHECK = f"""
import runpy
_process.run_for = lambda command, *_: sleep() if "pytest" in command else (1, "")
sys.argv = ["gpu_check", "--no-gpu", "--only", "tests", "--out", "out"]
runpy.run_path({str(ROOT / "scripts" / "gpu_check")!r}, run_name="__main__")
"""


def wait_for(what, seconds=20.0):
    ends = time.monotonic() + seconds
    while not (value := what()) and time.monotonic() < ends:
        time.sleep(0.02)
    return value


def number(folder):
    """The sleeper's number, when it has written that."""
    text = (folder / "number").read_text() if (folder / "number").exists() else ""
    return int(text) if text.endswith(" ") else None


def has_ended(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    # Where nobody waits for orphans, it stays as a zombie.
    state = pathlib.Path(f"/proc/{process}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_process_is_ended_with_what_it_has_started():
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('begun', flush=True); time.sleep(60)"
    start = time.monotonic()
    assert run_for([sys.executable, "-c", code], 2, os.environ, ROOT) == (None, "begun\n")
    assert time.monotonic() - start < 20
    assert run_for([sys.executable, "-c", "raise SystemExit(3)"], 20, os.environ, ROOT) == (3, "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which processes a process has started")
def test_a_process_is_ended_with_what_it_runs_for_a_time(tmp_path):
    """As `gpu_check` runs `benchmarks.gpu`, which runs its parts."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run_for, [sys.executable, "-c", CALLER + "sleep()"], 60, os.environ, tmp_path)
        sleeper = wait_for(lambda: number(tmp_path))
        end_all()
        assert ended.result() == (-signal.SIGKILL, "")
    assert wait_for(lambda: has_ended(sleeper))


@pytest.mark.parametrize(
    ("code", "given"),
    [("sleep()", signal.SIGINT), (GPU_CHECK, signal.SIGINT), (GPU_CHECK, signal.SIGTERM)],
    ids=["Ctrl-C", "gpu_check, Ctrl-C", "gpu_check, SIGTERM"],
)
def test_a_script_that_is_ended_leaves_no_process(tmp_path, code, given):
    script = subprocess.Popen([sys.executable, "-c", CALLER + code], cwd=tmp_path, stdout=-1, stderr=-2)
    try:
        sleeper = wait_for(lambda: number(tmp_path))
        script.send_signal(given)
        script.communicate(timeout=20)
        assert script.returncode != 0
        assert wait_for(lambda: has_ended(sleeper), 5)
    finally:
        script.kill()
        script.communicate()
