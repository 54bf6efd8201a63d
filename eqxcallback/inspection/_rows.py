"""Sum up what ran: a row for external calls that are alike, and one for XLA's instructions of each kind."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ._costs import bytes_of, flops_of, is_native, kind_of
from ._hlo import Instruction, Module
from ._matching import match
from ._profile import Limits, Profile, ProfileRow, Span
from ._profiler import Event, Run
from ._report import ExternalCall


# They run other instructions, which have rows of their own.
_CONTAINERS = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class _Key:
    """The properties that all instructions of a row have in common."""

    name: str
    kind: str
    lane: str
    path: str = ""
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def profile_of(
    calls: Sequence[ExternalCall],
    flops: Sequence[float | None],
    text: str,
    seconds: Sequence[float],
    runs: Sequence[Run],
    limits: Limits,
) -> Profile:
    """The profile of a program.

    **Arguments:**

    - `flops`: of one execution of each call, or `None`.
    - `text`: of the compiled program.
    - `seconds`: of the runs without the profiler. `runs` are those with it.
    """
    plan = _Plan(calls, flops, text)
    times = [{key: _length(events) for key, events in plan.by_row(run).items()} for run in runs]
    covered = [_length(plan.leaves(run)) for run in runs]
    usual = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
    medians = {key: statistics.median(its.get(key, 0.0) for its in times) for key in plan.by_row(usual)}
    keys = sorted(medians, key=lambda key: -medians[key])
    executions = plan.executions(usual)
    return Profile(
        repeats=len(runs),
        seconds=statistics.median(seconds),
        profiled_seconds=statistics.median(run.seconds for run in runs),
        rows=tuple(plan.row(key, medians[key], executions, limits) for key in keys),
        other_seconds=statistics.median(run.seconds - part for run, part in zip(runs, covered, strict=True)),
        overlap_seconds=statistics.median(sum(its.values()) - part for its, part in zip(times, covered, strict=True)),
        limits=limits,
        spans=tuple(
            Span(keys.index(plan.keys[event.instruction]), event.thread, event.start, event.end)
            for event in plan.leaves(usual)
        ),
    )


class _Plan:
    """**Attributes:**

    - `keys`: the row of each instruction that is not a loop or a branch, by its name.
    """

    def __init__(self, calls: Sequence[ExternalCall], flops: Sequence[float | None], text: str):
        self._module = module = Module(text)
        self._instructions = {instruction.name: instruction for instruction in module}
        self.keys: dict[str, _Key] = {}
        self._calls: dict[_Key, list[int]] = collections.defaultdict(list)
        self._flops: dict[str, float | None] = {}
        self._in_place: set[str] = set()
        for i, instructions in match(calls, module).items():
            call = calls[i]
            key = _Key(call.op, call.kind, call.lane, call.path, call.operands, call.results)
            self._calls[key].append(i)
            for instruction in instructions:
                self.keys.setdefault(instruction.name, key)
                # Nobody knows those of the part that one of several devices computes.
                self._flops[instruction.name] = None if call.note.startswith("on each device") else flops[i]
                if call.in_place:
                    self._in_place.add(instruction.name)
        for name, instruction in self._instructions.items():
            if instruction.opcode not in _CONTAINERS and name not in self.keys:
                lane = "native" if is_native(instruction) else "xla"
                self.keys[name] = _Key(kind_of(instruction, module), "", lane)

    def leaves(self, run: Run) -> list[Event]:
        return [event for event in run.events if event.instruction in self.keys]

    def by_row(self, run: Run) -> Mapping[_Key, list[Event]]:
        rows = collections.defaultdict(list)
        for event in self.leaves(run):
            rows[self.keys[event.instruction]].append(event)
        return rows

    def executions(self, run: Run) -> Mapping[str, int]:
        """Count how often each instruction ran: some are several thunks, as a sort that copies first."""
        events = collections.Counter(
            event.instruction for event in run.events if event.instruction in self._instructions
        )
        of_computation: dict[str, int] = {self._module.entry: len({event.device for event in run.events})}
        for name, count in events.items():
            computation = self._instructions[name].computation
            if computation != self._module.entry:
                of_computation[computation] = min(count, of_computation.get(computation, count))
        return {name: of_computation[self._instructions[name].computation] for name in events}

    def row(self, key: _Key, seconds: float, executions: Mapping[str, int], limits: Limits) -> ProfileRow:
        ran = [(self._instructions[name], count) for name, count in executions.items() if self.keys.get(name) == key]
        size = sum(count * bytes_of(instruction, self._module) for instruction, count in ran)
        counts = [self._flops_of(instruction) for instruction, _ in ran]
        known = [flops * count for flops, (_, count) in zip(counts, ran, strict=True) if flops is not None]
        flops = sum(known) if len(known) == len(counts) else None
        needed = {"bytes": size / limits.bytes_per_second, "flops": (flops or 0.0) / limits.flops_per_second}
        bound = max(needed, key=lambda limit: needed[limit])
        has_share = needed[bound] > 0 and seconds > 0
        return ProfileRow(
            **dataclasses.asdict(key),
            calls=tuple(self._calls.get(key, ())),
            count=sum(count for _, count in ran),
            seconds=seconds,
            bytes=size,
            at_most=any(instruction.name in self._in_place for instruction, _ in ran),
            flops=flops,
            share=needed[bound] / seconds if has_share else None,
            bound=bound if has_share else "",
        )

    def _flops_of(self, instruction: Instruction) -> float | None:
        name = instruction.name
        return self._flops[name] if name in self._flops else flops_of(instruction, self._module)


def _length(events: Iterable[Event]) -> float:
    """Return for how long at least one of them ran."""
    total, last = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, last))
        last = max(last, event.end)
    return total
