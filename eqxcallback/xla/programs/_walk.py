"""The external calls of a program, found in its jaxpr: compiled text shows neither ops nor what is partitioned."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters import partial_eval

from ...core import Value
from ..calls import Tap, effectful_call_p, op_call_p, platform_of, python_call_p, tap_p
from ..handles import PYTHON, PYTHON_CAPTURED


# JAX's own ways out of a program, by the names of their primitives.
_JAX_CALLS = ("ffi_call", "pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")


@dataclasses.dataclass(frozen=True)
class CallSite:
    """One external call in a program.

    **Attributes:**

    - `primitive`: `"op"`, `"callback"` (`buffer_callback`), or the name of a primitive of JAX's.
    - `params`: of the primitive: an op has `call`, a callback `body` and `spec`.
    - `path`: the name stack.
    - `operands`, `results`: abstract values.
    - `arguments`: for each operand, the flat argument of the program that it is, or `None`.
    - `times`: how often it is called, or `None` if nobody knows. A branch counts as if it were taken.
    """

    primitive: str
    params: Mapping[str, Any]
    path: str
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    arguments: tuple[int | None, ...]
    times: int | None


def call_sites(jaxpr: ClosedJaxpr, platform: str) -> list[CallSite]:
    """List the call sites of a program for `platform`, in order, without calls whose results nobody uses."""
    inner = _open(jaxpr)
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return list(_walk(live, list(range(len(live.invars))), None, 1, platform))


def calls_kernels(jaxpr: ClosedJaxpr, platform: str) -> bool:
    """True if a program runs anything but XLA's own code. Calls whose results nobody uses count: eager ones are made."""
    inner = _open(jaxpr)
    sites = _walk(inner, list(range(len(inner.invars))), None, 1, platform)
    return any(site.primitive != "op" or site.params["call"].lowering(platform) is not None for site in sites)


