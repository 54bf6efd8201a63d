"""The primitive of an op: one mathematical operation, which becomes a kernel, or its reference, when it is lowered."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...core import AnyArray, Aval, Size, Value, reraise_native
from ..handles import JaxLowering, LaunchLowering, Lowering, PythonLowering, Run, handle_for, own
from ..types import (
    Factors,
    kernel_effect,
    memory_aval,
    minor_to_major,
    on_current_mesh,
    result_aval,
    split_alike,
    vary_alike,
    vary_like,
)
from . import _partition, _python_call
from ._debug import check_values, is_debugging, run_eagerly
from ._eager import is_spread, platform_of, run_and_wait, run_on_cpu
from ._evaluate import evaluate_without
from ._inline import is_inline, run_inline
from ._jax_code import jax_code
from ._loops import stays_in_loops


# In JAX's spelling: where an op may have a kernel. Everywhere else its reference is lowered.
PLATFORMS = ("cpu", "cuda", "rocm")


@runtime_checkable
class OpCall(Protocol):
    """A call that the primitive makes. Hashable, and equal for calls that share a program. `None` stands for zero tangents."""

    @property
    def result_avals(self) -> Sequence[Aval]: ...

    @property
    def has_side_effect(self) -> bool: ...

    @property
    def factors(self) -> Factors:
        """The way in which the call may be split between devices."""
        ...

    @property
    def description(self) -> str:
        """The same text in each process, and another one for a call that does something else with its kernel."""
        ...

    @property
    def is_plain(self) -> bool:
        """True if the call is its reference on every platform, with the reference's own derivatives."""
        ...

    def part(self, shapes: Sequence[Sequence[Size]]) -> "OpCall":
        """The call on a part of its operands, of these shapes."""
        ...

    def reference(self, *args: Value) -> Sequence[Value]:
        """The op in pure JAX, flat."""
        ...

    def lowering(self, platform: str) -> Lowering | None:
        """The kernel for a platform, made runnable, or `None` if there is none."""
        ...

    def is_python(self, platform: str) -> bool:
        """True if the kernel for `platform` is in Python."""
        ...

    def native_name(self, platform: str) -> str | None:
        """The name under which errors are raised, if the kernel is in C++."""
        ...

    def launch(self, lowering: Lowering, run: Run, args: Sequence[Value]) -> Sequence[Value]:
        """Call the kernel, which `run` does, on operands in the form that it takes."""
        ...

    def jvp(self, primals: Sequence[Value], outs: Sequence[Value], tangents: Sequence[Value]) -> Sequence[Value]:
        """The tangents of the results `outs`."""
        ...

    def transpose(self, cotangents: Sequence[Value], args: Sequence[Value], linear: Sequence[int]) -> Sequence[Value]:
        """The cotangents of the operands `linear`, which `args` lacks."""
        ...

    def batch(self, args: Sequence[Value], dims: Sequence[int | None]) -> tuple[Sequence[Value], Sequence[int]]:
        """The call on mapped operands: the results and their mapped axes."""
        ...


op_call_p: Primitive = Primitive("op_call")
op_call_p.multiple_results = True


def op_call(call: OpCall, *args: Value) -> Sequence[AnyArray]:
    return op_call_p.bind(*fit_mesh(args, call), call=call)


def call_of(primitive: Primitive, params: Mapping[str, Any]) -> OpCall | None:
    """The call that an equation of a jaxpr makes; `None` where it is another primitive's."""
    return params["call"] if primitive is op_call_p else None


def fit_mesh(args: Sequence[Value], call: OpCall) -> Sequence[Value]:
    """Operands of types that go together, where types say something of devices."""
    if jax.sharding.get_abstract_mesh().empty:
        return args
    return split_alike(vary_alike(args), call.factors)


@op_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Aval, call: OpCall):
    effects = {kernel_effect} if call.has_side_effect else set()
    return on_current_mesh(call.result_avals, avals, call), effects


