"""Losses: operands, what the references say of them, and which tests take which."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from eqxcallback import ops
from eqxcallback.ops.loss import _reference as reference
from eqxcallback.ops.loss._reference_targets import cross_entropy_of_targets

from ..table import BATCHES, STREAMED, Case, Row, floats, normal, python, row, rows, with_options


def softmax_cross_entropy(dtype: Any, shape: Any, options: Any = None, targets: bool = False) -> Case:
    """With labels, or with targets, which need not be shares of one."""
    logits, definition = normal(1, shape, dtype, 3.0), reference.softmax_cross_entropy
    labels = _labels(shape[:-1], shape[-1])
    if targets:
        labels, definition = np.abs(normal(2, shape)), cross_entropy_of_targets
    op, definition = (with_options(f, **(options or {})) for f in (ops.softmax_cross_entropy, definition))
    return Case(op, definition, (logits, labels), shape[-1], np.dtype(np.float32))


def _labels(shape: Any, size: int) -> Any:
    return (np.random.default_rng(4).integers(-size, size, shape) if size else np.zeros(shape)).astype(np.int32)


def of_model(model: Any) -> Iterator[Row]:
    yield row(softmax_cross_entropy, (2, model.vocabulary), tags=())


_SMOOTH: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": -2}
_OPTIONS: Any = [*({name: option} for name, option in _SMOOTH.items()), _SMOOTH]
_PENALTY: Any = {"z_loss": 0.01}

CASES = [
    *rows(
        softmax_cross_entropy,
        [
            *[((*batch, size),) for batch in BATCHES for size in (1, 17)],
            *[((3, size),) for size in (3, 16, 63, 300)],
            ((0, 5),),
        ],
        "edge",
    ),
    row(softmax_cross_entropy, (301, 2003), tags=("large", "large gradient")),
    row(softmax_cross_entropy, (1200, 17), tags=["written"]),
    *rows(softmax_cross_entropy, [(shape, options) for shape in STREAMED for options in ({}, _SMOOTH)], "streamed"),
    *rows(softmax_cross_entropy, [((17,),), ((3, 1),), ((2, 3, 300),), ((2, 5000),)], "gradient"),
    row(softmax_cross_entropy, (2, 5), tags=("mapped", "derived"), name="softmax_cross_entropy"),
    row(softmax_cross_entropy, (2, 5), _SMOOTH, tags=("mapped", "derived"), name="softmax_cross_entropy smooth"),
    row(
        softmax_cross_entropy, (2, 5), _PENALTY, True, tags=("mapped", "derived"), name="softmax_cross_entropy targets"
    ),
    # Less than a pack, odd, one warp and several of a row, and the vocabulary of GPT-2.
    *rows(softmax_cross_entropy, [((1, 1),), ((5, 7),), ((9, 264),), ((3, 1001),), ((2, 50_257),)], "cuda"),
    *rows(softmax_cross_entropy, [(shape, _SMOOTH) for shape in ((1, 1), (5, 7), (9, 264), (2, 9001))], "cuda"),
    *rows(softmax_cross_entropy, [((3, 65), options) for options in _OPTIONS[:-1]], "cuda"),
    *rows(softmax_cross_entropy, [(shape, {}, True) for shape in ((1, 1), (5, 7), (9, 264))], "cuda"),
    *rows(softmax_cross_entropy, [(shape, _PENALTY, True) for shape in ((3, 1001), (2, 9001))], "cuda"),
    *rows(softmax_cross_entropy, [((1024, 32_000),), ((7, 151_936),)], "model"),
    python(
        "softmax_cross_entropy",
        ops.softmax_cross_entropy,
        lambda d: [*floats(d, (2, 17), scale=3.0), _labels((2,), 17)],
        "python mapped",
    ),
    python(
        "softmax_cross_entropy smooth",
        with_options(ops.softmax_cross_entropy, **_SMOOTH),
        lambda d: [*floats(d, (5, 3)), np.array([-2, 1, 0, 2, -2], np.int32)],
        "python mapped",
    ),
    python(
        "linear_cross_entropy",
        ops.linear_cross_entropy,
        lambda d: [*floats(d, (2, 5), (7, 5)), _labels((2,), 7)],
        *("python mapped", "python derived"),
    ),
    python(
        "linear_cross_entropy mean",
        with_options(ops.linear_cross_entropy, reduction="mean"),
        lambda d: [*floats(d, (2, 5), (7, 5)), _labels((2,), 7)],
        *("python mapped", "python derived", "mapped", "derived"),
    ),
    python(
        "linear_cross_entropy sum of many",
        with_options(ops.linear_cross_entropy, reduction="sum", soft_cap=2.0, **_SMOOTH),
        lambda d: [*floats(d, (3, 5), (1030, 5)), np.array([1029, -2, 300], np.int32)],
        "python derived",
    ),
    python(
        "linear_cross_entropy of many",
        with_options(ops.linear_cross_entropy, soft_cap=2.0, **_SMOOTH),
        lambda d: [*floats(d, (3, 5), (1030, 5)), np.array([1029, -2, 300], np.int32)],
    ),
]
