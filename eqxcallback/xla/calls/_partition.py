"""A call on several devices: each one calls the kernel on its own part."""

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# `jax._src.custom_partitioning._sharding_callbacks`: the public function puts an address into the program's text, and so
# into the key of the persistent cache, which then never hits. Here it becomes a name of what is called.
# `jax._src.dispatch`: partitioning needs to know the devices when a program is lowered, and there is no public way to ask.
# Noticed by: tests/xla/test_private_jax.py.
from jax._src import custom_partitioning as _custom_partitioning, dispatch as _dispatch
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from ...core import Aval, Size, Value
from ..handles import is_exported
from ..types import Factors, even, named, no_mesh, result_aval, split, summed_axes
from ._decode import decode_all


_config: Any = jax.config  # its options are made at run time: no type checker knows them


# The operand, or the result, of a call that has none: XLA partitions nothing else.
_NOTHING = jax.ShapeDtypeStruct((), jnp.uint8)

# What runs on one device. Parts have no shardings in their types, also where the whole program has.
_local_p = Primitive("local_part")
_local_p.multiple_results = True


@_local_p.def_abstract_eval
def _abstract_eval(*_: object, avals: Sequence[Aval], **__: object) -> Sequence[Aval]:
    return avals


def _lower_local(
    ctx: mlir.LoweringRuleContext, *operands: Value, function: Callable[..., Sequence[Value]], **_: object
) -> Sequence[Value]:
    with no_mesh():
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_local_p, _lower_local)


def requires_devices(primitive: Primitive) -> None:
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """True if a program runs on several devices, and XLA says what each of them has."""
    axis_context: Any = ctx.module_context.axis_context
    if not _config.jax_use_shardy_partitioner or is_exported(ctx):
        return False
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:  # inside shard_map
        return set(manual) != set(axis_context.mesh.axis_names)
    devices = getattr(axis_context, "device_assignment", None)
    return devices is not None and len(devices) > 1


def is_manual(ctx: mlir.LoweringRuleContext) -> bool:
    """True if a program is inside `shard_map`, over some axes at least."""
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", None))


def devices_of(ctx: mlir.LoweringRuleContext) -> tuple[Any, ...] | None:
    """Return the devices that a program runs on, in their order in it, or `None` if they are not known yet."""
    axis_context: Any = ctx.module_context.axis_context
    if is_manual(ctx):
        mesh = axis_context.mesh
        return None if isinstance(mesh, jax.sharding.AbstractMesh) else tuple(mesh.devices.flat)
    return getattr(axis_context, "device_assignment", None)


