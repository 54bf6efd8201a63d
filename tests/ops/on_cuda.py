"""The kernels on a GPU for every op and option, as docs/gpus.md has them: `python -m tests.ops.on_cuda` prints the table anew."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from eqxcallback import ops, xla
from eqxcallback.ops.attention import _cudnn

from .attention import by_cudnn, options


DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
PLAIN = "-"
_INTERLEAVED = tuple(ops.DEINTERLEAVED)


class Call(NamedTuple):
    """`op(*args, **options)`, where types stand for operands. Calls of the same op with the same words are one row."""

    op: Callable[..., Any]
    words: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def keywords(self) -> set[str]:
        """The parameters of the op that the call gives."""
        return {*inspect.signature(self.op).bind_partial(*self.args).arguments, *self.options}


def struct(*shape: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int, dtype: Any = jnp.int32) -> Any:
    return struct(*shape, dtype=dtype)


def calls(dtype: Any) -> Iterator[Call]:
    """A call of each op with each option, whose numbers are of this dtype."""

    def array(*shape: int) -> Any:
        return struct(*shape, dtype=dtype)

    rows, weight, wide = array(64, 256), array(256), struct(64, 32, dtype=jnp.float32)
    for op in (ops.rms_norm, ops.layer_norm):
        for args in ((rows,), (rows, weight), (rows, weight, weight)):
            yield Call(op, "also with weight and bias", args, {"eps": 1e-6})
    yield Call(ops.add_rms_norm, PLAIN, (rows, rows, weight), {"eps": 1e-6})
    yield Call(
        ops.group_norm,
        PLAIN,
        (array(8, 16, 16), weight_of(16, dtype), weight_of(16, dtype)),
        {"groups": 4, "eps": 1e-6},
    )
    yield Call(ops.group_norm, "groups that blocks share", (array(8, 16, 16_384),), {"groups": 4})
    yield Call(ops.gelu, "also approximate=False", (rows,))
    yield Call(ops.gelu, "also approximate=False", (rows,), {"approximate": False})
    for op in (ops.swiglu, ops.geglu):
        yield Call(op, "one array or two", (rows, rows))
        yield Call(op, "one array or two", (rows,))
    yield Call(ops.geglu, "approximate=False", (rows, rows), {"approximate": False})
    for chosen in ({"scale": 0.1}, {"mask": integers(256, dtype=jnp.bool_)}):
        yield Call(ops.softmax, "also with a mask", (rows,), chosen)
    yield Call(ops.rotary_embedding, PLAIN, (array(64, 4, 64), wide, wide))
    cache, start, table = array(256, 2, 64), integers(), struct(1, 32, dtype=jnp.float32)
    yield Call(ops.rotary_append, PLAIN, (array(1, 8, 64), table, table, cache, cache, start))
    yield from _attention(array)
    yield Call(ops.cache_append, "also of a batch", (cache, array(1, 2, 64), start))
    of_batch = array(3, 256, 2, 64), array(3, 1, 2, 64), integers(3)
    yield Call(ops.cache_append, "also of a batch", of_batch, {"batch_dims": 1})
    yield from _linear(array)
    yield from _losses(array)
    yield Call(ops.lstm_gates, PLAIN, (array(64, 1024), rows))
    yield Call(ops.gru_gates, "also with bias", (array(64, 768), array(64, 768), rows))
    yield Call(ops.gru_gates, "also with bias", (array(64, 768), array(64, 768), rows, weight))


def weight_of(size: int, dtype: Any) -> Any:
    return struct(size, dtype=dtype)


def _attention(array: Callable[..., Any]) -> Iterator[Call]:
    queries, alike, keys = array(150, 4, 64), array(150, 2, 64), array(70, 2, 64)
    few = array(8, 4, 64), *2 * [array(1024, 2, 64)]
    longer = array(150, 4, 256), *2 * [array(150, 2, 256)]
    long = array(150, 4, 320), *2 * [array(70, 2, 320)]
    of_cudnn = {
        "causal, scale, grouped heads": {"causal": True, "scale": 0.1},
        "causal window": {"causal": True, "window": 9},
        "deterministic=False": {"deterministic": False},
    }
    others = {
        "causal, queries not as many as keys": {"causal": True},
        **{name: options.options(150, 70, 4)[name] for name in _OPTIONS},
    }
    for op in (ops.attention, ops.attention_with_lse):
        is_plain = op is ops.attention
        for name, chosen in of_cudnn.items():
            yield Call(
                op, name if is_plain else "causal, its window, deterministic=False", (queries, alike, alike), chosen
            )
        for name, chosen in others.items():
            yield Call(op, name if is_plain else "any other option", (queries, keys, keys), chosen)
        yield Call(op, "few queries of many keys", few)
        yield Call(op, "heads of 129 to 256", longer)
        for chosen in (of_cudnn | others).values():
            yield Call(op, "heads longer than 256", long, chosen)
    args = array(4, 64), array(70, 2, 64), array(70, 2, 64), integers()
    yield Call(ops.decode_attention, "scale, grouped heads", args, {"scale": 0.1})
    yield Call(ops.decode_attention, "window", args, {"window": 9})
    yield Call(ops.decode_attention, "soft cap", args, {"soft_cap": 2.0})
    yield Call(ops.decode_attention, "alibi", args, {"alibi_slopes": struct(4, dtype=jnp.float32)})
    small, scales = integers(70, 2, 64, dtype=jnp.int8), struct(70, 2, dtype=jnp.float32)
    of_int8 = array(4, 64), small, small, integers()
    yield Call(ops.decode_attention, "a cache in int8", of_int8, {"k_scale": scales, "v_scale": scales})
    for heads, size in ((18, 64), (10, 320)):
        shared = array(heads, size), array(70, 2, size), array(70, 2, size), integers()
        yield Call(ops.decode_attention, "many heads share keys", shared)
    of_longer = array(4, 320), array(70, 2, 320), array(70, 2, 320), integers()
    yield Call(ops.decode_attention, "heads of 257 to 1024", of_longer)
    longest = array(4, 1040), array(70, 2, 1040), array(70, 2, 1040), integers()
    yield Call(ops.decode_attention, "heads longer than 1024", longest)


BY_TENSOR_CORES = "9 to 64 rows in 16 bits"
_OPTIONS = ("window", "soft cap", "bias", "mask", "alibi", "segments", "lengths", "offset", "dropout")


def _blocks(rows: int, features: int, encoding: Any) -> Any:
    weights = 256 if encoding.endswith("_K") else 32
    return integers(rows, features // weights * ops.ENCODINGS[encoding], dtype=jnp.uint8)


def _rows_of_quantized(x: Any, encoding: str) -> str:
    rows = x.shape[0]
    if encoding in _INTERLEAVED:
        return "rows side by side"
    if x.dtype.itemsize == 2 and 8 < rows <= 64:
        return BY_TENSOR_CORES
    return "up to 8 rows" if rows <= 8 else "more rows"


def _linear(array: Callable[..., Any]) -> Iterator[Call]:
    for bias in ((), (array(512),)):
        yield Call(ops.linear, "also with bias", (array(64, 256), array(512, 256), *bias))
    yield Call(ops.embedding, PLAIN, (integers(64), array(512, 256)))
    for op in (ops.quantized_linear, ops.quantized_linear_swiglu):
        for encoding in ops.ENCODINGS:
            blocks, chosen = _blocks(512, 256, encoding), {"encoding": encoding}
            for rows in (1, 8, 9, 64, 65):
                x = array(rows, 256)
                yield Call(op, _rows_of_quantized(x, encoding), (x, blocks), chosen)
            for rows in (1, 9):
                yield Call(op, "activations int8", (array(rows, 256), blocks), {**chosen, "activations": "int8"})
    of_int8 = integers(512, 256, dtype=jnp.int8), struct(512, dtype=jnp.float32)
    for activations in ("exact", "int8"):
        for rows in (1, 9):
            args = array(rows, 256), *of_int8
            yield Call(ops.int8_linear, f"activations {activations}", args, {"activations": activations})


def _losses(array: Callable[..., Any]) -> Iterator[Call]:
    logits, labels, weights = array(64, 256), integers(64), struct(256, dtype=jnp.float32)
    of_both: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "label_smoothing": {"label_smoothing": 0.1},
        "z_loss": {"z_loss": 0.1},
        "ignore_index": {"ignore_index": 0},
        "class_weights": {"class_weights": weights},
        "class_weights and another option": {"class_weights": weights, "label_smoothing": 0.1},
    }
    for name, chosen in of_both.items():
        yield Call(ops.softmax_cross_entropy, name, (logits, labels), chosen)
        if "ignore_index" not in chosen:  # which those have not
            yield Call(ops.softmax_cross_entropy, "a target for each class", (logits, logits), chosen)
    of_last = {**of_both, "bias": {"bias": array(256)}, "soft cap": {"soft_cap": 30.0}, "mean": {"reduction": "mean"}}
    for chosen in of_last.values():
        yield Call(ops.linear_cross_entropy, "any option", (logits, array(256, 256), labels), chosen)


WORDS = {
    "cuda": "CUDA C++",
    "triton": "Triton",
    "cudnn": "cuDNN",
    "jax": "XLA's products",
    "several": "the two ops",
    "reference": "definition",
}
# Where the definition is what XLA does best: plain products, and plain reads and writes of rows.
BEST_BY_XLA = ("gelu", "linear", "embedding", "cache_append", "rotary_append")
# Each runs two ops, one after the other, if no kernel does both.
OF_TWO_OPS = ("quantized_linear_swiglu",)


def _is_operand(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _is_number(x: Any) -> bool:
    return _is_operand(x) and jnp.issubdtype(x.dtype, jnp.floating)


def kinds(call: Call) -> tuple[str, str, str]:
    """The kernel that runs forward, the one that has the gradients of all floating operands, and what is differentiated for other
    derivatives.
    """
    operands, static = eqx.partition((call.args, call.options), _is_operand)
    numbers, others = eqx.partition(operands, _is_number)

    def function(numbers: Any, others: Any) -> Any:
        args, chosen = eqx.combine(numbers, others, static)
        return call.op(*args, **chosen)

    def loss(numbers: Any, others: Any) -> Any:
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(function(numbers, others)))

    def made(program: Callable[..., Any]) -> list[Any]:
        return [site.params["call"] for site in xla.call_sites(jax.make_jaxpr(program)(numbers, others), "cuda")]

    def chosen(program: Callable[..., Any]) -> list[tuple[bool, str]]:
        return [(repr(call).endswith(".vjp"), _kind(call.choice("cuda").kernel)) for call in made(program)]

    def pushed(numbers: Any, others: Any) -> Any:
        return jax.jvp(lambda numbers: function(numbers, others), (numbers,), (numbers,))

    tangents = [call for call in made(pushed) if repr(call).endswith(".jvp")]
    others_of = {"jax" if "cuda" in call.call.differentiated_on else "reference" for call in tangents}
    forward = dict(chosen(function)).get(False, "reference")
    gradients = {kind for is_vjp, kind in chosen(jax.grad(loss)) if is_vjp}
    return forward, "reference" if "reference" in gradients else _one_of(gradients), _one_of(others_of)


def _kind(bound: Any) -> str:
    if bound is None:
        return "reference"
    return "cudnn" if bound.kernel in (_cudnn.ATTENTION, _cudnn.VALUE_BACKWARD) else bound.kernel.backend


def products_of_the_definition(call: Call) -> list[tuple[str, ...]]:
    """The types that the definition multiplies."""
    operands, static = eqx.partition((call.args, call.options), _is_operand)

    def definition(operands: Any) -> Any:
        args, chosen = eqx.combine(operands, static)
        return call.op(*args, **chosen, implementation="reference")

    text = jax.jit(definition).lower(operands).as_text()
    types = re.findall(r"stablehlo.dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\)", text)
    return [tuple(kind.split("x")[-1] for kind in pair) for pair in types]


def _one_of(kinds: set[str]) -> str:
    if not kinds:
        return "reference"
    return "several" if len(kinds) > 1 else next(iter(kinds))


Row = tuple[str, str]


def rows() -> dict[Row, tuple[str, str, str]]:
    """The words of each op and option, of the forward pass, of gradients, and of other derivatives."""
    made: dict[Row, dict[str, set[tuple[str, str, str]]]] = {}
    for name, dtype in DTYPES.items():
        for call in calls(dtype):
            words = _words_of(call, why_no_cudnn="there is none")
            if call.op in (ops.attention, ops.attention_with_lse):
                best = _words_of(call, why_no_cudnn=None)
                forward, gradients, others = (
                    a if a == b else f"{a}, else {b}" for a, b in zip(best, words, strict=True)
                )
                words = forward, gradients, others
            made.setdefault((call.op.__name__, call.words), {}).setdefault(name, set()).add(words)
    return {row: (_joined(of, 0), _joined(of, 1), _joined(of, 2)) for row, of in made.items()}


def _words_of(call: Call, *, why_no_cudnn: str | None) -> tuple[str, str, str]:
    op = call.op.__name__
    with by_cudnn.usable(why_no_cudnn):
        forward, gradients, others = kinds(call)
    return _words(op, forward), _words(op, gradients), _words_of_others(others)


def _joined(of_dtypes: dict[str, set[tuple[str, str, str]]], column: int) -> str:
    """One text if all dtypes have the same, else one for each."""
    texts = {dtype: " or ".join(sorted({words[column] for words in every})) for dtype, every in of_dtypes.items()}
    by_text: dict[str, list[str]] = {}
    for dtype, text in texts.items():
        by_text.setdefault(text, []).append(dtype)
    if len(by_text) == 1:
        return next(iter(by_text))
    return "; ".join(f"{', '.join(dtypes)}: {text}" for text, dtypes in by_text.items())


def _words(op: str, kind: str) -> str:
    if kind == "jax" and op in OF_TWO_OPS:
        return WORDS["several"]
    return "XLA" if kind == "reference" and op in BEST_BY_XLA else WORDS[kind]


def _words_of_others(kind: str) -> str:
    """The definition is what XLA does best for what is not a product: `test_definitions_that_are_differentiated`."""
    return "XLA" if kind == "reference" else WORDS[kind]


def table(made: dict[Row, tuple[str, str, str]]) -> str:
    lines = ["| op | option | forward | gradients | other derivatives |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| `{op}` | {option} | {' | '.join(words)} |" for (op, option), words in made.items()]
    return "\n".join(lines)


def of_page(text: str) -> str:
    match = re.search(r"\| op \| option .*?\n(?=\n)", text, re.DOTALL)
    assert match is not None
    return match[0].rstrip()


def parameters(op: Callable[..., Any]) -> Iterable[str]:
    """The names of what an op takes, but for `implementation`, which says in place of the table which kernel runs."""
    names = inspect.signature(ops.attention if op is ops.attention_with_lse else op).parameters
    return [name for name in names if name != "implementation"]


if __name__ == "__main__":
    print(table(rows()))
