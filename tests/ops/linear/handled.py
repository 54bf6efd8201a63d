"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

import numpy as np

from ..handled import BF16, a, i8, i32, present, u8


Q8 = {"encoding": "Q8_0", "activations": "int8"}
EXACT = {"activations": "exact"}
LINEAR = present(0, 1)


def of_columns(a_has_columns, b_has_columns, *slots):
    """The attributes of a product of matrices."""
    axes = {"a_has_columns": np.int64(a_has_columns), "b_has_columns": np.int64(b_has_columns)}
    return present(0, 1, *slots, **axes)


def b16(*shape):
    return a(*shape, dtype=BF16)


# With memory for both factors by tiles, two of each, and the highest magnitudes: by vectors it takes less.
PACKED = u8(4104)

HANDLED = {
    "linear": ([a(2, 5), a(3, 5), a(3)], a(2, 3), present(0, 1, 2)),
    "linear, plain": ([a(2, 5), a(3, 5)], a(2, 3), present(0, 1)),
    "matrix_product": ([b16(1, 2, 5), b16(1, 3, 5)], [a(1, 2, 3), PACKED], of_columns(0, 0)),
    "matrix_product, f32": ([a(1, 2, 5), a(1, 3, 5)], [a(1, 2, 3), u8(12296)], of_columns(0, 0)),
    "matrix_product, columns": (
        [b16(4, 5, 2), b16(4, 5, 3), a(3)],
        [a(4, 2, 3, dtype=BF16), PACKED],
        of_columns(1, 1, 2),
    ),
    "int8_linear": ([a(2, 5), i8(3, 5), a(3)], a(2, 3), EXACT),
    "int8_linear, int8": ([a(2, 5), i8(3, 5), a(3)], a(2, 3), {"activations": "int8"}),
    "quantized_linear": ([a(2, 32), u8(3, 34)], a(2, 3), Q8),
    "quantized_linear, interleaved": ([a(2, 32), u8(16, 34)], a(2, 16), {**Q8, "encoding": "Q8_0_R16"}),
}
NOT_HANDLED = [
    ("linear", [a(2, 5)], a(2, 3), present(0), r"weight to be present; got the mask 1"),
    ("linear", [a(2, 5), a(3, 5, dtype=BF16)], a(2, 3), LINEAR, r"weight of the type of x and shape"),
    ("linear", [a(2, 5), a(3, 4)], a(2, 3), LINEAR, r"shape \(out_features, 5\); got \(3, 4\)"),
    ("linear", [a(2, 5), a(3, 5), a(4)], a(2, 3), present(0, 1, 2), r"bias of shape \(3,\); got \(4\)"),
    ("linear", [a(2, 5), a(3, 5), a(3, dtype=BF16)], a(2, 3), present(0, 1, 2), r"bias of float32"),
    ("linear", [a(2, 5), a(3, 5)], a(2, 4), LINEAR, r"a result of shape \(\*batch, out_features\)"),
    *(
        ("matrix_product", operands, results, of_columns(0, 1, *range(2, len(operands))), message)
        for operands, results, message in (
            ([a(1, 2, 5), b16(1, 5, 3)], [a(1, 2, 3), PACKED], r"factors of bfloat16 or of float32"),
            ([a(1, 2, 5), a(1, 5, 3)], [a(1, 2, 3, dtype=BF16), u8(12296)], r"a result of float32"),
            ([b16(2, 5), b16(5, 3)], [a(2, 3), PACKED], r"factors and a result of 3 axes"),
            ([b16(1, 2, 5), b16(1, 3, 5)], [a(1, 2, 3), PACKED], r"and numbers; got \(1, 2, 5\) and \(1, 3, 5\)"),
            ([b16(1, 2, 5), b16(2, 5, 3)], [a(1, 2, 3), PACKED], r"as many examples and numbers"),
            ([b16(1, 2, 5), b16(1, 5, 3)], [a(1, 3, 2), PACKED], r"shape \(examples, rows, columns\); got \(1, 3, 2\)"),
            ([b16(1, 2, 5), b16(1, 5, 3)], [i32(1, 2, 3), PACKED], r"arrays of float32, bfloat16 or float16"),
            ([b16(1, 2, 5), b16(1, 5, 3), a(2)], [a(1, 2, 3), PACKED], r"bias of shape \(3,\); got \(2\)"),
        )
    ),
    ("int8_linear", [a(2, 5), u8(3, 5), a(3)], a(2, 3), EXACT, r"weight of int8"),
    ("int8_linear", [a(2, 5), i8(3, 4), a(3)], a(2, 3), EXACT, r"weight of shape \(out_features, 5\); got \(3, 4\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(4)], a(2, 3), EXACT, r"scale of shape \(3,\); got \(4\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(3)], a(2, 4), EXACT, r"a result of shape \(\*batch, out_features\)"),
    ("int8_linear", [a(2, 5), i8(3, 5), a(3)], a(2, 3), {"activations": "bf16"}, r"exact or int8; got bf16"),
    (
        "quantized_linear",
        [a(32), u8(3, 34)],
        a(3),
        {**Q8, "encoding": "Q2_K"},
        r"an encoding of GGUF's, Q4_1_R16 or Q8_0_R16; got Q2_K",
    ),
    (
        "quantized_linear",
        [a(32), u8(3, 34)],
        a(3),
        {**Q8, "encoding": ""},
        r"an encoding of GGUF's, Q4_1_R16 or Q8_0_R16; got \.",
    ),
    ("quantized_linear", [a(32), u8(3, 34)], a(3), {**Q8, "activations": ""}, r"the activations exact or int8; got \."),
    ("quantized_linear", [a(), u8(3, 34)], a(3), Q8, r"x with at least 1 axes"),
    ("quantized_linear", [a(32), u8(3, 34)], a(), Q8, r"the result with at least 1 axes"),
    ("quantized_linear", [a(32), a(3, 34)], a(3), Q8, r"blocks of uint8"),
    ("quantized_linear", [a(33), u8(3, 34)], a(3), Q8, r"bytes of 33 weights in blocks of 32\); got \(3, 34\)"),
    ("quantized_linear", [a(64), u8(3, 34)], a(3), Q8, r"blocks of shape \(out_features, bytes of 64 weights"),
    ("quantized_linear", [a(128), u8(3, 144)], a(3), {**Q8, "encoding": "Q4_K"}, r"weights in blocks of 256\); got"),
    (
        "quantized_linear",
        [a(32), u8(24, 34)],
        a(24),
        {**Q8, "encoding": "Q8_0_R16"},
        r"a multiple of 16 rows of blocks \(Q8_0_R16\); got \(24, 34\)",
    ),
    ("quantized_linear", [a(32), u8(102)], a(3), Q8, r"blocks of shape \(out_features"),
    ("quantized_linear", [a(32), u8(1, 3, 34)], a(3), Q8, r"blocks of shape \(out_features"),
    ("quantized_linear", [a(32), u8(3, 34)], a(4), Q8, r"a result of shape \(\*batch, out_features\); got \(4\)"),
    ("quantized_linear", [a(2, 32), u8(3, 34)], a(3), Q8, r"a result of shape \(\*batch, out_features\)"),
    ("quantized_linear", [a(2, 32), u8(3, 34)], a(5, 3), Q8, r"a result of shape \(\*batch, out_features\)"),
    ("quantized_linear", [a(32), u8(3, 34)], a(3, dtype=BF16), Q8, r"a result of shape \(\*batch, out_features\)"),
    ("quantized_linear", [i32(32), u8(3, 34)], i32(3), Q8, r"arrays of float32, bfloat16 or float16"),
]
