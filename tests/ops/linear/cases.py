"""Products with weights, also quantized ones: operands, what the references say of them, and which tests take which."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import Array

from eqxcallback import ops
from eqxcallback.ops.glu import _reference as glu_reference
from eqxcallback.ops.linear import _reference_quantized as reference

from ..table import BATCHES, Case, Row, floats, normal, python, row, rows, with_options


# The encodings that kernels of CPUs multiply as they are in memory, and that those in Python have.
ENCODINGS: Any = {"Q4_1": 20, "Q8_0": 34}
INTERLEAVED: Any = tuple(ops.DEINTERLEAVED)
# The encodings that a CPU unpacks first, with weights and bytes of a block, and where it has how many halves.
UNPACKED: Any = {
    "Q4_0": (32, 18, 0, 1),
    "Q5_0": (32, 22, 0, 1),
    "Q5_1": (32, 24, 0, 2),
    "Q4_K": (256, 144, 0, 2),
    "Q5_K": (256, 176, 0, 2),
    "Q6_K": (256, 210, 208, 1),
}


def quantized_linear(dtype: Any, encoding: Any, batch: Any, in_features: int, out_features: int) -> Case:
    args = (normal(1, (*batch, in_features), dtype), blocks(2, out_features, in_features, encoding))
    op, definition = (with_options(f, encoding=encoding) for f in (ops.quantized_linear, reference.quantized_linear))
    return Case(op, definition, args, in_features)


def quantized_linear_swiglu(dtype: Any, encoding: Any, batch: Any, in_features: int, out_features: int) -> Case:
    args = (normal(1, (*batch, in_features), dtype, 0.25), blocks(2, 2 * out_features, in_features, encoding))
    op = with_options(ops.quantized_linear_swiglu, encoding=encoding)
    # A gate halfway between two numbers of 16 bits may be rounded to either: as much as the sum of so many terms.
    terms = in_features if dtype == np.float32 else 1 << 28
    return Case(op, with_options(_two_references, encoding=encoding, dtype=dtype), args, terms)


def _two_references(x: Array, blocks: Array, *, encoding: str, dtype: Any) -> Array:
    """The values of an `x` of this dtype: gates and what they multiply are rounded to it."""
    both = reference.quantized_linear(x, blocks, encoding=encoding).astype(dtype)
    return glu_reference.swiglu(both.astype(x.dtype))


def blocks(seed: int, out_features: int, in_features: int, encoding: Any) -> Any:
    """Random weights of either sign, of a size that keeps sums of products near 1."""
    if encoding in ops.DEINTERLEAVED:
        separate = ops.DEINTERLEAVED[encoding]
        rows_apart = blocks(seed, out_features, in_features, separate)
        return np.asarray(ops.interleave_rows(rows_apart, encoding=separate))
    rng = np.random.default_rng((seed, out_features, in_features))
    if encoding in UNPACKED:
        weights, size, at, halves = UNPACKED[encoding]
        count = in_features // weights
        parts = rng.integers(0, 256, (out_features, count, size), np.uint8)
        sizes = rng.uniform(0.5, 1, (out_features, count, halves)) / (16 * 64 if weights == 256 else 16)
        sizes = rng.choice([-1, 1], sizes.shape) * sizes
        parts[..., at : at + 2 * halves] = (
            sizes.astype(np.float16).view(np.uint8).reshape(out_features, count, 2 * halves)
        )
        return parts.reshape(out_features, count * size)
    count = in_features // 32
    parts = rng.integers(0, 256, (out_features, count, ENCODINGS[encoding]), np.uint8)
    halves = 2 if encoding == "Q4_1" else 1
    sizes = rng.uniform(0.5, 1, (out_features, count, halves)) / (8 if encoding == "Q4_1" else 128)
    signs = rng.choice([-1, 1], sizes.shape)
    parts[..., : 2 * halves] = (
        (signs * sizes).astype(np.float16).view(np.uint8).reshape(out_features, count, 2 * halves)
    )
    return parts.reshape(out_features, count * ENCODINGS[encoding])


def of_model(model: Any) -> Iterator[Row]:
    for encoding in ENCODINGS:
        yield row(quantized_linear, encoding, (), model.hidden, model.embedding, tags=())


def _int8(*shape: int) -> Any:
    return np.random.default_rng(5).integers(-128, 128, shape).astype(np.int8)


CASES = [
    *rows(
        quantized_linear,
        [
            *[(encoding, batch, 64, 17) for encoding in ENCODINGS for batch in BATCHES],
            *[(encoding, (), 96, features) for encoding in ENCODINGS for features in (0, 1, 3, 8, 9, 63)],
            *[(encoding, (rows,), 32, 13) for encoding in ENCODINGS for rows in (0, 1, 2, 5, 63)],
            *[(encoding, rows, 0, 5) for encoding in ENCODINGS for rows in ((), (3,))],
            *[(encoding, (), 1056, 5) for encoding in ENCODINGS],
        ],
        "edge",
    ),
    *rows(
        quantized_linear,
        [
            (encoding, *shape)
            for encoding in UNPACKED
            for shape in (((), 256, 17), ((3,), 512, 9), ((6,), 256, 5), ((9,), 256, 3), ((), 0, 3), ((2,), 256, 0))
        ],
        "cpu edge",
    ),
    *rows(
        quantized_linear,
        [
            (encoding, *shape)
            for encoding in INTERLEAVED
            for shape in (
                *((batch, 64, 48) for batch in BATCHES),
                *(((rows,), 96, 32) for rows in (0, 1, 2, 4, 5, 6, 7, 9, 63)),
                *(((), 1056, 16), ((3,), 0, 16), ((2,), 32, 0)),
            )
        ],
        "cpu edge",
    ),
    *rows(quantized_linear, [(encoding, (), 1024, 3008) for encoding in INTERLEAVED], "large"),
    *rows(quantized_linear, [("Q4_1_R16", (330,), 512, 496), ("Q8_0_R16", (9,), 1056, 4096)], "large"),
    *rows(
        quantized_linear, [(encoding, batch, 96, 528) for encoding in INTERLEAVED for batch in ((), (3,))], "written"
    ),
    row(quantized_linear, "Q4_1_R16", (), 32, 16, tags=("mapped", "derived"), name="quantized_linear Q4_1_R16"),
    row(quantized_linear, "Q8_0_R16", (2,), 32, 16, tags=["mapped"], name="quantized_linear Q8_0_R16 of a batch"),
    row(quantized_linear, "Q4_K", (), 256, 3, tags=("mapped", "derived"), name="quantized_linear Q4_K"),
    row(quantized_linear, "Q6_K", (2,), 256, 3, tags=["mapped"], name="quantized_linear Q6_K of a batch"),
    *rows(quantized_linear, [(encoding, (), 1024, 3001) for encoding in (*ENCODINGS, "Q5_1", "Q6_K")], "large"),
    *rows(quantized_linear, [(encoding, (33,), 512, 1001) for encoding in ENCODINGS], "large"),
    *rows(quantized_linear, [(encoding, batch, 96, 523) for encoding in ENCODINGS for batch in ((), (3,))], "written"),
    row(quantized_linear, "Q4_1", (), 32, 3, tags=("mapped", "derived"), name="quantized_linear Q4_1"),
    row(quantized_linear, "Q8_0", (2,), 32, 3, tags=["mapped"], name="quantized_linear Q8_0 of a batch"),
    *rows(
        quantized_linear,
        [
            *[(encoding, (rows,), 2048, 5632) for encoding in ENCODINGS for rows in (1, 8, 9, 200)],
            *[(encoding, (1,), 576, 49_152) for encoding in ENCODINGS],
            *[(encoding, (rows,), 2048, 5632) for encoding in UNPACKED for rows in (1, 8)],
        ],
        "model",
    ),
    # One row and several, no whole packs of features, and more rows and features than a tile has.
    *rows(
        quantized_linear,
        [
            (encoding, (rows,), in_features, features)
            for encoding in ENCODINGS
            for rows, in_features, features in (
                *((1, 64, 17), (2, 96, 3), (3, 32, 4)),
                *((5, 1056, 9), (8, 64, 1), (65, 64, 70)),
            )
        ],
        "cuda",
    ),
    # In both halves of a block of 256, and more than 128 threads take at a time.
    *rows(
        quantized_linear,
        [
            (encoding, (rows,), in_features, features)
            for encoding in UNPACKED
            for rows, in_features, features in ((1, 256, 9), (3, 1280, 5), (8, 256, 4))
        ],
        "cuda",
    ),
    *rows(quantized_linear, [("Q4_0", (1,), 32, 5), ("Q5_0", (4,), 96, 3), ("Q6_K", (12,), 256, 66)], "cuda"),
    *rows(
        quantized_linear_swiglu,
        [
            *[(encoding, batch, 64, 17) for encoding in ENCODINGS for batch in BATCHES],
            ("Q4_1", (0,), 32, 5),
            ("Q8_0", (3,), 0, 5),
            ("Q4_1", (3,), 64, 0),
        ],
        "edge",
    ),
    *rows(quantized_linear_swiglu, [("Q4_1_R16", (3,), 96, 24), ("Q6_K", (), 512, 9)], "cpu edge"),
    *rows(quantized_linear_swiglu, [("Q4_1", (1,), 576, 1536), ("Q8_0", (8,), 2048, 5632)], "model"),
    row(quantized_linear_swiglu, "Q4_1", (), 32, 3, tags=["mapped"], name="quantized_linear_swiglu Q4_1"),
    *rows(
        quantized_linear_swiglu,
        [
            (encoding, (rows,), in_features, features)
            for encoding in ENCODINGS
            for rows, in_features, features in ((1, 1056, 9), (2, 96, 1), (3, 32, 4), (8, 64, 17))
        ],
        "cuda",
    ),
    *rows(quantized_linear_swiglu, [(encoding, (1,), 512, 5) for encoding in UNPACKED], "cuda"),
    python("linear", ops.linear, lambda d: floats(d, (2, 5), (3, 5), (3,)), "python mapped"),
    python("linear plain", ops.linear, lambda d: floats(d, (5,), (3, 5)), "python mapped"),
    python(
        "embedding",
        ops.embedding,
        lambda d: [np.array([[0, -1, 9], [-7, 2, 2]], np.int32), *floats(d, (5, 3))],
        "python mapped",
    ),
    python(
        "quantized_linear Q4_1",
        with_options(ops.quantized_linear, encoding="Q4_1"),
        lambda d: [*floats(d, (2, 64)), blocks(2, 1027, 64, "Q4_1")],
        "python mapped",
    ),
    python(
        "quantized_linear Q8_0",
        with_options(ops.quantized_linear, encoding="Q8_0"),
        lambda d: [*floats(d, (64,)), blocks(2, 17, 64, "Q8_0")],
        "python mapped",
    ),
    python(
        "quantized_linear_swiglu",
        with_options(ops.quantized_linear_swiglu, encoding="Q4_1"),
        lambda d: [*floats(d, (2, 64)), blocks(2, 34, 64, "Q4_1")],
        "python mapped",
    ),
    python(
        "int8_linear",
        ops.int8_linear,
        lambda d: [*floats(d, (2, 5)), _int8(1027, 5), *floats(d, (1027,), scale=0.1)],
        *("python mapped", "python derived"),
    ),
    python(
        "int8_linear int8",
        with_options(ops.int8_linear, activations="int8"),
        lambda d: [*floats(d, (2, 5)), _int8(1027, 5), *floats(d, (1027,), scale=0.1)],
        "python mapped",
    ),
    python(
        "quantized_linear int8",
        with_options(ops.quantized_linear, encoding="Q8_0", activations="int8"),
        lambda d: [*floats(d, (2, 64)), blocks(2, 17, 64, "Q8_0")],
        "python mapped",
    ),
]
