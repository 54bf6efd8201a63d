"""An op bound to one type of arguments."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.tree_util import tree_flatten_with_path, tree_leaves, tree_unflatten
from jaxtyping import PyTree

from .. import backends, xla
from ..core import (
    Aval,
    Leaf,
    PyTreeDef,
    ShapeAndDtype,
    Value,
    blaming,
    callable_name,
    check_aliases,
    path_text,
    resolve_aliases,
    root_name,
    signature_of,
)
from ..kernel import JaxKernel, Kernel, NativeKernel, NumbaKernel, PythonKernel
from ._axes import Axes
from ._binder import Binder, Slots
from ._bodies import Backward, Forward
from ._bound_op import BoundOp
from ._choice import named_types
from ._forward_call import ForwardCall
from ._jax_functions import jax_backward, jax_forward
from ._options import Options
from ._settings import Settings
from ._sharding import parse_sharding
from ._structure import Structure


@functools.lru_cache(maxsize=512)  # it holds static fields and options, such as a lambda with all that it captures
def bind_op(
    op: Any, in_tree: PyTreeDef, statics: tuple[Any, ...], avals: tuple[Aval, ...], options: Options, settings: Settings
) -> tuple[ForwardCall, Any]:
    """Check and make an op for one type of arguments. This runs once for each type. `statics` are the tree's, for equal trees."""
    who = f"Op({op.name})"
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    args = tree_unflatten(in_tree, structs)
    for (path, _, _), aval in zip(named_operands(op, args), avals, strict=True):
        if not isinstance(aval, ShapedArray):
            raise TypeError(
                f"{who}: expected {path} to be an array; got {aval}. Pass the values of a jax.Ref, {path}[...]: a Layer takes "
                "Refs, an Op does not."
            )
    inputs = _inputs(op, args)
    out_tree, outputs, has_refs = _result_types(op, args, options, settings, who)
    trees = Structure.of_arrays(in_tree), Structure.of_arrays(out_tree)
    # An argument that was not given is absent as well, if that is what it is by default.
    left_out = [(name, None) for name, default in list(op._defaults.items())[len(args) :] if default is None]
    slots = Slots.of([*((path, leaf) for path, _, leaf in named_operands(op, args, with_absent=True)), *left_out])
    names = tuple(leaf.path for leaf in outputs)

    def arguments(types: Sequence[ShapeAndDtype], _: Sequence[object]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        return tree_unflatten(in_tree, types), options.values

    def backward_body(needs_grad: tuple[int, ...], function: Callable[..., Any] = _nothing) -> Backward:
        return Backward(function, *trees, options, trees[1], needs_grad)

    def backward_arguments(needs_grad: tuple[int, ...]) -> Any:
        body = backward_body(needs_grad)
        return lambda types, results: (body.trees(results, types), options.values)

    static = functools.partial(_static, op, options)
    binder = Binder(
        slots, names, names, avals, static=static, arguments=arguments, backward_arguments=backward_arguments
    )

    def forward(kernel: Kernel, position: int) -> backends.BoundKernel:
        body = None
        if isinstance(kernel, PythonKernel):
            _check_body(kernel.body, ("ctx", "out", *args), options, who)
            body = Forward(kernel.body, *trees, options)
        elif isinstance(kernel, JaxKernel):
            body = jax_forward(functools.partial(results, settings.around(kernel.function)), _who(who, kernel))
        aliases = resolve_aliases(check_aliases(kernel.aliases, who), inputs, outputs, who)
        return binder.forward(kernel, position, xla.CallOptions(aliases), body)

    def backward(needs_grad: tuple[int, ...]) -> Mapping[str, tuple[backends.BoundKernel, ...]]:
        return {
            platform: tuple(of(needs_grad, kernel, i) for i, kernel in enumerate(kernels))
            for platform, kernels in op.backward.items()
        }

    def of(needs_grad: tuple[int, ...], kernel: Kernel, position: int) -> backends.BoundKernel:
        body = None
        if isinstance(kernel, PythonKernel):
            _check_body(kernel.body, ("ctx", "grads", "args", "out", "cotangents"), options, who)
            body = backward_body(needs_grad, kernel.body)
        elif isinstance(kernel, JaxKernel):
            call = functools.partial(gradients, settings.around(kernel.function), needs_grad)
            body = jax_backward(call, needs_grad, _who(who, kernel))
        return binder.backward(kernel, position, needs_grad, body)

    def results(function: Callable[..., object], operands: Sequence[Value]) -> Any:
        return function(*tree_unflatten(in_tree, operands), **options.values)

    def gradients(function: Callable[..., object], needs_grad: tuple[int, ...], operands: Sequence[Value]) -> Any:
        numbers, *trees = backward_body(needs_grad).trees(needs_grad, operands)
        return function(*trees, **options.values), numbers

    def flat(function: Callable[..., object], *, may_have_refs: bool) -> Callable[..., Sequence[Value]]:
        def of_arrays(*args: Value) -> Sequence[Value]:
            return tree_leaves(results(function, args))

        return settings.around(xla.without_refs(of_arrays) if may_have_refs else of_arrays)

    def types(structs: Sequence[ShapeAndDtype]) -> tuple[Any, Mapping[str, Any]]:
        return named_types(op._parameters, tree_unflatten(in_tree, structs)), options.values

    kernels = {
        platform: tuple(map(forward, of_platform, range(len(of_platform))))
        for platform, of_platform in op.kernels.items()
    }
    rule = _sharding(op.sharding, args, options, who)
    bound = BoundOp(
        key=(op, in_tree, statics, avals, options, settings),
        name=op.name,
        who=who,
        remedy="Give the Op a reference, or a kernel.",
        label=f"({options!r})" if options.values else "",
        names=tuple(str(leaf.root) for leaf in inputs),
        input_avals=tuple(xla.result_aval(aval.shape, aval.dtype) for aval in avals),
        result_avals=tuple(xla.result_aval(leaf.shape, leaf.dtype) for leaf in outputs),
        forward=kernels,
        backward=functools.cache(backward) if op.backward else None,
        types=types,
        sharding=None if rule is None else parse_sharding(rule, slots.indices, avals, outputs, who),
        reference=None if op.reference is None else flat(op.reference, may_have_refs=has_refs),
        differentiable={
            platform: [
                (bound, flat(bound.kernel.differentiable, may_have_refs=True))
                for bound in of_platform
                if isinstance(bound.kernel, JaxKernel) and bound.kernel.differentiable is not None
            ]
            for platform, of_platform in kernels.items()
        },
        reads_results=_reads_results(op.backward_reads_results, args, options, who),
        ignored=_ignored(op, len(outputs), who),
        batching=op.vmap_method,
        implementation=op.implementation,
    )
    call = ForwardCall(bound, Axes.none(len(avals)))
    call.check_supported()
    return call, out_tree


def _who(who: str, kernel: JaxKernel) -> str:
    return f"{who}: {kernel.name}"


def _static(op: Any, options: Options, kernel: Kernel, others: Mapping[str, object]) -> Mapping[str, Any]:
    """Return what a kernel may take by name: `others`, the options, and the reference's defaults of those that are left out."""
    defaults = op._default_options
    if isinstance(kernel, NumbaKernel):  # it takes all that it is given
        defaults = {name: value for name, value in defaults.items() if name in kernel.names}
    known = {**others, **defaults, **options.values}
    if not isinstance(kernel, NativeKernel):
        return known
    if kernel.attributes is None:
        return options.values
    missing = [name for name in kernel.attributes if name not in known]
    if missing:
        raise TypeError(f"Op({op.name}): the kernel {kernel.symbol} takes the option {missing[0]}; none was given.")
    return {name: known[name] for name in kernel.attributes}


def _reads_results(declared: bool | Callable[..., bool], args: Sequence[Value], options: Options, who: str) -> bool:
    if isinstance(declared, bool):
        return declared
    with _calling(declared, "backward_reads_results", args, options, who):
        return bool(declared(*args, **options.values))


def _ignored(op: Any, num_results: int, who: str) -> Callable[[frozenset[str]], Collection[str | int]]:
    declared: Any = op.backward_ignores
    if not callable(declared):
        op._check_ignored(declared, num_results)
        return lambda wanted: declared

    def ignored(wanted: frozenset[str]) -> Collection[str | int]:
        with blaming(who, "backward_ignores", (wanted,), {}):
            names: Any = declared(wanted)
        op._check_ignored(names, num_results)
        return names

    return ignored


def _sharding(
    declared: str | Callable[..., str | None] | None, args: Sequence[Value], options: Options, who: str
) -> str | None:
    if declared is None or isinstance(declared, str):
        return declared
    with _calling(declared, "sharding", args, options, who):
        rule = declared(*args, **options.values)
    if rule is not None and not isinstance(rule, str):
        raise TypeError(
            f"{who}: expected sharding to return a rule such as '... d, d -> ... d', or None; got {rule!r}."
        )
    return rule


def _result_types(op: Any, args: Any, options: Options, settings: Settings, who: str) -> tuple[Any, list[Leaf], bool]:
    """The tree and the leaves of the results, on which all who define them agree, and whether there are Refs in the reference."""
    types, has_refs = {}, False
    if op.reference is not None:
        with _calling(op.reference, "reference", args, options, who), xla.no_mesh():
            types["the reference"], has_refs = xla.eval_shape(functools.partial(op.reference, **options.values), *args)
    for platform, kernel in op._every_kernel:
        if kernel.out_type is not None:
            with _calling(kernel.out_type, f"out_type for {platform}", args, options, who):
                types[f"the out_type for {platform}"] = kernel.out_type(*args, **options.values)
    leaves = {name: _results(tree, f"{who}: {name}") for name, tree in types.items()}
    for name, got in leaves.items():
        settings.check_widths(got, f"{who}: {name}")
    (first, expected), *rest = leaves.items()
    for name, got in rest:
        if [(leaf.shape, leaf.dtype) for leaf in got] != [(leaf.shape, leaf.dtype) for leaf in expected]:
            raise ValueError(
                f"{who}: expected one type of results from all; {first} has {_text(expected)}, and {name} has {_text(got)}."
            )
    if types[first] is None:
        raise TypeError(f"{who}: {first} returned None; did it forget 'return'? The results of an op are arrays.")
    return jax.tree.structure(types[first]), expected, has_refs


def _inputs(op: Any, args: Sequence[Value]) -> list[Leaf]:
    return [Leaf(path, root, leaf.shape, leaf.dtype) for path, root, leaf in named_operands(op, args)]


def named_operands(op: Any, args: Sequence[Value], with_absent: bool = False) -> Iterator[tuple[str, str, Any]]:
    """The path of each flat operand, the parameter that it belongs to, and itself."""
    is_leaf = _is_absent if with_absent else None
    for i, arg in enumerate(args):
        root = op._parameters[i] if i < len(op._parameters) else f"args[{i}]"
        for path, leaf in tree_flatten_with_path(arg, is_leaf=is_leaf)[0]:
            yield path_text(root, path), root, leaf


def _is_absent(leaf: object) -> bool:
    return leaf is None


def _nothing(*_: object) -> None:
    """Do nothing, in place of a body in Python."""


@contextlib.contextmanager
def _calling(
    function: Callable[..., object], what: str, args: Sequence[Value], options: Options, who: str
) -> Iterator[None]:
    """Blame `function`, which defines an op, for its errors, but the caller for arguments that it does not take."""
    try:
        with blaming(who, what, args, options.values):
            yield
    except TypeError as error:
        problem = _problem(function, args, options)
        if problem is None:
            raise
        raise TypeError(f"{who}: {problem}.") from error


def _check_body(body: Callable[..., object], args: Sequence[object], options: Options, who: str) -> None:
    """Now, for the kernel runs when it is too late for the caller."""
    problem = _problem(body, args, options)
    if problem is not None:
        raise TypeError(f"{who}: expected its kernel {callable_name(body)} to take what it is called with; {problem}.")


def _problem(function: Callable[..., object], args: Sequence[object], options: Options) -> str | None:
    """Why `function` does not take these arguments, or `None`."""
    signature = signature_of(function)
    if signature is None:
        return None
    try:
        signature.bind(*args, **options.values)
    except TypeError as error:
        return f"{error}; its arguments are {signature.replace(return_annotation=inspect.Signature.empty)}"
    return None


def _results(tree: PyTree, who: str) -> list[Leaf]:
    leaves = []
    for path, leaf in tree_flatten_with_path(tree)[0]:
        text = path_text("result", path)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{who} has {text} = {leaf!r} of type {type(leaf).__name__}; expected `shape` and `dtype`, as of a "
                "jax.ShapeDtypeStruct."
            )
        leaves.append(Leaf(text, root_name(path), tuple(leaf.shape), leaf.dtype))
    return leaves


def _text(leaves: Sequence[Leaf]) -> str:
    return ", ".join(map(str, leaves)) or "none"
