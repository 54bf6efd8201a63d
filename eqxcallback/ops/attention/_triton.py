"""Attention. See _triton_forward.py and _triton_backward.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core import PyTree, ShapeAndDtype, Types, type_text
from ...kernel import TritonKernel
from .._cuda import ceil, multiprocessors
from .._supports import floats
from . import _triton_tiles as tiles
from ._operands import OF_KEYS, OPTIONAL, is_of_keys, places_of
from ._reference_dropout import threshold


# The longest head whose tiles fit into shared memory.
_MAX_SIZE = 256

# The most queries whose keys are divided into parts, and the fewest keys of a part and in all.
FEW_QUERIES, _MIN_PART_KEYS, _MIN_KEYS = 32, 128, 512

_MODULES = [f"eqxcallback.ops.attention._triton_{name}" for name in ("forward", "backward", "backward_options")]


def _batch(x: ShapeAndDtype) -> int:
    return math.prod(x.shape[:-3])


def _blocks(x: ShapeAndDtype, rows: int) -> int:
    """The number of blocks of `rows` rows of one head of one example."""
    return ceil(x.shape[-3], rows) * x.shape[-2] * _batch(x)


def _optional(args: PyTree, name: str) -> Any:
    """Return an optional argument of the op, or its gradient, or `None`: the last ones may be left out."""
    index = 2 + OPTIONAL.index(name)
    return args[index] if index < len(args) else None


def _given(*args: object, **_: object) -> Any:
    return args


def _differentiated(grads: PyTree, args: PyTree, *_: object, **__: object) -> Any:
    return args


def _scalars(arguments: Callable[..., Any]) -> Mapping[str, Any]:
    """`arguments`: those of the op, of what the kernel's functions are called with."""

    def of_q(function: Callable[[Any], int]) -> tuple[str, Any]:
        return "int32", lambda *args, **options: function(arguments(*args, **options)[0])

    def of_k(function: Callable[[Any], int]) -> tuple[str, Any]:
        return "int32", lambda *args, **options: function(arguments(*args, **options)[1][0])

    def of_optional(name: str, index: int) -> tuple[str, Any]:
        def place(*args: Any, **options: Any) -> int:
            operands = arguments(*args, **options)
            places = places_of(name, operands[0].shape[:-3], _optional(operands, name))
            assert places is not None  # or the call is not supported
            return places[index]

        return "int32", place

    def heads_of(name: str) -> tuple[str, Any]:
        def heads(*args: object, **options: object) -> int:
            x = _optional(arguments(*args, **options), name)
            return 1 if x is None else x.shape[-3]

        return "int32", heads

    scalars: dict[str, Any] = {
        "batch": of_q(_batch),
        "queries": of_q(lambda q: q.shape[-3]),
        "keys": of_k(lambda k: k.shape[-3]),
        "heads": of_q(lambda q: q.shape[-2]),
        "kv_heads": of_k(lambda k: k.shape[-2]),
        "kv_batch": of_k(_batch),
        "scale": "float32",
    }
    for name in OPTIONAL:
        short = name.removeprefix("alibi_")
        scalars |= {f"{short}_every": of_optional(name, 0), f"{short}_batch": of_optional(name, 1)}
        if name in ("bias", "mask"):
            scalars[f"{short}_heads"] = heads_of(name)
    return scalars


def _supports(types: Types, **options: object) -> bool | str:
    q = types[0]
    if q.shape[-1] == 0:
        return "heads have to have elements"
    if q.shape[-1] > _MAX_SIZE:
        return f"heads have to be no longer than {_MAX_SIZE}; they are {q.shape[-1]}"
    for name in OPTIONAL:
        x = _optional(types, name)
        if places_of(name, q.shape[:-3], x) is None:
            return f"{name} has a batch axis of 1 between others: it is {type_text(x.dtype, x.shape)}"
    return floats(types, **options)


def _settings(
    name: str,
    arch: int,
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    *optional: object,
    causal: bool,
    scale: float,
    window: int,
    soft_cap: float,
    dropout: float,
) -> Mapping[str, Any]:
    has = sum(1 << i for i, x in enumerate(optional) if x is not None)
    args = (q, kv, *optional)
    has += sum(bit for name, bit in OF_KEYS.items() if is_of_keys(_optional(args, name), q.shape[-3]))
    choice = tiles.CHOOSE[name](
        arch,
        q.shape[-1],
        q.dtype.name,
        queries=q.shape[-3],
        rows=_packed_rows(q, kv),
        has=has,
        soft_cap=soft_cap,
    )
    return {
        **choice.constants,
        "num_warps": choice.num_warps,
        "num_stages": choice.num_stages,
        "CAUSAL": causal,
        "NEGATIVE": scale < 0,
        "WINDOW": window,
        "SOFT_CAP": float(soft_cap),
        "DROPOUT": float(dropout),
        "KEEP": threshold(dropout),
        "HAS": has,
    }


def _packed_rows(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype]) -> int:
    return q.shape[-3] * (q.shape[-2] // kv[0].shape[-2])


def _packed_blocks(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], rows: int) -> int:
    return ceil(_packed_rows(q, kv), rows) * kv[0].shape[-2] * _batch(q)


