"""The primitive of an op: one mathematical operation, which becomes a kernel, or its reference, when it is lowered."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _partition, _python_call
from ._avals import on_current_mesh, split_alike, vary_alike, vary_like
from ._debug import check_values, is_debugging, run_eagerly
from ._eager import is_spread, platform_of, run_and_wait, run_on_cpu
from ._effects import kernel_effect
from ._handles import handle_for
from ._inline import is_inline, run_inline
from ._layouts import full_layouts, minor_to_major
from ._loops import stays_in_loops
from ._ownership import own
from ._plan import LaunchPlan, Plan, PythonPlan, Run
from ._sharding import Factors


# In JAX's spelling: where an op may have a kernel. Everywhere else its reference is lowered.
PLATFORMS = ("cpu", "cuda", "rocm")


class OpCall(Protocol):
    """What the primitive calls. Hashable, and equal for calls that share a program. `None` stands for zero tangents."""

    @property
    def result_avals(self) -> Sequence[Any]: ...

    @property
    def has_side_effect(self) -> bool: ...

    @property
    def has_kernel(self) -> bool: ...

    @property
    def factors(self) -> Factors:
        """How it may be split between devices."""
        ...

    @property
    def description(self) -> str:
        """The same text in each process, and another one for a call that does something else with its kernel."""
        ...

    def part(self, shapes: Sequence[Sequence[int]]) -> "OpCall":
        """The call on a part of its operands, of these shapes."""
        ...

    def reference(self, *args: Any) -> Sequence[Any]:
        """The op in pure JAX, flat."""
        ...

    def plan(self, platform: str) -> Plan | None:
        """The kernel for a platform, made runnable, or `None` if there is none."""
        ...

    def is_python(self, platform: str) -> bool:
        """Whether that kernel is one in Python."""
        ...

    def launch(self, plan: Plan, run: Run, args: Sequence[Any]) -> Sequence[Any]:
        """Call the kernel, which `run` does, on operands in the form that it takes."""
        ...

    def jvp(self, primals: Sequence[Any], outs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """The tangents of the results `outs`."""
        ...

    def transpose(self, cotangents: Sequence[Any], args: Sequence[Any], linear: Sequence[int]) -> Sequence[Any]:
        """The cotangents of the operands `linear`, which `args` lacks."""
        ...

    def batch(self, args: Sequence[Any], dims: Sequence[int | None]) -> tuple[Sequence[Any], Sequence[int]]:
        """The call on mapped operands: the results and their mapped axes."""
        ...


op_call_p = Primitive("op_call")
op_call_p.multiple_results = True


def op_call(call: OpCall, *args: Any) -> Sequence[jax.Array]:
    return op_call_p.bind(*fit_mesh(args, call), call=call)


def fit_mesh(args: Sequence[Any], call: OpCall) -> Sequence[Any]:
    """Operands of types that go together, where types say something of devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return args
    return split_alike(vary_alike(args), call.factors)


@op_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, call: OpCall):
    effects = {kernel_effect} if call.has_side_effect else set()
    return on_current_mesh(call.result_avals, avals, call), effects


@functools.lru_cache(maxsize=1024)
def _program(call: OpCall) -> Callable[..., Sequence[jax.Array]]:
    return jax.jit(lambda *args: op_call_p.bind(*args, call=call))


@op_call_p.def_impl
def _impl(*args: Any, call: OpCall) -> Sequence[jax.Array]:
    debugging = is_debugging()
    if debugging and not is_inline(call.result_avals):
        return run_eagerly(_program(call), call, *args)
    # A call of a Python kernel outside of any program is one of the callback: no program is made for it.
    plan = call.plan("cpu") if platform_of(args) == "cpu" and call.is_python("cpu") else None
    if not isinstance(plan, PythonPlan):
        return run_eagerly(_program(call), call, *args) if debugging else _program(call)(*args)
    if is_spread(args) and not debugging:
        return run_and_wait(_program(call), args)

    def run(*args: Any, result_avals: Sequence[Any]) -> Sequence[Any]:
        spec = plan.spec(result_avals)
        if debugging:
            return check_values(run_inline(plan.body, spec, args), call)
        return run_on_cpu(plan.eager_state, spec, args)

    return call.launch(plan, run, args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: OpCall) -> tuple[Sequence[Any], Sequence[Any]]:
    outs = op_call_p.bind(*primals, call=call)
    known = [None if _is_zero(tangent) else tangent for tangent in tangents]
    out_tangents = call.jvp(primals, outs, known)
    return outs, [
        ad.Zero(jax.typeof(out).to_tangent_aval()) if tangent is None or _is_zero(tangent) else tangent
        for out, tangent in zip(outs, out_tangents, strict=True)
    ]


ad.primitive_jvps[op_call_p] = _jvp


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _transpose(cotangents: Sequence[Any], *args: Any, call: OpCall) -> Sequence[Any]:
    linear = [i for i, arg in enumerate(args) if ad.is_undefined_primal(arg)]
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [ad.Zero(arg.aval) if ad.is_undefined_primal(arg) else None for arg in args]
    known = [None if isinstance(cotangent, ad.Zero) else cotangent for cotangent in cotangents]
    found = dict(zip(linear, call.transpose(known, args, linear), strict=True))
    return [found.get(i) for i in range(len(args))]


ad.primitive_transposes[op_call_p] = _transpose


