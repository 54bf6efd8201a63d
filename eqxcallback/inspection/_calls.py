"""Facts about an external call that are known before the program is compiled."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import backends, xla
from ..core import Aval, Value, callable_name, type_text
from ..transform import ForwardCall
from ._report import Alias, ExternalCall


def external_calls(
    site: xla.CallSite, program: str, platform: str, donated: Sequence[bool]
) -> Iterator[tuple[ExternalCall, xla.CallSite]]:
    """The one of `site`, and those in it, with their sites.

    **Arguments:**

    - `site`: in the jaxpr of `program`.
    - `donated`: for each flat argument of the program.
    """
    if site.primitive == "op":
        call = _of_op(site, platform)
    elif site.primitive == "callback":
        call = _of_callback(site, platform)
    else:
        call = _of_jax(site, platform)
    # A call outside of all scopes of its own is told by its name.
    path = "/".join(part for part in (f"jit({program})", site.path, call.op) if part)
    aliases = tuple(dataclasses.replace(alias, reason=_donation(site, alias, donated)) for alias in call.in_place)
    yield dataclasses.replace(call, path=path, in_place=aliases), site
    for inner in _inside(site, platform):
        yield from external_calls(inner, program, platform, donated)


def _of_op(site: xla.CallSite, platform: str) -> ExternalCall:
    call: Any = site.params["call"]
    bound = call.bound
    kind = "forward" if isinstance(call, ForwardCall) else repr(call).rpartition(".")[2]  # jvp, vjp
    lowering = call.lowering(platform)
    if lowering is None or isinstance(lowering, xla.JaxLowering):
        return _of_jax_code(call, kind, lowering, site, platform)
    seen = _kernel_types(call, lowering, site)
    operands, results = map(_types, seen[:2])
    is_python = isinstance(lowering, xla.PythonLowering)
    # The handler of a native kernel says it, and not its declaration.
    declares = not isinstance(lowering, xla.LaunchLowering)
    compatible = lowering.options.command_buffer_compatible if declares else None
    captured, reason = _captured(platform, "python" if is_python else "native", compatible)
    if isinstance(lowering, xla.PythonLowering):
        target = xla.python_target(platform, bool(compatible))
    else:
        target = lowering.target if seen.examples is None else xla.target_for_each(lowering.target)
    return ExternalCall(
        path="",
        op=bound.name,
        kind=kind,
        lane="python" if is_python else "native",
        target=target,
        operands=operands,
        results=results,
        in_place=tuple(Alias(i, o, None) for i, o in lowering.options.aliases),
        captured=captured,
        captured_reason=reason,
        fallback="",
        times=site.times,
        handle=xla.kernel_handle(lowering, bound.name),
        passed_over=call.choice(platform).reasons,
        hint=_hint(call),
        launches=backends.launched(lowering.for_types(*seen[:2]).attributes)
        if isinstance(lowering, xla.TypedLowering)
        else (),
        examples=1 if seen.examples is None else seen.examples,
    )


def _of_jax_code(
    call: Any, kind: str, lowering: xla.JaxLowering | None, site: xla.CallSite, platform: str
) -> ExternalCall:
    """A `JaxKernel`, or the reference where `lowering` is `None`."""
    is_reference = lowering is None
    seen = _Seen(site.operands, site.results) if lowering is None else _kernel_types(call, lowering, site)
    operands, results = map(_types, seen[:2])
    return ExternalCall(
        path="",
        op=call.bound.name,
        kind=kind,
        lane="reference" if is_reference else "jax",
        target=None,
        operands=operands,
        results=results,
        in_place=(),
        captured=None,
        captured_reason=f"XLA treats {'the reference' if is_reference else 'it'} as it does all code of its own",
        fallback=_why_reference(call, kind, platform) if is_reference else "",
        times=site.times,
        passed_over=() if is_reference else call.choice(platform).reasons,
        hint=_hint(call),
    )


def _inside(site: xla.CallSite, platform: str) -> Iterator[xla.CallSite]:
    """The calls in what a `JaxKernel` is."""
    call: Any = site.params.get("call")
    lowering = call.lowering(platform) if site.primitive == "op" else None
    if not isinstance(lowering, xla.JaxLowering):
        return

    def run(*args: Value, result_avals: Sequence[Aval]) -> Sequence[Value]:
        return lowering.function(args, result_avals)

    structs = _structs(site.operands)
    program = jax.make_jaxpr(lambda *args: call.launch(lowering, run, args))(*structs)
    for inner in xla.call_sites(program, platform):
        path = "/".join(part for part in (site.path, call.bound.name, inner.path) if part)
        times = None if site.times is None or inner.times is None else site.times * inner.times
        yield dataclasses.replace(inner, path=path, times=times, arguments=(None,) * len(inner.arguments))


def _of_callback(site: xla.CallSite, platform: str) -> ExternalCall:
    spec = site.params["spec"]
    captured, reason = _captured(platform, "python", spec.options.command_buffer_compatible)
    return ExternalCall(
        path="",
        op=repr(site.params["body"]),
        kind="callback",
        lane="python",
        target=xla.python_target(platform, spec.options.command_buffer_compatible),
        operands=_types(site.operands),
        results=_types(site.results),
        in_place=tuple(Alias(i, o, None) for i, o in spec.options.aliases),
        captured=captured,
        captured_reason=reason,
        fallback="",
        times=site.times,
        handle=xla.python_handle(site.params["body"]),
    )


def _of_jax(site: xla.CallSite, platform: str) -> ExternalCall:
    params = site.params
    target = params.get("target_name")
    callback = params.get("callback")
    function = getattr(callback, "callback_func", callback)
    captured, reason = _captured(platform, "ffi" if target else "jax callback", None)
    aliases = params.get("input_output_aliases") or ()
    return ExternalCall(
        path="",
        op=target or (callable_name(function) if callable(function) else site.primitive),
        kind="callback",
        lane="ffi" if target else "jax callback",
        target=target,
        operands=_types(site.operands),
        results=_types(site.results),
        in_place=tuple(Alias(i, o, None) for i, o in (aliases.items() if isinstance(aliases, dict) else aliases)),
        captured=captured,
        captured_reason=reason,
        fallback="",
        times=site.times,
    )


def _captured(platform: str, lane: str, compatible: bool | None) -> tuple[bool | None, str]:
    if platform not in ("cuda", "rocm"):
        return False, f"a {platform.upper()} has no command buffers"
    if lane == "jax callback":
        return False, "JAX's callbacks return to the host"
    if compatible is False:
        return False, "not declared command_buffer_compatible"
    if compatible is True:
        return None, "declared compatible: XLA decides"
    return None, "its handler says whether it is compatible, and XLA decides"


def _why_reference(call: Any, kind: str, platform: str) -> str:
    bound = call.bound
    if kind == "jvp":
        return "forward mode is the derivative of the reference"
    if platform not in bound.forward:
        platforms = ", ".join(bound.forward)
        there_are = f"there are kernels for {platforms}" if platforms else "there is none at all"
        return f"no kernel for {platform} ({there_are})"
    return call.choice(platform).text or f"no backward kernel for {platform}"


def _hint(call: Any) -> str:
    examples = max(call.examples, 1 if isinstance(call, ForwardCall) else call.call.examples)
    if examples == 1:
        return ""
    return f'vmap calls it for each of {examples} examples, as no vmap_method is stated: "fold" would be one call'


class _Seen(NamedTuple):
    """The types with which a kernel is called, and for how many examples XLA's threads call it, if they do."""

    operands: Sequence[Aval]
    results: Sequence[Aval]
    examples: int | None = None