@functools.lru_cache(maxsize=1024)
def _program(call: OpCall) -> Callable[..., Sequence[jax.Array]]:
    return jax.jit(lambda *args: op_call_p.bind(*args, call=call))


@op_call_p.def_impl
def _impl(*args: Value, call: OpCall) -> Sequence[jax.Array]:
    debugging = is_debugging()
    if debugging and not is_inline(call.result_avals):
        return run_eagerly(_program(call), call, *args)
    # A call of a Python kernel outside of any program is one of the callback: no program is made for it.
    on_cpu = platform_of(args) == "cpu"
    lowering = call.lowering("cpu") if on_cpu and call.is_python("cpu") else None
    if not isinstance(lowering, PythonLowering):
        return run_eagerly(_program(call), call, *args) if debugging else _run_program(call, args, on_cpu)
    if is_spread(args) and not debugging:
        return run_and_wait(_program(call), args)

    def run(*args: Value, result_avals: Sequence[Aval]) -> Sequence[Value]:
        spec = lowering.spec(result_avals)
        if debugging:
            return check_values(run_inline(lowering.body, spec, args), call)
        return run_on_cpu(lowering.eager_state, spec, args)

    return call.launch(lowering, run, args)


@functools.lru_cache(maxsize=1024)
def _native_program(call: OpCall) -> tuple[Callable[..., Sequence[jax.Array]], str | None]:
    return _program(call), call.native_name("cpu")


def _run_program(call: OpCall, args: Sequence[Value], on_cpu: bool) -> Sequence[jax.Array]:
    """Call a kernel that is not in Python. On a CPU its error is raised here."""
    if not on_cpu:
        return _program(call)(*args)
    program, name = _native_program(call)
    try:
        outs = program(*args)
        if name is not None:
            for out in outs:
                out.block_until_ready()
    except (JaxRuntimeError, ValueError) as error:
        reraise_native(error, name)
        raise
    return outs


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Value], *, call: OpCall
) -> tuple[Sequence[Value], Sequence[Value]]:
    known = [None if _is_zero(tangent) else tangent for tangent in map(_as_array, tangents)]
    if call.is_plain:  # derivatives share what they can with the value, such as the loops that XLA does not join
        outs, out_tangents = _jvp_of_reference(call, primals, known)
    else:
        outs = op_call_p.bind(*primals, call=call)
        out_tangents = call.jvp(primals, outs, known)
    return outs, [
        ad.Zero(jax.typeof(out).to_tangent_aval()) if tangent is None or _is_zero(tangent) else tangent
        for out, tangent in zip(outs, out_tangents, strict=True)
    ]


ad.primitive_jvps[op_call_p] = _jvp


def _jvp_of_reference(
    call: OpCall, primals: Sequence[Value], tangents: Sequence[Value]
) -> tuple[Sequence[Value], Sequence[Value]]:
    active = [i for i, tangent in enumerate(tangents) if tangent is not None]
    function = of_some(call.reference, primals, active)
    return jax.jvp(function, [primals[i] for i in active], [tangents[i] for i in active])


def of_some(
    function: Callable[..., Sequence[Value]], args: Sequence[Value], active: Sequence[int]
) -> Callable[..., Sequence[Value]]:
    """The function of the operands `active`, where the others are as in `args`."""

    def of_active(*values: Value) -> Sequence[Value]:
        merged = list(args)
        for i, value in zip(active, values, strict=True):
            merged[i] = value
        return function(*merged)

    return of_active


def _as_array(tangent: Value) -> Value:
    """`jax.jvp` takes numbers of Python's, and hands them on as they are."""
    return jnp.asarray(tangent) if isinstance(tangent, bool | int | float | complex) else tangent