def transpose(
    function: Callable[..., Sequence[Any]],
    cotangents: Sequence[Any],
    args: Sequence[Any],
    linear: Sequence[int],
    result_avals: Sequence[Any],
) -> Sequence[Any]:
    """The cotangents of the operands `linear`, of which `function` is one in pure JAX. `cotangents` has `None` for zeros."""
    filled = [
        jnp.zeros(aval.shape, aval.dtype) if cotangent is None else cotangent
        for cotangent, aval in zip(cotangents, result_avals, strict=True)
    ]
    filled = vary_like(filled, [arg for arg in args if not ad.is_undefined_primal(arg)])
    return jax.linear_transpose(lambda *values: list(function(*values)), *(args[i].aval for i in linear))(filled)


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, call: OpCall) -> tuple[Sequence[Any], Sequence[int]]:
    return call.batch(args, dims)


batching.primitive_batchers[op_call_p] = _batch


# What a call with a kernel is lowered to, once for each platform. The outer one has the name stack, see _python_call.py.
_kernel_call_p = Primitive("op_call")
_kernel_call_p.multiple_results = True


@_kernel_call_p.def_abstract_eval
def _kernel_abstract_eval(*avals: Any, call: OpCall, **_: object) -> Sequence[Any]:
    return on_current_mesh(call.result_avals, avals, call)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, call: OpCall) -> Sequence[Any]:
    platforms = ctx.platforms or ctx.module_context.platforms
    plans = [call.plan(platform) for platform in platforms if platform in PLATFORMS] if call.has_kernel else []
    if not any(plans):
        return mlir.lower_fun(call.reference, multiple_results=True)(ctx, *operands)
    python = [plan for plan in plans if isinstance(plan, PythonPlan)]
    # Native calls do not know where they are: so equal ones stay one.
    name_stack = str(ctx.name_stack) if python else ""
    if not _partition.is_partitioned(ctx):

        def kernel_call(*operands: Any) -> Sequence[Any]:
            return _kernel_call_p.bind(*operands, call=call, name_stack=name_stack, owned=None)

        return mlir.lower_fun(kernel_call, multiple_results=True)(ctx, *operands)

    # The parts are lowered into another program, without its callbacks: this one owns them.
    owned = tuple(own(ctx, handle_for(plan.body)).get("host_callback") for plan in python)

    def part(*operands: Any) -> Sequence[Any]:
        local = call.part([operand.shape for operand in operands])
        return _kernel_call_p.bind(*operands, call=local, name_stack=name_stack, owned=owned or None)

    def whole(*operands: Any) -> Sequence[Any]:
        return _kernel_call_p.bind(*operands, call=call, name_stack=name_stack, owned=owned or None)

    # Callables of one name that are alive together have different keys, the same ones in each process.
    keys = [handle_for(plan.body).key for plan in python]
    described = [plan.description for plan in plans if plan is not None]
    identity = f"{call.description} {described} {keys} {ctx.avals_in} {ctx.avals_out} {name_stack} {owned}"
    return _partition.lower(ctx, operands, call.factors, whole, part, identity, call.has_side_effect)


def _lower_kernel(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: OpCall, name_stack: str, owned: Any, platform: str | None
) -> Sequence[Any]:
    plan = None if platform is None else call.plan(platform)
    if plan is None:
        return mlir.lower_fun(call.reference, multiple_results=True)(ctx, *operands)

    def run(*args: Any, result_avals: Sequence[Any]) -> Sequence[Any]:
        if isinstance(plan, PythonPlan):
            spec = plan.spec(result_avals)
            return _python_call.named_call_p.bind(*args, body=plan.body, spec=spec, name_stack=name_stack, owned=owned)
        launch = plan.for_types([jax.typeof(arg) for arg in args], result_avals)
        outs = _native_call_p.bind(*args, plan=launch, result_avals=(*result_avals, *launch.workspaces))
        return outs[: len(result_avals)]

    def launch(*args: Any) -> Sequence[Any]:
        return call.launch(plan, run, args)

    return mlir.lower_fun(launch, multiple_results=True)(ctx, *operands)


_native_call_p = Primitive("native_call")
_native_call_p.multiple_results = True


@_native_call_p.def_abstract_eval
def _native_abstract_eval(*avals: Any, plan: LaunchPlan, result_avals: Sequence[Any]) -> Sequence[Any]:
    del plan
    return on_current_mesh(result_avals, avals)


def _lower_native(
    ctx: mlir.LoweringRuleContext, *operands: Any, plan: LaunchPlan, result_avals: Sequence[Any]
) -> Sequence[Any]:
    del result_avals
    rule = jax.ffi.ffi_lowering(
        plan.target,
        has_side_effect=plan.has_side_effect,
        operand_output_aliases=dict(plan.aliases),
        operand_layouts=minor_to_major(full_layouts(plan.input_layouts, ctx.avals_in)),
        result_layouts=minor_to_major(full_layouts(plan.output_layouts, ctx.avals_out)),
    )
    return rule(ctx, *operands, **plan.attributes)


def register() -> None:
    _partition.requires_devices(op_call_p)
    stays_in_loops(op_call_p, lambda params: params["call"].has_side_effect)
    mlir.register_lowering(op_call_p, _lower, cacheable=False)
    mlir.register_lowering(_kernel_call_p, functools.partial(_lower_kernel, platform=None))
    for platform in PLATFORMS:
        mlir.register_lowering(_kernel_call_p, functools.partial(_lower_kernel, platform=platform), platform=platform)
    mlir.register_lowering(_native_call_p, _lower_native)
