"""The ways in which `vmap` calls a kernel: the methods, and what they make of operands and results.

One method may be stated for all operands, or one for each parameter. The axes that `vmap` adds are in front of an operand:

| method | an operand that is mapped | an operand that is not |
| --- | --- | --- |
| `"fold"`, of all | all axes in one, tiled over those of others | its own shape |
| `"fold"`, of one | the axes from the outermost one that maps it inwards | its own shape |
| `"broadcast_all"` | all axes | all axes: it is tiled |
| `"expand_dims"` | all axes, of size 1 where it is not mapped | all axes, of size 1 |
| `"sequential"`, `"sequential_unrolled"` | the kernel is called for each example | its own shape |
| `"threads"`, of all | the same in one call, which XLA's threads share | its own shape |
| `"reference"` | the op's reference, which JAX maps, takes the place of the kernel | its own shape |

Where none is stated it is `"sequential"`, which is right for a kernel that knows of one example alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import xla
from ..core import Aval, Size, Value, callable_name
from ..kernel import Kernel, NativeKernel, PythonKernel
from . import _axes
from ._axes import Has


REFERENCE = "reference"
_LOOPS = ("sequential", "sequential_unrolled")
OF_EACH = ("fold", *_LOOPS, "expand_dims", "broadcast_all", REFERENCE)
METHODS = (*OF_EACH, "threads")
# These make one axis of all, in front.
_FOLDED = ("fold", "threads")


class Unstated(str):
    """The method where none is stated. It equals the text, and a hint tells it from one that somebody chose."""


DEFAULT_METHOD = Unstated("sequential")

Batching = str | Mapping[str, str]
Form = Has | None  # the axes that an operand should have; `None`: all, of size 1 where it has none


def method_of(batching: Batching, name: str) -> str:
    """Return the method of an operand of the parameter `name`; `""` is a result, or its cotangent, which has all axes."""
    if isinstance(batching, str):
        return batching
    return batching.get(name, "sequential") if name else "broadcast_all"


def why_no_threads(platform: str, kernel: Any) -> str | None:
    """Why XLA's threads cannot call a kernel for examples, or `None`. All that is not a kernel is a function in Python."""
    if not isinstance(kernel, Kernel) or isinstance(kernel, PythonKernel):
        name = callable_name(kernel.body if isinstance(kernel, PythonKernel) else kernel)
        return (
            f'expected kernels without Python for vmap_method="threads", in C, C++ or Numba; got {name} for {platform}, which '
            'holds Python\'s lock. Use "sequential", or "fold" if it takes a leading axis.'
        )
    if isinstance(kernel, NativeKernel) and kernel.library is None and kernel.source is None:
        return (
            f'expected kernels of yours for vmap_method="threads"; got {kernel.symbol} for {platform}, which divides a batch '
            "itself. Use another vmap_method."
        )
    return None


def is_stated(batching: Batching) -> bool:
    return not isinstance(batching, Unstated)


def is_of_one(batching: Batching, name: str) -> bool:
    """True if a kernel takes an operand of the parameter `name` for one example alone."""
    return method_of(batching, name) in (*_LOOPS, REFERENCE)


def looping_method(
    batching: Batching, names: Sequence[str], dims: Sequence[int | None], *, needs_kernel: bool
) -> str | None:
    """Return the method by which the kernel is called for each example of an axis, or `None`. A kernel that somebody chose is, in
    place of the reference.
    """
    mapped = {method_of(batching, name) for name, dim in zip(names, dims, strict=True) if dim is not None}
    if needs_kernel and REFERENCE in mapped:
        mapped.add("sequential")
    return max(mapped.intersection(_LOOPS), default=None)


def each_example(
    method: str,
    bind: Callable[..., Sequence[Value]],
    args: Sequence[Value],
    dims: Sequence[int | None],
    result_avals: Sequence[Aval],
    is_python: bool,
) -> tuple[Sequence[Value], Sequence[int]]:
    return xla.batch(
        lambda *args, result_avals: bind(*args),
        args,
        dims,
        vmap_method=method,
        result_avals=result_avals,
        aliased=frozenset(),
        is_python=is_python,
    )


