"""Say in words what a user's native kernel did in a process of its own."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from .. import _ext


def has_returned(said: Mapping[str, Any]) -> bool:
    return said["ending"][0] == "returned"


def problems_of_child(
    said: Mapping[str, Any], outputs: Sequence[_ext.Buffer], inputs: Sequence[_ext.Buffer], seconds: float
) -> list[str]:
    """`said` is what the call returned: see csrc/ffi/checked_call.cc."""
    names = [
        f"{kind} {i} ({b!r})" for kind, side in (("output", outputs), ("input", inputs)) for i, b in enumerate(side)
    ]
    problems = [
        f"{names[index]}: {count} bytes {_side(is_after)} its memory were overwritten, the nearest at {nearest}"
        for index, is_after, count, nearest in said["overruns"]
    ]
    if said["fault"] is not None:
        index, is_after, distance = said["fault"]
        _, _, _, is_write, _ = said["ending"]
        what = "wrote" if is_write else "read"
        problems.append(
            f"{names[index]}: the kernel {what} at {distance} bytes {_side(is_after)} its memory, and crashed"
        )
    elif not has_returned(said):
        problems.append(_ending_text(said["ending"], seconds))
    if ignored := said["ignored_attributes"]:
        problems.append(
            f"the kernel reads none of its attributes ({', '.join(ignored)}). Bind them in the handler, or name in "
            "NativeKernel(..., attributes=...) those that it takes"
        )
    return problems


def _side(is_after: bool) -> str:
    return "after" if is_after else "before"


def _ending_text(ending: tuple[str, int, int, bool, str], seconds: float) -> str:
    kind, number, address, _, text = ending
    if kind == "signal":
        where = f" at the address {address:#x}, which is none of its operands" if address else ""
        return f"the kernel crashed ({signal.Signals(number).name}: {signal.strsignal(number)}{where})"
    return {
        "threw": f"the kernel threw a C++ exception: {text}",
        "exit": f"the kernel ended the process with status {number}",
        "time limit": f"the kernel did not end within {seconds:g} s. In checked mode it runs in a process of its own, without "
        "the threads of this one: a kernel that waits for them never ends",
        "not started": f"no process could be started for the kernel (errno {number})",
    }[kind]
