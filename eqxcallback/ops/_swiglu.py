"""The gated activations of feed-forward blocks."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import kernels, reference
from .._checks import check, check_floats
from ..kernel import NativeKernel
from ..kernels import host
from ..op import Implementation, Op
from ._run import run


_swiglu = Op(
    "swiglu",
    kernels={"cpu": NativeKernel("swiglu"), "cuda": kernels.SWIGLU},
    reference=reference.swiglu,
    batching={"gate": "batched", "up": "batched"},
    backward={"cpu": NativeKernel("swiglu_backward"), "cuda": kernels.SWIGLU_BACKWARD},
    backward_reads_results=False,
    alternatives={"cpu": (host.SWIGLU,), "cuda": (host.SWIGLU,)},
)
_geglu = Op(
    "geglu",
    kernels={"cpu": NativeKernel("geglu")},
    reference=reference.geglu,
    batching={"gate": "batched", "up": "batched"},
    backward={"cpu": NativeKernel("geglu_backward")},
    backward_reads_results=False,
    alternatives={"cpu": (host.GEGLU,), "cuda": (host.GEGLU,)},
)


def swiglu(
    gate: Float[Array, "*batch size"],
    up: Float[Array, "*batch size"] | None = None,
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
    return _gated("swiglu", _swiglu, gate, up, implementation)


def geglu(
    gate: Float[Array, "*batch size"],
    up: Float[Array, "*batch size"] | None = None,
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
    return _gated("geglu", _geglu, gate, up, implementation, approximate=bool(approximate))


def _gated(
    name: str, op: Op, gate: Any, up: Any | None, implementation: Implementation, **options: bool
) -> Float[Array, "..."]:
    gate = jnp.asarray(gate)
    check(gate.ndim > 0, name, "gate with at least one axis", gate=gate)
    if up is None:
        check_floats(name, gate=gate)
        check(gate.shape[-1] % 2 == 0, name, "an even last axis of gate, which holds both halves", gate=gate)
        return run(op, gate, implementation=implementation, **options)
    up = jnp.asarray(up)
    check_floats(name, gate=gate, up=up)
    check(gate.shape == up.shape, name, "gate and up of one shape", gate=gate, up=up)
    return run(op, gate, up, implementation=implementation, **options)