def _walk(
    jaxpr: Jaxpr, arguments: Sequence[int | None], stack: Any, times: int | None, platform: str
) -> Iterator[CallSite]:
    origins = dict(zip(jaxpr.invars, arguments, strict=True))

    def origin(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else origins.get(atom)

    for eqn in jaxpr.eqns:
        inner_stack = eqn.source_info.name_stack
        full = inner_stack if stack is None else stack + inner_stack
        kind = _kind(eqn)
        if kind is not None:
            params = _call_of_tap(eqn.params["tap"]) if kind == "callback" and "tap" in eqn.params else eqn.params
            yield CallSite(
                kind,
                params,
                str(full),
                tuple(atom.aval for atom in eqn.invars),
                tuple(var.aval for var in eqn.outvars) if params is eqn.params else (),
                tuple(map(origin, eqn.invars)),
                times,
            )
            continue
        for label, inner, operands, factor in _inner(eqn, platform):
            known = _same_types(inner, operands)
            yield from _walk(
                inner,
                [origin(atom) if same else None for atom, same in zip(operands, known, strict=True)],
                full.extend(label) if label else full,
                None if times is None or factor is None else times * factor,
                platform,
            )


def _kind(eqn: Any) -> str | None:
    if eqn.primitive is op_call_p:
        return "op"
    if eqn.primitive in (python_call_p, effectful_call_p):
        return "callback"
    if eqn.primitive is tap_p:
        return "callback" if eqn.params["tap"].of == "values" else None
    return eqn.primitive.name if eqn.primitive.name in _JAX_CALLS else None


def _call_of_tap(tap: Tap) -> dict[str, Any]:
    """Return the call that a tap is lowered to: the identity around a callback without results."""
    return {"body": tap.body(), "spec": tap.spec}


def _inner(eqn: Any, platform: str) -> Iterator[tuple[str, Jaxpr, Sequence[Any], int | None]]:
    """The jaxprs that an equation runs: a label, the jaxpr, its operands, and how often it runs."""
    name: str = eqn.primitive.name
    params, operands = eqn.params, eqn.invars
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        yield "while/cond", _open(params["cond_jaxpr"]), [*operands[:first], *operands[second:]], None
        yield "while/body", _open(params["body_jaxpr"]), operands[first:], None
    elif name == "cond":
        platforms = params.get("branches_platforms")
        for i, branch in enumerate(params["branches"]):
            if platforms is None or i == _chosen(platforms, platform):
                yield "" if platforms else f"cond/branch_{i}", _open(branch), operands[1:], 1
    elif name == "custom_linear_solve":
        # The other three functions are for derivatives. The operands are the constants of the four, then those of a call.
        sizes = params["const_lengths"]
        first = sizes.matvec + sizes.vecmat
        constants = operands[first : first + sizes.solve]
        yield name, _open(params["jaxprs"].solve), [*constants, *operands[sum(sizes) :]], 1
    elif name != "pallas_call":  # what is inside is the kernel's own
        label = f"jit({params['name']})" if name in ("jit", "pjit") else _LABELS.get(name, name)
        factor = params["length"] if name == "scan" else 1
        for param in params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    jaxpr = _open(inner)
                    known = operands if len(operands) == len(jaxpr.invars) else [None] * len(jaxpr.invars)
                    yield label, jaxpr, known, factor


def inner_jaxprs(eqn: Any) -> Iterator[tuple[Jaxpr, int | None]]:
    """The jaxprs that an equation runs on a CPU, and how often each runs, or `None` if nobody knows."""
    for _, jaxpr, _, times in _inner(eqn, "cpu"):
        yield jaxpr, times


# Other primitives are shown by their own names.
_LABELS: Mapping[str, str] = {
    "remat2": "checkpoint",
    "remat": "checkpoint",
    "custom_jvp_call": "",
    "custom_vjp_call": "",
    "closed_call": "",
}


def _chosen(platforms: Sequence[Sequence[str] | None], platform: str) -> int:
    """The branch of `jax.lax.platform_dependent`."""
    for i, those in enumerate(platforms):
        if those is None or platform in those:
            return i
    return -1


def _same_types(jaxpr: Jaxpr, operands: Sequence[object]) -> list[bool]:
    """An operand that is sliced, by a scan say, is not the one outside."""
    return [atom is not None and _shape(atom) == _shape(var) for atom, var in zip(operands, jaxpr.invars, strict=True)]


def _shape(atom: Any) -> tuple[int, ...] | None:
    return getattr(atom.aval, "shape", None)


def _open(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def only_jit(jaxpr: ClosedJaxpr, args: Sequence[Value]) -> tuple[Any, Sequence[Any]]:
    """The jitted function that a jaxpr of flat arguments does nothing but call, and its arguments.

    For wrappers around `jax.jit` that keep it to themselves.
    """
    outer = _open(jaxpr)
    eqn = next(eqn for eqn in outer.eqns if eqn.primitive.name in ("jit", "pjit"))
    values = dict(zip(outer.invars, args, strict=True)) | dict(zip(outer.constvars, jaxpr.consts, strict=True))
    inner, params = eqn.params["jaxpr"], eqn.params
    function = jaxpr_as_fun(inner)

    def program(*args: Value) -> Any:
        return function(*args)

    program.__name__ = program.__qualname__ = params["name"]
    shardings = [
        sharding if isinstance(sharding, jax.sharding.Sharding) else None for sharding in params["in_shardings"]
    ]
    jitted = jax.jit(
        program,
        donate_argnums=tuple(i for i, donated in enumerate(params["donated_invars"]) if donated),
        in_shardings=tuple(shardings) if any(shardings) else None,
        keep_unused=params["keep_unused"],
        compiler_options=dict(params["compiler_options_kvs"]) or None,
    )
    return jitted, [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]


def platform_in_use(args: Sequence[Value]) -> str:
    """Return the platform of a program of `args`, in the spelling of lowerings, which tells GPUs apart."""
    platform = platform_of(args)
    if platform == "gpu":
        version = jax.devices("gpu")[0].client.platform_version
        return "rocm" if "rocm" in version.lower() else "cuda"
    return platform


def python_target(platform: str, command_buffer_compatible: bool) -> str:
    """The handler of the python lane."""
    return PYTHON_CAPTURED if platform == "cuda" and command_buffer_compatible else PYTHON
