"""The places where a layer of ours would not be faster than Equinox's, and might be slower."""

import equinox as eqx
import jax

from .. import ops
from ._parameters import is_parameter


# For which there are kernels. JAX calls CUDA by both of its names.
_PLATFORMS = ("cpu", "gpu", "cuda")


def checked(platform: str | None) -> str:
    """The name of a platform, by default that of this process."""
    if not (platform is None or isinstance(platform, str)):
        raise TypeError(f"fuse: expected platform to be the name of a platform, such as 'gpu'; got {platform!r}.")
    return jax.default_backend() if platform is None else platform


def reason_to_leave(layer: eqx.Module, platform: str) -> str:
    """Why no kernel would run, or `""`. A layer of ours is a formula in JAX then, written to be compared with."""
    if platform not in _PLATFORMS:
        return f"there are no kernels for {platform}"
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(layer) if is_parameter(leaf)}
    others = sorted(str(dtype) for dtype in dtypes if dtype not in ops.KERNEL_DTYPES)
    return f"no kernel takes {others[0]}" if others else ""
