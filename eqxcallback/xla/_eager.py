"""A call outside of any `jax.jit`: one compiled program for every callback, and the callback's own exception."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .. import _errors
from . import _targets
from ._body import CallSpec, PythonBody, handle_for


# Bound by the programs below only. Its first operand is the key of the callback: a program that carried the key in its
# text, as those under `jax.jit` do, would be compiled anew for each lambda, and would hold it until `clear_caches`.
_eager_call_p = Primitive("eager_buffer_callback")
_eager_call_p.multiple_results = True


@_eager_call_p.def_abstract_eval
def _abstract_eval(*_: Any, spec: CallSpec) -> Sequence[Any]:
    return spec.result_avals


def _runs_callbacks() -> None:
    """What an eager program owns, so that XLA runs it as a host callback."""


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, spec: CallSpec) -> Sequence[Any]:
    ctx.module_context.add_host_callback(_runs_callbacks)
    rule = jax.ffi.ffi_lowering(
        _targets.PYTHON_EAGER,
        has_side_effect=spec.has_side_effect,
        operand_output_aliases={i + 1: o for i, o in spec.input_output_aliases},
    )
    return rule(ctx, *operands)


mlir.register_lowering(_eager_call_p, _lower, platform="cpu")


@functools.cache
def _cpu_program(spec: CallSpec) -> Callable[..., Sequence[jax.Array]]:
    def buffer_callback(*operands: Any) -> Sequence[Any]:
        return _eager_call_p.bind(*operands, spec=spec)

    return jax.jit(buffer_callback)


def run(primitive: Primitive, *args: Any, body: PythonBody, spec: CallSpec) -> Sequence[jax.Array]:
    """Evaluate `primitive`, the python lane's, on concrete arrays."""
    if jax.config.jax_disable_jit:  # that is about the user's functions: a kernel has no other form than a program
        with jax.disable_jit(False):
            return run(primitive, *args, body=body, spec=spec)
    if _platform(args) != "cpu":
        return _own_program(primitive, body, spec)(*args)
    handle = handle_for(body)
    with _errors.Failures() as failures:
        try:
            outs = _cpu_program(spec)(body.key_operand, *args)
            for out in outs:
                out.block_until_ready()  # `handle` must live so long
        except (JaxRuntimeError, ValueError) as error:
            failures.reraise(error)
    return outs


def _own_program(primitive: Primitive, body: PythonBody, spec: CallSpec) -> Callable[..., Sequence[jax.Array]]:
    """Where the key cannot be read from an operand, being in a device's memory. It lives as long as `body`."""
    program = body.programs.get(spec)
    if program is None:
        program = body.programs[spec] = jax.jit(lambda *args: primitive.bind(*args, body=body, spec=spec))
    return program


def _platform(args: Sequence[Any]) -> str:
    for arg in args:
        if isinstance(arg, jax.Array):
            return next(iter(arg.devices())).platform
    device = jax.config.jax_default_device
    return getattr(device, "platform", device) or jax.default_backend()
