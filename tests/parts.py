"""The rows of tests that a run has: `--part 0/3`.

A row is a test with its parameters, and is in one part, whichever rows there are beside it: so all parts, each on a Python of
its own, have each row once.
"""

import argparse
import collections
import dataclasses
import hashlib
import os
import pathlib
import subprocess
from collections.abc import Collection

from . import cuda12


@dataclasses.dataclass(frozen=True)
class Part:
    indices: tuple[int, ...]
    count: int


def _turn() -> str:
    """Return a number that the commit chooses; 0 where there is no repository."""
    root = pathlib.Path(__file__).parents[1]
    try:
        said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return str(int(said, 16) % 3)


if "EQXCALLBACK_TESTS_TURN" not in os.environ:  # which workers of pytest inherit: a commit may be made while they start
    os.environ["EQXCALLBACK_TESTS_TURN"] = _turn()


def compiled_code(turn: int, *, is_twin: bool) -> Part:
    """Return the third of the tests marked `compiled_code`, which take minutes, that a machine has. The twin has another one than
    the others, so that a commit's two thirds are two, and commits take turns, so that each row runs on each machine.
    """
    return Part(((turn + is_twin) % 3,), 3)


def parse(text: str) -> Part:
    """Return what `0/3`, or `1,2/3`, names."""
    indices, _, count = text.partition("/")
    named = Part(tuple(int(index) for index in indices.split(",")), int(count))
    if not all(0 <= index < named.count for index in named.indices):
        raise argparse.ArgumentTypeError(f"expected I/N with 0 <= I < N, got {text}: name the first third as 0/3")
    return named


def rows_of(part: Part, rows: Collection[str], *, once: bool) -> set[str]:
    """Return which rows of one test are in a part. Unless each is to run once, each part has one at least."""
    chosen = {row for row in rows if _number(row) % part.count in part.indices}
    return chosen if chosen or once else {sorted(rows)[part.indices[0] % len(rows)]}


def _number(row: str) -> int:
    """Return what is as good as random: every third row would be of one dtype where there are three."""
    return int.from_bytes(hashlib.blake2s(row.encode()).digest()[:8], "big")


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        metavar="I[,I]/N",
        type=parse,
        help="rows of each test that are in these parts of N, one at least; those marked `any_jax_version` are in one part only. "
        "Of tests marked `compilers` all, where compilers are others, but for those marked `compiled_code`",
    )
    parser.addoption(
        "--compiled-code",
        metavar="I[,I]/N",
        type=parse,
        help="of tests marked `compiled_code` these parts of N, in place of the third that the commit chooses, which the first "
        "lines of a run name; 0/1 is all",
    )
    parser.addoption(
        "--no-row-else",
        action="store_true",
        help="with --part: of tests without a row in these parts none, in place of one",
    )
    parser.addoption(
        "--whole", metavar="MARK", help="all rows of tests with this mark, but for those marked `compilers`"
    )


def pytest_report_header(config):
    of = _of_compiled_code(config)
    named = "all rows" if of is None else f"--compiled-code {','.join(map(str, of.indices))}/{of.count}"
    return f"compiled code: {named}"


def pytest_collection_modifyitems(config, items):
    no_row_else = config.getoption("--no-row-else")
    of_compiled_code = _of_compiled_code(config)
    tests: dict[tuple[str, Part, bool], dict] = collections.defaultdict(dict)
    for item in items:
        is_compiled_code = item.get_closest_marker("compiled_code") is not None
        of = of_compiled_code if is_compiled_code else _part_of(item, config)
        if of is not None:
            runs_once = no_row_else or item.get_closest_marker("any_jax_version") is not None
            once = runs_once and not is_compiled_code
            tests[item.nodeid.partition("[")[0], of, once][item.nodeid] = item
    left_out = set()
    for (_, of, once), rows in tests.items():
        left_out.update(rows[row] for row in rows.keys() - rows_of(of, rows, once=once))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _of_compiled_code(config):
    """Return the part of the tests marked `compiled_code`; `None` for all, as `make twin` has them."""
    if (named := config.getoption("--compiled-code")) is not None:
        return named
    if cuda12.IS_TWIN and config.getoption("--part") is None:
        return None
    return compiled_code(int(os.environ["EQXCALLBACK_TESTS_TURN"]), is_twin=cuda12.IS_TWIN)


def _part_of(item, config):
    """Return the part that the rows of any other test are chosen by; `None` for all."""
    asked, whole = config.getoption("--part"), config.getoption("--whole")
    if item.get_closest_marker("compilers") is not None:
        return None if cuda12.IS_TWIN else asked
    return None if whole is not None and item.get_closest_marker(whole) is not None else asked
