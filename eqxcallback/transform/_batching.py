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
| `"threads"`, of one | the same, of the axes that it has; of the others it says nothing | its own shape |
| `"reference"` | the op's reference, which JAX maps, takes the place of the kernel | its own shape |

Where none is stated it is `"sequential"`, which is right for a kernel that knows of one example alone.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import xla
from ..core import Aval, Size, Value, callable_name
from ..kernel import Kernel, PythonKernel
from . import _axes
from ._axes import Has


REFERENCE = "reference"
_LOOPS = ("sequential", "sequential_unrolled")
METHODS = ("fold", *_LOOPS, "expand_dims", "broadcast_all", REFERENCE, "threads")


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
    if isinstance(kernel, PythonKernel) and kernel.only_if_chosen:  # by somebody who knows that it is Python
        return None
    if not isinstance(kernel, Kernel) or isinstance(kernel, PythonKernel):
        name = callable_name(kernel.body if isinstance(kernel, PythonKernel) else kernel)
        return (
            f'expected kernels without Python for vmap_method="threads", in C, C++ or Numba; got {name} for {platform}, which '
            'holds Python\'s lock. Use "sequential", or "fold" if it takes a leading axis.'
        )
    return None


def uses_threads(batching: Batching) -> bool:
    return "threads" in ([batching] if isinstance(batching, str) else batching.values())


def is_stated(batching: Batching) -> bool:
    return not isinstance(batching, Unstated)


def is_of_one(batching: Batching, name: str) -> bool:
    """True if a kernel takes an operand of the parameter `name` for one example alone."""
    return method_of(batching, name) in (*_LOOPS, REFERENCE)


def looping_method(
    batching: Batching, names: Sequence[str], dims: Sequence[int | None], *, needs_kernel: bool, is_python: bool
) -> str | None:
    """Return the method by which the kernel is called for each example of an axis, or `None`. A kernel that somebody chose is, in
    place of the reference; and one in Python, in place of threads.
    """
    mapped = {method_of(batching, name) for name, dim in zip(names, dims, strict=True) if dim is not None}
    if (needs_kernel and REFERENCE in mapped) or (is_python and "threads" in mapped):
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


def of_threads(batching: Batching, names: Sequence[str], operands: Sequence[Has], sizes: Sequence[Size]) -> Has:
    """Tell which axes are those of the examples that XLA's threads share. The kernel sees the others."""
    if isinstance(batching, str):
        return (batching == "threads",) * len(sizes)
    shared = [has for name, has in zip(names, operands, strict=True) if method_of(batching, name) == "threads"]
    return tuple(any(has[i] for has in shared) for i in range(len(sizes)))


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel, and what `vmap` makes of it.

    **Attributes:**

    - `names`: the parameters of the operands.
    - `operands`: the axes of those of `sizes` that each one has.
    - `aliased`: the operands that a result overwrites, which must have the result's shape.
    """

    lowering: xla.Lowering
    run: xla.Run
    batching: Batching
    names: Sequence[str]
    operands: Sequence[Has]
    sizes: Sequence[Size]
    aliased: frozenset[int] = frozenset()

    def results(
        self, args: Sequence[Value], avals: Sequence[Aval], given: Sequence[Has], shared: Has
    ) -> Sequence[Value]:
        """**Arguments:**

        - `avals`: the types of the results of one example.
        - `given`: the axes that the kernel gives each of them, all that are `shared` among them.
        - `shared`: the axes of threads.
        """
        if not self.sizes:
            return self.run(*args, result_avals=avals)
        if True in shared:
            return self._of_examples(args, avals, given, shared)
        fronts = [_axes.present(self.sizes, has) for has in given]
        if self.batching == "fold":
            fronts = [(math.prod(front),) if front else () for front in fronts]
        outs = self.run(*self._arranged(args), result_avals=_in_front(fronts, avals))
        results = zip(outs, given, avals, strict=True)
        return [out.reshape(*_axes.present(self.sizes, has), *aval.shape) for out, has, aval in results]

    def _arranged(self, args: Sequence[Value]) -> Sequence[Value]:
        """`args` as the kernel takes them."""
        if self.batching == "fold":
            folds = [i in self.aliased or True in has for i, has in enumerate(self.operands)]
            each = zip(args, self.operands, folds, strict=True)
            return [_axes.folded(arg, has, self.sizes) if fold else arg for arg, has, fold in each]
        forms = seen(self.batching, self.names, self.operands, self.sizes, self.aliased)
        return [_axes.extended(*each, self.sizes) for each in zip(args, self.operands, forms, strict=True)]

    def _of_examples(
        self, args: Sequence[Value], avals: Sequence[Aval], given: Sequence[Has], shared: Has
    ) -> Sequence[Value]:
        """XLA's threads share the examples, where the kernel is one that they may call. Else they are called one by one."""
        order = sorted(range(len(shared)), key=lambda i: not shared[i])  # the shared axes go in front
        sizes, count = [self.sizes[i] for i in order], sum(shared)
        args = [_axes.reordered(arg, has, order) for arg, has in zip(args, self.operands, strict=True)]
        operands = [tuple(has[i] for i in order) for has in self.operands]
        examples, inner = math.prod(sizes[:count]), sizes[count:]

        overwritten = frozenset(i for i, _ in self.lowering.options.aliases)
        mapped = [i in overwritten or True in has[:count] for i, has in enumerate(operands)]
        forms = seen(self.batching, self.names, [has[count:] for has in operands], inner, self.aliased)
        each = zip(args, operands, mapped, forms, strict=True)
        args = [_axes.of_examples(*of_one, count, sizes) for of_one in each]
        fronts = [_axes.present(inner, [has[i] for i in order[count:]]) for has in given]
        one = _in_front(fronts, avals)
        if self.lowering.on_threads:
            outs = self.run(*args, result_avals=_in_front([(examples,)] * len(one), one), mapped=mapped)
        else:
            dims = [0 if is_mapped else None for is_mapped in mapped]
            outs, _ = each_example(
                "sequential", lambda *args: self.run(*args, result_avals=one), args, dims, one, False
            )
        whole = [out.reshape(*sizes[:count], *aval.shape) for out, aval in zip(outs, one, strict=True)]
        return [_axes.restored(out, has, order) for out, has in zip(whole, given, strict=True)]


def _in_front(fronts: Sequence[Sequence[Size]], avals: Sequence[Aval]) -> Sequence[Aval]:
    return [aval.update(shape=(*front, *aval.shape)) for front, aval in zip(fronts, avals, strict=True)]


def arranged_shapes(
    batching: Batching,
    names: Sequence[str],
    shapes: Sequence[Sequence[Size]],
    operands: Sequence[Has],
    sizes: Sequence[Size],
    aliased: frozenset[int],
) -> list[tuple[Size, ...]]:
    """The shapes of what a kernel sees of operands whose examples have these shapes."""
    if batching == "fold":
        folded = (math.prod(sizes),) if sizes else ()
        fronts = [folded if i in aliased or True in has else () for i, has in enumerate(operands)]
    else:
        within = _axes.absent(of_threads(batching, names, operands, sizes))
        inner, sizes = [_axes.present(has, within) for has in operands], _axes.present(sizes, within)
        forms = seen(batching, names, inner, sizes, aliased)
        fronts = [_axes.front(sizes, *pair) for pair in zip(inner, forms, strict=True)]
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
