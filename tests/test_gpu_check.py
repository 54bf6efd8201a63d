"""The script that waits for a machine with a GPU: its dry run, and how it judges and ends things."""

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import types
import venv

import pytest

from benchmarks import _report, _rows
from benchmarks._process import run_for
from benchmarks._rows import Goal, Row
from benchmarks._timing import Race, Runner, Timing, race
from benchmarks.gpu import __main__ as gpu, tools
from benchmarks.gpu.compare import compare
from eqxcallback import available_backends, testing

from . import cuda12, one_device
from .gpu.checked import CALLS


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT, KIT = ROOT / "scripts" / "gpu_check", ROOT / "scripts" / "gpu_kit"


STEPS = ["environment", "smoke", "tests", "replay", "plans", "benchmarks", "tiles", "sanitizers", "profile"]


def run_without_gpu(python, folder, *arguments):
    environment = {name: value for name, value in one_device.environment().items() if name != "PYTHONPATH"}
    command = [python, str(SCRIPT), "--no-gpu", "--out", str(folder), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads((folder / "gpu_check.json").read_text())


@pytest.mark.compilers
@pytest.mark.skipif(not cuda12.IS_TWIN, reason="`make twin` runs it, with the versions of a machine that has a GPU")
def test_the_dry_run(tmp_path):
    said, results = run_without_gpu(sys.executable, tmp_path, "--archive", str(tmp_path.with_suffix(".tar.gz")))
    assert results["versions"]["jax"]
    assert list(results["steps"]) == STEPS
    without_tools = [step for name, step in results["steps"].items() if name not in ("sanitizers", "profile")]
    assert all(step["ok"] for step in without_tools)
    table = said.strip().splitlines()[-len(STEPS) :]
    assert [line.split()[0] for line in table] == STEPS
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    parts |= json.loads((tmp_path / "tiles" / "gpu.json").read_text())["parts"]
    assert set(parts) == set(gpu.PARTS)
    assert not [part for part in parts.values() if "error" in part or not part["is_whole"]]
    for row in (row for part in parts.values() for row in part["rows"]):
        assert row["failed"] == {}
        assert all(difference < 0.05 for difference in row["differences"].values()), row["case"]
    with tarfile.open(tmp_path.with_suffix(".tar.gz")) as archive:
        assert {f"{tmp_path.name}/{name}" for name in ("gpu_check.json", "gpu.md", "smoke.log")} <= set(
            archive.getnames()
        )


@pytest.mark.compilers
def test_nothing_is_installed_where_there_is_a_kit(tmp_path):
    """In an environment that has all packages but this one: editable installs are found by `.pth` files, which Python does not
    read in a folder that another one names."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    python = str(environment / "bin" / "python")
    importing = [python, "-c", "import eqxcallback"]
    assert b"_ext" in subprocess.run(importing, cwd=ROOT, capture_output=True, check=False).stderr
    packed = subprocess.run(
        [sys.executable, str(KIT), "--out", str(tmp_path / "kit")], capture_output=True, check=False
    )
    assert packed.returncode == 0, packed.stderr
    steps = [argument for step in ("smoke", "tests") for argument in ("--only", step)]
    _, results = run_without_gpu(python, tmp_path / "out", "--kit", str(tmp_path / "kit"), *steps)
    assert results["steps"]["environment"]["installed"] == f"nothing: it is in {tmp_path / 'kit' / 'site'}"
    assert results["versions"]["eqxcallback"]
    assert list(results["steps"]) == ["environment", "smoke", "tests"]
    assert not list(packages.glob("*eqxcallback*"))
    assert results["steps"]["tests"]["tests"] > 5


def test_the_page_shows_the_results_that_are_kept():
    """Results of a machine without a GPU are not kept."""
    results = json.loads((_report.RESULTS / "gpu.json").read_text())
    assert results["gpu"]["gpu"].startswith("NVIDIA")
    text = gpu.markdown(results["parts"], results["gpu"])
    assert f"<!-- gpu -->\n{text}\n<!-- /gpu -->" in gpu.PAGE.read_text()


@pytest.mark.compilers
@pytest.mark.parametrize("name", CALLS)
def test_what_is_checked_on_a_gpu_can_be_called(name):
    """An op that has moved, or has one option more, must not be seen by a GPU first."""
    pytest.importorskip("triton", reason="Triton is not installed")
    op, args, options = CALLS[name]()
    assert testing.check(op, *args, only=("types", "reference", "grad"), **options).passed


@pytest.fixture
def gpu_check(tmp_path):
    """The script as a module, and a run of it that has begun."""
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    loader.exec_module(module)
    sys.path[:] = path
    options = module.argparse.Namespace(
        out=tmp_path / "out", seconds=120.0, no_gpu=False, quick=False, only=None, archive=None
    )
    return module, module.Check(options)


TESTS = """
import pytest, time
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): assert False, "no"
def test_is_skipped(): pytest.skip("why not")
"""


def test_a_skip_has_failed(gpu_check, tmp_path):
    _, check = gpu_check
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    shard = check._shard("some", (str(file),))
    assert {name: shard[name] for name in ("tests", "bad", "skipped")} == {"tests": 3, "bad": 1, "skipped": 1}
    assert [name.rpartition("::")[2] for name in shard["failed"]] == ["test_fails"]
    assert check._shard("one", (str(file), "-k", "skipped"))["why"] == "exit code 0, 0 failed, 1 skipped"
    assert check._shard("other", (str(file), "-k", "passes"))["why"] == ""


def test_tests_that_take_too_long_are_counted(gpu_check, tmp_path, monkeypatch):
    module, check = gpu_check
    file = tmp_path / "test_slow.py"
    file.write_text(TESTS + "def test_later(): time.sleep(60)\n")
    monkeypatch.setitem(module.LIMITS, "tests", 6.0)
    shard = check._shard("slow", (str(file), "-k", "passes or later"))
    assert shard["why"] == "out of time after 1 that passed"


def test_the_limit_is_of_all_processes_of_the_tests(gpu_check, monkeypatch):
    """On one core, what comes late has no time."""
    module, check = gpu_check
    check.ends = 1e6
    clock, asked = [100.0], []

    def python(name, seconds, *_, **__):
        asked.append(seconds)
        clock[0] += 100.0
        return None, ""

    monkeypatch.setattr(check, "python", python)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 1)
    check.step("tests", check.tests)
    assert asked == [240.0, 140.0, 40.0]
    shards = check.results["steps"]["tests"]["shards"]
    assert [shard["why"] for shard in shards.values()] == ["out of time after 0 that passed"] * len(shards)


REPORT = '<testsuites><testsuite errors="{}" failures="0" skipped="1" tests="{}"/></testsuites>'


@pytest.mark.parametrize(
    ("code", "errors_and_tests", "ok", "text"),
    [
        (5, (0, 1), True, "1 skipped"),
        (0, (0, 3), True, "1 skipped"),
        (2, (1, 1), False, "1 failed, 1 skipped"),
        (4, (0, 0), False, "; all: exit code 4, 0 failed, 1 skipped"),
        (4, None, False, "; all: exit code 4: Segmentation fault"),
        (-11, None, False, "; all: exit code -11: Segmentation fault"),
        (None, None, False, "; all: out of time after 0 that passed"),
    ],
)
def test_without_a_gpu_tests_are_skipped_and_nothing_else(gpu_check, monkeypatch, code, errors_and_tests, ok, text):
    _, check = gpu_check
    check.options.no_gpu = True

    def python(*_, **__):
        if errors_and_tests is not None:
            (check.out / "tests-all.xml").write_text(REPORT.format(*errors_and_tests))
        return code, "Segmentation fault"

    monkeypatch.setattr(check, "python", python)
    result = check.tests()
    assert result["ok"] is ok
    assert result["says"].endswith(text)


@pytest.mark.parametrize(
    ("code", "data", "ok"),
    [
        (0, {"plans": {"rms_norm": {}}}, True),
        (0, {"plans": {}, "unavailable": "no plugin"}, True),
        (0, {"plans": {}}, False),
        (0, {"plans": {"rms_norm": {"error": "no"}}}, False),
        (-11, {"plans": {"rms_norm": {}}}, False),
        (1, None, False),
        (None, None, False),
    ],
)
def test_without_a_gpu_plans_may_lack_a_compiler_and_nothing_else(gpu_check, monkeypatch, code, data, ok):
    _, check = gpu_check
    check.options.no_gpu = True

    def python(*_, **__):
        if data is not None:
            (check.out / "plans-described.json").write_text(json.dumps(data))
        return code, "ImportError: no module"

    monkeypatch.setattr(check, "python", python)
    assert check.plans()["ok"] is ok


def test_a_step_that_fails_is_written_down(gpu_check):
    _, check = gpu_check
    check.step("broken", lambda: 1 / 0)
    check.step("whole", lambda: {"ok": True, "says": "fine"})
    steps = json.loads((check.out / "gpu_check.json").read_text())["steps"]
    assert steps["broken"]["says"] == "ZeroDivisionError: division by zero"
    assert not steps["broken"]["ok"]
    assert steps["whole"]["ok"]
    assert "broken: FAILED" in (check.out / "gpu_check.log").read_text()


MACHINE = {"platform": "gpu", "device": "NVIDIA H200", "driver": 13000, "versions": {"jax": "0.11.2"}}


@pytest.mark.parametrize(
    ("missing", "ok", "text"),
    [
        ({}, True, "missing: nothing"),
        ({"numba": "numba cannot be imported", "tvm_ffi": "no tvm_ffi", "c": "no"}, True, "missing: c, numba, tvm_ffi"),
        ({"numba": "no", "cupy": "cupy cannot be imported"}, False, "needed: cupy (cupy cannot be imported)"),
        ({"cuda": "no NVRTC", "triton": "no Triton"}, False, "needed: cuda (no NVRTC), triton (no Triton)"),
    ],
)
def test_what_a_machine_needs(gpu_check, monkeypatch, missing, ok, text):
    """A machine that lacks what no step launches is good enough."""
    module, check = gpu_check
    machine = {**MACHINE, "backends": {**dict.fromkeys(available_backends(), True), **missing}}
    monkeypatch.setattr(check, "_install", dict)
    monkeypatch.setattr(module, "run_for", lambda *_: (0, ""))
    monkeypatch.setattr(check, "python", lambda *_, **__: (0, json.dumps(machine)))
    result = check.environment()
    assert result["ok"] is ok
    assert result["says"].endswith(text)
    assert set(module.NEEDED) <= set(available_backends())


def test_a_cpu_is_not_the_machine(gpu_check, monkeypatch):
    module, check = gpu_check
    machine = {**MACHINE, "platform": "cpu", "backends": {}}
    monkeypatch.setattr(check, "_install", dict)
    monkeypatch.setattr(module, "run_for", lambda *_: (0, ""))
    monkeypatch.setattr(check, "python", lambda *_, **__: (0, json.dumps(machine)))
    assert check.environment()["ok"] is False


def test_where_a_launch_fails_nothing_else_is_tried(tmp_path, monkeypatch, gpu_check, capsys):
    module, _ = gpu_check
    monkeypatch.setattr(module.Check, "environment", lambda self: {"ok": True, "says": ""})
    monkeypatch.setattr(module.Check, "smoke", lambda self: {"ok": False, "says": "wrong"})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path)])
    assert module.main() == 1
    assert list(json.loads((tmp_path / "gpu_check.json").read_text())["steps"]) == ["environment", "smoke"]
    assert "the steps that follow are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "said", "ok"),
    [
        (0, "cache_append\n9 of 12 programs ran on a GPU\n========= ERROR SUMMARY: 0 errors\n", True),
        (0, "========= ERROR SUMMARY: 3 errors\n", False),
        (1, "Traceback\n========= ERROR SUMMARY: 0 errors\n", False),
        (1, "========= Error: Device not supported\n========= ERROR SUMMARY: 0 errors\n", None),
        (1, "ptrace: Operation not permitted", None),
        (None, "cache_append", None),
    ],
)
def test_what_a_sanitizer_says(monkeypatch, code, said, ok):
    monkeypatch.setattr(tools, "_tool", lambda name: f"/bin/{name}")
    asked = []

    def python(name, seconds, *arguments):
        asked.append((name, arguments))
        return code, said.replace("ERROR", "RACECHECK").replace(
            "errors", "hazards displayed"
        ) if "race" in name else said

    result = tools.sanitize(python, 65.0)
    assert result["ok"] is ok
    assert ("0 errors of 9 of 12 programs" in result["says"]) == ("12" in said)
    assert [name for name, _ in asked] == ["sanitizer-memcheck", "sanitizer-racecheck"]
    # It ends by itself, so that the tool can say what it has seen.
    assert asked[0][1][-4:] == ("-m", "benchmarks.gpu.kernels", "--seconds", "40.0")


def test_the_profiler_leaves_a_table(tmp_path, monkeypatch):
    ncu = tmp_path / "ncu"
    ncu.write_text("#!/bin/sh\n[ $1 = --import ] && printf 'name\\nunit\\nrms_norm\\n' || touch OUT/kernels.ncu-rep\n")
    ncu.write_text(ncu.read_text().replace("OUT", str(tmp_path)))
    ncu.chmod(0o755)
    monkeypatch.setattr(tools, "_tool", lambda name: str(ncu))

    def python(name, seconds, *arguments):
        return run_for([sys.executable, *arguments], seconds, os.environ, ROOT)

    assert tools.profile(python, 20.0, tmp_path) == {"ok": True, "says": "1 launches of kernels"}
    assert "rms_norm" in (tmp_path / "kernels.csv").read_text()
    monkeypatch.setattr(tools, "_tool", lambda name: "/bin/false")
    assert tools.profile(python, 20.0, tmp_path)["ok"] is None


def plan(captured="2 yes", copies=0, command_buffers=1):
    return {"captured": captured, "copies": copies, "command_buffers": command_buffers}


def test_plans_are_compared():
    assert compare({"a": plan()}, {"a": {**plan(), "kinds": {"kGemm": 1}}}) == []
    assert compare({"a": plan("1 yes, 1 no", 2)}, {"a": plan()}) == [
        "a: captured: 1 yes, 1 no on the GPU, 2 yes on the described one",
        "a: copies: 2 on the GPU, 0 on the described one",
    ]
    assert compare({"a": {"error": "no"}}, {"a": plan(), "b": plan()}) == [
        "a: on the GPU: no",
        "b: on the GPU: not compiled",
    ]


def row(unit, figures, goal):
    seconds = {name: Timing(value, value, value) for name, value in figures.items()}
    return Row("case", unit, 1e12, Race(seconds, {"peer": "not there"}, {}), (goal,)).as_data()


def test_goals():
    fast = row("TFLOP/s", {"eqxcallback": 0.01, "cuDNN": 0.009}, Goal("cuDNN", 0.8))
    assert fast["figures"] == {"eqxcallback": 100.0, "cuDNN": pytest.approx(111.1111)}
    assert fast["goals"] == [{"goal": ">= 0.8 x cuDNN", "ratio": pytest.approx(0.9), "met": True, "missing": 0.0}]
    assert row("TFLOP/s", {"eqxcallback": 0.02, "cuDNN": 0.01}, Goal("cuDNN", 0.8))["goals"][0]["met"] is False
    assert row("TFLOP/s", {"eqxcallback": 0.02}, Goal("cuDNN", 0.8))["goals"][0]["met"] is None
    slow = Row("case", "us", 100, Race({"eqxcallback": Timing(2e-4, 2e-4, 2e-4)}, {}, {}), (Goal(3.0),)).as_data()
    assert (slow["figures"], slow["goals"][0]["met"]) == ({"eqxcallback": 2.0}, True)
    assert _rows.tables([fast, slow]).splitlines() == [
        "| TFLOP/s | eqxcallback | cuDNN | peer | goals |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| case | 100 | 111 (0.90) | failed | >= 0.8 x cuDNN: yes, 0.90 |",
        "",
        "| us | eqxcallback | goals |",
        "| --- | ---: | ---: |",
        "| case | 2.00 | <= 3: yes, 2.00 |",
    ]


def test_a_contestant_that_cannot_run_leaves_the_others():
    def broken():
        raise ImportError("no module")

    runner = Runner(lambda count: 1e-3 * count, lambda: [1.0, 2.0])
    other = Runner(lambda count: 2e-3 * count, lambda: [1.0, 2.5])
    measured = race({"a": lambda: runner, "b": broken, "c": lambda: other}, rounds=2, round_seconds=0.01)
    assert (measured.seconds["a"].median, measured.seconds["c"].median) == (pytest.approx(1e-3), pytest.approx(2e-3))
    assert measured.failed == {"b": "ImportError: no module"}
