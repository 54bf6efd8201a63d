"""A call outside of any `jax.jit`: one compiled program for every callback, and the callback's own exception."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, concrete_or_error
from jax.interpreters import mlir

from ... import _ext
from ...core import Aval, Failures, Value
from ..handles import PYTHON_EAGER, CallSpec, EagerState, PythonBody, eager_state, own
from ..types import kernel_effect, layouts_attribute, minor_to_major, on_current_mesh
from ._debug import check_values, is_debugging, run_eagerly
from ._inline import is_inline, run_inline


# Bound by the programs below only. Its first operand is the key of the callback: a program that carried the key in its
# text, as those under `jax.jit` do, would be compiled anew for each lambda, and would hold it until `clear_caches`.
_eager_call_p = Primitive("eager_buffer_callback")
_eager_call_p.multiple_results = True


@_eager_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Aval, spec: CallSpec):
    # The program returns all results, so XLA cannot drop the call, unless there are none. An effect costs jit's fast path.
    effects = {kernel_effect} if spec.options.has_side_effect and not spec.result_avals else set()
    return on_current_mesh(spec.result_avals, avals), effects


def _lower(ctx: mlir.LoweringRuleContext, *operands: Value, spec: CallSpec) -> Sequence[Value]:
    avals: Any = ctx.avals_in
    inputs, outputs = spec.options.full_layouts(avals[1:], ctx.avals_out)
    rule = jax.ffi.ffi_lowering(
        PYTHON_EAGER,
        has_side_effect=spec.options.has_side_effect,
        operand_output_aliases={i + 1: o for i, o in spec.options.aliases},
        operand_layouts=None if inputs is None else [(0,), *(minor_to_major(inputs) or [])],
        result_layouts=minor_to_major(outputs),
    )
    attributes: dict[str, Any] = layouts_attribute(inputs, outputs, (avals[1:], ctx.avals_out))
    return rule(ctx, *operands, **own(ctx, _ext.resume), **attributes)


mlir.register_lowering(_eager_call_p, _lower, platform="cpu")


# Programs that no call is using. JAX lets nobody call a jitted function while its first call is under way, from the same
# thread or, without a deadlock, from another one that this call waits for. So each call that runs at once has its own.
_idle_programs: dict[CallSpec, list[Callable[..., Sequence[jax.Array]]]] = {}

_config: Any = jax.config  # its options are made at run time: no type checker knows them


def _new_program(spec: CallSpec) -> Callable[..., Sequence[jax.Array]]:
    def buffer_callback(*operands: Value) -> Sequence[Value]:
        return _eager_call_p.bind(*operands, spec=spec)

    return jax.jit(buffer_callback)


def run(primitive: Primitive, *args: Value, body: PythonBody, spec: CallSpec) -> Sequence[jax.Array]:
    """Evaluate `primitive`, the python lane's, on concrete arrays."""
    if is_debugging():
        if is_inline(spec.result_avals) and platform_of(args) == "cpu":
            return check_values(run_inline(body, spec, args), body)
        return run_eagerly(functools.partial(run, primitive, body=body, spec=spec), body, *args)
    state = eager_state(body)
    if platform_of(args) != "cpu":
        return _own_program(state, primitive, body, spec)(*args)
    if is_spread(args):
        return run_and_wait(_own_program(state, primitive, body, spec), args)
    return run_on_cpu(state, spec, args)


def run_on_cpu(state: EagerState, spec: CallSpec, args: Sequence[Value]) -> Sequence[jax.Array]:
    """Call the body of `state` on one device. It lives until then: its program does not hold it."""
    key = state.key(next((arg for arg in args if isinstance(arg, jax.Array)), None))
    idle = _idle_programs.setdefault(spec, [])
    program = idle.pop() if idle else _new_program(spec)
    try:
        if isinstance(key, jax.Array):
            return run_and_wait(program, (key, *args))
        with jax.transfer_guard("allow"):  # the key is our own affair
            return run_and_wait(program, (key, *args))
    finally:
        idle.append(program)


def _own_program(
    state: EagerState, primitive: Primitive, body: PythonBody, spec: CallSpec
) -> Callable[..., Sequence[jax.Array]]:
    """Return a program of this body's own, for devices whose memory hides a key that is an operand."""
    program = state.programs.get(spec)
    if program is None:
        program = state.programs[spec] = jax.jit(lambda *args: primitive.bind(*args, body=body, spec=spec))
    return program


def is_spread(args: Sequence[Value]) -> bool:
    """True if an eager call runs on several devices. Then it is split as it is under `jit`."""
    return any(isinstance(arg, jax.Array) and len(arg.devices()) > 1 for arg in args)


def run_and_wait(program: Callable[..., Sequence[jax.Array]], args: Sequence[Value]) -> Sequence[jax.Array]:
    """Run a program, and raise the exception of its kernel."""
    with Failures() as failures:
        try:
            outs = program(*args)
            for out in outs:
                out.block_until_ready()
        except Exception as error:
            failures.reraise(error)
    return outs


def check_devices(error: ValueError, who: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise `ValueError` if `error` is JAX's for arrays on several devices, which names operands of ours. `named` has those of
    the caller, with their paths.
    """
    if "incompatible devices" not in str(error):
        return
    first: dict[Any, str] = {}
    for path, array in named:
        try:
            array = concrete_or_error(None, array)  # a tracer of `jax.grad`, outside of `jit`, has a value
        except jax.errors.ConcretizationTypeError:
            continue
        if isinstance(array, jax.Array) and array.committed:
            first.setdefault(frozenset(array.devices()), path)
    if len(first) > 1:
        places = [f"{path} on {', '.join(sorted(map(str, devices)))}" for devices, path in first.items()]
        raise ValueError(
            f"{who}: expected arrays on the same devices; got {' and '.join(places)}. jax.device_put moves them."
        )


def platform_of(args: Sequence[Value]) -> str:
    """Return the platform on which an eager call on `args` runs."""
    like = next((arg for arg in args if isinstance(arg, jax.Array)), None)
    if like is not None:
        return next(iter(like.devices())).platform
    device = _config.jax_default_device
    return getattr(device, "platform", device) or jax.default_backend()
