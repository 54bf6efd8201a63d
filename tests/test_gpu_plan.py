"""The parts of the benchmarks for GPUs that run in the time that there is."""

import types

import pytest

from benchmarks import _report
from benchmarks.gpu import __main__ as gpu


pytestmark = pytest.mark.any_jax_version

ALL = [part for part in gpu.PARTS if part != "tiles"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs all parts by a clock that stands still between them. Returns the seconds that each part was given, in
    the order in which they ran, those of the whole run, and whether its results were kept.
    """

    def run(*arguments, takes=1.0):
        clock, given, kept = [0.0], {}, []

        def measured(part, seconds, options, folder):
            given[part] = seconds
            clock[0] += takes * (seconds + gpu._START_AND_END)
            return {"clock": "none", "rows": [{}]}

        monkeypatch.setattr(gpu, "measured", measured)
        monkeypatch.setattr(gpu, "markdown", lambda results, about: ", ".join(results))
        monkeypatch.setattr(gpu, "kept", lambda row: row)
        monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
        for name in ("write", "put"):
            monkeypatch.setattr(_report, name, lambda *_: kept.append(1))
        assert gpu.main(["--out", str(tmp_path), *arguments]) == 0
        return given, clock[0], bool(kept)

    return run


def test_each_part_has_the_time_that_it_needs(run):
    given, _, is_kept = run()
    assert given == {part: gpu.PARTS[part][1] for part in ALL}
    assert is_kept


@pytest.mark.parametrize("seconds", [100, 280, 520, 720])
def test_the_plan_fits_and_what_does_not_is_named(seconds, run, capsys):
    given, took, is_kept = run("--seconds", str(seconds))
    assert took <= seconds
    assert list(given) == [part for part in ALL if part in given]
    assert all(given[part] == gpu.PARTS[part][1] for part in given)
    left_out = [part for part in ALL if part not in given]
    said = capsys.readouterr().out
    assert left_out == [line.split()[0] for line in said.splitlines() if "is left out" in line]
    assert all(f"run `--only {part}`" in said for part in left_out)
    assert all(gpu.PARTS[part][1] + gpu._START_AND_END > seconds - took for part in left_out)
    assert left_out
    assert not is_kept  # the page would lose what other runs measured


def test_what_one_part_leaves_is_for_the_others(run):
    assert list(run("--seconds", "280", takes=0.3)[0]) == ALL


@pytest.mark.parametrize("arguments", [("--only", "tiles"), ("--no-gpu",), ("--quick",)])
def test_what_is_named_and_what_is_tiny_has_less_time(arguments, run):
    given, took, is_kept = run("--seconds", "180", *arguments)
    assert list(given) == (["tiles"] if "tiles" in arguments else ALL)
    assert took <= 180.001
    assert not is_kept
