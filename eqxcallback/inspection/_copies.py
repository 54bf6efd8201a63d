"""Which operands XLA copies before a kernel overwrites them, and why, read from the text of the compiled program."""

import dataclasses
import re
from collections.abc import Sequence

from ._hlo import Instruction, Module
from ._matching import match
from ._report import Alias, ExternalCall


_NOT_FOUND = "XLA has removed this call, or merged it with an equal one"


@dataclasses.dataclass(frozen=True)
class _Value:
    """An element of the value of an instruction: `path` are the indices into nested tuples."""

    instruction: Instruction
    path: tuple[int, ...] = ()

    @property
    def is_copy(self) -> bool:
        return self.instruction.opcode in ("copy", "copy-start")


def resolved(calls: Sequence[ExternalCall], text: str) -> list[ExternalCall]:
    """`calls` with what the compiled program says of them."""
    module = Module(text)
    found = match(calls, module)
    return [call if call.target is None else _resolved(call, found.get(i, ()), module) for i, call in enumerate(calls)]


def _resolved(call: ExternalCall, instructions: Sequence[Instruction], module: Module) -> ExternalCall:
    aliases = tuple(_resolved_alias(alias, instructions, module) for alias in call.in_place)
    return dataclasses.replace(call, in_place=aliases, note="" if instructions else _NOT_FOUND)


def _resolved_alias(alias: Alias, instructions: Sequence[Instruction], module: Module) -> Alias:
    if not instructions:
        return dataclasses.replace(alias, reason="")
    states = [_state(_operand(instruction, alias.operand, module), module) for instruction in instructions]
    copied = [reason for state, reason in states if state == "copied"]
    if not copied:
        return dataclasses.replace(alias, state="in place", reason=states[0][1])
    # XLA unrolls loops: one call of the program may be several of the compiled one.
    places = "" if len(copied) == len(states) else f", at {len(copied)} of {len(states)} places"
    return dataclasses.replace(alias, state="copied", reason=copied[0] + places)


def _state(value: _Value, module: Module) -> tuple[str, str]:
    made = _producer(value, module)
    if made.is_copy:
        return "copied", _why(made, module)
    loop = module.callers.get(made.instruction.computation)
    if made.instruction.opcode == "parameter" and loop is not None and loop.opcode == "while" and made.path:
        index = made.path[:1]
        if _producer(_Value(module.root(loop.body), index), module).is_copy:
            return "copied", "live later"
        first = _producer(_operand(loop, 0, module, index), module)
        if first.is_copy:
            return "in place", f"copied once, before the loop: {_why(first, module)}"
    return "in place", ""


def _why(copy: _Value, module: Module) -> str:
    """Of a copy."""
    source = copy
    while source.is_copy:
        source = _producer(_operand(source.instruction, 0, module), module)
    if source.instruction.opcode == "constant":
        return "a constant"
    is_argument = source.instruction.opcode == "parameter" and source.instruction.computation == module.entry
    if is_argument and int(source.instruction.operands[0]) not in module.donated:
        return "not donated"
    return "live later"


def _producer(value: _Value, module: Module) -> _Value:
    """What has filled the memory of a value: a copy, a kernel, a parameter of the program or of a loop."""
    while (step := _step(value, module)) is not None:
        value = step
    return value


def _step(value: _Value, module: Module) -> _Value | None:
    """What `value` is the same memory as; `None` if that is itself."""
    instruction, path = value.instruction, value.path
    match instruction.opcode:
        case "bitcast" | "copy-done" | "opt-barrier":
            return _operand(instruction, 0, module, path)
        case "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.rest)
            assert index is not None
            return _operand(instruction, 0, module, (int(index[1]), *path))
        case "tuple" if path:
            return _operand(instruction, path[0], module, path[1:])
        case "fusion" | "call":
            return _Value(module.root(instruction.called()[0]), path)
        case "parameter" if instruction.computation != module.entry:
            return _argument(value, module)
        case "copy":
            return _copied_inside(value, module)
    return None


def _argument(value: _Value, module: Module) -> _Value | None:
    """What a computation is called with, for a parameter of it."""
    instruction = value.instruction
    caller = module.callers.get(instruction.computation)
    if caller is None or caller.opcode not in ("fusion", "call", "conditional"):
        return None
    number = int(instruction.operands[0])
    if caller.opcode == "conditional":  # its first operand chooses, the others are one for each branch
        number = 1 + caller.called().index(instruction.computation)
    return _operand(caller, number, module, value.path)


def _copied_inside(value: _Value, module: Module) -> _Value | None:
    """A fusion that copies what it has made itself makes only one of the two."""
    computation = value.instruction.computation
    caller = module.callers.get(computation)
    if caller is None or caller.opcode != "fusion":
        return None
    source = _producer(_operand(value.instruction, 0, module), module)
    return source if source.instruction.computation == computation else None


def _operand(instruction: Instruction, index: int, module: Module, path: tuple[int, ...] = ()) -> _Value:
    return _Value(module.computations[instruction.computation][instruction.operands[index]], path)
