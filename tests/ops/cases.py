"""Operands for every op, and what its definition says about them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eqxcallback import _ext, ops, reference


DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
# Of a number that is rounded once.
ROUNDING = {DTYPES[0]: 2.0**-21, DTYPES[1]: 2.0**-8, DTYPES[2]: 2.0**-11}
ENCODINGS: Any = ops.ENCODINGS
BATCHES = [(), (3,), (2, 3)]


@dataclasses.dataclass(frozen=True)
class Case:
    """`op(*args)` is what `definition(*args)` is. `terms` are added up for each element of the result."""

    op: Callable[..., Any]
    definition: Callable[..., Any]
    args: tuple[Any, ...]
    terms: int
    dtype: Any = None  # of the result, if it is not that of the first operand

    def wide(self):
        """Operands of the same values, in f32."""
        return [np.asarray(x, np.float32) if x.dtype in DTYPES else x for x in self.args]

    def want(self):
        return np.asarray(quickly_compiled(self.definition)(*self.wide()))

    def check(self, got, want=None):
        want = self.want() if want is None else want
        assert got.dtype == (self.args[0].dtype if self.dtype is None else self.dtype)
        tolerate(got, want, self.terms)


def tolerate(got, want, terms):
    """As close as the order of the sums allows; bf16 and f16 are rounded once."""
    got = np.asarray(got)
    scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
    rtol = ROUNDING.get(got.dtype, 2.0**-21)
    np.testing.assert_allclose(got.astype(np.float32), want, rtol=rtol, atol=2.0**-21 * math.sqrt(terms + 1) * scale)


@functools.cache
def quickly_compiled(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def normal(seed, shape, dtype: Any = np.float32, scale=1.0) -> Any:
    return (scale * np.random.default_rng((seed, *shape)).standard_normal(shape)).astype(dtype)


def blocks(seed, out_features, in_features, encoding) -> Any:
    """Random weights of either sign, of a size that keeps sums of products near 1."""
    rng = np.random.default_rng((seed, out_features, in_features))
    count = in_features // 32
    parts = rng.integers(0, 256, (out_features, count, ops.ENCODINGS[encoding]), np.uint8)
    halves = 2 if encoding == "Q4_1" else 1
    sizes = rng.uniform(0.5, 1, (out_features, count, halves)) / (8 if encoding == "Q4_1" else 128)
    signs = rng.choice([-1, 1], sizes.shape)
    parts[..., : 2 * halves] = (
        (signs * sizes).astype(np.float16).view(np.uint8).reshape(out_features, count, 2 * halves)
    )
    return parts.reshape(out_features, count * ops.ENCODINGS[encoding])


def rms_norm(dtype, shape, weight=True, eps=1e-5, x=None):
    args = (normal(1, shape, dtype) if x is None else x, *([normal(2, shape[-1:])] if weight else []))
    return Case(_op(ops.rms_norm, eps=eps), _op(reference.rms_norm, eps=eps), args, shape[-1])


def layer_norm(dtype, shape, weight=True, bias=True, eps=1e-5):
    parameters = [normal(2, shape[-1:]) if weight else None, normal(3, shape[-1:]) if bias else None]
    args = (normal(1, shape, dtype), *(parameter for parameter in parameters if parameter is not None))

    def of(function):
        def f(x, *rest):
            given = iter(rest)
            return function(x, *(None if parameter is None else next(given) for parameter in parameters), eps=eps)

        return f

    return Case(_of(of, ops.layer_norm, weight, bias), _of(of, reference.layer_norm, weight, bias), args, shape[-1])


def softmax_cross_entropy(dtype, shape):
    labels = np.random.default_rng(4).integers(-shape[-1], shape[-1], shape[:-1]) if shape[-1] else np.zeros(shape[:-1])
    args = (normal(1, shape, dtype, 3.0), labels.astype(np.int32))
    return Case(ops.softmax_cross_entropy, reference.softmax_cross_entropy, args, shape[-1], np.dtype(np.float32))


def rotary_embedding(dtype, shape, shared=False):
    rows, half = shape[-3], shape[-1] // 2
    angles = normal(2, (rows, half) if shared else (*shape[:-2], half))
    args = (normal(1, shape, dtype), np.cos(angles), np.sin(angles))
    return Case(ops.rotary_embedding, reference.rotary_embedding, args, 2)


def swiglu(dtype, shape, packed=False):
    args = (normal(1, shape, dtype, 4.0), *([] if packed else [normal(2, shape, dtype)]))
    return Case(ops.swiglu, reference.swiglu, args, 1)


def attention(dtype, batch, queries, keys, heads, kv_heads, size, causal=False, scale=None):
    args = (
        normal(1, (*batch, queries, heads, size), dtype),
        normal(2, (*batch, keys, kv_heads, size), dtype),
        normal(3, (*batch, keys, kv_heads, size), dtype),
    )
    definition = _op(reference.attention, causal=causal, scale=1 / math.sqrt(max(size, 1)) if scale is None else scale)
    return Case(_op(ops.attention, causal=causal, scale=scale), definition, args, keys + size)


def decode_attention(dtype, batch, keys, heads, kv_heads, size, lengths=None):
    lengths = (
        np.random.default_rng(4).integers(-1, keys + 2, batch) if lengths is None else np.broadcast_to(lengths, batch)
    )
    args = (
        normal(1, (*batch, heads, size), dtype),
        normal(2, (*batch, keys, kv_heads, size), dtype),
        normal(3, (*batch, keys, kv_heads, size), dtype),
        np.asarray(lengths, np.int32),
    )
    definition = _op(reference.decode_attention, scale=1 / math.sqrt(max(size, 1)))
    return Case(ops.decode_attention, definition, args, keys + size)


def cache_append(dtype, batch, length, count, row, positions=None):
    positions = (
        np.random.default_rng(4).integers(-2, length + 2, batch)
        if positions is None
        else np.broadcast_to(positions, batch)
    )
    args = (
        normal(1, (*batch, length, *row), dtype),
        normal(2, (*batch, count, *row), dtype),
        np.asarray(positions, np.int32),
    )
    return Case(_op(ops.cache_append, batch_dims=len(batch)), _op(reference.cache_append, row_rank=len(row)), args, 0)


def quantized_linear(dtype, encoding, batch, in_features, out_features):
    args = (normal(1, (*batch, in_features), dtype), blocks(2, out_features, in_features, encoding))
    op, definition = _op(ops.quantized_linear, encoding=encoding), _op(reference.quantized_linear, encoding=encoding)
    return Case(op, definition, args, in_features)


@functools.cache
def _op(function, **options):
    """One function for each choice of options: JAX compiles it once for each shape."""
    return functools.partial(function, **options)


_made_functions: dict[Any, Any] = {}


def _of(make, function, *key):
    """`make(function)`, one for each key."""
    return _made_functions.setdefault((function, *key), make(function))


SHAPES = {
    layer_norm: [
        *[((*batch, size), *has) for batch in BATCHES for size, *has in ((1, True, True), (17, True, False))],
        *[((3, size), False, True) for size in (3, 16, 63)],
        ((3, 100), False, False),
        ((0, 5),),
    ],
    softmax_cross_entropy: [
        *[((*batch, size),) for batch in BATCHES for size in (1, 17)],
        *[((3, size),) for size in (3, 16, 63, 300)],
        ((0, 5),),
    ],
    rms_norm: [
        *[((*batch, size), weight) for batch in BATCHES for size, weight in ((1, True), (17, False))],
        *[((3, size),) for size in (0, 3, 16, 63, 100)],
        ((0, 5),),
        ((2, 0, 3),),
    ],
    rotary_embedding: [
        *[((*batch, 3, 2, size), shared) for batch in BATCHES for size, shared in ((2, True), (34, False))],
        *[((1, 1, size),) for size in (0, 6, 16, 32, 126, 200)],
        ((0, 2, 4),),
        ((0, 3, 2, 4), True),
        ((3, 0, 4),),
    ],
    swiglu: [
        *[((*batch, size), packed) for batch in BATCHES for size, packed in ((2, True), (34, False))],
        *[((3, size), packed) for size in (0, 6, 16, 126, 200) for packed in (True, False)],
        ((3, 1),),
        ((3, 17),),
        ((0, 6), True),
    ],
    attention: [
        *[(batch, 3, 17, 4, 2, 17, causal) for batch in BATCHES for causal in (True, False)],
        *[((), n, n, 1, 1, 16, True) for n in (1, 63, 65, 129, 257)],
        *[((), 5, keys, 3, 3, 8, causal) for keys in (0, 1, 128, 129, 300) for causal in (True, False)],
        *[((), queries, 3, 2, 1, 4, True) for queries in (0, 4, 17, 70)],  # queries that see no key
        *[((2,), 3, 4, 6, 2, size) for size in (0, 1, 3, 63, 100)],
        ((0,), 3, 4, 2, 1, 8),
        ((), 3, 4, 0, 2, 8),
        ((), 3, 4, 2, 1, 8, False, -0.7),
        ((), 3, 4, 2, 1, 8, True, 0.0),
    ],
    decode_attention: [
        *[(batch, 17, 4, 2, size) for batch in BATCHES for size in (1, 17)],
        *[((), 40, 3, 1, 8, length) for length in (-1, 0, 1, 3, 15, 16, 17, 39, 40, 41)],
        *[((2,), keys, 6, 3, 63) for keys in (0, 1, 512, 513, 1100)],
        ((3,), 5, 2, 2, 0),
        ((0,), 5, 2, 2, 8),
        ((), 5, 0, 2, 8),
    ],
    cache_append: [
        *[(batch, 7, count, row) for batch in BATCHES for count, row in ((0, (3,)), (1, ()), (3, (2, 5)), (7, (3,)))],
        *[((), 9, 2, (3,), position) for position in (-(2**31), -1, 0, 6, 7, 8, 2**31 - 1)],
        ((0,), 3, 1, (2,)),
        ((2,), 0, 0, (2,)),
        ((2,), 3, 1, (0,)),
    ],
    quantized_linear: [
        *[(encoding, batch, 64, 17) for encoding in ops.ENCODINGS for batch in BATCHES],
        *[(encoding, (), 96, features) for encoding in ops.ENCODINGS for features in (0, 1, 3, 8, 9, 63)],
        *[(encoding, (rows,), 32, 13) for encoding in ops.ENCODINGS for rows in (0, 1, 2, 5, 63)],
        *[(encoding, rows, 0, 5) for encoding in ops.ENCODINGS for rows in ((), (3,))],
        *[(encoding, (), 1056, 5) for encoding in ops.ENCODINGS],
    ],
}

# So much work that it is shared by threads: more than kSerialNanoseconds of csrc/cpu/executor.h.
LARGE = [
    (rms_norm, (1001, 1023)),
    (layer_norm, (1001, 1023)),
    (softmax_cross_entropy, (301, 2003)),
    (rotary_embedding, (2, 501, 9, 126), True),
    (swiglu, (301, 2002)),
    (swiglu, (301, 2002), True),
    (attention, (2,), 301, 401, 6, 3, 40, True),
    (attention, (), 400, 700, 3, 1, 64),
    (decode_attention, (3,), 3001, 8, 2, 65, [3001, 1500, 7]),
    (quantized_linear, "Q4_1", (), 1024, 3001),
    (quantized_linear, "Q8_0", (), 1024, 3001),
    (quantized_linear, "Q4_1", (33,), 512, 1001),
    (quantized_linear, "Q8_0", (33,), 512, 1001),
]


def name(make, *arguments):
    return "-".join(str(part).replace(" ", "") for part in (make.__name__, *arguments))


ALL = [(make, *arguments) for make, shapes in SHAPES.items() for arguments in shapes]


@functools.cache
def together(functions):
    """One function of the operands of each: it compiles in a tenth of the time that they take one by one."""
    return lambda operands: [function(*args) for function, args in zip(functions, operands, strict=True)]


@functools.cache
def every_case(make, dtype):
    """Of `SHAPES`, and what is to come out."""
    found = [make(dtype, *arguments) for arguments in SHAPES[make]]
    definitions = quickly_compiled(together(tuple(case.definition for case in found)))
    return found, jax.device_get(definitions([case.wide() for case in found]))


@functools.cache
def every_result(make, dtype, isa):
    found, _ = every_case(make, dtype)
    assert isa == _ext.isa()
    return jax.jit(together(tuple(case.op for case in found)))([case.args for case in found])


@functools.cache
def _made(dtype, make, *arguments):
    case = make(dtype, *arguments)
    return case, case.want()


def made(dtype, make, *arguments):
    """The case and the result, computed once for all instruction sets."""
    hashable = [tuple(item) if isinstance(item, list) else item for item in arguments]
    return _made(dtype, make, *hashable)


def one_of_each(dtype):
    """One case for each op and form, of odd sizes, and with more bytes of results than a C library keeps at hand."""
    return [
        rms_norm(dtype, (35, 17)),
        layer_norm(dtype, (35, 17)),
        softmax_cross_entropy(dtype, (1200, 17)),
        rotary_embedding(dtype, (2, 5, 2, 34)),
        swiglu(dtype, (35, 17)),
        swiglu(dtype, (35, 34), packed=True),
        attention(dtype, (2,), 33, 130, 4, 2, 17, causal=True),
        decode_attention(dtype, (2,), 19, 16, 2, 17),
        cache_append(dtype, (2,), 61, 3, (5,)),
        *[quantized_linear(dtype, encoding, batch, 96, 523) for encoding in ops.ENCODINGS for batch in ((), (3,))],
    ]


def jax_args(case):
    return [jnp.asarray(x) for x in case.args]
