"""The in-place callback: a Python function that works on XLA's own buffers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_flatten_with_path, tree_unflatten

from .. import xla
from ..core import (
    Aliases,
    AnyBool,
    Leaf,
    Memo,
    PyTree,
    PyTreeDef,
    ShapeAndDtype,
    callable_name,
    check_aliases,
    check_flags,
    check_runs,
    path_text,
    resolve_aliases,
    root_name,
    signature_of,
    strict_statics,
)
from . import _arguments


_WHO = "eqxcallback.buffer_callback"


def buffer_callback(
    callback: Callable[..., None],
    result_shape_dtypes: PyTree[ShapeAndDtype],
    *,
    has_side_effect: AnyBool = False,
    vmap_method: str | None = None,
    input_output_aliases: Aliases | None = None,
    command_buffer_compatible: AnyBool = False,
) -> Callable[..., PyTree[jax.Array]]:
    """Turn a function that works in place on buffers into a function of JAX arrays.

    !!! example

        ```python
        def add_one(ctx, out, x):
            np.add(x, 1, out=np.asarray(out))

        x = jnp.arange(3.0)
        y = eqxcallback.buffer_callback(add_one, jax.ShapeDtypeStruct.like(x))(x)
        ```

    Nothing is copied: `x` and `out` are the memory of the arrays themselves.

    **Arguments:**

    - `callback`: a function `callback(ctx, out, *args, **kwargs) -> None`. `ctx` is an
        [`eqxcallback.ExecutionContext`][]; `out` is a PyTree like `result_shape_dtypes` of writeable
        [`eqxcallback.Buffer`][]s; the arguments have the trees of the call's, with read-only Buffers as leaves. Buffers
        are dead when the callback returns. The content of `out` is arbitrary before it is written, unless it is
        aliased to an input. On a GPU the callback enqueues its work on `ctx.stream` and does not wait for it.
    - `result_shape_dtypes`: a PyTree whose leaves have `shape` and `dtype`, such as `jax.ShapeDtypeStruct`.
    - `has_side_effect`: whether the callback must run even if its results are unused. Without it XLA may drop a call, merge
        two equal ones, or move one out of a loop; and a callback whose only outputs are empty is not called.
    - `vmap_method`: what the callback sees under `jax.vmap`, as in `jax.pure_callback`: `"sequential"` and
        `"sequential_unrolled"` (one call for each example), `"expand_dims"` (one call; operands have a leading axis, of
        size 1 where they are not mapped), `"broadcast_all"` (one call; all operands have the leading axis), or `None`
        (refuse). An aliased operand always has the full axis. `"legacy_vectorized"` leaves unmapped operands alone.
    - `input_output_aliases`: `{input: output}`: outputs that overwrite an input. Flat indices over the leaves of
        `(args, kwargs)` and of the results, or names: of a parameter, and of a key or field of the results. Both sides
        have the same shape and dtype. XLA copies the input first if anybody else still needs it: no copy is made when it
        is donated to the enclosing `jax.jit`, or made inside of it and used nowhere else.
    - `command_buffer_compatible`: whether, on a GPU, XLA may record what the callback launches and replay it without
        Python. Then the callback may not allocate, synchronise, or depend on data. Ignored on a CPU.

    **Returns:**

    A function of arrays, and PyTrees of arrays, that returns arrays in the tree of `result_shape_dtypes`. It works under
    `jit`, `scan`, `while_loop`, `cond`, `checkpoint` and, with a `vmap_method`, `vmap`. It has no derivative of its own: wrap it
    in `jax.custom_jvp` or `jax.custom_vjp`.

    **Raises:**

    - `TypeError` or `ValueError` here, and when arguments do not fit the declarations.
    - [`eqxcallback.KernelError`][] from a call outside of `jit`, if the callback raises.
    """
    name = _check_callback(callback)
    who = f"{_WHO}({name})"
    result_avals, outputs, out_tree = _check_results(result_shape_dtypes, who)
    if vmap_method is not None and vmap_method not in xla.VMAP_METHODS:
        raise ValueError(f"{who}: expected vmap_method to be one of {xla.VMAP_METHODS} or None; got {vmap_method!r}.")
    check_flags(who, has_side_effect=has_side_effect, command_buffer_compatible=command_buffer_compatible)
    aliases = check_aliases({} if input_output_aliases is None else input_output_aliases, who)
    signature = signature_of(callback)

    # What is checked and made once for each tree of arguments, and for each of their types where aliases depend on them.
    calls: dict[Any, tuple[xla.PythonBody, xla.CallSpec, xla.EagerState]] = Memo()

    def bind(
        args: tuple[PyTree, ...], kwargs: dict[str, PyTree], in_tree: PyTreeDef
    ) -> tuple[xla.PythonBody, xla.CallSpec, xla.EagerState]:
        if signature is not None:
            _arguments.check_signature(signature, args, kwargs, who)
        inputs = _arguments.inputs(signature, args, kwargs) if aliases else ()
        pairs = resolve_aliases(aliases, inputs, outputs, who)
        body = xla.PythonBody(callback, in_tree, out_tree)
        options = xla.CallOptions(pairs, bool(has_side_effect), bool(command_buffer_compatible))
        spec = xla.CallSpec(result_avals, vmap_method, options)
        return body, spec, xla.eager_state(body)

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree[jax.Array]:
        leaves, in_tree = tree_flatten((args, kwargs))
        if not _arguments.are_arrays(leaves):
            _arguments.check_leaves(signature, args, kwargs, who)
        key = (in_tree, strict_statics(in_tree), *(map(jax.typeof, leaves) if aliases else ()))
        bound = calls.get(key)
        if bound is None:
            bound = calls[key] = bind(args, kwargs, in_tree)
        body, spec, _ = bound
        try:
            return tree_unflatten(out_tree, xla.python_call(body, spec, leaves))
        except ValueError as error:
            _arguments.check_places(error, signature, args, kwargs, who)
            raise

    call.__name__ = call.__qualname__ = name
    return call


def _check_callback(callback: object) -> str:
    if not callable(callback):
        raise TypeError(
            f"{_WHO}: expected a function callback(ctx, out, *args) -> None; got {callback!r} of type "
            f"{type(callback).__name__}."
        )
    name = callable_name(callback)
    check_runs(f"{_WHO}({name})", "callback(ctx, out, *args) -> None", callback)
    signature = signature_of(callback)
    if signature is not None:
        try:
            signature.bind_partial(None, None)
        except TypeError as error:
            raise TypeError(
                f"{_WHO}({name}): expected a function that takes (ctx, out, *args); got the signature {signature} ({error})."
            ) from None
    return name


def _check_results(result_shape_dtypes: object, who: str) -> tuple[tuple[Any, ...], Sequence[Leaf], Any]:
    flat, tree = tree_flatten_with_path(result_shape_dtypes)
    avals, leaves = [], []
    for path, leaf in flat:
        text = path_text("result_shape_dtypes", path)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{who}: expected {text} to have `shape` and `dtype`; got {leaf!r} of type {type(leaf).__name__}. Pass a "
                "jax.ShapeDtypeStruct."
            )
        try:
            aval = xla.result_aval(leaf.shape, leaf.dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{who}: expected {text} to have a shape of non-negative integers and the dtype of an array; got shape="
                f"{leaf.shape!r} and dtype={leaf.dtype!r} ({error})."
            ) from None
        avals.append(aval)
        leaves.append(Leaf(text, root_name(path), aval.shape, aval.dtype))
    return tuple(avals), leaves, tree
