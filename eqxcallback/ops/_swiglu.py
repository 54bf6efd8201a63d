"""The gated activation of Llama's feed-forward block."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import kernels, reference
from ..kernel import NativeKernel
from ..op import Op
from ._checks import check, check_floats, run


_swiglu = Op(
    "swiglu",
    kernels={"cpu": NativeKernel("swiglu"), "cuda": kernels.SWIGLU},
    reference=reference.swiglu,
    batching={"gate": "batched", "up": "batched"},
    backward={"cuda": kernels.SWIGLU_BACKWARD},
)


def swiglu(gate: Float[Array, "*batch size"], up: Float[Array, "*batch size"] | None = None) -> Float[Array, "..."]:
    r"""$\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up}$, computed in f32.

    **Arguments:**

    - `gate`: an array of shape `(*batch, size)`. f32 and bf16 run the kernel, on a GPU f16 as well, other
        dtypes the reference.
    - `up`: the same. Without it, `gate` has shape `(*batch, 2 * size)`, with the gate first: the result of one linear layer
        for both.

    **Returns:** an array of shape `(*batch, size)`.

    ??? cite

        [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202)
    """
    gate = jnp.asarray(gate)
    check(gate.ndim > 0, "swiglu", "gate with at least one axis", gate=gate)
    if up is None:
        check_floats("swiglu", gate=gate)
        check(gate.shape[-1] % 2 == 0, "swiglu", "an even last axis of gate, which holds both halves", gate=gate)
        return run(_swiglu, gate)
    up = jnp.asarray(up)
    check_floats("swiglu", gate=gate, up=up)
    check(gate.shape == up.shape, "swiglu", "gate and up of one shape", gate=gate, up=up)
    return run(_swiglu, gate, up)
