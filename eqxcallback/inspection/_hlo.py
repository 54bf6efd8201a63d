"""XLA's text of a compiled program, read as far as it tells who produced a value."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Instruction:
    """**Attributes:**

    - `computation`: the one that it is in.
    - `shape`: the type as text.
    - `rest`: the text after the operands; of a parameter, its number is in `operands`.
    """

    name: str
    computation: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool

    def called(self) -> tuple[str, ...]:
        """The computations that it calls with its operands."""
        names = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", self.rest)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        names += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.rest)
        return (*names, *(re.findall(r"%?([\w.\-]+)", branches[1]) if branches else ()))

    @property
    def body(self) -> str:
        """The name of a loop's body."""
        return re.findall(r"body=%?([\w.\-]+)", self.rest)[0]

    @property
    def index(self) -> int:
        """The index of an element that is taken from a tuple."""
        return int(re.findall(r"index=(\d+)", self.rest)[0])

    def attribute(self, name: str) -> str:
        match = re.search(rf'\b{name}="([^"]*)"', self.rest)
        return match[1] if match else ""


class Module:
    """**Attributes:**

    - `computations`: by name, the instructions by name, in the order of the schedule.
    - `entry`: the name of the one that the program is.
    - `donated`: the numbers of its parameters that results may overwrite.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        head = text.partition("\n")[0]
        self.donated = frozenset(
            int(number)
            for field in re.findall(r"(?:input_output_alias|buffer_donor)=\{(.*?) \}", head)
            for number in re.findall(r"\((\d+), \{", field)
        )
        current = ""
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if header and not line.startswith(" "):
                current = header[2]
                self.computations[current] = {}
                self.entry = current if header[1] else self.entry
            elif current and (instruction := _instruction(line, current)) is not None:
                self.computations[current][instruction.name] = instruction

    def __iter__(self) -> Iterator[Instruction]:
        for instructions in self.computations.values():
            yield from instructions.values()

    def root(self, computation: str) -> Instruction:
        return next(instruction for instruction in self.computations[computation].values() if instruction.is_root)

    def dims(self, instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the sizes of its operands, and of its results, as text: `"3,4"`. Tokens, which order calls, have none."""
        inside = self.computations[instruction.computation]
        operands = tuple(dims for name in instruction.operands for dims in _dims(inside[name].shape))
        return operands, _dims(instruction.shape)

    @functools.cached_property
    def callers(self) -> Mapping[str, Instruction]:
        """The instruction that calls each computation. XLA has made each the callee of one instruction."""
        return {called: instruction for instruction in self for called in instruction.called()}

    def is_in_loop(self, instruction: Instruction) -> bool:
        caller = self.callers.get(instruction.computation)
        return caller is not None and (caller.opcode == "while" or self.is_in_loop(caller))


def _dims(shape: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\b(?!token\[)\w+\[([\d,]*)\]", shape))


def _instruction(line: str, computation: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    shape, rest = _type(line[match.end() :])
    opcode, _, rest = rest.partition("(")
    end = _closing(rest)
    operands = rest[:end]
    names = [operands] if opcode == "parameter" else re.findall(r"%([\w.\-]+)", operands)
    return Instruction(match[2], computation, opcode, shape, tuple(names), rest[end + 1 :], bool(match[1]))


def _type(text: str) -> tuple[str, str]:
    """A type, and the text after it."""
    end = _closing(text[1:]) + 2 if text.startswith("(") else text.find(" ")
    return text[:end], text[end:].lstrip()


def _closing(text: str) -> int:
    """Find the closing parenthesis of one that was opened just before `text`."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)
