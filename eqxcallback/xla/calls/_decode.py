"""XLA's shardings of a partitioned call, in the names of a mesh."""

from typing import Any

import numpy as np

# `jax._src.sharding_impls`: nothing public decodes XLA's shardings.
# Noticed by: tests/xla/test_private_jax.py.
from jax._src import sharding_impls as _sharding_impls
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def decode_all(info: Any, ctx: mlir.LoweringRuleContext) -> None:
    """Let JAX tell the `partition` function of `info` of shardings that it has no names for: it would fail."""
    axis_context: Any = ctx.module_context.axis_context
    if getattr(axis_context, "manual_axes", None):
        # JAX takes the mesh of a `with mesh:`, of which some axes are manual here: a sharding over it aborts the process.
        mesh, devices = Mesh(np.empty((), object), ()), axis_context.mesh._flat_devices_tuple
    else:
        mesh = info.mesh if info.mesh.empty else _finest(info.mesh)
        devices = axis_context.device_assignment

    def decode(sharding: Any, ndim: int) -> Any:
        if sharding is None:
            return None
        try:
            spec = _sharding_impls.parse_flatten_op_sharding(sharding, mesh)[0] if not mesh.empty else None
        except Exception:  # there are several kinds
            spec = None
        if spec is None:
            return _sharding_impls.GSPMDSharding(devices, sharding)
        return NamedSharding(mesh, PartitionSpec(*spec, *(None,) * (ndim - len(spec))))

    info.mesh, info.to_mesh_pspec_sharding = mesh, decode


def _finest(mesh: Mesh) -> Mesh:
    """The same devices, on axes of prime sizes: XLA splits by a part of an axis as well, where a dimension is reshaped."""
    axes: list[tuple[str, int]] = []
    for name, size in mesh.shape.items():
        primes = _primes(size)
        axes += [(name, size)] if len(primes) < 2 else [(f"{name}:{i}", prime) for i, prime in enumerate(primes)]
    return Mesh(mesh.devices.reshape([size for _, size in axes]), tuple(name for name, _ in axes))


def _primes(number: int) -> list[int]:
    primes, factor = [], 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            primes.append(factor)
            number //= factor
    return primes
