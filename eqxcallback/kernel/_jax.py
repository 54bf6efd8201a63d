"""A JAX function in the place of a kernel."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ._checks import check_function, hash_of
from ._contract import Aliases, KernelContract


@dataclasses.dataclass(frozen=True)
class JaxKernel(KernelContract):
    """A function in JAX, `function(*args, **options)`, that computes the results of an op where a kernel would: what other
    libraries make of a kernel, such as `pallas_call`, `jax.ffi.ffi_call` or `jax_triton.triton_call`, or what XLA does best.

    JAX never differentiates or batches `function`, so it needs no rules of its own: derivatives are those of the op's
    `backward` or `reference`, and under `vmap` it is called as the op's `vmap_method` says. On several devices it is traced for
    the part of each.

    !!! example

        ```python
        def double(x):
            return jax.ffi.ffi_call("double", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

        op = eqxcallback.Op("double", kernels={"cpu": eqxcallback.JaxKernel(double)}, reference=lambda x: 2 * x)
        ```

    **Arguments:**

    - `function`: is called with the arguments and options of the op, and returns what its `reference` does: the same tree,
        shapes and dtypes. As a kernel of a layer it is called with the layer, then the arguments of the call.

        As the `backward` of an op it is `function(args, out, cotangents, **options)`, as a backward kernel of a layer
        `function(layer, args, out, cotangents)`. It returns the gradients in the tree of `args`, or of `(layer, *args)`, with
        `None` for arguments without a gradient. A gradient with more leading axes than its operand is summed over these: under
        `vmap`, an operand that is not mapped may lack the axis. XLA removes gradients that nobody needs.
    - `out_type`: a function of the op's arguments and options that returns a PyTree of `jax.ShapeDtypeStruct`s. By
        default, what the op's `reference` returns.
    - `differentiable`: for an op, a function of the same arguments and results in plain JAX. On this platform, JAX
        differentiates it in place of the `reference`: in forward mode, for higher derivatives, and wherever no backward kernel
        runs. It maps it, too, where the op's `vmap_method` is `"reference"`.
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].
    """

    backend: ClassVar[str] = "jax"
    aliases: ClassVar[Aliases] = {}  # XLA finds what may be overwritten

    function: Callable[..., PyTree]
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    differentiable: Callable[..., PyTree] | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"JaxKernel: expected a function of JAX arrays; got {self.function!r} of type {type(self.function).__name__}."
            )
        check_function(self.supports, "supports", f"JaxKernel({self.name})")
        check_function(self.out_type, "out_type", f"JaxKernel({self.name})")
        check_function(self.differentiable, "differentiable", f"JaxKernel({self.name})")

    @property
    def name(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__qualname__)

    def __hash__(self) -> int:
        return hash_of(self)
