"""Find the operands that XLA copies before a kernel overwrites them, and why, in the text of the compiled program."""

import collections
import dataclasses
from collections.abc import Sequence

from ._hlo import Instruction, Module
from ._matching import match
from ._report import Alias, ExternalCall


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
    matches = match(calls, module)
    sharing = collections.Counter(
        instruction.name for instructions in matches.values() for instruction in instructions[:1]
    )

    def with_program(call: ExternalCall, instructions: Sequence[Instruction]) -> ExternalCall:
        if call.target is None:
            return call
        aliases = tuple(_resolved_alias(alias, instructions, module) for alias in call.in_place)
        equal = sharing[instructions[0].name] if instructions else 0
        return dataclasses.replace(call, in_place=aliases, note=_note(call, instructions, equal, module))

    return [with_program(call, matches.get(i, ())) for i, call in enumerate(calls)]


def _note(call: ExternalCall, instructions: Sequence[Instruction], equal: int, module: Module) -> str:
    """Say how the compiled call differs from the call of the program."""
    if not instructions:
        return "XLA has removed this call"
    if equal > len(instructions):
        return f"XLA has merged {equal} equal calls into {len(instructions)}"
    if call.times not in (0, 1) and len(instructions) == 1 and not module.is_in_loop(instructions[0]):
        return "XLA has moved this call out of its loop: it runs once"
    return _types_on_each_device(call, instructions[0], module)


def _types_on_each_device(call: ExternalCall, instruction: Instruction, module: Module) -> str:
    """Return the types that each device has of a partitioned call, whose own types are those of the whole; else `""`."""
    if call.examples != 1:  # its types are those of one example
        return ""
    whole, local = [*call.operands, *call.results], sum(module.dims(instruction), ())
    if len(whole) != len(local):
        return ""
    texts = [f"{text.partition('[')[0]}[{dims}]" for text, dims in zip(whole, local, strict=True)]
    count = len(call.operands)
    return "" if texts == whole else f"on each device ({', '.join(texts[:count])}) -> ({', '.join(texts[count:])})"


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
        following = _producer(_Value(module.root(loop.body), index), module)
        if following.is_copy:
            return "copied", _why(following, module)
        first = _producer(_operand(loop, 0, module, index), module)
        if first.is_copy:
            return "in place", f"copied once, before the loop: {_why(first, module)}"
    return "in place", ""


def _why(copy: _Value, module: Module) -> str:
    """Say why XLA makes a copy."""
    source, is_shared = copy, False
    while source.is_copy:
        value = _operand(source.instruction, 0, module)
        while True:
            is_shared |= _is_shared(value, module)
            if (step := _step(value, module)) is None:
                break
            value = step
        source = value
    if source.instruction.opcode == "constant":
        return "a constant"
    is_argument = source.instruction.opcode == "parameter" and source.instruction.computation == module.entry
    if is_argument and int(source.instruction.operands[0]) not in module.donated:
        return "not donated"
    return "live later" if is_shared else "XLA's choice"


def _is_shared(value: _Value, module: Module) -> bool:
    """True if more than one instruction uses a value."""
    instruction = value.instruction
    inside = module.computations[instruction.computation].values()
    users = [user for user in inside if instruction.name in user.operands and user.opcode != "parameter"]
    if value.path:  # of a tuple: whether anybody else takes the same element, or all of it
        users = [user for user in users if user.opcode != "get-tuple-element" or user.index == value.path[0]]
    return len(users) > 1


def _producer(value: _Value, module: Module) -> _Value:
    """Find what has filled the memory of a value: a copy, a kernel, a parameter of the program or of a loop."""
    while (step := _step(value, module)) is not None:
        value = step
    return value


def _step(value: _Value, module: Module) -> _Value | None:
    """Return the value whose memory `value` shares, or `None` if the memory is its own."""
    instruction, path = value.instruction, value.path
    match instruction.opcode:
        case "bitcast" | "copy-done" | "opt-barrier":
            return _operand(instruction, 0, module, path)
        case "get-tuple-element":
            return _operand(instruction, 0, module, (instruction.index, *path))
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
    """Return the argument that stands for a parameter where its computation is called."""
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
