"""Norms, gates, rotation and loss as each peer has them. They are bound by memory, on every platform."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from eqxcallback import ops
from eqxcallback.ops.glu import _reference as glu_reference
from eqxcallback.ops.loss import _reference as loss_reference
from eqxcallback.ops.norm import _reference as norm_reference
from eqxcallback.ops.rotary import _reference as rotary_reference
from eqxcallback.ops.softmax import _reference as softmax_reference

from ._contestants import Pass, after_forward, normal, of_pass, operands, torch, torch_call, torch_ways
from ._rows import OURS, Setting
from ._timing import Runner


class Case(NamedTuple):
    """**Attributes:**

    - `formulations`: for XLA: the best of them is its figure.
    - `peers`: other libraries on XLA.
    - `torch`: the same in PyTorch, a function of the module `torch` and the arguments as tensors.
    - `args`: of a shape, as the op has it, and a dtype.
    - `moved`: arrays of the size of the first operand that the forward pass reads and writes, and both passes.
    - `differentiable`: the operands that are differentiated, or none.
    """

    name: str
    ours: Callable[..., jax.Array]
    formulations: Mapping[str, Callable[..., jax.Array]]
    peers: Mapping[str, Callable[..., jax.Array]]
    torch: Callable[..., Any]
    args: Callable[[tuple[int, ...], Any], tuple[Any, ...]]
    moved: tuple[float, float]
    differentiable: tuple[int, ...]


def _norm_args(parameters: int, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    return normal(0, *shape, dtype=dtype), *(normal(i + 1, shape[-1]) for i in range(parameters))


def _gate_args(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    return normal(0, *shape, dtype=dtype), normal(1, *shape, dtype=dtype)


def _gelu_args(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    return (normal(0, *shape, dtype=dtype),)


def _rotary_args(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    _, length, _, size = shape
    return normal(0, *shape, dtype=dtype), *ops.rotary_table(jnp.arange(length), size)


def _loss_args(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    rows, vocabulary = shape
    return normal(0, rows, vocabulary, dtype=dtype), jnp.arange(rows, dtype=jnp.int32) * 7 % vocabulary


def _wide(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Compute in f32, with the result in the dtype of the first operand."""

    @functools.wraps(f)
    def wrapped(x: jax.Array, *rest: Any) -> jax.Array:
        floats = (y.astype(jnp.float32) if jnp.issubdtype(y.dtype, jnp.floating) else y for y in rest)
        return f(x.astype(jnp.float32), *floats).astype(x.dtype)

    return wrapped


def _plain_rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight[None]


def _two_pass_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return centred * scale * weight[None] + bias[None]


def _one_pass_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    mean = jnp.mean(x, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) - mean * mean + 1e-5)
    return (x - mean) * scale * weight[None] + bias[None]


