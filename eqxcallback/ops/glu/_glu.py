"""The gated activations of feed-forward blocks."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import AnyArray, ShapeAndDtype, check, check_flags, check_floats
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._supports import floats
from . import _cuda, _numpy, _reference


def _sharding(gate: ShapeAndDtype, up: ShapeAndDtype | None, **_: object) -> str:
    """One operand has a gate and what it is for in different parts of its rows."""
    return "... _ -> ... _" if up is None else "... d, ... d -> ... d"


def _glu_op(name: str) -> Op:
    native = NativeKernel("glu", attributes=("activation", "present"), supports=floats)
    native_backward = NativeKernel("glu_backward", attributes=("activation", "present", "needs_grad"), supports=floats)
    return Op(
        name,
        kernels={"cpu": (native, _numpy.GLU), "cuda": (_cuda.GLU, _numpy.GLU)},
        reference=_reference.glu,
        vmap_method={"gate": "broadcast_all", "up": "broadcast_all"},
        backward={"cpu": native_backward, "cuda": _cuda.GLU_BACKWARD},
        backward_reads_results=False,
        sharding=_sharding,
    )


_swiglu, _geglu = _glu_op("swiglu"), _glu_op("geglu")


def swiglu(
    gate: Float[AnyArray, "*batch size"],
    up: Float[AnyArray, "*batch size"] | None = None,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "..."]:
    r"""$\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up}$, computed in f32.

    **Arguments:**

    - `gate`: an array of shape `(*batch, size)`. f32, bf16 and f16 run the kernel, other dtypes the reference.
    - `up`: the same. Without it, `gate` has shape `(*batch, 2 * size)`, with the gate first: the result of one linear layer
        for both.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, size)`.

    ??? cite

        [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202)
    """
    return _gated(_swiglu, gate, up, implementation, "silu")


def geglu(
    gate: Float[AnyArray, "*batch size"],
    up: Float[AnyArray, "*batch size"] | None = None,
    *,
    approximate: bool = True,
    implementation: Implementation = "auto",
) -> Float[Array, "..."]:
    r"""$\mathrm{gelu}(\mathrm{gate}) \cdot \mathrm{up}$, computed in f32.

    **Arguments:**

    - `gate`, `up`: as in [`eqxcallback.ops.swiglu`][].
    - `approximate`: whether $\mathrm{gelu}$ is the one with $\tanh$, as in `jax.nn.gelu`, or the exact one.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of shape `(*batch, size)`.

    ??? cite

        [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202)
    """
    check_flags("geglu", approximate=approximate)
    return _gated(_geglu, gate, up, implementation, "gelu_tanh" if approximate else "gelu")


def _gated(
    op: Op, gate: AnyArray, up: AnyArray | None, implementation: Implementation, activation: str
) -> Float[Array, "..."]:
    gate = jnp.asarray(gate)
    check(gate.ndim > 0, op.name, "gate with at least one axis", gate=gate)
    if up is None:
        check_floats(op.name, gate=gate)
        check(gate.shape[-1] % 2 == 0, op.name, "an even last axis of gate, which holds both halves", gate=gate)
    else:
        up = jnp.asarray(up)
        check_floats(op.name, gate=gate, up=up)
        check(gate.shape == up.shape, op.name, "gate and up of one shape", gate=gate, up=up)
    return op.using(implementation)(gate, up, activation=activation)
