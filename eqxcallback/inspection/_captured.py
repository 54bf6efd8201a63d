"""Read from XLA's plan whether it records a call into a command buffer, and if not, why."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

import jax

from .. import xla
from ._hlo import Instruction, Module
from ._matching import match
from ._report import ExternalCall
from ._thunks import Thunk, parse


# XLA's name of the smallest run of thunks that it records.
SMALLEST = "xla_gpu_graph_min_graph_size"
_COMMANDS = "xla_gpu_enable_command_buffer"

# Whether loops and branches that are recorded as a whole count as all that is in them, or as one.
# Noticed by: tests/deviceless/test_capture.py.
_COUNTS_ALL = jax.__version_info__ >= (0, 12)

# A slice of a loop's stacked inputs or results.
_SLICE = "kDynamicSliceFusion"
_BY_HOST = ": the host computes where {} lies, eqxcallback.jit_captured(scans=True) does not"
_WITHOUT_LOOPS = ": WHILE is not among the recorded commands, eqxcallback.jit_captured adds it"


def resolved(
    calls: Sequence[ExternalCall], compiled: xla.Compiled, compile_again: Callable[[dict[str, int]], xla.Compiled]
) -> list[ExternalCall]:
    """`calls` with what the plan says of them.

    **Arguments:**

    - `compile_again`: with further options. Runs of any size being recorded, what is still outside of command buffers is so
        for another reason, and each command buffer is a run.
    """
    plan = _Plan(calls, compiled)
    runs = functools.cache(lambda: _Plan(calls, compile_again({SMALLEST: 1})))

    def with_plan(i: int, call: ExternalCall) -> ExternalCall:
        if call.captured is not None or call.target is None:  # not declared, or none of ours
            return call
        captured, reason = _judge(i, plan, runs)
        return dataclasses.replace(call, captured=captured, captured_reason=reason)

    return [with_plan(i, call) for i, call in enumerate(calls)]


class _Plan:
    """The thunks of a program, and which are of its calls.

    **Attributes:**

    - `top`: the outermost thunks.
    - `places`: for each call, by its index: one, unless XLA has removed it or unrolled a loop.
    - `smallest`: the smallest run that it records.
    """

    def __init__(self, calls: Sequence[ExternalCall], compiled: xla.Compiled):
        self.top = parse(compiled.thunks, compiled.thunk_names)
        self.smallest = (re.findall(rf"{SMALLEST}: (\d+)", compiled.config) or ["0"])[0]
        self._commands = re.findall(rf"{_COMMANDS}: (\w+)", compiled.config) if compiled.config else None
        named = {thunk.name: thunk for outer in self.top for thunk in outer if thunk.name}
        module = Module(compiled.hlo_text)
        matches = match(calls, module)
        self.is_known = {i: bool(instructions) for i, instructions in matches.items()}
        # XLA joins a call with the slice that it reads: the thunk is then of both.
        self.places = {
            i: [named[name] for instruction in instructions for name in _names(module, instruction) if name in named]
            for i, instructions in matches.items()
        }
        self._calls = {thunk: calls[i] for i, thunks in self.places.items() for thunk in thunks}

    def excludes(self, command: str) -> bool:
        """True if the options exclude commands of this type from recording."""
        return self._commands is not None and command not in self._commands

    def describe(self, thunk: Thunk) -> str:
        call = self._calls.get(thunk)
        if call is not None:
            return call.path
        if thunk.kind == "kWhile" and self.excludes("WHILE"):
            return f"the loop {thunk.name}"
        return f"{thunk.name} ({thunk.kind})" if thunk.name else thunk.kind

    def others(self, thunk: Thunk) -> int:
        """Count the other calls that are recorded with this one."""
        return sum(call.buffer is thunk.buffer for call in self._calls) - 1

    def neighbours(self, buffer: Thunk) -> list[str]:
        """Describe the thunks just before and after a recorded run."""
        around = self.top if buffer.parent is None else buffer.parent.nested
        around = [thunk for thunk in around if thunk.branch == buffer.branch]
        i = around.index(buffer)
        return [self.describe(thunk) for thunk in (*around[max(i - 1, 0) : i], *around[i + 1 : i + 2])]


def _names(module: Module, instruction: Instruction) -> list[str]:
    """The names of the instruction itself and of the fusion that it is in."""
    caller = module.callers.get(instruction.computation)
    return [instruction.name, *([caller.name] if caller is not None and caller.opcode == "fusion" else [])]


def _judge(i: int, plan: _Plan, runs: Callable[[], _Plan]) -> tuple[bool | None, str]:
    if not plan.is_known.get(i):
        return False, "XLA has removed this call"
    places = plan.places[i]
    if not places:
        return None, "declared compatible, and XLA decides: its plan does not show this call"
    outside = [place for place in places if place.buffer is None]
    if not outside:
        return True, _how(places[0], plan)
    reason = _why_not(i, places.index(outside[0]), plan, runs)
    return False, reason + ("" if len(outside) == len(places) else f" (at {len(outside)} of {len(places)} places)")


def _how(thunk: Thunk, plan: _Plan) -> str:
    """Say how a call is recorded."""
    buffer = thunk.buffer
    assert buffer is not None
    others = plan.others(thunk)
    with_others = f", {others} other external call{'s' * (others > 1)} among them" if others else ""
    text = f"recorded into a command buffer of {_thunks(len(buffer.nested))}{with_others}"
    if any(outer.kind == "kWhile" for outer in thunk.above if buffer in outer.above):
        return f"{text}: its loop is one of them, one graph for all iterations"
    loop = next((outer for outer in buffer.above if outer.kind == "kWhile"), None)
    if loop is None:
        return text
    text += ", one graph for each iteration of its loop"
    if plan.excludes("WHILE"):
        return text + _WITHOUT_LOOPS
    breaker = next((inner for inner in loop if inner is not loop and _is_outside(inner)), None)
    if breaker is not None:
        return f"{text}: {plan.describe(breaker)} in the loop is not recorded"
    by_host = next((inner for inner in loop if inner.kind == _SLICE), None)
    return text if by_host is None else f"{text}{_BY_HOST.format(plan.describe(by_host))}"


def _is_outside(thunk: Thunk) -> bool:
    return thunk.kind != "kCommandBuffer" and thunk.buffer is None and thunk.branch != "condition"


def _why_not(i: int, place: int, plan: _Plan, runs: Callable[[], _Plan]) -> str:
    """Say why a call is not recorded."""
    if plan.excludes("CUSTOM_CALL"):
        return f"CUSTOM_CALL is not among the recorded commands ({_COMMANDS})"
    thunks = runs().places.get(i, [])
    thunk = thunks[place] if place < len(thunks) else None
    if thunk is None:
        return "XLA does not record it, and does not say why"
    if thunk.buffer is not None:
        ends = " and ".join(runs().neighbours(thunk.buffer))
        ended = f", ended by what is not recorded: {ends}" if ends else ""
        return (
            f"its run has {_thunks(_size(thunk.buffer))}{ended}; XLA records those of at least {plan.smallest} "
            f"({SMALLEST}), with eqxcallback.jit_captured of 1"
        )
    if any(outer.branch == "condition" for outer in (thunk, *thunk.above)):
        text = "the condition of a loop is recorded only together with the loop"
        return text + (_WITHOUT_LOOPS if plan.excludes("WHILE") else "")
    return "its handler is not registered as compatible with command buffers (kCmdBufferCompatible)"


def _size(buffer: Thunk) -> int:
    """Return the size that XLA compares with the smallest that it records."""
    return sum(1 for _ in buffer) - 1 if _COUNTS_ALL else len(buffer.nested)


def _thunks(count: int) -> str:
    return "1 thunk" if count == 1 else f"{count} thunks"
