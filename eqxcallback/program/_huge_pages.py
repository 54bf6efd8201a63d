"""Weights in large pages of memory."""

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from .. import _ext


def use_huge_pages(tree: PyTree) -> int:
    """Move the arrays of a model into pages of 2 MiB, where its kernels read them faster: there are fewer addresses to look up.
    What waits for memory, as a token of a language model does, may take 0.8 of the time; see
    [huge pages](../performance.md#huge-pages).

    They are the same arrays afterwards, at the same place. This takes a second for a few gigabytes, and is done once.

    !!! example

        ```python
        import equinox as eqx
        import eqxcallback as eqxc
        import jax

        model = eqx.nn.MLP(512, 512, 2048, depth=2, key=jax.random.key(0))
        moved = eqxc.use_huge_pages(model)  # bytes; 0 where the system has no such pages
        ```

    **Arguments:**

    - `tree`: any PyTree. Arrays of JAX's that are on a CPU are moved, other leaves are left alone.

    **Returns:**

    How many of their bytes are in such pages now: 0 on a system that cannot move them, for which it takes Linux 6.1.
    """
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    parts = {  # an array may be in a tree twice, and arrays may share memory
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for array in jax.block_until_ready(arrays)
        for shard in array.addressable_shards
        if shard.device.platform == "cpu"
    }
    return sum(_ext.move_into_huge_pages(*part) for part in parts)