def _is_zero(tangent: Value) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _transpose(cotangents: Sequence[Value], *args: Value, call: OpCall) -> Sequence[Value]:
    linear = [i for i, arg in enumerate(args) if ad.is_undefined_primal(arg)]
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [ad.Zero(arg.aval) if ad.is_undefined_primal(arg) else None for arg in args]
    known = [None if isinstance(cotangent, ad.Zero) else cotangent for cotangent in cotangents]
    gradients = dict(zip(linear, call.transpose(known, args, linear), strict=True))
    return [gradients.get(i) for i in range(len(args))]


ad.primitive_transposes[op_call_p] = _transpose


# JAX transposes none of them; but a linear function is transposed as what it computes.
_RULES_OF_THEIR_OWN = ("custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def transpose(
    function: Callable[..., Sequence[Value]],
    cotangents: Sequence[Value],
    args: Sequence[Value],
    linear: Sequence[int],
    result_avals: Sequence[Aval],
) -> Sequence[Value]:
    """The cotangents of the operands `linear`, of which `function` is one in pure JAX. `cotangents` has `None` for zeros."""
    filled = [
        jnp.zeros(aval.shape, aval.dtype) if cotangent is None else cotangent
        for cotangent, aval in zip(cotangents, result_avals, strict=True)
    ]
    filled = vary_like(filled, [arg for arg in args if not ad.is_undefined_primal(arg)])

    def transposable(*values: Value) -> Sequence[Value]:
        return evaluate_without(_RULES_OF_THEIR_OWN, jax.make_jaxpr(function)(*values), values)

    return jax.linear_transpose(transposable, *(args[i].aval for i in linear))(filled)


def _batch(args: Sequence[Value], dims: Sequence[int | None], *, call: OpCall) -> tuple[Sequence[Value], Sequence[int]]:
    return call.batch(args, dims)


batching.primitive_batchers[op_call_p] = _batch


# What a call with a kernel is lowered to, once for each platform. The outer one has the name stack, see _python_call.py.
_kernel_call_p = Primitive("kernel_call")
_kernel_call_p.multiple_results = True


@_kernel_call_p.def_abstract_eval
def _kernel_abstract_eval(*avals: Aval, call: OpCall, **_: object) -> Sequence[Aval]:
    return on_current_mesh(call.result_avals, avals, call)


def _lower(ctx: mlir.LoweringRuleContext, *operands: Value, call: OpCall) -> Sequence[Value]:
    platforms = ctx.platforms or ctx.module_context.platforms
    lowerings = [call.lowering(platform) for platform in platforms if platform in PLATFORMS]
    if not any(lowerings):
        return mlir.lower_fun(call.reference, multiple_results=True)(ctx, *operands)
    python = [lowering for lowering in lowerings if isinstance(lowering, PythonLowering)]
    # Native calls do not know where they are: so equal ones stay one.
    name_stack = str(ctx.name_stack) if python else ""
    if not _partition.is_partitioned(ctx):

        def kernel_call(*operands: Value) -> Sequence[Value]:
            return _kernel_call_p.bind(*operands, call=call, name_stack=name_stack, owned=None)

        return mlir.lower_fun(kernel_call, multiple_results=True)(ctx, *operands)

    # The parts are lowered into another program, without its callbacks: this one owns them.
    owned = tuple(own(ctx, handle_for(lowering.body)).get("host_callback") for lowering in python)

    def part(*operands: Value) -> Sequence[Value]:
        local = call.part([operand.shape for operand in operands])
        return _kernel_call_p.bind(*operands, call=local, name_stack=name_stack, owned=owned or None)

    def whole(*operands: Value) -> Sequence[Value]:
        return _kernel_call_p.bind(*operands, call=call, name_stack=name_stack, owned=owned or None)

    # Callables of one name that are alive together have different keys, the same ones in each process.
    keys = [handle_for(lowering.body).key for lowering in python]
    described = [lowering.description for lowering in lowerings if lowering is not None]
    identity = f"{call.description} {described} {keys} {ctx.avals_in} {ctx.avals_out} {name_stack} {owned}"
    return _partition.lower(
        ctx, operands, call.factors, whole, part, identity, has_side_effect=call.has_side_effect, called=call
    )


