"""Taps: the identity, which hands what passes to a function of the user's."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

from .. import _ext, xla
from ..core import AnyBool, AnyInt, OwnCallable, PyTree, callable_name, check_flags, identity
from ._deliveries import deliveries
from ._functions import check_function
from ._host import copy_to_host, device_of
from ._leaves import Leaves


Mode = Literal["sync", "async"]


class Receiver(OwnCallable):
    """A function that taps call, and how. Hashable, and equal for those that do the same."""

    def __init__(self, fn: Callable[..., object], leaves: Leaves, with_device: bool, mode: Mode):
        self.fn = fn
        self.leaves = leaves
        self.with_device = with_device
        self.mode = mode

    def _named_like(self) -> Callable[..., object]:
        return self.fn

    def _identity(self) -> object:
        return Receiver, identity(self.fn), self.leaves, self.with_device, self.mode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receiver) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return callable_name(self.fn)

    def receive(
        self,
        ctx: _ext.ExecutionContext,
        buffers: Sequence[_ext.Buffer],
        leaves: Sequence[int],
        transforms: Sequence[tuple[object, ...]],
    ) -> None:
        device = {"device": device_of(ctx.platform, ctx.device_ordinal)} if self.with_device else {}

        def copy() -> PyTree:
            return self.leaves.from_kernel([copy_to_host(ctx, buffer) for buffer in buffers], leaves)

        def call(x: PyTree) -> None:
            self.fn(x, tuple(map(_described, transforms)), **device)

        if self.mode == "sync":
            deliveries().call_now(repr(self), lambda: call(copy()))
            return
        x = copy()
        deliveries().call_later(repr(self), lambda: call(x), sum(buffer.nbytes for buffer in buffers))


def _described(transform: tuple[Any, ...]) -> tuple[str, dict[str, Any]]:
    name, *axes = transform
    return name, {"batch_dims": axes[0]} if axes else {}


def tap(
    fn: Callable[..., object],
    x: PyTree,
    *,
    result: PyTree = None,
    with_device: AnyBool = False,
    device_index: AnyInt | None = None,
    ordered: AnyBool = False,
    mode: Mode = "sync",
) -> PyTree:
    """The identity, which calls `fn(x, transforms)` whenever `x` has been computed.

    !!! example

        ```python
        def show(x, transforms):
            print(x.mean(), transforms)

        y = eqxcallback.debug.tap(show, layer(x))
        ```

    It is never dropped, also when its result is not used. Under `jit` the program copies nothing for it.

    **Arguments:**

    - `fn`: a function. `x` has NumPy arrays in place of JAX's, which are `fn`'s own to keep. Those of typed PRNG keys are their
        words, with the implementation in `dtype.metadata["prng_impl"]`. `transforms` is a tuple of what happened to the tap,
        the innermost first: `("batch", {"batch_dims": (0, None, ...)})` for each `vmap`, with the mapped axis of each leaf of
        `x`, and `("transpose", {})` where `x` was a tangent and this is its cotangent. What `fn` returns is ignored.
    - `x`: a PyTree of arrays and numbers.
    - `result`: what to return in place of `x`. `fn` does not see it.
    - `with_device`: whether to call `fn(x, transforms, device=device)`, with the `jax.Device` that has computed `x`.
    - `device_index`: in a program of several devices, `None` calls `fn` for each of them, with its part of `x`. With a number
        that device gathers `x`, and calls `fn` once. Inside `shard_map` it calls `fn` with its own part.
    - `ordered`: whether taps with it are called in the order of the program, also those of one program after those of another
        that the same thread started before. In a program of several devices, device 0 then calls `fn` with all of `x` if
        `device_index` says nothing else; inside `shard_map` each device has an order of its own.
    - `mode`: `"sync"` calls `fn` while the program waits. `"async"` copies into a queue and goes on; a thread calls `fn`. If
        more than 256 MB are queued, or `EQXCALLBACK_TAP_QUEUE_BYTES`, the program waits.

    **Returns:** `x`, or `result`.

    Under `vmap` there is one call, with all examples. Under `grad` and `jvp`, values are tapped once, and nothing else;
    what `jax.checkpoint` computes again is tapped again. For derivatives see [`eqxcallback.debug.tap_tangents`][] and
    [`eqxcallback.debug.tap_cotangents`][].

    **Raises:** `TypeError` for a leaf that is not an array or a number, and for wrong options. What `fn` raises is logged on the
    logger `eqxcallback` and kept for [`eqxcallback.debug.barrier_wait`][]; the program goes on.
    """
    options = (with_device, device_index, ordered, mode)
    tapped = tap_leaves("tap", "values", fn, x, *options)
    return tapped if result is None else result


def tap_tangents(
    fn: Callable[..., object],
    x: PyTree,
    *,
    with_device: AnyBool = False,
    device_index: AnyInt | None = None,
    ordered: AnyBool = False,
    mode: Mode = "sync",
) -> PyTree:
    """The identity, which calls `fn(tangents, transforms)` with the tangents of `x` under forward-mode differentiation.

    `transforms` has `("jvp", {})`. The tangents are in the tree of `x`, `None` for leaves that have none, as integers. In
    reverse mode there are no tangents. The arguments are those of [`eqxcallback.debug.tap`][].
    """
    return tap_leaves("tap_tangents", "tangents", fn, x, with_device, device_index, ordered, mode)


def tap_cotangents(
    fn: Callable[..., object],
    x: PyTree,
    *,
    with_device: AnyBool = False,
    device_index: AnyInt | None = None,
    ordered: AnyBool = False,
    mode: Mode = "sync",
) -> PyTree:
    """The identity, which calls `fn(cotangents, transforms)` with the cotangents of `x` under reverse-mode differentiation.

    They are those of what it returns: go on with that. `transforms` has `("transpose", {})`. The cotangents are in the tree of
    `x`, `None` for leaves by which nothing is differentiated. The arguments are those of [`eqxcallback.debug.tap`][].
    """
    return tap_leaves("tap_cotangents", "cotangents", fn, x, with_device, device_index, ordered, mode)


def tap_leaves(
    name: str,
    of: str,
    fn: Callable[..., object],
    x: PyTree,
    with_device: AnyBool,
    device_index: AnyInt | None,
    ordered: AnyBool,
    mode: Mode,
) -> PyTree:
    who = f"eqxcallback.debug.{name}"
    check_flags(who, with_device=with_device, ordered=ordered)
    check_function(who, fn, ("x", "transforms"), with_device)
    if mode not in ("sync", "async"):
        raise ValueError(f'{who}: expected mode to be "sync" or "async"; got {mode!r}.')
    leaves, arrays = Leaves.of(x, who)
    receiver = Receiver(fn, leaves, bool(with_device), mode)
    operands = tuple(range(len(arrays)))
    outs = xla.tap(xla.Tap(receiver, of, operands, _index(device_index, who), bool(ordered)), arrays)
    return leaves.from_program(outs)


def _index(device_index: AnyInt | None, who: str) -> int | None:
    if device_index is None:
        return None
    try:
        index = operator.index(device_index)
    except TypeError:
        index = -1
    if index < 0 or isinstance(device_index, bool):
        raise ValueError(
            f"{who}: expected device_index to be None or the number of a device of the program; got {device_index!r}."
        )
    return index
