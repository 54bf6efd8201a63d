"""`fuse` and `unfuse`."""

from collections.abc import Sequence
from typing import Any

from jax.tree_util import keystr

from .._adopt import adopt
from ._compare import compared
from ._report import Change, Fused, FusionReport
from ._select import Which, selection
from ._twins import FUSED, PLAIN, reason_to_leave, title
from ._walk import Path, rebuilt


def fuse(
    model: Any,
    *,
    only: Which | Sequence[Which] | None = None,
    exclude: Which | Sequence[Which] | None = None,
    example: Any = None,
    tolerance: float | None = None,
) -> Fused:
    """A model with our layers in place of those of `equinox.nn` that they stand for, and what was done.

    !!! example

        ```python
        model, report = eqxcallback.fuse(model)
        print(report)
        ```

    The layers have the very same arrays, and one that is in several places stays one. The structure, the API and the leaves of
    the model do not change: what was saved of one is loaded into the other. The pair that is returned can also be used as the
    model itself.

    **Arguments:**

    - `model`: a PyTree with layers in it.
    - `only`, `exclude`: which layers: classes, `equinox.nn.Linear` or a user's Module with all that is in it; paths as the
        report has them, with all that is below; functions of path and layer; or a sequence of these.
    - `example`: the arguments of a call, a tuple, or the one argument. Both models are called with it, compiled.
    - `tolerance`: how far each array of the results may differ, relative to its largest value, or to 1 if that is
        smaller. By default 256 times the rounding error of the dtype, 8 times in 16 bits.

    **Returns:** a pair of the model and a report, which is printed as a line for each layer: what stands in its place, or why
    it was left alone.

    **Raises:** `ValueError` if a result of the example differs by more than the tolerance. `TypeError` for an `only` or
    `exclude` that is none of the above.

    A subclass of a layer may do something else, and is left alone. Layers that are not in the PyTree cannot be seen: in static
    fields, and in functions that hold them.
    """
    is_included = selection(only, "only")
    is_excluded = selection(exclude, "exclude")
    changes: list[Change] = []

    def replace(path: Path, node: Any, above: tuple[Any, ...]) -> Any:
        reason = reason_to_leave(node)
        if reason is None:
            return node
        where = keystr(path)
        if not reason and only is not None and not is_included(where, node, above):
            reason = "not in `only`"
        if not reason and exclude is not None and is_excluded(where, node, above):
            reason = "in `exclude`"
        changes.append(Change(where, title(type(node)), None if reason else title(FUSED[type(node)]), reason))
        return node if reason else adopt(FUSED[type(node)], node)

    fused = rebuilt(model, replace)
    error = None if example is None else compared(model, fused, example, tolerance)
    return Fused(fused, FusionReport(tuple(changes), error))


def unfuse(model: Any) -> Any:
    """The model with Equinox's own layers again: what [`eqxcallback.fuse`][] was given, with the arrays that it has now.

    **Arguments:**

    - `model`: of `fuse`, or any other with our layers in place of Equinox's.
    """
    if isinstance(model, Fused):
        model = model.model
    return rebuilt(model, lambda _, node, above: adopt(PLAIN[type(node)], node) if type(node) in PLAIN else node)
