"""Norms: operands, what the references say of them, and which tests take which."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from eqxcallback import ops
from eqxcallback.ops.norm import _reference as reference

from ..table import BATCHES, STREAMED, Case, Row, floats, normal, python, row, rows, with_options


def rms_norm(dtype: Any, shape: Any, weight: bool = True, eps: float = 1e-5, x: Any = None) -> Case:
    args = (normal(1, shape, dtype) if x is None else x, *([normal(2, shape[-1:])] if weight else []))
    return Case(with_options(ops.rms_norm, eps=eps), with_options(reference.rms_norm, eps=eps), args, shape[-1])


def layer_norm(dtype: Any, shape: Any, weight: bool = True, bias: bool = True, eps: float = 1e-5) -> Case:
    parameters = [normal(seed, shape[-1:]) for seed, has in ((2, weight), (3, bias)) if has]
    op, definition = (_of_parameters(f, bool(weight), bool(bias), eps) for f in (ops.layer_norm, reference.layer_norm))
    return Case(op, definition, (normal(1, shape, dtype), *parameters), shape[-1])


def add_rms_norm(dtype: Any, shape: Any, weight: bool = True) -> Case:
    args = (normal(1, shape, dtype), normal(2, shape, dtype), *([normal(3, shape[-1:])] if weight else []))
    return Case(_add_and_norm, _sum_and_norm(dtype), args, shape[-1])


def _add_and_norm(*args: Any) -> Any:
    """Both results as one array."""
    return jnp.concatenate(ops.add_rms_norm(*args, eps=1e-5), axis=-1)


@functools.cache
def _sum_and_norm(dtype: Any) -> Any:
    """Make a reference for operands in f32. The norm is of the sum as it is in `dtype`; to a derivative it is not rounded."""

    def f(x: Any, residual: Any, *weight: Any) -> Any:
        total = jnp.asarray(x + residual)
        if dtype.itemsize == 2:
            total = total + jax.lax.stop_gradient(total.astype(dtype).astype(total.dtype) - total)
        return jnp.concatenate([reference.rms_norm(total, *weight, eps=1e-5), total], axis=-1)

    return f


def group_norm(dtype: Any, shape: Any, groups: int, weight: bool = True, bias: bool = True) -> Case:
    *_, channels, size = shape
    parameters = [normal(seed, (channels,)) for seed, has in ((2, weight), (3, bias)) if has]
    op, definition = (_of_groups(f, weight, bias, groups) for f in (ops.group_norm, reference.group_norm))
    return Case(op, definition, (normal(1, shape, dtype), *parameters), channels // groups * size)


@functools.cache
def _of_groups(function: Any, weight: bool, bias: bool, groups: int) -> Any:
    return _of_parameters(functools.partial(function, groups=groups), weight, bias, 1e-5)


@functools.cache
def _of_parameters(function: Any, weight: bool, bias: bool, eps: float) -> Any:
    """Make a function of `x` and those parameters that there are."""

    def f(x: Any, *parameters: Any) -> Any:
        given = iter(parameters)
        return function(x, *(next(given) if has else None for has in (weight, bias)), eps=eps)

    return f


def of_model(model: Any) -> Iterator[Row]:
    yield row(layer_norm, (3, model.embedding), tags=())
    yield row(rms_norm, (3, model.embedding), tags=())


CASES = [
    *rows(
        rms_norm,
        [
            *[((*batch, size), weight) for batch in BATCHES for size, weight in ((1, True), (17, False))],
            *[((3, size),) for size in (0, 3, 16, 63, 100)],
            ((0, 5),),
            ((2, 0, 3),),
        ],
        "edge",
    ),
    *rows(
        layer_norm,
        [
            *[((*batch, size), *has) for batch in BATCHES for size, *has in ((1, True, True), (17, True, False))],
            *[((3, size), False, True) for size in (3, 16, 63)],
            ((3, 100), False, False),
            ((0, 5),),
        ],
        "edge",
    ),
    *rows(
        add_rms_norm,
        [
            *[((*batch, 17), weight) for batch, weight in zip(BATCHES, (True, False, True), strict=True)],
            ((3, 1),),
            ((0, 5),),
        ],
        "edge",
    ),
    *[row(make, (1001, 1023), tags=("large", "large gradient")) for make in (rms_norm, layer_norm)],
    *[row(make, (35, 17), tags=["written"]) for make in (rms_norm, layer_norm)],
    *rows(rms_norm, [(shape,) for shape in STREAMED], "streamed"),
    *rows(layer_norm, [(shape, False, False) for shape in STREAMED], "streamed"),
    *rows(
        rms_norm,
        [
            *[((*batch, size), weight) for batch, size in (((), 17), ((3,), 1), ((2, 9), 63)) for weight in (0, 1)],
            *[(shape,) for shape in ((0, 5), (2, 0, 3), (67, 3))],
        ],
        "gradient",
    ),
    *rows(
        layer_norm,
        [
            *[
                ((*batch, size), weight, bias)
                for batch, size in (((), 17), ((19,), 5), ((2, 3), 100))
                for weight in (0, 1)
                for bias in (0, 1)
            ],
            ((0, 5),),
        ],
        "gradient",
    ),
    row(rms_norm, (2, 5), tags=("mapped", "derived"), name="rms_norm"),
    row(add_rms_norm, (2, 5), tags=("mapped", "derived"), name="add_rms_norm"),
    row(rms_norm, (2, 5), False, tags=("mapped", "derived"), name="rms_norm without weight"),
    row(layer_norm, (2, 5), tags=("mapped", "derived"), name="layer_norm"),
    row(layer_norm, (2, 5), False, tags=("mapped", "derived"), name="layer_norm without weight"),
    *rows(group_norm, [((6, 17), 2), ((2, 3, 4, 1), 2, False), ((3, 6, 16), 3, True, False), ((0, 4, 3), 2)], "edge"),
    *rows(
        group_norm,
        [
            ((2, 6, 5), 3),
            ((6, 17), 2, False),
            ((2, 3, 4, 1), 2),
            ((3, 6, 16), 6, True, False),
            ((2, 34, 1), 2, False, False),
        ],
        "gradient",
    ),
    row(group_norm, (5, 64, 300), 8, tags=["large gradient"]),
    row(group_norm, (2, 4, 3), 2, tags=("mapped", "derived"), name="group_norm"),
    # Less than a pack, odd, of one warp, of several, and more than stays in registers.
    *[
        row(make, shape, tags=["cuda"])
        for make in (rms_norm, layer_norm)
        for shape in ((1, 1), (3, 7), (5, 64), (2, 1000), (9, 257), (3, 4096), (2, 9001))
    ],
    *rows(
        add_rms_norm,
        [((1, 1),), ((3, 7), False), ((5, 64),), ((9, 257), False), ((19, 40),), ((2, 4099),), ((2, 25_003),)],
        "cuda",
    ),
    # Channels of one element, fewer and more of them than warps, odd ones, and more than stays in registers.
    *rows(
        group_norm,
        [
            ((1, 1, 1), 1),
            ((3, 6, 1), 3),
            ((2, 12, 5), 2),
            ((2, 6, 264), 6),
            ((2, 3, 4099), 1),
            ((3, 40, 33), 1, False),
            ((5, 8, 16), 4, True, False),
            ((2, 34, 1025), 2, False, False),
        ],
        "cuda",
    ),
    *rows(group_norm, [((8, 320, 4096), 32)], "model"),
    *rows(add_rms_norm, [((4096, 4096),)], "model"),
    *rows(rms_norm, [((4096, 4096),), ((1, 576),), ((33, 50_257), False)], "model"),
    *rows(layer_norm, [((4096, 1024),), ((33, 50_257), True, False)], "model"),
    python("rms_norm", ops.rms_norm, lambda d: floats(d, (2, 17), (17,)), "python mapped"),
    python("rms_norm plain", ops.rms_norm, lambda d: floats(d, (1,)), "python mapped"),
    python("rms_norm of nothing", ops.rms_norm, lambda d: floats(d, (3, 0), (0,))),
    python(
        "add_rms_norm",
        ops.add_rms_norm,
        lambda d: floats(d, (2, 17), (2, 17), (17,)),
        *("python mapped", "python derived", "python checked"),
    ),
    python("add_rms_norm plain", ops.add_rms_norm, lambda d: floats(d, (5,), (5,)), "python mapped"),
    python("layer_norm", ops.layer_norm, lambda d: floats(d, (2, 17), (17,), (17,)), "python mapped"),
    python("layer_norm plain", with_options(ops.layer_norm, eps=0.1), lambda d: floats(d, (2, 3)), "python mapped"),
    python(
        "group_norm",
        with_options(ops.group_norm, groups=3),
        lambda d: floats(d, (2, 6, 5), (6,), (6,)),
        "python mapped",
    ),
    python("group_norm plain", with_options(ops.group_norm, groups=1), lambda d: floats(d, (4, 7)), "python mapped"),
]
