"""Measure the kernels on a CPU, against peers in the same process: `python -m benchmarks [SUITE ...] [--quick] [--readme]`.

Peers take turns, in two passes, on one core and on two. Results go to benchmarks/results/ as JSON, tables and plots. `--check`
compares those that are there, of each processor, with the goals. Suites of their own have a language model,
`python -m benchmarks.generate`, and its server, `python -m benchmarks.serve`.
"""

import argparse
import importlib
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence

from . import _report, _suite, _summary


# Suites that are not races between peers have tables of their own.
_APART = ("overhead", "quality", "training_parts")
_ALL = (*_APART, *_suite.TITLES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(_ALL)} (default: all)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="fewer rows and rounds; written only with --out")
    how.add_argument("--tiny", action="store_true", help="every path once, tiny; written only with --out")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="on how many cores (default: 1 2)"
    )
    parser.add_argument(
        "--readme", action="store_true", help="also put the tables into the README and the documentation"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="a folder for the results (default: benchmarks/results)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure nothing: say which goals the results do not reach, the worst first",
    )
    parser.add_argument("--all", action="store_true", help="with --check: every such goal, not only a page of them")
    parser.add_argument("--measure", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [suite for suite in options.suites if suite not in _ALL]:
        parser.error(f"no suite {', '.join(unknown)}: there are {', '.join(_ALL)}")
    suites = options.suites or list(_ALL)
    if options.readme and (options.quick or options.tiny or not {1, 2} <= set(options.threads)):
        parser.error("--readme needs a full run, on one core and on two")
    if options.all and not options.check:
        parser.error("--all says which goals --check lists: pass both")
    mode = "tiny" if options.tiny else "quick" if options.quick else "full"
    folder = options.out or _report.RESULTS
    if options.measure is not None:
        _suite.measure(suites, options.measure, mode, folder)
        return 0
    if options.check:
        from ._check import check

        print(check(folder, options.suites, every=options.all))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        results = folder if mode == "full" or options.out is not None else pathlib.Path(scratch) / "results"
        _run(parser, suites, options.threads, mode, pathlib.Path(scratch), results)
        if options.readme:
            _put(suites, results)
    return 0


def _run(
    parser: argparse.ArgumentParser,
    suites: Sequence[str],
    threads: Sequence[int],
    mode: str,
    scratch: pathlib.Path,
    results: pathlib.Path,
) -> None:
    from ._plot import require

    try:
        require()  # not after half an hour
    except ModuleNotFoundError as error:
        parser.error(str(error))
    cores = sorted(os.sched_getaffinity(0))
    counts = [count for count in threads if count <= len(cores)]
    if not counts:
        parser.error(f"--threads {' '.join(map(str, threads))}: there are {len(cores)} cores")
    for suite in _APART:
        if suite in suites:
            importlib.import_module(f"benchmarks.{suite}").in_own_process(mode, results)
    of_rows = [suite for suite in suites if suite not in _APART]
    # Tiny ones share a process, which takes longer to start than they do.
    for group in [of_rows] if mode == "tiny" else [[suite] for suite in of_rows]:
        for count in counts if group else ():
            _suite.in_own_process(group, cores[:count], mode, scratch)
        for suite in group:
            data = _suite.collect(suite, counts, mode, scratch)
            _suite.write(data, results)
            print(_suite.markdown(data), flush=True)


def _put(suites: Sequence[str], results: pathlib.Path) -> None:
    """The site draws its plots from benchmarks/results."""
    if results != _report.RESULTS:
        shutil.copytree(results, _report.RESULTS, dirs_exist_ok=True)
    for suite in suites:
        text = (results / f"{suite}.md").read_text().strip()
        _report.put(_report.PAGE, suite, text)
    for path in _report.RESULTS.glob("*/*.json"):
        _report.put(_report.page_of(path.parent), path.stem, _suite.markdown_of(path))
    _summary.publish(_report.RESULTS)


if __name__ == "__main__":
    sys.exit(main())
