"""The rules that installed packages bring."""

import functools
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from ..core import warn
from ._rules import FuseRule, sequence


GROUP = "eqxcallback.fuse"


@functools.cache
def of_packages() -> tuple[tuple[str, FuseRule], ...]:
    """Whose each one is, and the rule, by the names of the packages. They are imported here, at the first call."""
    rules: list[tuple[str, FuseRule]] = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (_package(entry), entry.name)):
        try:
            loaded = entry.load()
            given: Any = (
                [loaded] if isinstance(loaded, Mapping) else loaded
            )  # a mapping is for callers, and refused here
            rules += [(f"a rule of {_package(entry)}", rule) for rule in sequence(given)]
        except Exception as error:
            warn(
                f"fuse: the rules of the package {_package(entry)} are left out: its entry point {entry.name!r} = "
                f"{entry.value!r} of {GROUP} failed: {type(error).__name__}: {error}"
            )
    return tuple(rules)


def _package(entry: metadata.EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