def lower(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Value],
    factors: Factors,
    whole: Callable[..., Sequence[Value]],
    part: Callable[..., Sequence[Value]],
    identity: str,
    *,
    has_side_effect: bool,
    called: Hashable = None,
) -> Sequence[Value]:
    """Lower a call to one on each device's part of the operands.

    **Arguments:**

    - `whole`, `part`: the call, on whole operands and on one part of them.
    - `identity`: the same text in each process, and another one for what calls something else, as far as texts tell.
    - `called`: what tells two calls of one text apart, in this process.
    """

    # XLA partitions nothing that has no operand, or no result.
    num_operands, num_results = len(factors.operands), len(factors.results)
    factors = dataclasses.replace(factors, operands=factors.operands or ((),), results=factors.results or ((),))

    def with_both(function: Callable[..., Sequence[Value]], args: Sequence[Value]) -> Sequence[Value]:
        outs = function(*args[:num_operands])
        return outs if num_results else [jnp.zeros((), jnp.uint8)]

    @custom_partitioning
    def call(*args: Value) -> Sequence[Value]:
        return with_both(whole, args)

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        shardings = [array.sharding for array in (*args, *results)]
        known = all(isinstance(sharding, NamedSharding) for sharding in shardings)
        shapes = [array.shape for array in args]
        specs = [sharding.spec for sharding in shardings] if known else []
        splits = split(factors, specs, factors.sizes(shapes), mesh) if known else {}

        def summed(*args: Value) -> Sequence[Value]:
            outs = with_both(part, args)
            sums = [summed_axes(dims, splits) for dims in factors.results]
            return [
                jax.lax.psum(out, axes) if axes and factors.sums else out for out, axes in zip(outs, sums, strict=True)
            ]

        def local(*args: Value) -> Sequence[Value]:
            with no_mesh():
                types = [jax.ShapeDtypeStruct(arg.shape, arg.dtype) for arg in args]
                avals = jax.eval_shape(lambda *args: with_both(part, args), *types)
            return _local_p.bind(
                *args, function=summed, avals=tuple(result_aval(aval.shape, aval.dtype) for aval in avals)
            )

        results = [named(mesh, dims, splits) for dims in factors.results]
        operands = [named(mesh, dims, splits) for dims in factors.operands]
        if factors.independent and known:
            operands = [
                NamedSharding(mesh, even(spec, shape, mesh)) for spec, shape in zip(specs, shapes, strict=False)
            ]
        return mesh, local, results, tuple(operands)

    avals_in, avals_out = list[Any](ctx.avals_in)[:num_operands], list[Any](ctx.avals_out)[:num_results]
    shapes = [aval.shape for aval in (*(avals_in or [_NOTHING]), *(avals_out or [_NOTHING]))]
    call.def_partition(partition=partition, sharding_rule=_rule(factors, shapes))

    def with_operand(*args: Value) -> Sequence[Value]:
        return list(call(*args) if num_operands else call(jnp.zeros((), jnp.uint8)))

    outs = mlir.lower_fun(with_operand, multiple_results=True)(ctx, *operands)
    _rename(ctx, identity, has_side_effect, called)
    return outs if num_results else []


def _rule(factors: Factors, shapes: Sequence[Sequence[Size]]) -> SdyShardingRule:
    """Make the rule in which each dimension has a name, or two: of groups, and of what is in them."""
    whole: list[str] = []
    groups: dict[str, Any] = {}  # how many elements one has
    count = len(factors.operands)
    sizes = factors.sizes(shapes[:count])

    def new_name() -> str:
        whole.append(f"whole{len(whole)}")
        return whole[-1]

    def names(dims: Sequence[str | None], shape: Sequence[Size]) -> tuple[Any, ...]:
        terms: list[Any] = []
        for name, size in zip(dims, shape, strict=True):
            if name is None:
                terms.append(new_name())
            elif size == sizes[name]:
                terms.append(name)
            else:
                inner = new_name()
                groups[inner] = size // sizes[name]
                terms.append(CompoundFactor(name, inner))
        return tuple(terms)

    operands: Any = tuple(map(names, factors.operands, shapes[:count]))
    results: Any = tuple(map(names, factors.results, shapes[count:]))
    return SdyShardingRule(operands, results, need_replication_factors=tuple(whole), **groups)


def _rename(ctx: mlir.LoweringRuleContext, identity: str, has_side_effect: bool, called: Hashable) -> None:
    """Give the custom call, which has an address in its text, a name that is the same in each process."""
    place: Any = mlir.ir.InsertionPoint.current
    *_, operation = place.block.operations
    if operation.name == "func.call":
        function = ctx.module_context.symbol_table[operation.attributes["callee"].value]
        operation = next(op for op in function.regions[0].blocks[0].operations if "CustomSPMDPartitioning" in str(op))
    attributes = operation.attributes
    address = attributes["backend_config"].value.encode()
    info = _custom_partitioning._sharding_callbacks[address]
    decode_all(info, ctx)
    name = hashlib.blake2b(
        f"{identity} {info.mesh} {ctx.module_context.platforms}".encode(), digest_size=16
    ).hexdigest()
    # A living one of that name, which programs before this one may still need, does the same if its call is equal. If it is not,
    # the address stays: another process has no such program.
    info.eqxcallback_called = called
    living = _custom_partitioning._sharding_callbacks.setdefault(name.encode(), info)
    ctx.module_context.add_keepalive(living)
    string, boolean = mlir.ir.StringAttr, mlir.ir.BoolAttr
    if living.eqxcallback_called == called:
        attributes["backend_config"] = string.get(name)
    if has_side_effect:
        attributes["has_side_effect"] = boolean.get(True)
