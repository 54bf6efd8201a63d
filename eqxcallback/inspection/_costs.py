"""Count what an instruction of a compiled program, or the definition of a call, reads, writes and computes."""

import math
import re
from collections.abc import Iterator
from typing import Any

from .. import xla
from ._hlo import Instruction, Module


# One operation for each element, as XLA counts them. It counts exponentials and the like apart.
_NAMES = """
abs add and ceil clamp compare convert divide floor is-finite maximum minimum multiply negate not or remainder
round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign subtract xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
# Nobody here knows how many operations these do.
_UNKNOWN = ("cholesky", "conditional", "custom-call", "fft", "rng", "sort", "triangular-solve", "while")
# These may touch only a part of their operands, or of what they overwrite.
_PARTIAL = ("dynamic-slice", "dynamic-update-slice", "gather", "scatter", "slice")


def bytes_of(instruction: Instruction, module: Module) -> int:
    """Return the sizes of the operands, each array counted once, and of the results."""
    inside = module.computations[instruction.computation]
    shapes = [inside[name].shape for name in dict.fromkeys(instruction.operands)]
    return sum(
        -(-math.prod(dims) * bits // 8) for shape in (*shapes, instruction.shape) for bits, dims in _arrays(shape)
    )


def is_partial(instruction: Instruction, module: Module) -> bool:
    """True if the instruction may read or write less than `bytes_of` says."""
    inner = [step for name in instruction.called() for step in module.computations[name].values()]
    return any(step.opcode in _PARTIAL for step in (instruction, *inner))


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
