"""Softmax: operands, what the reference says of them, and which tests take which."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from eqxcallback import ops
from eqxcallback.ops.softmax import _reference as reference

from ..table import BATCHES, Case, Row, normal, python, row, rows, with_options


def softmax(dtype: Any, shape: Any, mask: Any = None, scale: float = 1.0) -> Case:
    """`mask`: its shape."""
    op, of_reference = with_options(ops.softmax, scale=scale), with_options(reference.softmax, scale=scale)
    return Case(op, of_reference, tuple(_operands(dtype, shape, mask)), shape[-1])


def _operands(dtype: Any, shape: Any, mask: Any = None) -> list[Any]:
    masks = [] if mask is None else [np.random.default_rng(2).random(mask) < 0.6]
    return [normal(1, shape, dtype, 3.0), *masks]


def of_model(model: Any) -> Iterator[Row]:
    yield row(softmax, (2, model.vocabulary), tags=())
    yield row(softmax, (model.heads, 17, 130), (17, 130), model.head_size**-0.5, tags=())


EDGES = [
    *[((*batch, size),) for batch in BATCHES for size in (1, 17)],
    *[((3, size),) for size in (0, 3, 16, 63, 300)],
    *[((*batch, 17), (*batch, 17)) for batch in BATCHES],
    *[((2, 3, size), (3, size)) for size in (1, 16, 63, 300)],
    *[((2, 3, 37), (37,), scale) for scale in (0.25, -2.0, 0.0)],
    ((3, 70), None, -0.5),
    ((0, 5),),
    ((2, 0, 3), (0, 3)),
    ((3, 0), (0,)),
]
CASES = [
    *rows(softmax, EDGES, "edge"),
    *rows(softmax, [((1001, 1023),), ((2, 301, 2003), (301, 2003), -0.5)], "large", "large gradient"),
    *rows(softmax, [((35, 17),), ((4, 35, 17), (35, 17))], "written"),
    row(softmax, (2, 5), tags=("mapped", "derived"), name="softmax"),
    row(softmax, (2, 5), (2, 5), 0.5, tags=("mapped", "derived"), name="softmax with a mask"),
    row(softmax, (2, 5), (5,), tags=["mapped"], name="softmax of a batch with one mask"),
    row(softmax, (2, 2, 5), (2, 5), -0.5, tags=["mapped"], name="softmax of batches with one mask"),
    # Less than a pack, odd, one warp and several of a row, and more than the threads of a block take at once.
    *rows(
        softmax,
        [
            *[
                (shape, None, scale)
                for shape in ((1, 1), (5, 7), (9, 264), (3, 1001), (2, 50_257))
                for scale in (1.0, -0.3)
            ],
            *[
                (shape, mask, scale)
                for size in (1, 7, 264, 1001)
                for shape, mask in (
                    *(((6, size), mask) for mask in (None, (size,), (6, size))),
                    ((2, 3, size), (3, size)),
                )
                for scale in (0.5, -0.5)
            ],
        ],
        "cuda",
    ),
    # The weights of attention, with the shape of a causal mask, and a vocabulary.
    *rows(softmax, [((16, 1024, 1024), (1024, 1024), 0.125), ((16_384, 1024),), ((7, 151_936),)], "model"),
    python("softmax", ops.softmax, lambda d: _operands(d, (2, 17)), "python mapped"),
    python(
        "softmax with a mask",
        with_options(ops.softmax, scale=-0.5),
        lambda d: _operands(d, (2, 3, 17), (3, 17)),
        *("python mapped", "python derived"),
    ),
    python("softmax of nothing", ops.softmax, lambda d: _operands(d, (3, 0))),
]
