"""A call of a function on the host, with results."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from .. import _ext, xla
from ..core import AnyBool, Aval, OwnCallable, PyTree, PyTreeDef, callable_name, check_flags, identity, type_text
from ._functions import check_function
from ._host import copy_from_host, copy_to_host, device_of
from ._leaves import Leaves


_WHO = "eqxcallback.debug.call"

# With jax_enable_x64 off, NumPy's own 64-bit results are what JAX makes of them.
_NARROWER = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


class HostFunction(OwnCallable):
    """A function as the callback of the python lane. Hashable, and equal for those that do the same."""

    def __init__(
        self,
        fn: Callable[..., PyTree],
        leaves: Leaves,
        paths: Sequence[str],
        tree: PyTreeDef,
        with_device: bool,
    ):
        self.fn = fn
        self.leaves = leaves
        self.paths = tuple(paths)
        self.tree = tree
        self.with_device = with_device
        self.narrows = not jax.config.read("jax_enable_x64")

    def _named_like(self) -> Callable[..., PyTree]:
        return self.fn

    def _identity(self) -> object:
        parts = (self.leaves, self.paths, self.tree, self.with_device, self.narrows)
        return HostFunction, identity(self.fn), parts

    def _refusal(self, what: str) -> Exception:
        name = callable_name(self.fn)
        if what == "vmap":
            return NotImplementedError(
                f"{_WHO}({name}): batching rules are implemented only for id_tap, not for call. Map it with `jax.lax.map`, give "
                "the call a rule with `jax.custom_batching.custom_vmap`, or use `eqxcallback.buffer_callback` with a vmap_method."
            )
        return NotImplementedError(
            f"{_WHO}({name}): {what} rule is implemented only for id_tap, not for call. Wrap the call in `jax.custom_jvp` or "
            "`jax.custom_vjp`."
        )

    def __call__(self, ctx: _ext.ExecutionContext, out: PyTree, *buffers: _ext.Buffer) -> None:
        arrays = [copy_to_host(ctx, buffer) for buffer in buffers]
        x = self.leaves.from_kernel(arrays, range(len(arrays)))
        device = {"device": device_of(ctx.platform, ctx.device_ordinal)} if self.with_device else {}
        lent = jax.tree.leaves(out)
        for buffer, result in zip(lent, self.results(self.fn(x, **device), lent), strict=True):
            copy_from_host(ctx, buffer, result)

    def results(self, returned: PyTree, lent: Sequence[_ext.Buffer]) -> list[np.ndarray]:
        """The flat results, if they are what was declared. Their shapes are those of the memory that is lent for them: a program
        that was exported for many sizes has declared symbols."""
        name = callable_name(self.fn)
        flat, tree = jax.tree.flatten(returned)
        if tree != self.tree:
            raise TypeError(
                f"Callback func {name} should have returned a result with pytree {self.tree} but returned {tree}."
            )
        results = []
        for path, buffer, value in zip(self.paths, lent, flat, strict=True):
            array = np.asarray(value)
            if self.narrows and _NARROWER.get(array.dtype.name) == buffer.dtype.name:
                wide, array = array, array.astype(buffer.dtype)
                if array.dtype.kind in "iu" and (array != wide).any():
                    raise OverflowError(
                        f"Callback func {name} returned {reprlib.repr(value)} at result{path}, which {array.dtype} does not "
                        "hold. Enable 64 bits (jax_enable_x64), or return less."
                    )
            if array.shape != buffer.shape or array.dtype != buffer.dtype:
                raise TypeError(
                    f"Callback func {name} should have returned a result with abstract values "
                    f"{type_text(buffer.dtype, buffer.shape)} at result{path} but returned "
                    f"{type_text(array.dtype, array.shape)}."
                )
            results.append(array)
        return results


def call(
    fn: Callable[..., PyTree],
    x: PyTree,
    *,
    result_shape: PyTree,
    with_device: AnyBool = False,
    ordered: AnyBool = False,
) -> PyTree[jax.Array]:
    """Call `fn(x)` on the host, and go on with what it returns.

    !!! example

        ```python
        def eigenvalues(m):
            return np.linalg.eigvals(m).astype(np.complex64)

        like = jax.ShapeDtypeStruct(m.shape[:-1], jnp.complex64)
        w = eqxcallback.debug.call(eigenvalues, m, result_shape=like)
        ```

    Everything is copied, in and out: [`eqxcallback.buffer_callback`][] works in place. The call is made even if nobody uses the
    result. In a program of several devices each one calls `fn`, with all of `x`; inside `shard_map` with its own part.

    **Arguments:**

    - `fn`: a function. `x` has NumPy arrays in place of JAX's, as in [`eqxcallback.debug.tap`][].
    - `x`: a PyTree of arrays and numbers.
    - `result_shape`: a PyTree like the results, whose leaves are arrays, numbers, or have `shape` and `dtype`; `()` or `None`
        for no results.
    - `with_device`: whether to call `fn(x, device=device)`, with the `jax.Device` that waits.
    - `ordered`: whether the call is made in the order of the program, between the taps and calls with `ordered=True` before and
        after it, also those of other programs that the same thread starts. In a program of several devices, each has an order
        of its own.

    **Returns:** arrays in the tree of `result_shape`.

    It has no derivative and no `vmap` of its own: `jax.custom_jvp`, `jax.custom_vjp` and `jax.custom_batching.custom_vmap` give
    it one.

    **Raises:**

    - `TypeError` or `ValueError` for wrong arguments, naming the leaf.
    - [`eqxcallback.KernelError`][] from a call outside of `jit`, and JAX's own error under it, if `fn` raises, or returns
        another tree, shape or dtype than declared.
    """
    check_flags(_WHO, with_device=with_device, ordered=ordered)
    check_function(_WHO, fn, ("x",), with_device)
    leaves, arrays = Leaves.of(x, _WHO)
    flat, tree = tree_flatten_with_path(result_shape)
    avals = [_result_aval(keystr(path), leaf) for path, leaf in flat]
    function = HostFunction(fn, leaves, [keystr(path) for path, _ in flat], tree, bool(with_device))
    in_tree = jax.tree.structure(((0,) * len(arrays), {}))
    spec = xla.CallSpec(tuple(avals), None, xla.CallOptions(has_side_effect=True), ordered=bool(ordered))
    outs = xla.python_call(xla.PythonBody(function, in_tree, tree), spec, arrays)
    return jax.tree.unflatten(tree, outs)


def _result_aval(path: str, leaf: Any) -> Aval:
    try:
        is_struct = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        like = leaf if is_struct else jax.typeof(leaf)
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
            raise TypeError("a function on the host returns no typed keys, but their words")
        return xla.result_aval(like.shape, jax.dtypes.canonicalize_dtype(like.dtype))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{_WHO}: result_shape should be a pytree of values with structure matching the expected result of the callback "
            "function. The values must be either numeric scalars, or must have 'shape' and 'dtype' attributes. Got "
            f"{reprlib.repr(leaf)} at result_shape{path} ({error})."
        ) from None
