"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

from ..handled import BF16, OF_TYPES, a, i32, needs, present


SILU = {"activation": "silu"}
BOTH = present(0, 1, **SILU)
PACKED = present(0, **SILU)
D_BOTH = needs((0, 1), (0, 1), **SILU)
D_PACKED = needs((0,), (0,), **SILU)
GELU = {"activation": "gelu"}

HANDLED = {
    "gelu": ([a(2, 4)], a(2, 4), present(0, **GELU)),
    "gelu, of one number": ([a()], a(), present(0, activation="gelu_tanh")),
    "gelu_backward": ([a(2, 4), a(2, 4), a(2, 4)], a(2, 4), needs((0,), (0,), **GELU)),
    "glu": ([a(2, 4), a(2, 4)], a(2, 4), present(0, 1, **SILU)),
    "glu, packed": ([a(2, 8)], a(2, 4), present(0, activation="gelu")),
    "glu_backward": (
        [a(2, 4), a(2, 4), a(2, 4), a(2, 4)],
        [a(2, 4), a(2, 4)],
        needs((0, 1), (0, 1), activation="gelu_tanh"),
    ),
    "glu_backward, packed": ([a(2, 8), a(2, 4), a(2, 4)], a(2, 8), needs((0,), (0,), **SILU)),
    "glu_backward, of up": ([a(2, 4), a(2, 4), a(2, 4), a(2, 4)], a(2, 4), needs((0, 1), (1,), **SILU)),
}
NOT_HANDLED = [
    ("gelu", [a(2, 4)], a(4, 2), present(0, **GELU), r"a result of the type of x"),
    ("gelu", [a(2, 4)], a(2, 4), present(0, activation="relu"), r"silu, gelu or gelu_tanh; got relu"),
    ("gelu", [i32(4)], i32(4), present(0, **GELU), r"arrays of float32, bfloat16 or float16"),
    ("gelu_backward", [a(4), a(4), a(5)], a(4), needs((0,), (0,), **GELU), r"a cotangent of the type of x"),
    ("gelu_backward", [a(4), a(4), a(4)], a(4, dtype=BF16), needs((0,), (0,), **GELU), OF_TYPES),
    ("glu", [a(2, 4), a(2, 5)], a(2, 4), present(0, 1, activation="gelu"), r"gate and up of one shape and dtype"),
    ("glu", [a(2, 4), a(2, 4)], a(2, 4), present(0, 1, activation="relu"), r"silu, gelu or gelu_tanh; got relu"),
    (
        "glu_backward",
        [a(2, 4), a(2, 4), a(2, 4)],
        a(2, 4),
        D_PACKED,
        r"a cotangent that matches the operands; got \(2, 4\) for \(2, 4\)",
    ),
    ("glu_backward", [a(2, 4), a(2, 2), a(2, 2)], a(2, 5), D_PACKED, OF_TYPES + r"\(2, 5\) for \(2, 4\)"),
    ("glu_backward", [a(2, 4), a(2, 4), a(2, 4), a(2, 4)], [a(2, 4), a(2, 4, dtype=BF16)], D_BOTH, OF_TYPES),
    (
        "glu_backward",
        [a(2, 4), a(2, 4), a(2, 4), a(2, 4)],
        a(2, 4),
        {**D_BOTH, "activation": ""},
        r"2 results, one for",
    ),
    ("glu_backward", [a(2, 4), a(2, 5), a(2, 4), a(2, 4)], [a(2, 4), a(2, 5)], D_BOTH, r"gate and up of one shape"),
    ("glu", [a()], a(), PACKED, r"glu\[native\]: expected gate with at least 1 axes"),
    ("glu", [a(4)], a(), PACKED, r"glu\[native\]: expected a result with at least 1 axes"),
    ("glu", [a(2, 4)], a(2, 4), PACKED, r"a result that matches the operands; got \(2, 4\) for \(2, 4\)"),
    ("glu", [a(2, 4)], a(2), PACKED, r"a result that matches the operands"),
    ("glu", [a(2, 4)], a(3, 2), PACKED, r"a result that matches the operands"),
    ("glu", [a(2, 4), a(2, 4)], a(2, 2), BOTH, r"a result that matches the operands"),
    ("glu", [a(2, 4)], a(2, 2, dtype=BF16), PACKED, r"a result that matches the operands"),
    ("glu", [a(2, 4), a(2, 5)], a(2, 4), BOTH, r"gate and up of one shape and dtype; got \(2, 4\) and \(2, 5\)"),
    ("glu", [a(2, 4), a(2, 4, dtype=BF16)], a(2, 4), BOTH, r"gate and up of one shape and dtype"),
    ("glu", [i32(2, 4)], i32(2, 2), PACKED, r"arrays of float32, bfloat16 or float16"),
]
