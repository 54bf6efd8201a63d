"""The rows of tests that a run has: `--part 0/3`.

A row is a test with its parameters, and is in one part, whichever rows there are beside it: so all parts, each on a Python of
its own, have each row once.
"""

import argparse
import collections
import dataclasses
import hashlib
from collections.abc import Collection

from . import cuda12


@dataclasses.dataclass(frozen=True)
class Part:
    indices: tuple[int, ...]
    count: int


# Of what looks at code that compilers made, which takes minutes, the twin has another third than other machines.
_COMPILED_CODE = Part((1,) if cuda12.IS_TWIN else (0,), 3)


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
        "Of tests marked `compilers` all, where compilers are others, but for a third of those marked `compiled_code`",
    )
    parser.addoption(
        "--no-row-else",
        action="store_true",
        help="with --part: of tests without a row in these parts none, in place of one",
    )
    parser.addoption(
        "--whole", metavar="MARK", help="all rows of tests with this mark, but for those marked `compilers`"
    )


def pytest_collection_modifyitems(config, items):
    no_row_else = config.getoption("--no-row-else")
    tests: dict[tuple[str, Part, bool], dict] = collections.defaultdict(dict)
    for item in items:
        if (of := _part_of(item, config.getoption("--part"), config.getoption("--whole"))) is not None:
            runs_once = no_row_else or item.get_closest_marker("any_jax_version") is not None
            once = runs_once and of is not _COMPILED_CODE
            tests[item.nodeid.partition("[")[0], of, once][item.nodeid] = item
    left_out = set()
    for (_, of, once), rows in tests.items():
        left_out.update(rows[row] for row in rows.keys() - rows_of(of, rows, once=once))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def _part_of(item, asked, whole):
    """Return the part that a test's rows are chosen by; `None` for all."""
    if item.get_closest_marker("compiled_code") is not None:
        return None if cuda12.IS_TWIN and asked is None else _COMPILED_CODE
    if item.get_closest_marker("compilers") is not None:
        return None if cuda12.IS_TWIN else asked
    return None if whole is not None and item.get_closest_marker(whole) is not None else asked
