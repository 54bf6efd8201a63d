"""Abstract values of results: their types, and where they live on a mesh."""

import operator
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec

from ...core import Aval, DType, Size, Value
from ._sharding import Dims, Factors, spec_of, split


# What an array has that a kernel is given. JAX knows more: XLA makes bools of its integers of one bit, and hands nobody its
# floats of six.
KERNEL_DTYPES = frozenset(
    np.dtype(getattr(jnp, name))
    for name in (
        *(
            "bool_",
            "int2",
            "int4",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint2",
            "uint4",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
        ),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
        *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)
_INSTEAD = {"int1": "int8", "uint1": "uint8", "float6_e2m3fn": "float8_e4m3fn", "float6_e3m2fn": "float8_e4m3fn"}


def dtype_problem(dtype: DType) -> str | None:
    """Why no kernel is given arrays of `dtype`, and the remedy; or `None`."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):  # a typed PRNG key, say
        return None
    dtype = np.dtype(dtype)
    if dtype in KERNEL_DTYPES:
        return None
    if dtype == jax.dtypes.float0:
        return "No array has this type, which is for tangents of integers. Leave it out"
    if dtype.name in _INSTEAD:
        return f"XLA gives no kernel arrays of {dtype.name}. Use {_INSTEAD[dtype.name]} instead"
    return f"No kernel is given arrays of {dtype}. Use a dtype such as float32 or int32 instead"


def result_aval(shape: Sequence[Size], dtype: DType) -> Aval:
    """The abstract value of a result. 64-bit types stay what they are, also where `jax_enable_x64` is off."""
    known = (dim for dim in shape if not jax.export.is_symbolic_dim(dim))
    if dtype is None or any(operator.index(dim) < 0 for dim in known):
        raise ValueError("no array has this type")
    if (problem := dtype_problem(dtype)) is not None:
        raise ValueError(problem)
    is_extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return ShapedArray(tuple(shape), dtype if is_extended else np.dtype(dtype))


def memory_aval(aval: Aval) -> Aval:
    """The abstract value of what is in memory: of typed PRNG keys, their words."""
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return result_aval(words.shape, words.dtype)


@runtime_checkable
class Splittable(Protocol):
    @property
    def factors(self) -> Factors:
        """The way in which a call may be split between devices."""
        ...


def on_current_mesh(
    results: Sequence[Aval], operands: Sequence[Aval], call: Splittable | None = None
) -> Sequence[Aval]:
    """`results` on the mesh in use, varying over the manual axes that the operands, all alike, vary over.

    Without this `shard_map` would believe that results are the same on all devices. Where shardings are part of types,
    results are split as the operands are, as far as `call` says that they can be.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return results
    factors = None if call is None else call.factors
    dims = [(None,) * len(aval.shape) for aval in results] if factors is None else factors.results
    splits: dict[str, Any] = {}
    if factors is not None:
        specs = [operand.sharding.spec for operand in operands]
        splits = split(factors, specs, factors.sizes([operand.shape for operand in operands]), mesh)

    def typed(aval: Aval, dims: Dims) -> Aval:
        sharding = NamedSharding(mesh, spec_of(dims, splits))
        return aval.update(sharding=sharding, manual_axis_type=operands[0].mat if operands else aval.mat)

    return [typed(aval, names) for aval, names in zip(results, dims, strict=True)]


def split_alike(args: Sequence[Value], factors: Factors) -> Sequence[Value]:
    """Split `args`, on a mesh of explicit axes, as `factors` and the others say. So results, which are split like that, and their
    gradients have types that fit those of operands.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return args
    avals = [jax.typeof(arg) for arg in args]
    splits = split(factors, [aval.sharding.spec for aval in avals], factors.sizes([a.shape for a in avals]), mesh)
    wanted = [spec_of(dims, splits) for dims in factors.operands]
    return [
        arg if aval.sharding.spec == spec else jax.sharding.reshard(arg, NamedSharding(mesh, spec))
        for arg, aval, spec in zip(args, avals, wanted, strict=True)
    ]


def first_axis(args: Sequence[Value]) -> Any:
    """The mesh axes that split the first axis of all `args`, on a mesh of explicit axes; `None` on others."""
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return None
    return next((spec[0] for spec in (jax.typeof(arg).sharding.spec for arg in args) if spec), None)


def with_first_axis(args: Sequence[Value], entry: Any) -> Sequence[Value]:
    """`args` with the first axis split so, on a mesh of explicit axes: a loop over it, such as `scan`, takes it whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.explicit_axes:
        return args
    specs = [PartitionSpec(entry, *jax.typeof(arg).sharding.spec[1:]) for arg in args]
    return [jax.sharding.reshard(arg, NamedSharding(mesh, spec)) for arg, spec in zip(args, specs, strict=True)]


def vary_like(arrays: Sequence[Value], others: Sequence[Value]) -> Sequence[Value]:
    """Inside `shard_map`: `arrays`, varying over each manual axis that one of them or of `others` varies over."""
    return vary_alike([*arrays, *others])[: len(arrays)]


def vary_alike(args: Sequence[Value]) -> Sequence[Value]:
    """Inside `shard_map`: `args`, all varying over each manual axis that one of them varies over."""
    if jax.sharding.get_abstract_mesh().empty:
        return args
    varying = [jax.typeof(arg).mat.varying for arg in args]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(arg, tuple(union - axes), to="varying") if union - axes else arg
        for arg, axes in zip(args, varying, strict=True)
    ]
