"""How `vmap` calls a kernel: the methods, and what they make of operands and results."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import xla
from . import _axes
from ._axes import Has


METHODS = ("fold", "sequential", "sequential_unrolled", "expand_dims", "broadcast_all")
MODES = ("batched", "either", "shared")

_FORMS = {"fold": _axes.folded, "expand_dims": _axes.expanded, "broadcast_all": _axes.batched}

Batching = str | Mapping[str, str]


def needs_examples(batching: Batching, names: Sequence[str], dims: Sequence[int | None]) -> bool:
    """Whether the kernel is called for each example of an axis."""
    if isinstance(batching, str):
        return batching in ("sequential", "sequential_unrolled")
    return any(batching.get(name) == "shared" and dim is not None for name, dim in zip(names, dims, strict=True))


def each_example(
    batching: Batching,
    bind: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    dims: Sequence[int | None],
    result_avals: Sequence[Any],
    is_python: bool,
) -> tuple[Sequence[Any], Sequence[int]]:
    return xla.batch(
        lambda *args, result_avals: bind(*args),
        args,
        dims,
        vmap_method="sequential_unrolled" if batching == "sequential_unrolled" else "sequential",
        result_avals=result_avals,
        aliased=frozenset(),
        is_python=is_python,
    )


def arrange(
    batching: Batching,
    names: Sequence[str],
    args: Sequence[Any],
    operands: Sequence[Has],
    sizes: Sequence[int],
    aliased: frozenset[int] = frozenset(),
) -> Sequence[Any]:
    """`args` as a kernel takes them.

    - `names`: of the parameters. `""` for what is no parameter, such as a result in a backward kernel.
    - `aliased`: those that a result overwrites, which must have the result's shape.
    """
    if not sizes:
        return args
    if isinstance(batching, str):
        form = _FORMS[batching]
        full = _axes.always_folded if batching == "fold" else _axes.batched
        return [
            (full if i in aliased else form)(arg, has, sizes)
            for i, (arg, has) in enumerate(zip(args, operands, strict=True))
        ]
    wanted = seen(batching, names, operands, sizes, aliased)
    return [_axes.extended(*each, sizes) for each in zip(args, operands, wanted, strict=True)]


def seen(
    batching: Mapping[str, str],
    names: Sequence[str],
    operands: Sequence[Has],
    sizes: Sequence[int],
    aliased: frozenset[int] = frozenset(),
) -> list[Has]:
    """The axes with which a kernel sees each operand, where each parameter has its mode."""
    # The arrays of one argument, a PyTree, go together.
    together: dict[str, Has] = {}
    for name, has in zip(names, operands, strict=True):
        before = together.get(name, (False,) * len(sizes))
        together[name] = tuple(a or b for a, b in zip(before, has, strict=True))
    found = []
    for i, name in enumerate(names):
        if i in aliased or batching.get(name, "batched") == "batched":
            first = 0
        else:
            first = together[name].index(True) if True in together[name] else len(sizes)
        found.append(tuple(axis >= first for axis in range(len(sizes))))
    return found


def leading(batching: Batching, sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes in front of a kernel's result that has them."""
    if batching == "fold" and sizes:
        return (math.prod(sizes),)
    return tuple(sizes)
