"""A step of training over several devices: each has the whole model, and some rows of the batch.

Such a step is the one for one device, under `jax.jit` or `equinox.filter_jit`: JAX adds up the gradients of the devices.
"""

from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .tensor_parallel import AXIS, put


_T = TypeVar("_T", bound=PyTree)


def replicate(tree: _T, mesh: jax.sharding.Mesh) -> _T:
    """Return a tree, such as a model and the state of its optimizer, with all of its arrays and PRNG keys on each device.

    **Arguments:**

    - `mesh`: of `models.parallel.tensor_parallel.mesh_of`. Of several processes each has the same `tree`.
    """
    arrays, others = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda x: put(x, NamedSharding(mesh, PartitionSpec())), arrays), others)


def split_rows(batch: _T, mesh: jax.sharding.Mesh) -> _T:
    """Return a batch with its rows, the first axis of each array, split over the devices.

    **Arguments:**

    - `batch`: a tree of arrays of NumPy or JAX, whole in each process, PRNG keys among them. All else in it stays as it is.
    - `mesh`: of `models.parallel.tensor_parallel.mesh_of`.

    **Raises:** `ValueError` if the rows are not a multiple of the devices.
    """

    def split(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        if x.ndim == 0 or len(x) % mesh.size:
            raise ValueError(
                f"split_rows: expected arrays whose first axis is a multiple of {mesh.size} devices; got shape {x.shape}."
            )
        return put(x, NamedSharding(mesh, PartitionSpec(AXIS)))

    return jax.tree.map(split, batch)
