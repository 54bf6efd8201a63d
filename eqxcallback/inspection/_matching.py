"""Match the instructions of a compiled program with its calls."""

import collections
import re
from collections.abc import Hashable, Mapping, Sequence

from ._hlo import Instruction, Module
from ._report import ExternalCall


def match(calls: Sequence[ExternalCall], module: Module) -> Mapping[int, Sequence[Instruction]]:
    """Map the indices of `calls` to their instructions: one, unless XLA has unrolled a loop, and none if XLA has removed it.

    Nothing in the text identifies a call. So those that agree in all that both sides tell, and are equally many, are paired
    in order, then those that agree in less.
    """
    instructions = sorted((instruction for instruction in module if instruction.opcode == "custom-call"), key=_number)
    left = {i: _keys_of_call(call) for i, call in enumerate(calls) if call.target is not None}
    right = {instruction.name: (instruction, _keys_of_instruction(instruction, module)) for instruction in instructions}
    matches: dict[int, Sequence[Instruction]] = {}
    for level in range(_LEVELS):
        ours, theirs = collections.defaultdict(list), collections.defaultdict(list)
        for i, keys in left.items():
            ours[keys[level]].append(i)
        for name, (_, keys) in right.items():
            theirs[keys[level]].append(name)
        for key, indices in ours.items():
            if len(indices) == len(theirs[key]):
                matches.update((i, (right.pop(name)[0],)) for i, name in zip(indices, theirs[key], strict=True))
                for i in indices:
                    del left[i]
    for i, keys in left.items():
        for level in range(_LEVELS):
            alike = [instruction for instruction, its in right.values() if its[level] == keys[level]]
            if alike:
                matches[i] = alike
                break
    return matches


def _number(instruction: Instruction) -> int:
    """XLA numbers instructions in the order of the program, and schedules them in another."""
    digits = instruction.name.rpartition(".")[2]
    return int(digits) if digits.isdigit() else -1


def _keys_of_call(call: ExternalCall) -> Sequence[Hashable]:
    aliases = tuple(sorted((alias.operand, alias.result) for alias in call.in_place))
    operands, results = (tuple(text.partition("[")[2][:-1] for text in of) for of in (call.operands, call.results))
    path = _scopes(call.path)
    return _levels(call.target, aliases, operands, results, path, call.times not in (0, 1))


def _keys_of_instruction(instruction: Instruction, module: Module) -> Sequence[Hashable]:
    pairs = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.rest)
    aliased = re.findall(r"\{(\d*)\}: \((\d+)", pairs[1]) if pairs else []
    aliases = tuple(sorted((int(operand), int(result or 0)) for result, operand in aliased))
    operands, results = module.dims(instruction)
    target = instruction.attribute("custom_call_target")
    path = _scopes(instruction.attribute("op_name"))
    return _levels(target, aliases, operands, results, path, module.is_in_loop(instruction))


# Loops differ where XLA unrolls them, shapes of results where kernels have workspaces, paths where XLA or JAX moves calls.
_LEVELS = 6


def _levels(
    target: Hashable,
    aliases: Hashable,
    operands: tuple[str, ...],
    results: tuple[str, ...],
    path: Hashable,
    in_loop: bool,
) -> Sequence[Hashable]:
    call = target, aliases
    shapes = operands + results
    exact = *call, shapes, path
    return (*exact, in_loop), exact, (*call, shapes), (*call, operands, path), (*call, path), call


# Where JAX's versions differ from each other, and from what we show.
_OURS = ("while", "body", "cond", "closed_call", "eval_jaxpr", "scan", "checkpoint", "rematted_computation")


def _scopes(path: str) -> tuple[str, ...]:
    """Return the scopes of a path, without its end, which is the call itself."""
    scopes = path.replace("while/cond/", "while_cond/").split("/")[:-1]
    scopes = [re.sub(r"^(branch_\d+)_fun$", r"\1", scope) for scope in scopes]
    return tuple(scope for scope in scopes if scope and scope not in _OURS)
