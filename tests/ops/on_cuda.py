"""The kernels on a GPU for every op and option, as docs/gpus.md has them: `python -m tests.ops.on_cuda` prints the table anew."""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops, xla

from .attention import options


BF16 = jnp.bfloat16


def struct(*shape: int, dtype: Any = BF16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, WEIGHT = struct(64, 256), struct(256)
QUERIES, KEYS = struct(150, 4, 64), struct(70, 2, 64)
INDICES = struct(64, dtype=jnp.int32)
PLAIN = "-"


def calls() -> Iterator[tuple[str, str, Callable[..., Any], tuple[Any, ...]]]:
    """The op, the options in words, a function, and its arguments."""
    for op in (ops.rms_norm, ops.layer_norm):
        yield op.__name__, "also with weight and bias", op, (ROWS, WEIGHT, WEIGHT)
    yield "add_rms_norm", PLAIN, ops.add_rms_norm, (ROWS, ROWS, WEIGHT)
    for size, name in ((16, "also with silu"), (16_384, "groups that blocks share")):
        yield "group_norm", name, functools.partial(ops.group_norm, groups=4), (struct(8, 16, size), *2 * [struct(16)])
    for op in (ops.swiglu, ops.geglu):
        yield op.__name__, PLAIN, op, (ROWS, ROWS)
    yield "softmax", "also with a mask", ops.softmax, (ROWS,)
    table = struct(64, 32, dtype=jnp.float32)
    yield "rotary_embedding", PLAIN, ops.rotary_embedding, (struct(64, 4, 64), table, table)
    qkv, cache, start = struct(1, 8, 64), struct(256, 2, 64), struct(dtype=jnp.int32)
    table = struct(1, 32, dtype=jnp.float32)
    yield "rotary_append", PLAIN, ops.rotary_append, (qkv, table, table, cache, cache, start)
    yield from _attention()
    yield "cache_append", PLAIN, ops.cache_append, (struct(256, 2, 64), struct(1, 2, 64), struct(dtype=jnp.int32))
    yield from _linear()
    yield from _losses()
    yield "lstm_gates", PLAIN, ops.lstm_gates, (struct(64, 1024), ROWS)
    yield "gru_gates", PLAIN, ops.gru_gates, (struct(64, 768), struct(64, 768), ROWS, WEIGHT)


def _attention() -> Iterator[Any]:
    arguments = QUERIES, KEYS, KEYS
    yield "attention", "causal, scale, grouped heads", functools.partial(ops.attention, causal=True), arguments
    few = struct(8, *QUERIES.shape[1:]), *2 * [struct(1024, *KEYS.shape[1:])]
    yield "attention", "few queries of many keys", ops.attention, few
    long = tuple(struct(*x.shape[:-1], 320) for x in arguments)
    yield "attention", "heads longer than 256", ops.attention, long
    for name in ("window", "soft cap", "bias", "mask", "alibi", "segments", "length", "offset", "dropout"):
        chosen = options.options(150, 70, 4)[name]
        yield "attention", name, functools.partial(ops.attention, **chosen), arguments
    yield "attention", "deterministic=False", functools.partial(ops.attention, deterministic=False), arguments
    yield "attention_with_lse", "any option", ops.attention_with_lse, arguments
    q, cache, length = struct(4, 64), struct(70, 2, 64), struct(dtype=jnp.int32)
    yield "decode_attention", PLAIN, ops.decode_attention, (q, cache, cache, length)
    for name, chosen in (
        ("window", {"window": 9}),
        ("soft cap", {"soft_cap": 2.0}),
        ("alibi", {"alibi_slopes": np.ones(4)}),
    ):
        yield "decode_attention", name, functools.partial(ops.decode_attention, **chosen), (q, cache, cache, length)

    def of_int8(q: Any, k: Any, v: Any, length: Any, k_scale: Any, v_scale: Any) -> Any:
        return ops.decode_attention(q, k, v, length, k_scale=k_scale, v_scale=v_scale)

    integers, scales = struct(70, 2, 64, dtype=jnp.int8), struct(70, 2, dtype=jnp.float32)
    yield "decode_attention", "a cache in int8", of_int8, (q, integers, integers, length, scales, scales)


def _linear() -> Iterator[Any]:
    yield "linear", PLAIN, ops.linear, (ROWS, struct(512, 256))
    yield "embedding", PLAIN, ops.embedding, (INDICES, struct(512, 256))
    for rows, name in ((8, "up to 8 rows"), (9, "more rows")):
        given = struct(rows, 256), struct(512, 160, dtype=jnp.uint8)
        yield "quantized_linear", name, functools.partial(ops.quantized_linear, encoding="Q4_1"), given
    given = struct(8, 256), struct(512, 144, dtype=jnp.uint8)
    others = functools.partial(ops.quantized_linear, encoding="Q4_K")
    yield "quantized_linear", "encodings but Q4_1 and Q8_0", others, given
    for rows, name in ((8, "up to 8 rows"), (9, "more rows, or other encodings")):
        given = struct(rows, 256), struct(512, 160, dtype=jnp.uint8)
        gated = functools.partial(ops.quantized_linear_swiglu, encoding="Q4_1")
        yield "quantized_linear_swiglu", name, gated, given
    for activations in ("exact", "int8"):
        given = ROWS, struct(512, 256, dtype=jnp.int8), struct(512, dtype=jnp.float32)
        yield (
            "int8_linear",
            f"activations {activations}",
            functools.partial(ops.int8_linear, activations=activations),
            given,
        )


def _losses() -> Iterator[Any]:
    yield "softmax_cross_entropy", PLAIN, ops.softmax_cross_entropy, (ROWS, INDICES)
    for name, chosen in (
        ("label_smoothing", 0.1),
        ("z_loss", 0.1),
        ("ignore_index", 0),
        ("class_weights", np.ones(256)),
    ):
        yield (
            "softmax_cross_entropy",
            name,
            functools.partial(ops.softmax_cross_entropy, **{name: chosen}),
            (ROWS, INDICES),
        )
    weighted = functools.partial(ops.softmax_cross_entropy, class_weights=np.ones(256), label_smoothing=0.1)
    yield "softmax_cross_entropy", "class_weights and another option", weighted, (ROWS, INDICES)
    yield "softmax_cross_entropy", "a target for each class", ops.softmax_cross_entropy, (ROWS, ROWS)
    yield "linear_cross_entropy", "any option", ops.linear_cross_entropy, (ROWS, struct(512, 256), INDICES)


WORDS = {
    "cuda": "CUDA C++",
    "triton": "Triton",
    "jax": "XLA's products",
    "several": "the two ops",
    "reference": "definition",
}
# Where the definition is what XLA does best: plain products, and plain reads and writes of rows.
BEST_BY_XLA = ("linear", "embedding", "cache_append", "rotary_append")
# Each runs two ops, one after the other, if no kernel does both.
OF_TWO_OPS = ("quantized_linear_swiglu",)


def kinds(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, str]:
    """The kernel that runs forward, and the one that has the gradients of all floating arguments."""
    numbers = tuple(i for i, arg in enumerate(args) if jnp.issubdtype(arg.dtype, jnp.floating))

    def loss(*args: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(function(*args)))

    def calls(program: Callable[..., Any]) -> list[tuple[bool, str]]:
        made = [site.params["call"] for site in xla.call_sites(jax.make_jaxpr(program)(*args), "cuda")]
        kernels = [(repr(call).endswith(".vjp"), call.choice("cuda").kernel) for call in made]
        return [(is_vjp, "reference" if bound is None else bound.kernel.backend) for is_vjp, bound in kernels]

    forward = dict(calls(function)).get(False, "reference")
    gradients = {kind for is_vjp, kind in calls(jax.grad(loss, numbers)) if is_vjp}
    if not gradients or "reference" in gradients:
        return forward, "reference"
    return forward, "several" if len(gradients) > 1 else gradients.pop()


def table() -> str:
    lines = ["| op | option | forward | gradients |", "| --- | --- | --- | --- |"]
    for op, option, function, args in calls():
        words = [_words(op, kind) for kind in kinds(function, args)]
        lines.append(f"| `{op}` | {option} | {' | '.join(words)} |")
    return "\n".join(lines)


def _words(op: str, kind: str) -> str:
    if kind == "jax" and op in OF_TWO_OPS:
        return WORDS["several"]
    return "XLA" if kind == "reference" and op in BEST_BY_XLA else WORDS[kind]


def of_page(text: str) -> str:
    match = re.search(r"\| op \| option .*?\n(?=\n)", text, re.DOTALL)
    assert match is not None
    return match[0].rstrip()


if __name__ == "__main__":
    print(table())