def _kernel_types(call: Any, lowering: xla.Lowering, site: xla.CallSite) -> _Seen:
    """Return the types that the kernel sees, which under `vmap` are not those of the program."""
    seen: list[_Seen] = []

    def run(*args: Value, result_avals: Sequence[Aval], mapped: Sequence[bool] | None = None) -> Sequence[Value]:
        if mapped is None:
            seen.append(_Seen(_structs(args), _structs(result_avals)))
        else:
            (size,) = {arg.shape[0] for arg, has in zip(args, mapped, strict=True) if has}
            operands, results = xla.of_one(args, result_avals, mapped)
            seen.append(_Seen(_structs(operands), _structs(results), size))
        with jax.enable_x64(True):  # types are what they are, also where the rest of the program has no such
            return [jnp.zeros(aval.shape, aval.dtype) for aval in result_avals]

    structs = _structs(site.operands)
    jax.eval_shape(lambda *args: call.launch(lowering, run, args), *structs)
    return seen[0] if seen else _Seen(site.operands, site.results)


def _structs(avals: Sequence[Aval]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def _types(avals: Sequence[Aval]) -> tuple[str, ...]:
    return tuple(type_text(aval.dtype, aval.shape) for aval in avals)


def _donation(site: xla.CallSite, alias: Alias, donated: Sequence[bool]) -> str:
    argument = site.arguments[alias.operand] if alias.operand < len(site.arguments) else None
    if argument is None:
        return ""
    return "donated" if donated[argument] else "not donated"
