"""The primitive of an op: one mathematical operation, which becomes a kernel, or its reference, when it is lowered."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._avals import on_current_mesh, vary_alike
from ._debug import is_debugging, run_eagerly
from ._plan import LaunchPlan


# In JAX's spelling: where an op may have a kernel. Everywhere else its reference is lowered.
PLATFORMS = ("cpu", "cuda", "rocm")

Bind = Callable[..., Sequence[Any]]


class OpCall(Protocol):
    """What the primitive calls. Hashable, and equal for calls that share a program."""

    @property
    def result_avals(self) -> Sequence[Any]: ...

    def reference(self, *args: Any) -> Sequence[Any]:
        """The op in pure JAX, flat."""
        ...

    def plan(self, platform: str) -> LaunchPlan | None:
        """The kernel for a platform, made runnable, or `None` if there is none."""
        ...

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """The tangents of the results. A tangent is `None` where it is zero."""
        ...

    def batch(self, bind: Bind, args: Sequence[Any], dims: Sequence[int | None]) -> tuple[Sequence[Any], Sequence[int]]:
        """`bind(call, *args)` on mapped operands: the results and their mapped axes."""
        ...


op_call_p = Primitive("op_call")
op_call_p.multiple_results = True


def op_call(call: OpCall, *args: Any) -> Sequence[jax.Array]:
    return op_call_p.bind(*vary_alike(args), call=call)


@op_call_p.def_abstract_eval
def _abstract_eval(*avals: Any, call: OpCall) -> Sequence[Any]:
    return on_current_mesh(call.result_avals, avals)


@functools.lru_cache(maxsize=1024)
def _program(call: OpCall) -> Callable[..., Sequence[jax.Array]]:
    return jax.jit(lambda *args: op_call_p.bind(*args, call=call))


@op_call_p.def_impl
def _impl(*args: Any, call: OpCall) -> Sequence[jax.Array]:
    if is_debugging():
        return run_eagerly(_program(call), call, *args)
    return _program(call)(*args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: OpCall) -> tuple[Sequence[Any], Sequence[Any]]:
    outs = op_call_p.bind(*primals, call=call)
    known = [None if isinstance(tangent, ad.Zero) else tangent for tangent in tangents]
    out_tangents = call.jvp(primals, known)
    return outs, [
        ad.Zero(jax.typeof(out).to_tangent_aval()) if tangent is None else tangent
        for out, tangent in zip(outs, out_tangents, strict=True)
    ]


ad.primitive_jvps[op_call_p] = _jvp


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, call: OpCall) -> tuple[Sequence[Any], Sequence[int]]:
    return call.batch(op_call, args, dims)


batching.primitive_batchers[op_call_p] = _batch


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: OpCall, platform: str | None) -> Sequence[Any]:
    plan = None if platform is None else call.plan(platform)
    if plan is None:
        return mlir.lower_fun(call.reference, multiple_results=True)(ctx, *operands)
    rule = jax.ffi.ffi_lowering(plan.target, operand_output_aliases=dict(plan.aliases))
    return rule(ctx, *operands, **plan.attributes)


def register() -> None:
    mlir.register_lowering(op_call_p, functools.partial(_lower, platform=None))
    for platform in PLATFORMS:
        mlir.register_lowering(op_call_p, functools.partial(_lower, platform=platform), platform=platform)