def _parts(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, **__: object) -> int:
    """Into how many parts the keys of few queries are divided, so that all multiprocessors have two programs.

    0 where a program has all the keys of a block of queries of one head: where queries are many, or keys are few, or heads do not
    share them and are enough for all multiprocessors.
    """
    queries, heads, size = q.shape[-3:]
    keys, kv_heads, _ = kv[0].shape[-3:]
    if queries > FEW_QUERIES or keys < _MIN_KEYS or not math.prod(q.shape):
        return 0
    blocks = _packed_blocks(q, kv, tiles.packed_rows(size, q.dtype.name, _packed_rows(q, kv)))
    parts = max(1, min(2 * multiprocessors() // blocks, ceil(keys, _MIN_PART_KEYS)))
    return parts if parts > 1 or heads > kv_heads else 0


def _of_parts(q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *_: object, **__: object) -> list[jax.ShapeDtypeStruct]:
    """The results of the softmax of each part."""
    parts, rows = _parts(q, kv), (_batch(q), *q.shape[-3:-1])
    shapes = ((parts, *rows, q.shape[-1]), (parts, *rows)) if parts else ((1,), (1,))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _choose_forward(
    arch: int, q: ShapeAndDtype, kv: Sequence[ShapeAndDtype], *args: Any, **options: Any
) -> Mapping[str, Any]:
    return _settings("packed" if _parts(q, kv) else "forward", arch, q, kv, *args, **options)


def _forward_grid(
    q: ShapeAndDtype,
    kv: Sequence[ShapeAndDtype],
    *_: object,
    BLOCK_QUERIES: int,  # noqa: N803 - a constant of the kernel
    **__: object,
) -> int | tuple[int, int]:
    parts = _parts(q, kv)
    return (_packed_blocks(q, kv, BLOCK_QUERIES), parts) if parts else _blocks(q, BLOCK_QUERIES)


def _joining_constants(arch: int, q: ShapeAndDtype, *_: object, **__: object) -> Mapping[str, Any]:
    size = q.shape[-1]
    return {"SIZE": size, "WIDTH": 1 << (size - 1).bit_length(), "BLOCK_PARTS": 16}


ATTENTION = TritonKernel(
    f"{_MODULES[0]}:attention_forward",
    _forward_grid,
    scalars={**_scalars(_given), "parts": ("int32", _parts)},
    workspaces=_of_parts,
    choose=_choose_forward,
    then=[
        TritonKernel(
            f"{_MODULES[0]}:attention_join",
            lambda q, kv, *_, **__: math.prod(q.shape[:-1]) if _parts(q, kv) else 0,
            choose=_joining_constants,
        )
    ],
    supports=_supports,
)


def _rows_grid(grads: PyTree, args: PyTree, *_: object, BLOCK_QUERIES: int, **__: object) -> int:  # noqa: N803
    return _blocks(args[0], BLOCK_QUERIES)


def _keys_grid(grads: PyTree, args: PyTree, *_: object, BLOCK_KEYS: int, **__: object) -> int:  # noqa: N803
    is_needed = any(gradient is not None for gradient in grads[1] or ())
    return _blocks(args[1][0], BLOCK_KEYS) if is_needed else 0


def _queries_grid(grads: PyTree, args: PyTree, *_: object, BLOCK_QUERIES: int, **__: object) -> int:  # noqa: N803
    is_needed = grads[0] is not None or _optional(grads, "alibi_slopes") is not None
    return _blocks(args[0], BLOCK_QUERIES) if is_needed else 0


def _slopes_grid(grads: PyTree, args: PyTree, *_: object, **__: object) -> int:
    slopes = _optional(grads, "alibi_slopes")
    return 0 if slopes is None else math.prod(slopes.shape)


def _bias_grid(grads: PyTree, args: PyTree, *_: object, BLOCK_QUERIES: int, BLOCK_KEYS: int, **__: object) -> int:  # noqa: N803
    bias = _optional(grads, "bias")
    if bias is None:
        return 0
    *shared, queries, keys = bias.shape
    return math.prod(shared) * ceil(queries, BLOCK_QUERIES) * ceil(keys, BLOCK_KEYS)


def _step(name: str, grid: Callable[..., int], tile: str | None = None, **more: Any) -> TritonKernel:
    """One of the launches of the backward pass. `tile`: the name of its tiles, if it is another one."""

    def settings(arch: int, grads: PyTree, args: PyTree, *_: object, **options: Any) -> Mapping[str, Any]:
        return _settings(tile or name, arch, *args, **options)

    module = _MODULES[2 if name in ("slopes", "bias") else 1]
    return TritonKernel(f"{module}:attention_backward_{name}", grid, choose=settings, **more)


def _workspaces(grads: PyTree, args: PyTree, *_: object, **__: object) -> list[jax.ShapeDtypeStruct]:
    """The sums and products of rows, and the gradient of a slope of each block of queries, of which the shortest has 16 rows."""
    queries, heads, _ = args[0].shape[-3:]
    of_rows = (_batch(args[0]), heads, queries)
    of_blocks = (*of_rows[:2], ceil(queries, 16)) if _optional(grads, "alibi_slopes") is not None else (1,)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (of_rows, of_rows, of_blocks)]


ATTENTION_BACKWARD = _step(
    "rows",
    _rows_grid,
    scalars=_scalars(_differentiated),
    workspaces=_workspaces,
    then=[
        _step("keys", _keys_grid),
        _step("queries", _queries_grid),
        _step("slopes", _slopes_grid, "queries"),
        _step("bias", _bias_grid),
    ],
    supports=_supports,
)
