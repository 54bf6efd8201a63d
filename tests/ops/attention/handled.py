"""The calls that this family's handlers take, by names that begin with their symbol, and the calls that they refuse."""

import numpy as np

from ..handled import BF16, OF_TYPES, a, i8, i32, mask, needs, present


SCALE = {"scale": np.float64(1)}
ATTENTION = {
    "causal": np.bool_(True),
    **SCALE,
    "window": np.int64(2),
    "soft_cap": np.float64(0),
    "dropout": np.float64(0.5),
}
DECODE = {**SCALE, "window": np.int64(0), "soft_cap": np.float64(2)}
LSE = a(2, 3, 4)
OF_LSE = r"log-sum-exps in float32 of the shape of q without its last axis; got "
QKV = [a(2, 3, 4, 5), a(7, 2, 5), a(7, 2, 5)]
MORE = [a(1, 4, 3, 7), a(1, 4), a(2, 4, 2, dtype=np.uint32)]
SLOTS = (0, 1, 2, 3, 5, 10)
DECODED = [a(2, 4, 5), a(2, 7, 2, 5), a(2, 7, 2, 5), i32()]
INT8_DECODED = [a(2, 4, 5), i8(2, 7, 2, 5), i8(2, 7, 2, 5), i32(), a(4), a(2, 7, 2), a(2, 7, 2)]
HEADS = r"expected a number of query heads that is a multiple of the key/value heads; got"
PLAIN = present(0, 1, 2, **ATTENTION)
D_PLAIN = needs((0, 1, 2), (0, 1, 2), **ATTENTION)
MASKED = present(*SLOTS, **ATTENTION)
DECODING = present(0, 1, 2, 3, **DECODE)
WITHOUT_LENGTH = present(0, 1, 2, **DECODE)

