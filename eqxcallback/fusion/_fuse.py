"""`fuse` and `unfuse`."""

import dataclasses
import functools
import reprlib
from collections.abc import Sequence

import jax

from ..core import PyTree, callable_name
from ..nn._adopt import adopt
from ._compare import compared
from ._packages import of_packages
from ._parameters import of_model, of_module
from ._platform import checked, reason_to_leave as no_kernel
from ._report import Change, Fused, FusionReport
from ._rules import FuseRule, Given, replacements, sequence
from ._select import Selection, Which
from ._twins import PLAIN, reason_to_leave, title
from ._walk import Place, rebuilt


def fuse(
    model: PyTree,
    *,
    only: Which | Sequence[Which] | None = None,
    exclude: Which | Sequence[Which] | None = None,
    rules: Given = None,
    example: PyTree = None,
    tolerance: float | None = None,
    platform: str | None = None,
) -> Fused:
    """Put our layers in the place of those of `equinox.nn` in a model, and report what was done.

    !!! example

        ```python
        model, report = eqxcallback.fuse(model)
        print(report)
        ```

    The layers have the very same arrays, and one that is in several places stays one. The structure, the API and the leaves of
    the model do not change: what was saved of one is loaded into the other. The pair that is returned can also be used as the
    model itself.

    **Arguments:**

    - `model`: a PyTree with layers in it: a model, the state of its optimizer, or both.
    - `only`, `exclude`: which layers: classes, `equinox.nn.Linear` or a user's Module with all that is in it; paths as the
        report has them, with all that is below, where `[*]` is any index; functions of path and layer; or a sequence of these.
        A layer in several places is replaced if one of them is in `only`, and left alone if one is in `exclude`.
    - `rules`: what stands for other classes, or in place of our choice: [`eqxcallback.FuseRule`][]s, which `unfuse` undoes, and
        which share the layers' arrays; or `{class: function}`, from a layer of just this class to any other in its place, or to a
        text that says why it is left alone. They go before those that installed packages register, which go before ours.
    - `example`: the arguments of a call, a tuple, or the one argument. Both models are called with it, compiled.
    - `tolerance`: how far each array of the results may differ, relative to its largest value, or to 1 if that is
        smaller. By default 256 times the rounding error of the dtype, 8 times in 16 bits.
    - `platform`: where the model is to run: `"cpu"`, `"gpu"` or another name of JAX's, by default `jax.default_backend()`. Where
        no kernel would run a layer, Equinox's stays, which is as fast or faster: on a platform that there are no kernels for,
        and with weights that are not f32, bf16 or f16. `rules`, yours and those of packages, are followed in any case.

    **Returns:** a pair of the model and a report, which is printed: what stands in the place of each layer; and why every other
    Module with parameters of its own was left alone, with its share of them.

    **Raises:** `ValueError` if a result of the example differs by more than the tolerance, for an `only` that matches no layer,
    for a path that does not exist, and for a rule that fails. `TypeError` for an `only`, an `exclude`, `rules` or a `platform`
    that is none of the above, and for a `model` in which there can be no layer: a class, a function, `None` or a number. A model
    may have functions and `None` in it.

    A subclass of a layer may do something else, and is left alone. Layers that are not in the PyTree cannot be seen: in static
    fields, and in functions that hold them.
    """
    _check_model(model)
    included = None if only is None else Selection(only, "only")
    excluded = None if exclude is None else Selection(exclude, "exclude")
    where_it_runs = checked(platform)
    twins = replacements(rules, of_packages())
    fused_already = {*PLAIN, *(twin.rule.by for twin in twins.values() if twin.rule is not None)}
    used: dict[FuseRule, None] = {}
    changes: list[Change] = []
    paths: list[str] = []

    def why_not(node: PyTree, places: Sequence[Place]) -> str | None:
        """`""` for a layer that is replaced, and `None` for what has no line in the report."""
        reason = reason_to_leave(node, twins, fused_already)
        if reason or type(node) not in {*twins, *fused_already}:
            return reason
        if included is not None and included.place_of(node, places) is None:  # it may mean one that is ours already
            reason = "not in `only`"
        elif excluded is not None and (place := excluded.place_of(node, places)) is not None:
            reason = "in `exclude`" + ("" if place is places[0] else f", as {place.path}")
        elif type(node) in twins and not twins[type(node)].whose:
            reason = no_kernel(node, where_it_runs)
        else:
            reason = ""
        return reason if type(node) in twins else None

    def replace(node: PyTree, places: Sequence[Place]) -> PyTree:
        where = places[0].path
        paths.extend(place.path for place in places)
        reason = why_not(node, places)
        if reason is None:
            return node
        if reason:
            changes.append(Change(where, title(type(node)), None, reason, of_module(node)))
            return node
        twin = twins[type(node)]
        new = twin(node, where)
        if isinstance(new, str) or new is node:
            reason = new if isinstance(new, str) else "its rule leaves it"
            changes.append(Change(where, title(type(node)), None, reason, of_module(node), twin.whose))
            return node
        if twin.rule is not None:
            used[twin.rule] = None
        changes.append(Change(where, title(type(node)), title(type(new)), "", of_module(node), twin.whose))
        return new

    fused = rebuilt(model, replace)
    layers = [change.path for change in changes]
    if excluded is not None:
        excluded.check_paths(paths, layers)
    if included is not None:
        included.check_paths(paths, layers)
        included.check_matched(layers)
    report = FusionReport(tuple(changes), None, of_model(model), tuple(used))
    if example is not None:
        report = dataclasses.replace(report, error=compared(model, fused, example, tolerance, report.by_rules))
    return Fused(fused, report)


def _check_model(model: PyTree) -> None:
    if model is not None and not jax.tree_util.all_leaves([model]):
        return
    got = f"got {reprlib.repr(model)} of type {type(model).__name__}, which has no parts."
    if isinstance(model, type):
        got = f"got a class, {title(model)}. Make an instance."
    elif callable(model):
        got = f"got the function {callable_name(model)}, which hides its layers. Pass the model that it calls."
    raise TypeError(f"fuse: expected a model, a PyTree with layers in it; {got}")


def unfuse(model: PyTree, *, rules: Given = None) -> PyTree:
    """The model with the layers that [`eqxcallback.fuse`][] replaced again, and with the arrays that it has now.

    **Arguments:**

    - `model`: the pair that `fuse` returned, its model, or any other with our layers in place of Equinox's.
    - `rules`: the rules that `fuse` was given. The pair has them itself, and rules of packages are known. Layers that functions
        of a mapping have made stay.
    """
    backs = {ours: functools.partial(adopt, theirs) for ours, theirs in PLAIN.items()}
    others = [rule for _, rule in of_packages()] + list(sequence(rules))
    if isinstance(model, Fused):
        model, others = model.model, others + list(model.report.rules)
    backs |= {rule.by: rule.undone for rule in others}

    def replace(node: PyTree, places: Sequence[Place]) -> PyTree:
        del places
        return backs[type(node)](node) if type(node) in backs else node

    return rebuilt(model, replace)