def _standardized(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * weight[None] + bias[None]


def _equinox_norm(
    make: Callable[[int], Any], x: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    layer = eqx.filter_eval_shape(make, x.shape[-1])
    where = lambda layer: [layer.weight, *([] if bias is None else [layer.bias])]
    layer = eqx.tree_at(where, layer, [weight, *([] if bias is None else [bias])])
    return jax.vmap(layer)(x)


def _rolled_rotation(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The halves joined by a roll, which XLA fuses into one pass."""
    half = x.shape[-1] // 2
    cos, sin = (jnp.concatenate([table, table], -1)[None, :, None] for table in (cos, sin))
    sign = jnp.where(jnp.arange(x.shape[-1]) < half, -1.0, 1.0)
    return x * cos + jnp.roll(x, half, -1) * sin * sign[None, None, None]


def _complex_rotation(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    turned = jax.lax.complex(x[..., :half], x[..., half:]) * jax.lax.complex(cos, sin)[None, :, None]
    return jnp.concatenate([turned.real, turned.imag], -1)


def _equinox_rotation(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate by Equinox's layer, which has a table of its own."""
    layer = eqx.nn.RotaryPositionalEmbedding(x.shape[-1], dtype=jnp.float32)
    return jax.vmap(jax.vmap(layer, in_axes=1, out_axes=1))(x)


def _loss_of_sums(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return jax.nn.logsumexp(wide, -1) - jnp.take_along_axis(wide, labels[:, None], -1)[:, 0]


def _loss_of_one_hot(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    chosen = jnp.where(jnp.arange(wide.shape[-1])[None] == labels[:, None], wide, 0.0).sum(-1)
    return jax.nn.logsumexp(wide, -1) - chosen


def _softmax_of_powers(x: jax.Array) -> jax.Array:
    powers = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return powers * (1 / jnp.sum(powers, -1, keepdims=True))


def _optax_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def _torch_norm(name: str, torch: Any, x: Any, *parameters: Any) -> Any:
    return getattr(torch.nn.functional, name)(
        x, x.shape[-1:], *(parameter.to(x.dtype) for parameter in parameters), eps=1e-5
    )


def _torch_rotation(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


# The most telling ones first.
CASES = {
    case.name: case
    for case in (
        Case(
            "rms_norm",
            ops.rms_norm,
            {"reference": functools.partial(norm_reference.rms_norm, eps=1e-5), "plain": _wide(_plain_rms_norm)},
            {
                "Equinox": _wide(
                    functools.partial(_equinox_norm, lambda size: eqx.nn.RMSNorm(size, 1e-5, use_bias=False))
                )
            },
            functools.partial(_torch_norm, "rms_norm"),
            functools.partial(_norm_args, 1),
            (2, 5),
            (0, 1),
        ),
        Case(
            "softmax_cross_entropy",
            ops.softmax_cross_entropy,
            {"reference": loss_reference.softmax_cross_entropy, "sums": _loss_of_sums, "one hot": _loss_of_one_hot},
            {"optax": _optax_loss},
            lambda torch, x, labels: torch.nn.functional.cross_entropy(x, labels.long(), reduction="none"),
            _loss_args,
            (1, 3),
            (0,),
        ),
        Case(
            "swiglu",
            ops.swiglu,
            {"reference": glu_reference.swiglu, "in its dtype": lambda gate, up: jax.nn.silu(gate) * up},
            {},
            lambda torch, gate, up: torch.nn.functional.silu(gate) * up,
            _gate_args,
            (3, 8),
            (0, 1),
        ),
        Case(
            "layer_norm",
            ops.layer_norm,
            {
                "reference": functools.partial(norm_reference.layer_norm, eps=1e-5),
                "two passes": _wide(_two_pass_norm),
                "one pass": _wide(_one_pass_norm),
            },
            {
                "jax.nn": _wide(_standardized),
                "Equinox": _wide(functools.partial(_equinox_norm, lambda size: eqx.nn.LayerNorm(size, 1e-5))),
            },
            functools.partial(_torch_norm, "layer_norm"),
            functools.partial(_norm_args, 2),
            (2, 5),
            (0, 1, 2),
        ),
        Case(
            "rotary_embedding",
            ops.rotary_embedding,
            {
                "reference": rotary_reference.rotary_embedding,
                "roll": _wide(_rolled_rotation),
                "complex": _wide(_complex_rotation),
            },
            {"Equinox": _wide(_equinox_rotation)},
            _torch_rotation,
            _rotary_args,
            (2, 4),
            (0,),
        ),
        Case(
            "gelu",
            ops.gelu,
            {"reference": functools.partial(glu_reference.gelu, approximate=True)},
            {"jax.nn": jax.nn.gelu},
            lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh"),
            _gelu_args,
            (2, 5),
            (0,),
        ),
        Case(
            "geglu",
            ops.geglu,
            {
                "reference": functools.partial(glu_reference.geglu, approximate=True),
                "in its dtype": lambda gate, up: jax.nn.gelu(gate) * up,
            },
            {},
            lambda torch, gate, up: torch.nn.functional.gelu(gate, approximate="tanh") * up,
            _gate_args,
            (3, 8),
            (0, 1),
        ),
        Case(
            "softmax",
            ops.softmax,
            {"reference": functools.partial(softmax_reference.softmax, scale=1.0), "powers": _wide(_softmax_of_powers)},
            {"jax.nn": _wide(jax.nn.softmax), "jax.nn in its dtype": jax.nn.softmax},
            lambda torch, x: torch.nn.functional.softmax(x, -1),
            functools.partial(_norm_args, 0),
            (2, 5),
            (0,),
        ),
    )
}


def of_ensemble(case: Case) -> Case:
    """The case of several models at once, each with parameters of its own: `jax.vmap` of all of its formulations.

    Its shapes begin with the number of models.
    """

    def args(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
        members = ([x * (1 + i / 8) for x in case.args(shape[1:], dtype)] for i in range(shape[0]))
        return tuple(map(jnp.stack, zip(*members, strict=True)))

    def mapped(of: Mapping[str, Callable[..., jax.Array]]) -> dict[str, Callable[..., jax.Array]]:
        return {name: jax.vmap(f) for name, f in of.items()}

    def of_torch(torch: Any, *args: Any) -> Any:
        return torch.func.vmap(functools.partial(case.torch, torch))(*args)

    return case._replace(
        name=f"{case.name} of an ensemble",
        ours=jax.vmap(case.ours),
        formulations=mapped(case.formulations),
        peers=mapped(case.peers),
        torch=of_torch,
        args=args,
    )


def case_contestants(
    setting: Setting,
    case: Case,
    which: Pass,
    args: tuple[Any, ...],
    torch_runner: Callable[[Callable[[Sequence[Any]], Callable[[], Any]], Sequence[Any]], Runner],
) -> dict[str, Callable[[], Runner]]:
    """Ours first. A backward pass alone is after a forward one; XLA may do better if it begins with the operands. `torch_runner`
    gets a function of operands that returns PyTorch's call on them, and the operands."""
    given = operands(case.ours, which, args)

    def runner(f: Callable[..., jax.Array]) -> Runner:
        return setting.clock.runner(of_pass(f, which, case.differentiable), *given)

    def kept(f: Callable[..., jax.Array]) -> Runner:
        backward, operands_of_it = after_forward(f, case.differentiable, given)
        return setting.clock.runner(backward, *operands_of_it)

    def of_torch(prepare: Callable[[Any], Any]) -> Runner:
        f = prepare(functools.partial(case.torch, torch()))
        return torch_runner(functools.partial(torch_call, f, which, case.differentiable), given)

    xla = {f"XLA: {name}": f for name, f in case.formulations.items()}
    rivals = {**xla, **case.peers}
    made = {name: functools.partial(runner, f) for name, f in {OURS: case.ours, **rivals}.items()}
    if which == "backward":
        made[OURS] = functools.partial(kept, case.ours)
        made |= {
            f"{name}{', kept' if ':' in name else ': kept'}": functools.partial(kept, f) for name, f in rivals.items()
        }
    if setting.torch:
        made |= {name: functools.partial(of_torch, prepare) for name, prepare in torch_ways(setting.tiny).items()}
    return made
