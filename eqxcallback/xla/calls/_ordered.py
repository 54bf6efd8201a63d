"""Calls in the order of the program: each takes a token from the one before, and hands one on."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# `jax._src.core.abstract_token`: the type of what orders calls, which has no public name.
# Noticed by: tests/xla/test_private_jax.py.
from jax._src.core import abstract_token as _abstract_token
from jax.interpreters import mlir

from ...core import Value
from ..types import ordered_kernel_effect, result_aval
from . import _partition


def lower(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence[Value],
    target: str,
    options: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> Sequence[Value]:
    """Lower a call to `target`. `options` are those of `jax.ffi.ffi_lowering`, and count no tokens."""
    options = dict(options)
    aliases = options["operand_output_aliases"]
    options["operand_output_aliases"] = {i + 1: o + 1 for i, o in aliases.items()}
    for side in ("operand_layouts", "result_layouts"):
        if options[side] is not None:
            options[side] = [(), *options[side]]
    token: Any = _abstract_token
    with_token = dataclasses.replace(ctx, avals_in=[token, *ctx.avals_in], avals_out=[token, *ctx.avals_out])
    call = jax.ffi.build_ffi_lowering_function(target, **options)
    operation: Any = call(with_token, ctx.tokens_in.get(ordered_kernel_effect), *operands, **attributes)
    token, *results = operation.results
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ordered_kernel_effect: token})))
    return results


def lower_on_each_device(
    ctx: mlir.LoweringRuleContext, operands: Sequence[Value], call: Callable[..., Sequence[Value]]
) -> Sequence[Value]:
    """Lower `call` to one on each device of the program, with whole operands. Where XLA splits programs, it knows no tokens."""
    devices: Any = _partition.devices_of(ctx)
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = jax.P()
    mapped = jax.shard_map(call, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    # Types may say how arrays are split on another mesh, which this one knows nothing of.
    sides: Any = (ctx.avals_in, ctx.avals_out)
    plain: Any = [[result_aval(aval.shape, aval.dtype) for aval in side] for side in sides]
    inner = dataclasses.replace(ctx, avals_in=plain[0], avals_out=plain[1])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        results = mlir.lower_fun(mapped, multiple_results=True)(inner, *operands)
    tokens: Any = inner.tokens_out
    ctx.set_tokens_out(tokens)
    return results
