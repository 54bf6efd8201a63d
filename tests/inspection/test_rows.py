"""The rows of a profile, from events that are made up: what runs side by side, in loops, and in several steps."""

import pytest

from eqxcallback.inspection import Limits
from eqxcallback.inspection._profiler import Event, Run
from eqxcallback.inspection._rows import profile_of


TEXT = """\
HloModule jit_program, is_scheduled=true

%less (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %compare.1 = pred[] compare(%a, %b), direction=LT
}

%body (state: f32[8]) -> f32[8] {
  %state = f32[8]{0} parameter(0)
  %copy.1 = f32[8]{0} copy(%state)
  ROOT %sort.1 = f32[8]{0} sort(%copy.1), dimensions={0}, is_stable=true, to_apply=%less
}

%condition (state.1: f32[8]) -> pred[] {
  %state.1 = f32[8]{0} parameter(0)
  ROOT %constant.1 = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %add.1 = f32[8]{0} add(%x, %x)
  %copy.2 = f32[8]{0} copy(%add.1)
  ROOT %while.1 = f32[8]{0} while(%copy.2), condition=%condition, body=%body
}
"""
LIMITS = Limits(2, 1e9, 1e9)


def profile(*runs, slower=1.0):
    """**Arguments:** for each run its length, and events: instruction, start, end, thread."""
    made = [
        Run(seconds, tuple(Event(name, start, end, thread, 0) for name, start, end, thread in events))
        for seconds, events in runs
    ]
    return profile_of([], [], TEXT, [run.seconds / slower for run in made], made, LIMITS)


def rows(profile):
    return {row.name: (row.count, row.seconds) for row in profile.rows}


def test_what_runs_side_by_side_is_counted_in_both_rows():
    report = profile((10.0, [("add.1", 1.0, 5.0, 0), ("copy.2", 3.0, 8.0, 1)]))
    assert rows(report) == {"copy": (1, 5.0), "add": (1, 4.0)}
    assert (report.overlap_seconds, report.other_seconds) == (2.0, 3.0)
    assert "side by side" in str(report)


def test_a_row_that_runs_beside_itself_is_counted_once():
    report = profile((10.0, [("copy.1", 1.0, 5.0, 0), ("copy.2", 2.0, 4.0, 1)]))
    assert rows(report) == {"copy": (2, 4.0)}
    assert (report.overlap_seconds, report.other_seconds) == (0.0, 6.0)


def test_a_loop_is_what_runs_in_it():
    """A sort is two steps here: it copies first. It ran as often as the others in its loop."""
    turn = [("copy.1", 1.0, 2.0, 0), ("sort.1", 2.0, 3.0, 0), ("sort.1", 3.0, 4.0, 0)]
    later = [(name, start + 4, end + 4, thread) for name, start, end, thread in turn]
    report = profile((10.0, [("while.1", 0.5, 9.0, 0), *turn, *later]))
    assert rows(report) == {"sort": (2, 4.0), "copy": (2, 2.0)}
    assert report.other_seconds == 4.0
    assert [row.bytes for row in report.rows] == [2 * 2 * 32] * 2


def test_times_are_medians_and_the_timeline_is_of_the_run_in_the_middle():
    report = profile(*((seconds, [("add.1", 1.0, seconds - 1, 0)]) for seconds in (4.0, 9.0, 5.0)))
    assert (report.repeats, report.seconds, report.profiled_seconds) == (3, 5.0, 5.0)
    assert rows(report) == {"add": (1, 3.0)}
    assert [(span.start, span.end) for span in report.spans] == [(1.0, 4.0)]


def test_the_share_is_of_the_nearer_limit():
    (row,) = profile((1.0, [("add.1", 0.0, 128e-9, 0)])).rows
    assert (row.bytes, row.flops, row.bound) == (64, 8, "bytes")
    assert row.share == pytest.approx(0.5)


def test_it_says_how_much_the_profiler_takes():
    run = (4.0, [("add.1", 1.0, 3.0, 0)])
    assert "\nprofile: 4000.000 ms, median of 1 run; 4000.000 ms with the profiler\n" in f"\n{profile(run)}"
    assert "times as long" not in str(profile(run, slower=1.4))
    assert "\n2.0 times as long with the profiler: rows of many short steps" in str(profile(run, slower=2.0))
