"""Activations, with a gate and without: operands, what the references say of them, and which tests take which."""

from collections.abc import Iterator
from typing import Any

from eqxcallback import ops
from eqxcallback.ops.glu import _reference as reference

from ..table import BATCHES, STREAMED, Case, Row, floats, normal, python, row, rows, with_options


def swiglu(dtype: Any, shape: Any, packed: bool = False) -> Case:
    args = (normal(1, shape, dtype, 4.0), *([] if packed else [normal(2, shape, dtype)]))
    return Case(ops.swiglu, reference.swiglu, args, 1)


def geglu(dtype: Any, shape: Any, packed: bool = False, approximate: bool = True) -> Case:
    args = (normal(1, shape, dtype, 3.0), *([] if packed else [normal(2, shape, dtype)]))
    op, definition = (with_options(f, approximate=approximate) for f in (ops.geglu, reference.geglu))
    return Case(op, definition, args, 1)


def gelu(dtype: Any, shape: Any, approximate: bool = True) -> Case:
    op, definition = (with_options(f, approximate=approximate) for f in (ops.gelu, reference.gelu))
    return Case(op, definition, (normal(1, shape, dtype, 3.0),), 1)


def of_model(model: Any) -> Iterator[Row]:
    yield row(swiglu, (2, model.hidden), tags=())


# Less than a pack, odd, and one warp and several of a row.
_CUDA = [(1, 1), (3, 7), (5, 64), (2, 1001)]
CASES = [
    *rows(
        swiglu,
        [
            *[((*batch, size), packed) for batch in BATCHES for size, packed in ((2, True), (34, False))],
            *[((3, size), packed) for size in (0, 6, 16, 126, 200) for packed in (True, False)],
            ((3, 1),),
            ((3, 17),),
            ((0, 6), True),
        ],
        "edge",
    ),
    *rows(
        geglu,
        [
            (shape, packed, approximate)
            for approximate in (True, False)
            for shape, packed in (((34,), True), ((3, 2), True), ((2, 3, 126), False), ((3, 17), False), ((0, 4), True))
        ],
        "edge",
    ),
    *rows(
        gelu,
        [
            (shape, approximate)
            for approximate in (True, False)
            for shape in ((), (1,), (17,), (3, 0), (2, 3, 126), (1025,))
        ],
        "edge",
    ),
    row(swiglu, (301, 2002), tags=["large"]),
    row(swiglu, (301, 2002), True, tags=("large", "large gradient")),
    row(gelu, (301, 2002), tags=["large"]),
    row(gelu, (301, 2002), False, tags=["large", "large gradient"]),
    row(swiglu, (35, 17), tags=["written"]),
    row(gelu, (35, 17), tags=["written"]),
    row(swiglu, (35, 34), True, tags=["written"]),
    *rows(swiglu, [(shape, packed) for shape in STREAMED for packed in (False, True)], "streamed"),
    *rows(geglu, [(shape,) for shape in STREAMED], "streamed"),
    *rows(gelu, [(shape,) for shape in STREAMED], "streamed"),
    *rows(swiglu, [(shape, packed) for shape in ((34,), (3, 2), (2, 3, 126)) for packed in (0, 1)], "gradient"),
    *rows(gelu, [(shape, False) for shape in ((), (34,), (3, 1025))], "gradient"),
    row(swiglu, (2, 5), tags=("mapped", "derived"), name="swiglu"),
    row(swiglu, (2, 6), True, tags=("mapped", "derived"), name="swiglu packed"),
    row(gelu, (2, 5), tags=("mapped", "derived"), name="gelu"),
    row(gelu, (), False, tags=("mapped", "derived"), name="gelu exact"),
    *rows(swiglu, [(shape,) for shape in _CUDA], "cuda"),
    *rows(geglu, [(shape, False, approximate) for shape in _CUDA for approximate in (True, False)], "cuda"),
    *rows(swiglu, [((1024, 11_008),), ((1001, 3072), True), ((333, 1001),)], "model"),
    python("swiglu", ops.swiglu, lambda d: floats(d, (2, 17), (2, 17), scale=4.0), "python mapped"),
    python("swiglu packed", ops.swiglu, lambda d: floats(d, (3, 10), scale=4.0), "python mapped"),
    python("geglu", ops.geglu, lambda d: floats(d, (2, 17), (2, 17), scale=2.0), "python mapped"),
    python(
        "geglu exact",
        with_options(ops.geglu, approximate=False),
        lambda d: floats(d, (2, 17), (2, 17), scale=2.0),
        *("python mapped", "python derived"),
    ),
    python("gelu", ops.gelu, lambda d: floats(d, (2, 17), scale=2.0), *("python mapped", "python derived")),
    python("geglu packed", ops.geglu, lambda d: floats(d, (3, 10)), "python mapped"),
]
