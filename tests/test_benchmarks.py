"""Benchmarks: every suite runs once, tiny, and its contestants compute the same. No time is asserted."""

import json
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _memory, _onnx_linear, _plot, _report, _suite, _summary, linear, training_parts
from benchmarks.__main__ import main
from benchmarks._check import check, table_of_misses
from benchmarks._json import dumps
from benchmarks._rows import BEST, Goal, Row, Setting, best_of, best_of_row, speed, tables
from benchmarks._timing import Memory, Race, Timing, WaitingClock, family, probe, race, samples, waited_for
from benchmarks.quality import quality_of

from . import one_device


pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[1]
ROW = {
    "case": str,
    "unit": str,
    "figures": dict,
    "seconds": dict,
    "memory": dict,
    "differences": dict,
    "tolerance": float,
    "tried": dict,
    "failed": dict,
    "goals": list,
    "curve": (list, type(None)),
    "x": (int, float, type(None)),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of all suites, tiny, on one core."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks", "--tiny", "--threads", "1", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=one_device.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def rows_of(results, suite):
    return json.loads((results / f"{suite}.json").read_text())["threads"]["1"]["rows"]


@pytest.mark.parametrize("suite", list(_suite.TITLES))
def test_contestants_compute_the_same(results, suite):
    rows = rows_of(results, suite)
    assert rows
    for row in rows:
        # A peer that is not installed here is none.
        broken = {name: why for name, why in row["failed"].items() if not why.startswith("ModuleNotFoundError")}
        assert not broken, row["case"]
        assert family(next(iter(row["figures"]))) == "eqxcallback", row["case"]
        computed = [name for name in row["figures"] if not name.startswith("probe")][1:]
        assert computed, row["case"]
        for name in computed:
            assert row["differences"][name] <= row["tolerance"], (row["case"], name)


@pytest.mark.parametrize("suite", list(_suite.TITLES))
def test_what_is_written(results, suite):
    data = json.loads((results / f"{suite}.json").read_text())
    assert (data["suite"], data["mode"], list(data["threads"])) == (suite, "tiny", ["1"])
    assert {"cpu", "python", "jax", "numpy"} <= data["machine"].keys()
    assert data["threads"]["1"]["peak_rss"] > 1e7
    text = (results / f"{suite}.md").read_text()
    for row in data["threads"]["1"]["rows"]:
        assert row.keys() == ROW.keys()
        for key, kind in ROW.items():
            assert isinstance(row[key], kind), key
        assert all(name.startswith("eqxcallback") for name in row["seconds"])
        for seconds in row["seconds"].values():
            assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
        for goal in row["goals"]:
            assert goal.keys() == {"goal", "ratio", "met", "missing"}
        assert f"| {row['case']} |" in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert xml.etree.ElementTree.parse(results / f"{suite}.svg").getroot().tag.endswith("svg")


def test_what_callbacks_cost(results):
    data = json.loads((results / "overhead.json").read_text())
    assert data["mode"] == "tiny"
    assert {"eqxcallback, empty", "ffi_call, native add", "jax pure_callback, np.add"} <= data["calls"].keys()
    assert data["loops"].keys() == {"C, gcc -O3", "Numba"}
    assert all(seconds > 0 for step in data["startup"].values() for seconds in step.values())
    assert all(goal["met"] is not None for row in data["rows"] for goal in row["goals"])
    assert "| jax buffer_callback, empty |" in (results / "overhead.md").read_text()


def test_what_fewer_bits_cost(results):
    data = json.loads((results / "quality.json").read_text())
    first, *others = data["variants"]
    assert (data["mode"], first["error"], first["agreement"]) == ("tiny", 0.0, 1.0)
    for row in others:
        assert 1e-4 < row["error"] < 1, row
        assert abs(np.log(row["perplexity"] / first["perplexity"])) < 0.5, row
    for row in data["variants"]:
        assert all(row[what]["low"] <= row[what]["median"] <= row[what]["high"] for what in ("prompt", "decode"))
    assert (results / "quality.md").read_text().count("| Q4_1 and Q8_0, the file's |") == 6


def test_parts_of_a_step(results, tmp_path):
    data = json.loads((results / "training_parts.json").read_text())
    assert len(data["rows"]) == 4
    for row in data["rows"]:
        parts = row["parts"]
        assert tuple(parts) == training_parts.PARTS
        assert min(parts[training_parts.PRODUCTS], parts[training_parts.LOOPS]) > 0, row
        is_ours = row["contestant"] == "eqxcallback"
        assert (parts[training_parts.ATTENTION] > 0) == (parts[training_parts.NORMS] > 0) == is_ours, row
        assert f"| {row['case']}, {row['contestant']} | " in (results / "training_parts.md").read_text()
    _plot.stacked(data, tmp_path / "parts.svg")
    assert xml.etree.ElementTree.parse(tmp_path / "parts.svg").getroot().tag.endswith("svg")


def test_perplexity_is_that_of_the_losses():
    """The perplexity of uniform logits is the number of tokens; of certain ones 1."""
    tokens = np.array([1, 2, 0, 3])
    uniform, certain = np.zeros((4, 7)), np.zeros((4, 7))
    certain[np.arange(3), tokens[1:]] = 100.0
    assert quality_of([uniform], [certain], [tokens]).perplexity == pytest.approx(7)
    quality = quality_of([certain], [certain], [tokens])
    assert quality == (pytest.approx(1), 0.0, 1.0)


def test_what_falls_short_is_told(results, tmp_path, capsys):
    assert "goals met" in check(results).splitlines()[-1]
    assert main(["--check", "--out", str(tmp_path)]) == 0
    assert "has no results with goals: make bench measures them" in capsys.readouterr().out
    seconds = {name: Timing(s, s, s) for name, s in {"eqxcallback": 1.0, "XLA: a": 3.0, "torch": 0.5}.items()}
    measured = Race(seconds, {}, {"XLA: a": 0.0, "torch": 0.0, "Equinox": 0.5})
    row = Row("case", "s", 1, measured, (Goal("XLA", 2.0), Goal("torch", 1.5), Goal("probe", 0.75))).as_data()
    (tmp_path / "norms.json").write_text(json.dumps({"threads": {"1": {"rows": [row]}}}))
    assert check(tmp_path).splitlines() == [
        "norms, 1 thread: case: Equinox differs by 5.0e-01, which is more than 0.05",
        "100% missing: norms, 1 thread: case: >= 0.75 x probe: not measured; limit: not known",
        " 67% missing: norms, 1 thread: case: >= 1.5 x torch: no, 0.50; limit: not known",
        "1 of 3 goals met, 1 not, 1 not measured.",
    ]
    many = [row | {"case": f"case {i}"} for i in range(50)]
    (tmp_path / "norms.json").write_text(json.dumps({"threads": {"1": {"rows": many}}}))
    assert check(tmp_path).splitlines()[-2] == "... and 60 of which less is missing."
    (tmp_path / "norms.json").write_text(json.dumps({"threads": {"1": {"rows": [row]}}}))
    assert main(["norms", "--check", "--out", str(tmp_path)]) == 0
    assert "1 of 3 goals met" in capsys.readouterr().out
    assert main(["linear", "--check", "--out", str(tmp_path)]) == 0
    assert "no results with goals" in capsys.readouterr().out


def test_the_summary(results, tmp_path):
    of_titles = {summary.title: summary.ratios for summary in _summary.summaries(results)}
    for suite, title in _suite.TITLES.items():
        ratios = {}
        for row in rows_of(results, suite):
            peers = best_of_row(row).keys() - {"eqxcallback", "probe"}
            if peers and row["unit"] != "MB" and row["curve"] is None:
                ratios[f"{row['case']}, 1 thread"] = min(
                    speed(row["figures"], row["unit"], "eqxcallback", peer) or 0.0 for peer in peers
                )
        assert of_titles.get(title, {}) == ratios
    assert of_titles["A callback in a program"].keys() == set(_summary._CALLS)
    assert len(of_titles) > 6
    text = _summary.table(results)
    for title, ratios in of_titles.items():
        assert f"| {title} | {min(ratios.values()):.2f} | {np.median([*ratios.values()]):.2f} |" in text
    _summary.plot(results, tmp_path / "summary.svg")
    assert xml.etree.ElementTree.parse(tmp_path / "summary.svg").getroot().tag.endswith("svg")


def test_no_summary_leaves_out_what_ours_did_not_run(results, tmp_path):
    data = json.loads((results / "linear.json").read_text())
    row = data["threads"]["1"]["rows"][0]
    row["failed"] = {"eqxcallback: rows": "ValueError: why"}
    (tmp_path / "linear.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"linear: expected a figure of eqxcallback for 'one token.*ValueError: why"):
        _summary.summaries(tmp_path)


@pytest.mark.parametrize("encoding", ["Q4_1", "int8"])
def test_onnxruntime_gets_the_same_weights(encoding):
    """Digits and zero points of four bits are two in a byte, and products with scales are exact."""
    (weight,) = linear.weights([(16, 384)])
    parts, want = linear.quantized(encoding, weight)
    assert float(jnp.max(jnp.abs(want - weight))) < 0.03
    codes, scales, zeros = _onnx_linear.parts_of(encoding, parts)
    if encoding == "Q4_1":
        codes, zeros = (np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1) for x in (codes, zeros))
    got = (codes.astype(np.float32) - zeros[..., None]) * scales[..., None]
    np.testing.assert_array_equal(got.reshape(weight.shape), want)


def test_the_pages_show_the_results_that_are_kept():
    """The repository has of each row what its tables show, and the tables are these."""
    page = _report.PAGE.read_text()
    for suite in ("training_parts", "generate", *_suite.TITLES):
        text = _suite.markdown_of(_report.RESULTS / f"{suite}.json")
        assert f"<!-- {suite} -->\n{text}\n<!-- /{suite} -->" in page, suite
    others = list(_report.RESULTS.glob("*/*.json"))
    for path in others:
        text = _suite.markdown_of(path)
        assert f"<!-- {path.stem} -->\n{text}\n<!-- /{path.stem} -->" in _report.page_of(path.parent).read_text(), path
    for folder in {path.parent for path in others}:
        text = table_of_misses(folder)
        assert f"<!-- misses -->\n{text}\n<!-- /misses -->" in _report.page_of(folder).read_text(), folder
    processors = _summary.of_processors(_report.RESULTS)
    assert f"<!-- processors -->\n{processors}\n<!-- /processors -->" in page
    assert processors.splitlines()[0].count(" (family ") == 1 + len({path.parent for path in others})
    table = _summary.table(_report.RESULTS)
    assert f"<!-- kernels -->\n{table}\n<!-- /kernels -->" in _report.README.read_text()
    assert 3 < len(table.splitlines()) - 4 <= 10
    assert sum(len(path.read_text().splitlines()) for path in _report.RESULTS.glob("*.json")) < 3500


def test_json_in_few_lines():
    data = {
        "a": [1.23456789, None, True, "x, y"],
        "b": {str(i): {"n": i} for i in range(40)},
        "empty": {},
        "long": "z" * 200,
    }
    text = dumps({**data, "threads": {1: "one"}})
    assert json.loads(text) == {**data, "threads": {"1": "one"}, "a": [1.23457, None, True, "x, y"]}
    assert 4 <= len(text.splitlines()) <= 10
    assert max(len(line) for line in text.splitlines() if "zz" not in line) <= 130


def test_pages_have_a_place_for_each_suite(tmp_path):
    for page, names in (
        (_report.PAGE, ("overhead", "quality", "training_parts", "generate", *_suite.TITLES)),
        (_report.README, ("kernels",)),
    ):
        for name in names:
            copy = tmp_path / page.name
            copy.write_text(page.read_text())
            _report.put(copy, name, "| new |")
            assert f"<!-- {name} -->\n| new |\n<!-- /{name} -->" in copy.read_text()
    copy = tmp_path / _report.README.name
    with pytest.raises(ValueError, match=r"expected one <!-- missing --> and one <!-- /missing --> around"):
        _report.put(copy, "missing", "")


def test_bad_arguments(capsys, monkeypatch):
    for arguments, message in (
        (["nonsense"], "no suite nonsense: there are overhead, quality, training_parts, attention"),
        (["norms", "--threads", "100000"], "--threads 100000: there are"),
        (["--readme", "--quick"], "--readme needs a full run"),
        (["norms", "--all"], "--all says which goals --check lists: pass both"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(_plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["norms", "--tiny"])
    assert "expected matplotlib for the plots, and it is not installed. pip install" in capsys.readouterr().err


def planted(**results):
    def contestant(value):
        return lambda: waited_for(lambda: np.asarray(value, np.float32))

    measured = race({name: contestant(value) for name, value in results.items()}, rounds=2, round_seconds=0.0)
    return Row("case", "ms", 1, measured, tolerance=1e-3).as_data()


def test_a_contestant_that_computes_something_else_is_wrong():
    data = planted(eqxcallback=[1.0, 2.0], good=[1.0, 2.0001], bad=[1.0, 2.1], short=[1.0])
    assert data["differences"]["good"] < 1e-3
    assert data["differences"]["bad"] == pytest.approx(0.05)
    assert data["differences"]["short"] == float("inf")
    assert tables([data]).splitlines()[-1].count("wrong") == 2
    assert best_of_row(data).keys() == {"eqxcallback", "good"}
    nan = planted(eqxcallback=[1.0, 2.0], nan=[1.0, float("nan")])
    assert "wrong" in tables([nan])


def test_every_array_of_a_result_is_compared():
    one, other = samples((np.ones(3), {"b": np.zeros(2)})), samples((np.ones(3), {"b": np.ones(2)}))
    assert [x.tolist() for x in one] == [[1, 1, 1], [0, 0]]
    assert one[1].tolist() != other[1].tolist()
    large = np.arange(1 << 20)
    assert len({int(x) % 1024 for x in samples(large)[0]}) > 1


def test_the_best_formulation_counts():
    figures = {"eqxcallback": 6.0, "XLA: a": 2.0, "XLA: b": 3.0, "torch": 12.0}
    assert best_of(figures, "GB/s") == {"eqxcallback": "eqxcallback", "XLA": "XLA: b", "torch": "torch"}
    assert best_of(figures, "us")["XLA"] == "XLA: a"
    assert speed(figures, "GB/s", "eqxcallback", "XLA") == 2.0
    assert speed(figures, "us", "eqxcallback", "torch") == 2.0
    assert speed(figures, "us", "eqxcallback", "Equinox") is None
    data = {"goal": ">= 2 x XLA", "ratio": 2.0, "met": True, "missing": 0.0}
    assert Goal("XLA", 2.0).as_data(figures, "GB/s") == data
    probe = Goal("probe", 0.75).as_data(figures | {"probe: FMA": 12.0}, "GB/s")
    assert (probe["ratio"], probe["missing"]) == (0.5, round(1 / 3, 4))
    best = Goal(BEST).as_data(figures | {"probe: FMA": 60.0}, "GB/s")
    assert best == {"goal": ">= 1 x best peer", "ratio": 0.5, "met": False, "missing": 0.5}
    assert Goal(BEST).reached(figures, "us") == 2 / 6
    assert Goal(BEST).reached({"eqxcallback": 6.0, "probe: FMA": 1.0}, "us") is None
    assert Goal("XLA", 2.1).is_met(figures, "GB/s") is False
    assert Goal(5.0).as_data(figures, "us") == {"goal": "<= 5", "ratio": 6.0, "met": False, "missing": round(1 / 6, 4)}
    assert Goal(5.0).as_data(figures, "GB/s") == {"goal": ">= 5", "ratio": 6.0, "met": True, "missing": 0.0}
    assert Goal("Equinox").is_met(figures, "us") is None


def test_a_slow_formulation_is_tried_once():
    calls = {"XLA: fast": 0, "XLA: slow": 0, "torch": 0}

    def contestant(name, seconds):
        def run(count):
            calls[name] += count
            return seconds * count

        return lambda: probe(lambda: None)._replace(run=run)

    contestants = {name: contestant(name, s) for name, s in zip(calls, (1e-3, 2e-3, 9e-3), strict=True)}
    measured = race(contestants, rounds=3, round_seconds=0.01, best_only=True)
    assert measured.tried == {"XLA: slow": pytest.approx(2e-3)}
    assert measured.seconds.keys() == {"XLA: fast", "torch"}
    before = dict(calls)
    measured.again()
    assert calls["XLA: slow"] == before["XLA: slow"]
    assert calls["torch"] > before["torch"]
    assert len(measured.passes) == 2


def test_memory_of_a_call():
    used = _memory.peak_of(lambda: np.ones(8 << 20, np.uint8))
    assert used is not None
    assert 7 << 20 < used < 16 << 20
    timing = Timing(1.0, 1.0, 1.0)
    measured = Race({"eqxcallback": timing}, {}, {}, {"eqxcallback": Memory(5, 2_000_000)})
    row = Row("memory", "MB", 1, measured, (Goal(1.0),)).as_data()
    assert (row["figures"], row["goals"][0]["met"]) == ({"eqxcallback": 2.0}, False)
    untimed = Setting(WaitingClock()).race({"eqxcallback": lambda: waited_for(lambda: np.ones(3))}, timed=False)
    assert untimed.seconds == {}
    assert untimed.memory["eqxcallback"].peak is not None
