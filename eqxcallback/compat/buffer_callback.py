"""A module to import in place of `jax.experimental.buffer_callback`.

The same as [`eqxcallback.buffer_callback`][], but for what JAX's own tests pin: on a CPU, `ctx.stream` raises.
"""

from collections.abc import Callable

import jax
from jax.errors import JaxRuntimeError

from .. import _ext
from .._ext import Buffer as Buffer, ExecutionStage as ExecutionStage
from ..callback import buffer_callback as _buffer_callback
from ..core import Aliases, AnyBool, OwnCallable, PyTree, ShapeAndDtype, identity, signature_of


class ExecutionContext:
    """The context of a call, for its callback: `stage`, and on a GPU XLA's `stream`."""

    def __init__(self, ctx: _ext.ExecutionContext):
        self._ctx = ctx

    @property
    def stage(self) -> ExecutionStage:
        return self._ctx.stage

    @property
    def stream(self) -> int:
        stream = self._ctx.stream
        if stream is None:
            raise JaxRuntimeError("UNIMPLEMENTED: XLA FFI GPU context is not available: this call runs on a CPU.")
        return stream


class _WithCompatContext(OwnCallable):
    """Has the name, the signature and the identity of the callback."""

    def __init__(self, callback: Callable[..., None]):
        self.callback = callback
        if (signature := signature_of(callback)) is not None:
            self.__signature__ = signature

    def __reduce__(self) -> tuple[type["_WithCompatContext"], tuple[Callable[..., None]]]:
        # Without the signature: annotations may have no name to be pickled by.
        return _WithCompatContext, (self.callback,)

    def _named_like(self) -> Callable[..., None]:
        return self.callback

    def _identity(self) -> object:
        return _WithCompatContext, identity(self.callback)

    def __call__(self, ctx: _ext.ExecutionContext, out: PyTree, *args: PyTree, **kwargs: PyTree) -> None:
        return self.callback(ExecutionContext(ctx), out, *args, **kwargs)


def buffer_callback(
    callback: Callable[..., None],
    result_shape_dtypes: PyTree[ShapeAndDtype],
    *,
    has_side_effect: AnyBool = False,
    vmap_method: str | None = None,
    input_output_aliases: Aliases | None = None,
    command_buffer_compatible: AnyBool = False,
) -> Callable[..., PyTree[jax.Array]]:
    """Make a callback as `jax.experimental.buffer_callback.buffer_callback` does; see [`eqxcallback.buffer_callback`][]."""
    return _buffer_callback(
        _WithCompatContext(callback) if callable(callback) else callback,
        result_shape_dtypes,
        has_side_effect=has_side_effect,
        vmap_method=vmap_method,
        input_output_aliases=input_output_aliases,
        command_buffer_compatible=command_buffer_compatible,
    )
