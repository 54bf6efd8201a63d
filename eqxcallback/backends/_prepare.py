"""Finds the technology of a kernel."""

from collections.abc import Mapping
from typing import Any

from ..kernel import NativeKernel
from ..xla import LaunchPlan
from . import _native


def prepare(
    kernel: Any, platform: str, options: Mapping[str, Any], aliases: tuple[tuple[int, int], ...], who: str
) -> LaunchPlan:
    """Make `kernel` runnable on `platform`. Called when a program is lowered: nothing is compiled or loaded later."""
    if isinstance(kernel, NativeKernel):
        return _native.prepare(kernel, platform, options, aliases, who)
    raise TypeError(f"{who}: expected a kernel; got {kernel!r} of type {type(kernel).__name__}.")
