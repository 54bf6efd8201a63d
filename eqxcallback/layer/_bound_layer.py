"""A layer for one type of arguments: checked and made once, and shared by all instances that differ in arrays alone."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path, tree_leaves

from .. import backends, xla
from ..core import (
    Aval,
    Leaf,
    PyTree,
    ShapeAndDtype,
    Value,
    check_alias_pairs,
    check_aliases,
    path_text,
    ref_text,
    resolve_aliases,
    root_name,
    type_text,
)
from ..kernel import JaxKernel, Kernel, PythonKernel, as_tuple
from ..transform import (
    Axes,
    Binder,
    BoundOp,
    ForwardCall,
    Options,
    Settings,
    Slots,
    Structure,
    called_with_a_buffer,
    is_array,
    jax_backward,
    jax_forward,
    named_types,
    parse_sharding,
)
from . import _declarations as declarations, _results as results, _rules as rules, _statics as statics
from ._bodies import KernelForward, LayerBackward, LayerForward
from ._declarations import LayerClass
from ._poison import Poisoning
from ._refs import WithRefs


@dataclasses.dataclass(frozen=True, eq=False)
class BoundLayer:
    """**Attributes:**

    - `call`: what the primitive calls.
    - `outputs`: the tree of what callers get.
    - `input_keys`, `output_keys`: flat indices of typed PRNG keys, which kernels take as the words that they are made of, and
        their implementations.
    """

    call: ForwardCall
    outputs: Structure
    num_results: int
    input_keys: dict[int, str]
    output_keys: dict[int, str]


@functools.lru_cache(maxsize=512)  # it holds static arguments, such as a lambda with all that it captures
def bind_layer(
    cls: LayerClass, inputs: Structure, avals: tuple[Aval, ...], refs: tuple[int, ...], settings: Settings
) -> BoundLayer:
    """**Arguments:** `inputs` is the structure of `(layer, args, kwargs)`, `avals` are the types of its arrays, of which
    `refs` are changed in place: what becomes of them are results after those of the layer."""
    name = cls.__qualname__
    if any(aval.dtype == jax.dtypes.float0 for aval in avals):
        raise TypeError(
            f"{name}: expected arrays; got one of float0, which is the tangent of integers and has no memory."
        )
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    layer, args, kwargs = inputs.build(types)
    _check_no_buffers(cls, layer, args, kwargs)
    outputs, result_types, has_refs = results.result_types(cls, inputs, types, refs, settings)
    num_results = len(result_types)
    if not (result_types or refs or layer.has_side_effect):
        results.check_computes(cls, args, outputs.build(()))
    residuals, residual_types = results.structure_of(
        None
        if (residual_type := declarations.method(cls, "residual_type")) is None
        else residual_type(layer, *args, **kwargs),
        f"{name}.residual_type",
    )
    settings.check_widths(residual_types, f"{name}.residual_type")
    kernel_outputs = outputs if residual_type is None else results.pair(outputs, residuals)

    input_keys, input_avals = _as_words(avals)
    output_keys, result_avals = _as_words([*result_types, *(types[i] for i in refs), *residual_types])
    leaves_in, leaves_out = (
        _leaves(cls, layer, args, kwargs, types),
        _named("result", outputs.build(result_types), set(map(id, result_types))),
    )
    num_own = sum(1 for leaf in leaves_in if str(leaf.root).startswith("self."))
    pairs = _alias_pairs(cls.input_output_aliases, leaves_in, num_own, leaves_out, name)
    ref_pairs = tuple((i, num_results + k) for k, i in enumerate(refs))

    def static(kernel: Any, others: Mapping[str, object]) -> dict[str, Any]:
        return statics.of(kernel, others, layer, args, kwargs)

    order = declarations.in_order(cls, kwargs)
    no_options = Options({}, name)

    def backward_body(needs_grad: tuple[int, ...], function: Callable[..., None] = _nothing) -> LayerBackward:
        return LayerBackward(function, inputs, kernel_outputs, no_options, outputs, needs_grad, name, keywords=order)

    def with_errors(body: Callable[..., None]) -> Callable[..., None]:
        return Poisoning(body) if layer.on_error == "poison" else body

    def backward_arguments(needs_grad: tuple[int, ...]) -> Any:
        body = backward_body(needs_grad)
        return lambda operands, results: (body.arguments(results, operands), {})

    functions = rules.Functions(cls, inputs, outputs, input_keys, output_keys, tuple(result_types), order, refs)
    reference = xla.without_refs(functions.reference) if has_refs else functions.reference

    def jax_name(kernel: JaxKernel) -> str:
        return f"Layer {name}: {kernel.name}"

    paths = tuple(leaf.path for leaf in leaves_out)
    binder = Binder(
        Slots.of(_with_absent(cls, layer, args, kwargs, types)),
        (*paths, *("a ref",) * len(refs), *("a residual",) * len(residual_types)),
        paths,
        input_avals,
        static,
        functools.partial(_arguments, inputs),
        backward_arguments,
    )

    def forward(kernel: Kernel | Callable[..., None], position: int) -> backends.BoundKernel:
        if isinstance(kernel, JaxKernel):
            call = functools.partial(functions.kernel, settings.around(kernel.function))
            return binder.forward(kernel, position, xla.CallOptions(), jax_forward(call, jax_name(kernel)))
        alias_pairs, body = pairs, None
        if isinstance(kernel, Kernel) and kernel.aliases:
            alias_pairs = _alias_pairs(kernel.aliases, leaves_in, num_own, leaves_out, name)
        if isinstance(kernel, PythonKernel):
            body = KernelForward(kernel.body, inputs, kernel_outputs, no_options, name)
        elif not isinstance(kernel, Kernel):
            body = LayerForward(kernel, inputs, kernel_outputs, no_options, name)
            kernel = PythonKernel(kernel, command_buffer_compatible=layer.command_buffer_compatible)
        if body is not None:
            body = with_errors(WithRefs(body, refs, num_results) if refs else body)
        options = xla.CallOptions(
            tuple(sorted(alias_pairs + ref_pairs)),
            layer.has_side_effect,
            input_layouts=_layouts(layer.input_layouts, input_avals, num_own, f"{name}.input_layouts"),
            output_layouts=_layouts(layer.output_layouts, result_avals, 0, f"{name}.output_layouts"),
        )
        return binder.forward(kernel, position, options, body)

    def backward_kernel(kernel: Kernel, position: int, needs_grad: tuple[int, ...]) -> backends.BoundKernel:
        if not isinstance(kernel, JaxKernel):
            return binder.backward(kernel, position, needs_grad, None)
        function = settings.around(kernel.function)
        call = functools.partial(functions.backward_kernel, function, backward_body(needs_grad), needs_grad)
        body = jax_backward(call, needs_grad, jax_name(kernel))
        return binder.backward(kernel, position, needs_grad, body)

    def backward(needs_grad: tuple[int, ...]) -> dict[str, tuple[backends.BoundKernel, ...]]:
        method = declarations.method(cls, "backward")
        by_platform = {
            platform: tuple(backward_kernel(declared, i, needs_grad) for i, declared in enumerate(as_tuple(kernels)))
            for platform, kernels in layer.backward_kernels.items()
        }
        if method is not None:
            kernel = PythonKernel(method, command_buffer_compatible=layer.command_buffer_compatible)
            in_python = binder.backward(kernel, "backward", needs_grad, with_errors(backward_body(needs_grad, method)))
            for platform in declarations.kernels_of(cls):
                if platform in xla.PYTHON_PLATFORMS:
                    by_platform[platform] = (*by_platform.get(platform, ()), in_python)
        return by_platform

    def supports_types(structs: Sequence[ShapeAndDtype]) -> tuple[Any, Mapping[str, Any]]:
        self_types, args, kwargs = inputs.build(structs)
        return named_types(("self", *declarations.names_of(cls, len(args))), (self_types, *args)), kwargs

    has_backward = not refs and (declarations.method(cls, "backward") or cls.backward_kernels)
    bound = BoundOp(
        key=(
            cls,
            inputs,
            avals,
            refs,
            kernel_outputs,
            tuple((aval.shape, aval.dtype) for aval in result_avals),
            settings,
        ),
        name=name,
        who=f"Layer {name}",
        remedy=f"Define {_remedy(refs, has_backward)} in the layer.",
        names=tuple(str(leaf.root) for leaf in leaves_in),
        input_avals=input_avals,
        result_avals=result_avals,
        forward={
            platform: tuple(map(forward, kernels, range(len(kernels))))
            for platform, kernels in declarations.kernels_of(cls).items()
        },
        backward=functools.cache(backward) if has_backward else None,
        types=supports_types,
        reference=None if declarations.method(cls, "reference") is None else settings.around(reference),
        jvp=None
        if refs or declarations.method(cls, "jvp") is None
        else settings.around(xla.without_refs(functions.jvp)),
        batch=None if refs or declarations.method(cls, "batch") is None else settings.around(functions.batch),
        batching=layer.vmap_method,
        sharding=None
        if layer.sharding is None
        else parse_sharding(layer.sharding, binder.slots.indices, input_avals, result_avals, f"Layer {name}"),
        num_residuals=len(residual_types),
        has_side_effect=layer.has_side_effect,
    )
    visible_keys = {i: impl for i, impl in output_keys.items() if i < num_results}
    return BoundLayer(ForwardCall(bound, Axes.none(len(avals))), outputs, num_results, input_keys, visible_keys)


def _remedy(refs: Sequence[int], has_backward: object) -> str:
    """Name the methods that a layer without derivatives lacks. With Refs, neither `backward` nor `jvp` is used."""
    if refs:
        return "`reference` (pure JAX)"
    return "`reference` or `jvp` (pure JAX)" if has_backward else "`backward` (a kernel) or `reference` (pure JAX)"


def _as_words(avals: Sequence[Aval]) -> tuple[dict[int, str], tuple[Any, ...]]:
    """The typed PRNG keys among `avals`, and the types with the words in place of keys."""
    keys, words = {}, []
    for i, aval in enumerate(avals):
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):

            def words_of(key: jax.Array, i: int = i) -> jax.Array:
                keys[i] = str(jax.random.key_impl(key))
                return jax.random.key_data(key)

            aval = jax.eval_shape(words_of, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        words.append(xla.result_aval(aval.shape, aval.dtype))
    return keys, tuple(words)


def _leaves(
    cls: type, layer: PyTree, args: Sequence[Value], kwargs: dict[str, PyTree], types: Sequence[ShapeAndDtype]
) -> list[Leaf]:
    """The flat operands, which are the leaves `types`, with the names that `input_output_aliases` has for them."""
    arrays = set(map(id, types))
    leaves = []
    for path, leaf in tree_flatten_with_path(layer)[0]:
        if id(leaf) in arrays:
            root = f"self.{root_name(path)}"
            leaves.append(Leaf(path_text("self", path), root, leaf.shape, leaf.dtype))
    named = zip(declarations.names_of(cls, len(args)), args, strict=True)
    for name, arg in [*named, *sorted(kwargs.items())]:
        leaves.extend(_named(name, arg, arrays, name))
    return leaves


def _with_absent(
    cls: type, layer: PyTree, args: Sequence[Value], kwargs: dict[str, PyTree], types: Sequence[ShapeAndDtype]
) -> list[tuple[str, Any]]:
    """The paths of the flat operands, and of what is absent: `None`, in the layer or among the arguments."""
    arrays = set(map(id, types))
    named = zip(declarations.names_of(cls, len(args)), args, strict=True)
    return [
        (path_text(root, path), leaf)
        for root, tree in [("self", layer), *named, *sorted(kwargs.items())]
        for path, leaf in tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]
        if leaf is None or id(leaf) in arrays
    ]


def _check_no_buffers(cls: type, layer: PyTree, args: Sequence[Value], kwargs: dict[str, PyTree]) -> None:
    """A kernel has Buffers in place of arrays, and they would be static here."""
    buffers = [leaf for leaf in tree_leaves((layer, args, kwargs)) if isinstance(leaf, xla.Buffer)]
    if buffers:
        path = _leaves(cls, layer, args, kwargs, buffers)[0].path
        raise called_with_a_buffer(cls.__qualname__, path, "the kernel of a layer, self.inner.kernel(ctx, out, x)")


def check_no_views(layer: PyTree, args: Sequence[Value], kwargs: dict[str, PyTree]) -> None:
    """Raise `TypeError` for a view of a Ref, which JAX has no type for."""
    views = [leaf for leaf in tree_leaves((layer, args, kwargs)) if ref_text(leaf) and not is_array(leaf)]
    if views:
        cls = type(layer)
        raise TypeError(
            f"{cls.__qualname__}: expected {_leaves(cls, layer, args, kwargs, views)[0].path} to be an array or a whole "
            f"jax.Ref; got {ref_text(views[0])}. Pass the Ref, or the values there, ref[...]."
        )


def named_arrays(layer: PyTree, args: Sequence[Value], kwargs: dict[str, PyTree]) -> list[tuple[str, Any]]:
    """The arrays of a call, which are its flat operands, with their paths."""
    arrays = [leaf for leaf in tree_leaves((layer, args, kwargs)) if is_array(leaf)]
    leaves = _leaves(type(layer), layer, args, kwargs, arrays)
    return [(leaf.path, array) for leaf, array in zip(leaves, arrays, strict=True)]


def _named(text: str, tree: PyTree, arrays: set[int], root: str | None = None) -> list[Leaf]:
    return [
        Leaf(path_text(text, path), root_name(path) if root is None else root, leaf.shape, leaf.dtype)
        for path, leaf in tree_flatten_with_path(tree)[0]
        if id(leaf) in arrays
    ]


def _alias_pairs(
    declared: object,
    inputs: Sequence[Leaf],
    num_own: int,
    outputs: Sequence[Leaf],
    who: str,
) -> tuple[tuple[int, int], ...]:
    declared = check_aliases(declared, who)
    # Flat indices count the call's arguments: the layer's own arrays are not overwritten by accident.
    named = {key: value for key, value in declared.items() if isinstance(key, str)}
    counted = {key: value for key, value in declared.items() if not isinstance(key, str)}
    pairs = resolve_aliases(counted, inputs[num_own:], outputs, who)
    pairs = tuple((i + num_own, o) for i, o in pairs) + resolve_aliases(named, inputs, outputs, who)
    check_alias_pairs(pairs, inputs, outputs, who)
    return tuple(sorted(pairs))


def _nothing(*_: object) -> None:
    """Do nothing, in place of a method where a kernel takes it."""


def _arguments(
    inputs: Structure, operands: Sequence[Aval], results: Sequence[Aval]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return the arguments that the functions of a kernel are called with, as types."""
    del results
    layer, args, kwargs = inputs.build(operands)
    return (layer, *args), kwargs


def _layouts(layouts: Any, avals: Sequence[Aval], num_own: int, who: str) -> tuple[Any, ...] | None:
    """Return the layouts of all arrays; the declared ones come after the layer's `num_own`."""
    if layouts is None:
        return None
    declared = [None if layout is None else tuple(layout) for layout in layouts]
    full = (*(None,) * num_own, *declared, *(None,) * (len(avals) - num_own - len(declared)))
    if len(full) > len(avals):
        raise ValueError(f"{who}: expected a layout for each of {len(avals) - num_own} arrays; got {len(declared)}.")
    for layout, aval in zip(full, avals, strict=True):
        if layout is not None and sorted(layout) != list(range(aval.ndim)):
            raise ValueError(
                f"{who}: expected the axes of {type_text(aval.dtype, aval.shape)} from major to minor, each once; got {layout}."
            )
    return full