def arrange(
    batching: Batching,
    names: Sequence[str],
    args: Sequence[Value],
    operands: Sequence[Has],
    sizes: Sequence[Size],
    aliased: frozenset[int] = frozenset(),
) -> Sequence[Value]:
    """`args` as a kernel takes them.

    - `names`: the parameters of the operands.
    - `operands`: the axes of those of `sizes` that each one has.
    - `aliased`: the operands that a result overwrites, which must have the result's shape.
    """
    if not sizes:
        return args
    if batching in _FOLDED:
        folds = [i in aliased or True in has for i, has in enumerate(operands)]
        pairs = zip(args, operands, strict=True)
        return [_axes.folded(*pair, sizes) if fold else pair[0] for fold, pair in zip(folds, pairs, strict=True)]
    forms = seen(batching, names, operands, sizes, aliased)
    return [_axes.extended(*triple, sizes) for triple in zip(args, operands, forms, strict=True)]


def arranged_shapes(
    batching: Batching,
    names: Sequence[str],
    shapes: Sequence[Sequence[Size]],
    operands: Sequence[Has],
    sizes: Sequence[Size],
    aliased: frozenset[int],
) -> list[tuple[Size, ...]]:
    """The shapes of what a kernel sees of operands whose examples have these shapes."""
    if batching == "threads":
        return [tuple(shape) for shape in shapes]
    if batching == "fold":
        folded = (math.prod(sizes),) if sizes else ()
        fronts = [folded if i in aliased or True in has else () for i, has in enumerate(operands)]
    else:
        forms = seen(batching, names, operands, sizes, aliased)
        fronts = [_axes.front(sizes, *pair) for pair in zip(operands, forms, strict=True)]
    return [(*front, *shape) for front, shape in zip(fronts, shapes, strict=True)]


def seen(
    batching: Batching,
    names: Sequence[str],
    operands: Sequence[Has],
    sizes: Sequence[Size],
    aliased: frozenset[int] = frozenset(),
) -> list[Form]:
    """The axes with which a kernel sees each operand, where they are not folded into one."""
    every, none = (True,) * len(sizes), (False,) * len(sizes)
    # The arrays of one argument, a PyTree, go together.
    together: dict[str, Has] = {}
    for name, has in zip(names, operands, strict=True):
        together[name] = tuple(map(max, together.get(name, none), has))
    forms = []
    for i, name in enumerate(names):
        method = method_of(batching, name)
        if i in aliased or method == "broadcast_all":
            forms.append(every)
        elif method == "expand_dims":
            forms.append(None)
        else:
            first = together[name].index(True) if True in together[name] else len(sizes)
            forms.append((*none[:first], *every[first:]))
    return forms


def leading(batching: Batching, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """The axes in front of a kernel's result that has them."""
    if batching in _FOLDED and sizes:
        return (math.prod(sizes),)
    return tuple(sizes)


def run_examples(
    lowering: xla.Lowering,
    run: xla.Run,
    args: Sequence[Value],
    operands: Sequence[Has],
    sizes: Sequence[Size],
    avals: Sequence[Aval],
) -> Sequence[Value]:
    """The results, of types `avals`, of a kernel that sees one example, each by itself: with one axis of all in front.

    XLA's threads share them, where the kernel is one that its threads may call. Else one is called after the other.
    """
    aliased = frozenset(i for i, _ in lowering.options.aliases)
    mapped = [i in aliased or True in has for i, has in enumerate(operands)]
    folded = arrange("threads", (), args, operands, sizes, aliased)
    if lowering.on_threads:
        front = leading("threads", sizes)
        result_avals = [aval.update(shape=(*front, *aval.shape)) for aval in avals]
        return run(*folded, result_avals=result_avals, mapped=mapped)
    dims = [0 if is_mapped else None for is_mapped in mapped]
    return each_example("sequential", lambda *one: run(*one, result_avals=avals), folded, dims, avals, False)[0]