HANDLED = {
    "attention": ([*QKV, *MORE], QKV[0], present(*SLOTS, **ATTENTION)),
    "attention, plain": (QKV, QKV[0], present(0, 1, 2, **ATTENTION)),
    "attention, with lse": (QKV, [QKV[0], LSE + np.log(np.float32(2))], PLAIN),
    "attention_backward, with lse": ([*QKV, QKV[0], LSE, QKV[0], LSE], QKV, D_PLAIN),
    "attention_backward": (
        [*QKV, *MORE, QKV[0], QKV[0]],
        [*QKV, *MORE[:2]],
        needs(SLOTS, (0, 1, 2, 3, 5), **ATTENTION),
    ),
    "attention_backward, plain": ([*QKV, QKV[0], QKV[0]], QKV, needs((0, 1, 2), (0, 1, 2), **ATTENTION)),
    "attention_backward, of q": ([*QKV, QKV[0], QKV[0]], QKV[0], needs((0, 1, 2), (0,), **ATTENTION)),
    "attention_backward, of v": ([*QKV, QKV[0], QKV[0]], QKV[2], needs((0, 1, 2), (2,), **ATTENTION)),
    "attention_backward, of a bias": ([*QKV, *MORE, QKV[0], QKV[0]], MORE[0], needs(SLOTS, (3,), **ATTENTION)),
    "decode_attention": ([*DECODED, a(4)], DECODED[0], present(0, 1, 2, 3, 4, **DECODE)),
    "decode_attention, plain": (DECODED, DECODED[0], present(0, 1, 2, 3, **DECODE)),
    "decode_attention, int8": (INT8_DECODED, INT8_DECODED[0], present(*range(7), **DECODE)),
    "decode_attention, shared scales": (
        [*INT8_DECODED[:4], a(7, 2), a(2, 7, 2)],
        INT8_DECODED[0],
        present(0, 1, 2, 3, 5, 6, **DECODE),
    ),
}
NOT_HANDLED = [
    ("attention", QKV, [QKV[0], a(2, 3, 5)], PLAIN, OF_LSE + r"\(2, 3, 5\)"),
    ("attention", QKV, [QKV[0], a(2, 3, 4, dtype=BF16)], PLAIN, OF_LSE),
    ("attention", QKV, [QKV[0], LSE, LSE], PLAIN, r"one of the results, or two; got 3"),
    ("attention_backward", [*QKV, QKV[0], LSE, QKV[0], a(3, 4)], QKV, D_PLAIN, OF_LSE + r"\(3, 4\)"),
    ("attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5)], a(4, 5), PLAIN, r"q with at least 3 axes"),
    ("attention", [a(3, 4, 5), a(2, 5), a(2, 5)], a(3, 4, 5), PLAIN, r"k with at least 3 axes"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), a(7, 2, 5)], a(3, 4, 6), PLAIN, r"a result of the shape of q"),
    ("attention", [a(3, 4, 5, dtype=BF16), a(7, 2, 5), a(7, 2, 5)], a(3, 4, 5, dtype=BF16), PLAIN, r"of one dtype"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), a(6, 2, 5)], a(3, 4, 5), PLAIN, r"k and v of one shape and dtype; got"),
    ("attention", [a(3, 4, 5), a(7, 2, 5), i32(7, 2, 5)], a(3, 4, 5), PLAIN, r"k and v of one shape and dtype"),
    (
        "attention",
        [a(3, 4, 5), a(7, 2, 6), a(7, 2, 6)],
        a(3, 4, 5),
        PLAIN,
        r"heads of one size in q and k; got 5 and 6",
    ),
    ("attention", [a(3, 4, 5), a(7, 3, 5), a(7, 3, 5)], a(3, 4, 5), PLAIN, HEADS + " 4 and 3"),
    ("attention", [a(3, 4, 5), a(7, 0, 5), a(7, 0, 5)], a(3, 4, 5), PLAIN, HEADS + " 4 and 0"),
    ("attention", [a(2, 3, 4, 5), a(3, 7, 2, 5), a(3, 7, 2, 5)], a(2, 3, 4, 5), PLAIN, r"the batch axes of q; got"),
    ("attention", [a(3, 4, 5), a(3, 7, 2, 5), a(3, 7, 2, 5)], a(3, 4, 5), PLAIN, r"the batch axes of q"),
    ("attention", [i32(3, 4, 5), i32(7, 2, 5), i32(7, 2, 5)], i32(3, 4, 5), PLAIN, r"float32, bfloat16 or float16"),
    *[
        ("attention", [*QKV, *MORE], QKV[0], {**MASKED, name: value}, message)
        for name, value, message in (
            ("window", np.int64(-1), r"a window of 0 or more, below 2\^30"),
            ("window", np.int64(2**40), r"a window of 0 or more"),
            ("soft_cap", np.float64(-1), r"a soft_cap of 0 or more, and dropout from 0 up to 1"),
            ("dropout", np.float64(1), r"dropout from 0 up to 1"),
            ("dropout", np.float64(np.nan), r"dropout from 0 up to 1"),
            ("present", np.int64(mask((0, 1, 2, 3))), r"4 operands, 4 of them in the mask `present`; got 6"),
            ("present", np.int64(mask((*SLOTS, 4))), r"7 operands, 7 of them in the mask `present`; got 6"),
            ("present", np.int64(mask((0, 1, 2, 4, 5, 10))), r"mask of its dtype: bool, float32, int32 or uint32"),
            ("present", np.int64(mask((0, 1, 3, 4, 5, 10))), r"v to be present; got the mask"),
            ("present", np.int64(1 << 12), r"present to be a mask of 12 bits; got 4096"),
            ("present", np.int64(-1), r"present to be a mask of 12 bits; got -1"),
        )
    ],
    *[
        ("attention", [*QKV, x], QKV[0], present(0, 1, 2, slot, **ATTENTION), message)
        for slot, x, message in (
            (3, a(3, 7), r"bias with at least 3 axes; got the shape \(3, 7\)"),
            (3, a(2, 3, 7), r"bias that fits queries, heads and keys; got \(2, 3, 7\)"),
            (3, a(4, 3, 8), r"bias that fits queries, heads and keys"),
            (3, i32(4, 3, 7), r"arrays of float32, bfloat16 or float16"),
            (3, a(3, 4, 3, 7), r"bias with the batch axes of q, or 1; got \(2, 3, 4, 5\) and \(3, 4, 3, 7\)"),
            (3, a(1, 2, 4, 3, 7), r"bias with the batch axes of q, or 1"),
            (5, a(3), r"alibi_slopes that fits"),
            (8, i32(3), r"lengths with the batch axes of q, or 1"),
            (8, a(2), r"lengths of its dtype"),
            (7, i32(7), r"segments of queries and of keys, or none"),
            (6, i32(7), r"query_segments that fits"),
        )
    ],
    ("attention_backward", [*QKV, QKV[0], a(2, 3, 4, 6)], QKV, D_PLAIN, r"a cotangent of the type of q"),
    ("attention_backward", [*QKV, QKV[0], QKV[0]], [*QKV[:2], a(7, 2, 6)], D_PLAIN, OF_TYPES + r"\(7, 2, 6\) for"),
    (
        "attention_backward",
        [*QKV, QKV[0], QKV[0]],
        [*QKV, QKV[0]],
        D_PLAIN,
        r"3 results, one for each operand in the mask",
    ),
    (
        "attention_backward",
        [*QKV, *MORE, QKV[0], QKV[0]],
        QKV,
        needs(SLOTS, (0, 1, 2, 3), **ATTENTION),
        r"4 results, one for each operand in the mask `needs_grad`; got 3",
    ),
    ("attention_backward", [*QKV, *MORE, QKV[0], QKV[0]], [a(1, 4)], needs(SLOTS, (3,), **ATTENTION), OF_TYPES),
    (
        "attention_backward",
        [*QKV, *MORE, QKV[0], QKV[0]],
        MORE[2],
        needs(SLOTS, (10,), **ATTENTION),
        r"needs_grad to be a mask of operands of floating type; got 1024",
    ),
    (
        "attention_backward",
        [*QKV, QKV[0], QKV[0]],
        MORE[0],
        needs((0, 1, 2), (3,), **ATTENTION),
        r"operands that are present",
    ),
    ("attention_backward", [*QKV, QKV[0]], QKV, D_PLAIN, r"5 operands, 3 of them in the mask `present`; got 4"),
    ("decode_attention", [a(5), a(7, 2, 5), a(7, 2, 5), i32()], a(5), DECODING, r"q with at least 2 axes"),
    ("decode_attention", [a(4, 5), a(2, 5), a(2, 5), i32()], a(4, 5), DECODING, r"k with at least 3 axes"),
    (
        "decode_attention",
        [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32()],
        a(4, 6),
        DECODING,
        r"a result of the shape and dtype of q",
    ),
    ("decode_attention", [a(4, 5), a(7, 3, 5), a(7, 3, 5), i32()], a(4, 5), DECODING, HEADS + " 4 and 3"),
    ("decode_attention", [a(4, 5), a(7, 2, 6), a(7, 2, 6), i32()], a(4, 5), DECODING, r"heads of one size in q and k"),
    ("decode_attention", [a(4, 5), a(7, 2, 5), a(7, 2, 5), a()], a(4, 5), DECODING, r"length of int32"),
    (
        "decode_attention",
        [a(4, 5), a(7, 2, 5), a(7, 2, 5), i32(2)],
        a(4, 5),
        DECODING,
        r"k, v and length with the batch axes",
    ),
    (
        "decode_attention",
        [a(2, 4, 5), a(7, 2, 5), a(7, 2, 5), i32(3)],
        a(2, 4, 5),
        DECODING,
        r"with the batch axes of q",
    ),
    *[
        (
            "decode_attention",
            [a(4, 5), k, k, i32(), k_scale, v_scale],
            a(4, 5),
            present(0, 1, 2, 3, 5, 6, **DECODE),
            message,
        )
        for k, k_scale, v_scale, message in (
            (a(7, 2, 5), a(7, 2), a(7, 2), r"k of int8"),
            (i8(7, 2, 5), a(7), a(7), r"k_scale with at least 2 axes; got the shape \(7\)"),
            (i8(7, 2, 5), a(7, 2), a(2, 7), r"scales of the shape of k without its last axis; got \(2, 7\)"),
            (i8(7, 2, 5), a(2, 7, 2), a(7, 2), r"k_scale with the batch axes of q, or 1"),
            (i8(7, 2, 5), i8(7, 2), a(7, 2), r"k_scale of float32"),
            (i8(7, 2, 5), a(7, 2), i32(7, 2), r"v_scale of float32"),
        )
    ],
    *[
        (
            "decode_attention",
            [a(4, 5), *QKV[1:], i32(), slopes],
            a(4, 5),
            present(0, 1, 2, 3, 4, **{**DECODE, **more}),
            message,
        )
        for slopes, more, message in (
            (a(3), {}, r"a slope for each head; got the shape \(3\)"),
            (a(2, 4), {}, r"slopes with the batch axes of q, or 1"),
            (i32(4), {}, r"slopes of float32"),
            (a(4), {"window": np.int64(-1)}, r"a window and a soft_cap of 0 or more"),
            (a(4), {"soft_cap": np.float64(-1)}, r"a window and a soft_cap of 0 or more"),
        )
    ],
    (
        "decode_attention",
        [a(4, 5), *QKV[1:], i32(), a(7, 2)],
        a(4, 5),
        present(0, 1, 2, 3, 5, **DECODE),
        r"scales of k and of v, or none",
    ),
    ("decode_attention", [a(4, 5), i8(7, 2, 5), i8(7, 2, 5), i32()], a(4, 5), DECODING, r"q and k of one dtype"),
    ("decode_attention", [a(4, 5), *QKV[1:]], a(4, 5), WITHOUT_LENGTH, r"length to be present; got the mask 7"),
]
