"""A kernel in Python that works in place on XLA's buffers."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ._checks import check_function, frozen_mapping, hash_of
from ._contract import Aliases, KernelContract


@dataclasses.dataclass(frozen=True)
class PythonKernel(KernelContract):
    """A function `body(ctx, out, *args, **options) -> None` that writes its results into `out`.

    !!! example

        ```python
        def saxpy(ctx, out, x, y, *, a):
            np.multiply(x, a, out=np.asarray(out))
            np.asarray(out)[...] += y

        op = eqxcallback.Op("saxpy", kernels={"cpu": eqxcallback.PythonKernel(saxpy)}, reference=lambda x, y, *, a: a * x + y)
        ```

    **Arguments:**

    - `body`: called as the callback of [`eqxcallback.buffer_callback`][] is, with the op's arguments and options. As the
        `backward` of an op it is `body(ctx, grads, args, out, cotangents, **options)`.
    - `out_type`: a function of the op's arguments and options that returns a PyTree of `jax.ShapeDtypeStruct`s. By
        default, what the op's `reference` returns.
    - `aliases`: `{input: output}`: results that overwrite an operand, by parameter and result names or flat indices.
    - `command_buffer_compatible`: whether, on a GPU, XLA may record what `body` launches and replay it without Python.
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].
    """

    backend: ClassVar[str] = "python"

    body: Callable[..., None]
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    aliases: Aliases = dataclasses.field(default_factory=dict)
    command_buffer_compatible: bool = False

    def __post_init__(self) -> None:
        if not callable(self.body):
            raise TypeError(
                f"PythonKernel: expected a function body(ctx, out, *args) -> None; got {self.body!r} of type "
                f"{type(self.body).__name__}."
            )
        frozen_mapping(self, "aliases")
        check_function(self.supports, "supports", "PythonKernel")
        check_function(self.out_type, "out_type", "PythonKernel")

    def __hash__(self) -> int:
        return hash_of(self)
