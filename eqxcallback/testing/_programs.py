"""Programs that call every kernel of a subject, by which rows find out what kernels do to memory."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax

from .. import xla
from ..core import Value
from ._findings import NotApplicable, host
from ._operand import on_device
from ._subject import Subject


_SIZE = 3
# Its name, the function, and what makes its arrays, those of the operands first: new ones for each call.
Program = tuple[str, Callable[..., Any], Callable[[], list[Any]]]


def programs(subject: Subject) -> list[Program]:
    """Every kernel there is, forward and backward, and as `vmap` calls them."""

    def mapped() -> list[Any]:
        return [operand.stack([operand.example(number) for number in range(_SIZE)]) for operand in subject.operands]

    every: list[Program] = [
        ("eager", subject.call, subject.arrays),
        ("compiled", subject.jitted, subject.arrays),
    ]
    if subject.operands:
        every.append(("vmap", jax.vmap(subject.call), mapped))
    with contextlib.suppress(NotApplicable):
        subject.need_reverse()
        every += [
            ("gradient", _of_flat(subject, subject.pullback), lambda: [*subject.arrays(), *subject.cotangents()]),
            (
                "vmap of the gradient",
                _of_flat(subject, subject.mapped_pullback),
                lambda: [*mapped(), *(on_device([host(ct)] * _SIZE) for ct in subject.cotangents())],
            ),
        ]
    return every


def few_programs(subject: Subject) -> list[Program]:
    """The same calls of kernels in up to three programs: those that other rows run as well, and one of all others."""
    every = programs(subject)
    alone = [program for program in every if program[0] in ("eager", "gradient")]
    joined = [program for program in every if program not in alone]

    def make() -> list[Any]:
        return [array for _, _, make_some in joined for array in make_some()]

    return [*alone, (", ".join(name for name, _, _ in joined), _joined(subject), make)]


def may_call_kernels(subject: Subject) -> bool:
    """True if any of the programs calls anything but XLA's own code. Tracing tells it: nothing is compiled."""
    return any(
        xla.calls_kernels(jax.make_jaxpr(function)(*make()), jax.default_backend())
        for name, function, make in few_programs(subject)
        if name != "eager"
    )


def _joined(subject: Subject) -> Callable[..., Any]:
    """One program in place of several, which takes the arrays of all of them: it compiles in less time. The subject keeps it, for
    all rows.
    """
    if "joined" in vars(subject):
        return vars(subject)["joined"]
    joined = [
        (function, len(make())) for name, function, make in programs(subject) if name not in ("eager", "gradient")
    ]

    def all_of_them(*arrays: Value) -> list[Any]:
        rest = iter(arrays)
        results = [function(*itertools.islice(rest, count)) for function, count in joined]
        return list(itertools.chain.from_iterable(results))

    vars(subject)["joined"] = jax.jit(all_of_them)
    return vars(subject)["joined"]


def _of_flat(subject: Subject, gradient: Value) -> Any:
    count = len(subject.operands)
    return lambda *arrays: gradient(arrays[:count], arrays[count:])
