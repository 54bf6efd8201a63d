"""GELU, without a gate."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import AnyArray, check_flags, check_floats
from ...kernel import NativeKernel
from ...transform import Implementation, Op
from .._supports import floats
from . import _numpy, _reference


_gelu = Op(
    "gelu",
    kernels={
        "cpu": (NativeKernel("gelu", attributes=("activation", "present"), supports=floats), _numpy.GELU),
        "cuda": _numpy.GELU,
    },
    reference=_reference.activated,
    vmap_method="broadcast_all",
    backward={
        "cpu": NativeKernel("gelu_backward", attributes=("activation", "present", "needs_grad"), supports=floats)
    },
    backward_reads_results=False,
    sharding="... -> ...",
)


def gelu(
    x: Float[AnyArray, "*shape"], *, approximate: bool = True, implementation: Implementation = "auto"
) -> Float[Array, "*shape"]:
    r"""$x \, \Phi(x)$, computed in f32, where $\Phi$ is the distribution function of normal numbers.

    It is `jax.nn.gelu`, rounded once. The gradient keeps `x` alone, and is one kernel.

    **Arguments:**

    - `x`: an array of any shape. f32, bf16 and f16 run the kernel on a CPU, other dtypes the reference. On a GPU XLA computes the
        reference where its operand is made or its result is read.
    - `approximate`: whether $\Phi$ is approximated by $\tanh$, as `jax.nn.gelu` does by default, or exact.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** an array of the shape and dtype of `x`.

    ??? cite

        [Gaussian Error Linear Units (GELUs)](https://arxiv.org/abs/1606.08415)
    """
    x = jnp.asarray(x)
    check_floats("gelu", x=x)
    check_flags("gelu", approximate=approximate)
    result: jax.Array = _gelu.using(implementation)(x, activation="gelu_tanh" if approximate else "gelu")
    return result
