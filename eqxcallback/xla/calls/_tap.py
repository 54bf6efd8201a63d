"""The primitive of taps: the identity, which hands its operands to a function outside of the program."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from ... import _ext
from ...core import Aval, OwnCallable, Value
from ..handles import CallSpec, PythonBody
from ..types import CallOptions, kernel_effect, ordered_kernel_effect
from . import _partition
from ._eager import is_spread, run_and_wait
from ._loops import stays_in_loops
from ._python_call import effectful_call_p


@runtime_checkable
class Receiver(Protocol):
    """A receiver of the values of taps. Hashable, and equal for receivers that do the same."""

    def receive(
        self, ctx: _ext.ExecutionContext, buffers: Sequence[_ext.Buffer], leaves: Sequence[int], transforms: Any
    ) -> None: ...


@dataclasses.dataclass(frozen=True)
class Tap:
    """One tap, under the transformations so far.

    **Attributes:**

    - `of`: `"values"`, which are tapped when they pass; or `"tangents"`, `"cotangents"`: then nothing happens before there
        are some.
    - `leaves`: which leaves of the tapped tree the operands are.
    - `transforms`: `("batch", axes of the operands)`, `("jvp",)` and `("transpose",)`, the innermost first.
    - `backwards`: whether the transpose is a tap as well.
    - `device_index`: the device that receives, in a program of several. It gets whole operands, unless `shard_map` has split
        them.
    - `ordered`: see `CallSpec`. Without a number, device 0 receives, unless `shard_map` has split the operands.
    """

    receiver: Receiver
    of: str
    leaves: tuple[int, ...]
    device_index: int | None
    ordered: bool
    transforms: tuple[tuple[Any, ...], ...] = ()
    backwards: bool = True

    def then(self, transform: tuple[object, ...], **changes: object) -> "Tap":
        return dataclasses.replace(self, transforms=(*self.transforms, transform), **changes)

    def of_some(self, operands: Sequence[int]) -> "Tap":
        """Return the tap of these operands only."""

        def some(transform: tuple[Any, ...]) -> tuple[Any, ...]:
            name, *axes = transform
            return (name, tuple(axes[0][i] for i in operands)) if axes else transform

        leaves = tuple(self.leaves[i] for i in operands)
        return dataclasses.replace(self, leaves=leaves, transforms=tuple(map(some, self.transforms)))

    def body(self, ordinal: int | None = None) -> PythonBody:
        """Return the body that programs call. Only the device with this number receives, or each one."""
        operands = jax.tree.structure(((0,) * len(self.leaves), {}))
        return PythonBody(_Callback(self, ordinal), operands, jax.tree.structure(()))

    @property
    def spec(self) -> CallSpec:
        return CallSpec(
            result_avals=(),
            vmap_method=None,
            options=CallOptions(has_side_effect=True),
            ordered=self.ordered,
            keeps_parts=self.device_index is None,
        )


class _Callback(OwnCallable):
    """A tap as the callback of the python lane."""

    def __init__(self, tap: Tap, ordinal: int | None):
        self.tap = tap
        self.ordinal = ordinal

    def _named_like(self) -> Any:
        return self.tap.receiver

    def _identity(self) -> object:
        return _Callback, self.tap.receiver, self.tap.leaves, self.tap.transforms, self.ordinal

    def __call__(self, ctx: _ext.ExecutionContext, out: object, *buffers: _ext.Buffer) -> None:
        del out
        if self.ordinal is None or ctx.device_ordinal == self.ordinal:
            self.tap.receiver.receive(ctx, buffers, self.tap.leaves, self.tap.transforms)


tap_p: Primitive = Primitive("tap")
tap_p.multiple_results = True


def tap(tap: Tap, args: Sequence[Value]) -> Sequence[Value]:
    """`args`, which `tap` has seen."""
    return tap_p.bind(*args, tap=tap)


@tap_p.def_impl
def _impl(*args: Value, tap: Tap) -> Sequence[Value]:
    if tap.of == "values":
        if is_spread(args):
            run_and_wait(jax.jit(lambda *args: tap_p.bind(*args, tap=tap)), args)
        else:
            _check_device(tap, 1)
            effectful_call_p.bind(*args, body=tap.body(), spec=tap.spec)
    # JAX hands numbers and NumPy's arrays on in types of its own, which are private.
    return [arg if isinstance(arg, jax.Array) else jnp.asarray(arg) for arg in args]


@tap_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Aval, tap: Tap) -> tuple[Sequence[Aval], set[Any]]:
    if tap.of != "values":
        return list(avals), set()
    return list(avals), {ordered_kernel_effect if tap.ordered else kernel_effect}


def _jvp(primals: Sequence[Value], tangents: Sequence[Value], *, tap: Tap) -> tuple[Sequence[Value], Sequence[Value]]:
    outs = tap_p.bind(*primals, tap=tap)
    if tap.of == "values":
        return outs, tangents
    # Integers have no tangents. Zeros are tangents too, but nothing is differentiated by what has them.
    some = [i for i, tangent in enumerate(tangents) if _has_tangents(tangent)]
    if tap.of == "cotangents":
        some = [i for i in some if not isinstance(tangents[i], ad.Zero)]
        inner = tap.of_some(some)
    else:
        inner = tap.of_some(some).then(("jvp",), of="values", backwards=False)
    out_tangents = list(tangents)
    if any(not isinstance(tangents[i], ad.Zero) for i in some):
        values = tap_p.bind(*(ad.instantiate_zeros(tangents[i]) for i in some), tap=inner)
        for i, value in zip(some, values, strict=True):
            out_tangents[i] = value
    return outs, out_tangents


def _has_tangents(tangent: Value) -> bool:
    aval: Aval = tangent.aval if isinstance(tangent, ad.Zero) else jax.typeof(tangent)
    return aval.dtype != jax.dtypes.float0


def _transpose(cotangents: Sequence[Value], *args: Value, tap: Tap) -> Sequence[Value]:
    linear = [i for i, arg in enumerate(args) if ad.is_undefined_primal(arg)]
    gradients = dict(zip(linear, (cotangents[i] for i in linear), strict=True))
    known = any(not isinstance(cotangent, ad.Zero) for cotangent in gradients.values())
    if known and tap.backwards and tap.of != "tangents":
        some = [i for i in linear if _has_tangents(cotangents[i])]
        inner = tap.of_some(some).then(("transpose",), of="values")
        values = tap_p.bind(*(ad.instantiate_zeros(cotangents[i]) for i in some), tap=inner)
        gradients |= dict(zip(some, values, strict=True))
    return [gradients.get(i) for i in range(len(args))]


def _batch(
    args: Sequence[Value], dims: Sequence[int | None], *, tap: Tap
) -> tuple[Sequence[Value], Sequence[int | None]]:
    return tap_p.bind(*args, tap=tap.then(("batch", tuple(dims)))), dims


def _partial_eval(saveable: Callable[..., object], unknown: Sequence[bool], made: Sequence[bool], eqn: Any) -> Any:
    """Split a tap under `jax.checkpoint`: what is computed again is tapped again."""
    missing = [var for var, is_made in zip(eqn.invars, made, strict=True) if not is_made]
    if any(unknown):
        return None, eqn, [True] * len(eqn.outvars), [True] * len(eqn.outvars), missing
    policy = saveable(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
    if policy and type(policy).__name__ != "RecomputeType":  # the values are kept for the backward pass
        return eqn, None, [False] * len(eqn.outvars), [False] * len(eqn.outvars), []
    return eqn, eqn, [False] * len(eqn.outvars), [True] * len(eqn.outvars), missing


def _lower(ctx: mlir.LoweringRuleContext, *operands: Value, tap: Tap) -> Sequence[Value]:
    if tap.of != "values":
        return operands
    devices, ordinal = _partition.devices_of(ctx), None
    if devices is not None:
        _check_device(tap, len(devices))
        whole = _partition.is_partitioned(ctx) and not _partition.is_manual(ctx)
        if tap.device_index is not None or (tap.ordered and whole):
            ordinal = devices[tap.device_index or 0].local_hardware_id
    body, spec = tap.body(ordinal), tap.spec

    def call(*args: Value) -> Sequence[Value]:
        return effectful_call_p.bind(*args, body=body, spec=spec)

    mlir.lower_fun(call, multiple_results=True)(ctx, *operands)
    return operands


def _check_device(tap: Tap, count: int) -> None:
    if tap.device_index is not None and tap.device_index >= count:
        raise ValueError(
            f"eqxcallback.debug.tap: expected device_index to be one of the {count} devices of the program; got "
            f"{tap.device_index}."
        )


def register() -> None:
    _partition.requires_devices(tap_p)
    ad.primitive_jvps[tap_p] = _jvp
    ad.primitive_transposes[tap_p] = _transpose
    batching.primitive_batchers[tap_p] = _batch
    stays_in_loops(tap_p, lambda params: params["tap"].of == "values")
    partial_eval.partial_eval_jaxpr_custom_rules[tap_p] = _partial_eval
    mlir.register_lowering(tap_p, _lower, cacheable=False)
