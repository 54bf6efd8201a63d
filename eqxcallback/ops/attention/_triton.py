"""Attention. See _triton_forward.py and _triton_backward.py."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...kernel import TritonKernel
from .._cuda import ceil
from .._supports import floats
from ._triton_tiles import Choice, choose_backward, choose_forward


# The longest head whose tiles fit into shared memory.
_MAX_SIZE = 256

_MODULES = "eqxcallback.ops.attention._triton_forward", "eqxcallback.ops.attention._triton_backward"


def _batch(x: Any) -> int:
    return math.prod(x.shape[:-3])


def _choice(choose: Callable[..., Any], arch: int, q: Any, kv: Any, causal: bool, scale: float) -> Any:
    queries, _, size = q.shape[-3:]
    # Heads without elements have nothing to launch, but a kernel all the same.
    return choose(arch, max(size, 1), q.dtype.name, causal=causal, queries=queries, keys=kv[0].shape[-3], scale=scale)


def _settings(choice: Choice) -> Mapping[str, Any]:
    return {**choice.constants, "num_warps": choice.num_warps, "num_stages": choice.num_stages}


def _blocks(x: Any, rows: int) -> int:
    """The number of blocks of `rows` rows of one head of one example."""
    return ceil(x.shape[-3], rows) * x.shape[-2] * _batch(x) if x.shape[-1] else 0


def _forward(q: Any, kv: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    return q, kv


def _backward(grads: Any, args: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    return _forward(*args)


def _scalars(arguments: Callable[..., tuple[Any, Any]]) -> Mapping[str, Any]:
    """`arguments`: `q` and `kv` of what the kernel's functions are called with."""

    def of_q(function: Callable[[Any], int]) -> tuple[str, Any]:
        return "int32", lambda *args, **options: function(arguments(*args, **options)[0])

    def of_k(function: Callable[[Any], int]) -> tuple[str, Any]:
        return "int32", lambda *args, **options: function(arguments(*args, **options)[1][0])

    return {
        "batch": of_q(_batch),
        "queries": of_q(lambda q: q.shape[-3]),
        "keys": of_k(lambda k: k.shape[-3]),
        "heads": of_q(lambda q: q.shape[-2]),
        "kv_heads": of_k(lambda k: k.shape[-2]),
        "kv_batch": of_k(_batch),
        "scale": "float32",
    }


# Names of operands and options in words.
_WORDS = {
    "alibi_slopes": "ALiBi slopes",
    "query_segments": "segments",
    "key_segments": "segments",
    "dropout_keys": "dropout",
    "kept": "dropout",
    "soft_cap": "soft cap",
}


def _supports(types: Any, *, window: int, soft_cap: float, dropout: float, **options: Any) -> bool | str:
    # A window, a soft cap or a dropout of 0 is none.
    more = {**types._asdict(), "window": window or None, "soft_cap": soft_cap or None, "dropout": dropout or None}
    lacking = [_WORDS.get(name, name) for name, value in more.items() if value is not None and name not in ("q", "kv")]
    if lacking:
        return f"it has no {lacking[0]}"
    if types.q.shape[-1] > _MAX_SIZE:
        return f"heads have to be no longer than {_MAX_SIZE}; they are {types.q.shape[-1]}"
    return floats(types, **options)


def _choose_forward(arch: int, q: Any, kv: Any, *_: Any, causal: bool, scale: float, **__: Any) -> Mapping[str, Any]:
    return _settings(_choice(choose_forward, arch, q, kv, causal, scale))


def _forward_grid(q: Any, *_: Any, BLOCK_QUERIES: int, **__: Any) -> int:  # noqa: N803 - a constant of the kernel
    return _blocks(q, BLOCK_QUERIES)


ATTENTION = TritonKernel(
    f"{_MODULES[0]}:attention_forward",
    _forward_grid,
    scalars=_scalars(_forward),
    choose=_choose_forward,
    supports=_supports,
)


def _rows_grid(grads: Any, args: Any, *_: Any, BLOCK_QUERIES: int, **__: Any) -> int:  # noqa: N803
    return _blocks(args[0], BLOCK_QUERIES)


def _keys_grid(grads: Any, args: Any, *_: Any, BLOCK_KEYS: int, **__: Any) -> int:  # noqa: N803
    is_needed = any(gradient is not None for gradient in grads[1] or ())
    return _blocks(args[1][0], BLOCK_KEYS) if is_needed else 0


def _queries_grid(grads: Any, args: Any, *_: Any, BLOCK_QUERIES: int, **__: Any) -> int:  # noqa: N803
    return 0 if grads[0] is None else _blocks(args[0], BLOCK_QUERIES)


def _step(index: int, name: str, grid: Callable[..., int], **more: Any) -> TritonKernel:
    """One of the three launches of the backward pass."""

    def choose(arch: int, *args: Any, causal: bool, scale: float, **_: Any) -> Mapping[str, Any]:
        q, kv = _backward(*args)
        return _settings(_choice(choose_backward, arch, q, kv, causal, scale)[index])

    return TritonKernel(f"{_MODULES[1]}:attention_backward_{name}", grid, choose=choose, **more)


def _workspaces(grads: Any, args: Any, *_: Any, **__: Any) -> list[jax.ShapeDtypeStruct]:
    """The logarithms of the sums of a row's exponentials, and the products of its results and cotangents."""
    queries, heads, _ = args[0].shape[-3:]
    return [jax.ShapeDtypeStruct((_batch(args[0]), heads, queries), jnp.float32)] * 2


ATTENTION_BACKWARD = _step(
    0,
    "rows",
    _rows_grid,
    scalars=_scalars(_backward),
    workspaces=_workspaces,
    then=[_step(1, "keys", _keys_grid), _step(2, "queries", _queries_grid)],
    supports=_supports,
)
