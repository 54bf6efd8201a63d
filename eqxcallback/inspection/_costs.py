"""Count what an instruction of a compiled program, or the definition of a call, reads, writes and computes."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .. import xla
from ._hlo import Instruction, Module


# One operation for each element, as XLA counts them. It counts exponentials and the like apart.
_NAMES = """
abs add and ceil clamp compare convert divide floor is-finite maximum minimum multiply negate not or remainder
round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign subtract xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_PRODUCT = xla.CPU_OPS["matrix_product"]
# Nobody here knows how many operations these do.
_UNKNOWN = ("cholesky", "conditional", "custom-call", "fft", "rng", "sort", "triangular-solve", "while")
# These read as much of their first operand as they return.
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATE = "dynamic-update-slice"


def bytes_of(instruction: Instruction, module: Module) -> int:
    """Return how much an instruction reads and writes: its operands, each array counted once, and its results.

    Of an array that is only sliced, or updated in place, it is the slice.
    """
    inside = module.computations[instruction.computation]
    steps = inside
    names = {name: [name] for name in instruction.operands}
    users, results = [instruction], [instruction]
    if instruction.opcode == "fusion":
        steps = module.computations[instruction.called()[0]]
        parameters = {int(step.operands[0]): step.name for step in steps.values() if step.opcode == "parameter"}
        names = {name: [] for name in instruction.operands}
        for number, name in enumerate(instruction.operands):
            names[name].append(parameters[number])
        root = module.root(instruction.called()[0])
        users = [step for step in steps.values() if step.opcode != "parameter"]
        results = [steps[name] for name in root.operands] if root.opcode == "tuple" else [root]
    read = (max(_read(steps[inner], users) for inner in inners) for inners in names.values())
    written = (_size(steps[step.operands[1]] if step.opcode == _UPDATE else step) for step in results)
    return sum(read) + sum(written)


def _read(array: Instruction, users: Sequence[Instruction]) -> int:
    """Return how much of an array its users read."""
    uses = [(user, i) for user in users for i, name in enumerate(user.operands) if name == array.name]
    parts = [_part(user) for user, i in uses if i == 0 and user.opcode in (*_SLICES, _UPDATE)]
    return min(_size(array), sum(parts)) if len(parts) == len(uses) else _size(array)


def _part(user: Instruction) -> int:
    return 0 if user.opcode == _UPDATE else _size(user)


def _size(instruction: Instruction) -> int:
    return sum(-(-math.prod(dims) * bits // 8) for bits, dims in _arrays(instruction.shape))


def kind_of(instruction: Instruction, module: Module) -> str:
    """Return the opcode; of a fusion that of a product in it; and the target of a custom call."""
    match instruction.opcode:
        case "custom-call":
            return instruction.attribute("custom_call_target") or instruction.opcode
        case "fusion":
            inner = {step.opcode for step in module.computations[instruction.called()[0]].values()}
            return next((opcode for opcode in ("convolution", "dot") if opcode in inner), instruction.opcode)
        case opcode:
            return opcode


def is_native(instruction: Instruction) -> bool:
    """Return true for a product that is this package's own kernel, which no external call of the program stands for."""
    return instruction.attribute("custom_call_target") == _PRODUCT


def flops_of(instruction: Instruction, module: Module) -> float | None:
    """Count the operations of floating point and of integers as XLA does, or return `None` where nobody knows."""
    inside = module.computations[instruction.computation]

    def elements(name: str = "") -> int:
        shape = inside[name].shape if name else instruction.shape
        return next((math.prod(dims) for _, dims in _arrays(shape)), 0)

    def dims(name: str) -> tuple[int, ...]:
        return next(dims for _, dims in _arrays(inside[name].shape))

    match instruction.opcode:
        case "fusion" | "call" | "map":
            return _sum(instruction.called()[0], module)
        case "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
            lhs, axes = dims(instruction.operands[0]), re.findall(r"\d+", contracted[1] if contracted else "")
            return 2.0 * elements() * math.prod(lhs[int(axis)] for axis in axes)
        case "convolution":  # padding counts as if it were multiplied
            labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
            kernel = dims(instruction.operands[1])
            return None if labels is None else 2.0 * elements() * math.prod(kernel) / kernel[labels[1].index("o")]
        case "custom-call" if is_native(instruction):
            examples, rows, _ = next(dims for _, dims in _arrays(instruction.shape))
            return 2.0 * elements() * elements(instruction.operands[0]) / max(examples * rows, 1)
        case "reduce":
            combine = _sum(instruction.called()[0], module)
            return None if combine is None else combine * (elements(instruction.operands[0]) - elements())
        case opcode if opcode in _UNKNOWN:
            return None
        case opcode:
            return float(elements()) if opcode in _ELEMENTWISE else 0.0


def flops_of_reference(site: xla.CallSite) -> float | None:
    """Count the operations of a call's reference, or return `None` where there is none, or nobody knows."""
    call: Any = site.params.get("call")
    if site.primitive != "op" or call.bound.reference is None:
        return None
    return xla.count_operations(call.reference, site.operands)


def _sum(computation: str, module: Module) -> float | None:
    counts = [flops_of(step, module) for step in module.computations[computation].values()]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _arrays(shape: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The arrays of a type as text: the bits of an element, which its name has, and the sizes of the axes. Tokens have none."""
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)
        size = int(bits[0]) if bits else {"pred": 8}.get(dtype, 0)
        yield size, tuple(map(int, filter(None, dims.split(","))))