def _lower_kernel(
    ctx: mlir.LoweringRuleContext, *operands: Value, call: OpCall, name_stack: str, owned: Any, platform: str | None
) -> Sequence[Value]:
    lowering = None if platform is None else call.lowering(platform)
    if lowering is None:
        return mlir.lower_fun(call.reference, multiple_results=True)(ctx, *operands)

    def run(*args: Value, result_avals: Sequence[Aval], mapped: Sequence[bool] | None = None) -> Sequence[Value]:
        if isinstance(lowering, PythonLowering):
            spec = lowering.spec(result_avals)
            return _python_call.named_call_p.bind(
                *args, body=lowering.body, spec=spec, name_stack=name_stack, owned=owned
            )
        if isinstance(lowering, JaxLowering):
            return jax_code(lowering, args, result_avals)
        types, of_results = [memory_aval(jax.typeof(arg)) for arg in args], list(map(memory_aval, result_avals))
        if mapped is None:
            launch = lowering.for_types(types, of_results)
        else:
            (size,) = {aval.shape[0] for aval, has in zip(types, mapped, strict=True) if has}
            launch = lowering.for_types(*of_one(types, of_results, mapped)).for_each(mapped, size, len(result_avals))
        outs = _native_call_p.bind(*args, lowering=launch, result_avals=(*result_avals, *launch.workspaces))
        return outs[: len(result_avals)]

    def launch(*args: Value) -> Sequence[Value]:
        return call.launch(lowering, run, args)

    return mlir.lower_fun(launch, multiple_results=True)(ctx, *operands)


def of_one(
    operands: Sequence[Aval], results: Sequence[Aval], mapped: Sequence[bool]
) -> tuple[Sequence[Aval], Sequence[Aval]]:
    """The types of one example."""

    def one(aval: Aval, is_mapped: bool) -> Aval:
        return result_aval(aval.shape[1:] if is_mapped else aval.shape, aval.dtype)

    return list(map(one, operands, mapped)), [one(aval, True) for aval in results]


_native_call_p = Primitive("native_call")
_native_call_p.multiple_results = True


@_native_call_p.def_abstract_eval
def _native_abstract_eval(*avals: Aval, lowering: LaunchLowering, result_avals: Sequence[Aval]) -> Sequence[Aval]:
    del lowering
    return on_current_mesh(result_avals, avals)


def _lower_native(
    ctx: mlir.LoweringRuleContext, *operands: Value, lowering: LaunchLowering, result_avals: Sequence[Aval]
) -> Sequence[Value]:
    del result_avals
    inputs, outputs = lowering.options.full_layouts(ctx.avals_in, ctx.avals_out)
    rule = jax.ffi.ffi_lowering(
        lowering.target,
        has_side_effect=lowering.options.has_side_effect,
        operand_output_aliases=dict(lowering.options.aliases),
        operand_layouts=minor_to_major(inputs),
        result_layouts=minor_to_major(outputs),
    )
    return rule(ctx, *operands, **lowering.attributes)


def register() -> None:
    _partition.requires_devices(op_call_p)
    stays_in_loops(op_call_p, lambda params: params["call"].has_side_effect)
    mlir.register_lowering(op_call_p, _lower, cacheable=False)
    mlir.register_lowering(_kernel_call_p, functools.partial(_lower_kernel, platform=None))
    for platform in PLATFORMS:
        mlir.register_lowering(_kernel_call_p, functools.partial(_lower_kernel, platform=platform), platform=platform)
    mlir.register_lowering(_native_call_p, _lower_native)
    # A call for a GPU has the kernel's image in it: equal calls of a program are calls of one function, which has it once.
    mlir.register_lowering(_native_call_p, _lower_native, platform="cuda", inline=False)
