"""The primitive of the python lane: call a Python function on XLA's own buffers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...core import Aval, OwnCallable, Value
from ..handles import (
    PYTHON,
    PYTHON_CAPTURED,
    PYTHON_PLATFORMS,
    CallSpec,
    PythonBody,
    handle_for,
    is_exported,
    own,
    portable_attributes,
)
from ..types import (
    Factors,
    kernel_effect,
    layouts_attribute,
    minor_to_major,
    on_current_mesh,
    ordered_kernel_effect,
    vary_alike,
)
from . import _batching, _eager, _ordered, _partition
from ._loops import stays_in_loops


python_call_p: Primitive = Primitive("buffer_callback")
python_call_p.multiple_results = True

# The same with an effect. On several devices XLA must be told where it happens, for which lowering needs to know them.
effectful_call_p: Primitive = Primitive("effectful_buffer_callback")
effectful_call_p.multiple_results = True


def python_call(body: PythonBody, spec: CallSpec, args: Sequence[Value]) -> Sequence[jax.Array]:
    """Call `body` on flat operands, as `spec` says. Returns one array for each of `spec.result_avals`."""
    primitive = effectful_call_p if spec.options.has_side_effect else python_call_p
    return primitive.bind(*vary_alike(args), body=body, spec=spec)


def _abstract_eval(*avals: Aval, spec: CallSpec, **_: object):
    return on_current_mesh(spec.result_avals, avals), _effects_of(spec)


def _effects_of(spec: CallSpec) -> set[Any]:
    if spec.ordered:
        return {ordered_kernel_effect}
    return {kernel_effect} if spec.options.has_side_effect else set()


def no_derivative(what: str) -> Callable[..., NoReturn]:
    def rule(*_: object, body: PythonBody, **__: object) -> NoReturn:
        raise _refusal(body, what) or ValueError(
            f"eqxcallback.buffer_callback: {body!r} has no {what}, because an external kernel says nothing about its "
            "derivative. Wrap the call in `jax.custom_jvp` or `jax.custom_vjp`."
        )

    return rule


def _refusal(body: PythonBody, what: str) -> Exception | None:
    """Return the error that our own callbacks raise instead, if any."""
    return body.callback._refusal(what) if isinstance(body.callback, OwnCallable) else None


def _batch(args: Sequence[Value], dims: Sequence[int | None], *, body: PythonBody, spec: CallSpec):
    if spec.vmap_method is None:
        raise _refusal(body, "vmap") or NotImplementedError(
            f"eqxcallback.buffer_callback: {body!r} was called under `jax.vmap`, but it has no vmap_method. Pass one of "
            f"{', '.join(_batching.VMAP_METHODS[:4])}."
        )

    def bind(*args: Value, result_avals: Sequence[Aval]) -> Sequence[Value]:
        batched_spec = dataclasses.replace(spec, result_avals=tuple(result_avals))
        return python_call(body, batched_spec, args)

    aliased = frozenset(i for i, _ in spec.options.aliases)
    return _batching.batch(
        bind,
        args,
        dims,
        vmap_method=spec.vmap_method,
        result_avals=spec.result_avals,
        aliased=aliased,
        is_python=True,
    )


# What a call is lowered to: the same call, with the name stack that its errors show. JAX lowers equal calls once, and their
# name stacks are not known then; so the outer primitive is lowered each time, and this one wherever it is new.
named_call_p = Primitive("named_buffer_callback")
named_call_p.multiple_results = True


@named_call_p.def_effectful_abstract_eval
def _named_abstract_eval(*avals: Aval, spec: CallSpec, **_: object):
    # Without an order there is nothing to say here: the effect of the outer one has kept it.
    effects = {ordered_kernel_effect} if spec.ordered else set()
    return on_current_mesh(spec.result_avals, avals), effects


def _lower(ctx: mlir.LoweringRuleContext, *operands: Value, body: PythonBody, spec: CallSpec) -> Sequence[Value]:
    name_stack = str(ctx.name_stack)
    owned = None

    def named_call(*operands: Value) -> Sequence[Value]:
        return named_call_p.bind(*operands, body=body, spec=spec, name_stack=name_stack, owned=owned)

    if not spec.options.has_side_effect or not _partition.is_partitioned(ctx):
        return mlir.lower_fun(named_call, multiple_results=True)(ctx, *operands)
    if spec.ordered:
        if _partition.is_manual(ctx):  # XLA aborts
            raise NotImplementedError(
                f"eqxcallback: {body!r} was called with ordered=True inside `jax.shard_map` over some axes of the mesh only. "
                "Make all axes manual, or leave the order out."
            )
        return _ordered.lower_on_each_device(ctx, operands, named_call)
    handle = handle_for(body)
    owned = (own(ctx, handle)["host_callback"],)
    if spec.keeps_parts and not spec.result_avals:
        whole = Factors.as_they_are(ctx.avals_in)
    else:
        whole = Factors.whole(ctx.avals_in, spec.result_avals)
    identity = f"{body.description} {handle.key} {spec} {ctx.avals_in} {name_stack} {owned}"
    return _partition.lower(ctx, operands, whole, named_call, named_call, identity, has_side_effect=True)


def _lower_named(
    ctx: mlir.LoweringRuleContext,
    *operands: Value,
    body: PythonBody,
    spec: CallSpec,
    name_stack: str,
    owned: tuple[np.uint64, ...] | None,
    target: str,
    captured_target: str,
) -> Sequence[Value]:
    handle = handle_for(body)
    inputs, outputs = spec.options.full_layouts(ctx.avals_in, ctx.avals_out)
    options: dict[str, Any] = {
        "has_side_effect": spec.options.has_side_effect,
        "operand_output_aliases": dict(spec.options.aliases),
        "operand_layouts": minor_to_major(inputs),
        "result_layouts": minor_to_major(outputs),
    }
    name = captured_target if spec.options.command_buffer_compatible else target
    attributes: dict[str, Any]
    if is_exported(ctx):
        attributes = portable_attributes(body)
    elif owned is None:
        attributes = {"key": np.uint64(handle.key), **own(ctx, handle)}
    else:
        attributes = {"key": np.uint64(handle.key), "host_callback": owned[0]}
    attributes.update(layouts_attribute(inputs, outputs, (ctx.avals_in, ctx.avals_out)))
    attributes["name_stack"] = name_stack
    if spec.ordered:
        return _ordered.lower(ctx, operands, name, options, attributes)
    return jax.ffi.ffi_lowering(name, **options)(ctx, *operands, **attributes)


def _lower_nowhere(ctx: mlir.LoweringRuleContext, *_: object, body: PythonBody, **__: object) -> NoReturn:
    platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
    raise ValueError(
        f"eqxcallback.buffer_callback: {body!r} cannot be lowered for {platforms}: the python lane has handlers for "
        f"{', '.join(PYTHON_PLATFORMS)}. Choose another function there with `jax.lax.platform_dependent`."
    )


def register() -> None:
    _partition.requires_devices(effectful_call_p)
    stays_in_loops(effectful_call_p, lambda params: True)
    for primitive in (python_call_p, effectful_call_p):
        primitive.def_impl(functools.partial(_eager.run, primitive))
        primitive.def_effectful_abstract_eval(_abstract_eval)
        ad.primitive_jvps[primitive] = no_derivative("JVP")
        ad.primitive_transposes[primitive] = no_derivative("transpose")
        batching.primitive_batchers[primitive] = _batch
        mlir.register_lowering(primitive, _lower, cacheable=False)
    for platform, captured_target in (
        ("cpu", PYTHON),  # a CPU has no command buffers: there the trait is ignored
        ("cuda", PYTHON_CAPTURED),
    ):
        rule = functools.partial(_lower_named, target=PYTHON, captured_target=captured_target)
        mlir.register_lowering(named_call_p, rule, platform=platform)
    mlir.register_lowering(named_call_p, _lower_nowhere)
