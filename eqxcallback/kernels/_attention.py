"""Attention. See triton/attention.py and triton/attention_backward.py."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..kernel import TritonKernel
from ._geometry import ceil
from .triton.attention_tiles import Choice, choose_backward, choose_forward


# Of a head: what tiles of it have shared memory for.
MAX_ATTENTION_SIZE = 256

_MODULES = "eqxcallback.kernels.triton.attention", "eqxcallback.kernels.triton.attention_backward"


def _batch(x: Any) -> int:
    return math.prod(x.shape[:-3])


def _choice(choose: Callable[..., Any], arch: int, q: Any, kv: Any, causal: bool, scale: float) -> Any:
    queries, _, size = q.shape[-3:]
    # Heads without elements have nothing to launch, but a kernel all the same.
    return choose(arch, max(size, 1), q.dtype.name, causal=causal, queries=queries, keys=kv[0].shape[-3], scale=scale)


def _settings(choice: Choice) -> Mapping[str, Any]:
    return {**choice.constants, "num_warps": choice.num_warps, "num_stages": choice.num_stages}


def _blocks(x: Any, rows: int) -> int:
    """Of `rows` rows of one head of one example."""
    return ceil(x.shape[-3], rows) * x.shape[-2] * _batch(x) if x.shape[-1] else 0


def _forward(q: Any, kv: Any, **_: Any) -> tuple[Any, Any]:
    return q, kv


def _backward(grads: Any, args: Any, out: Any, cotangents: Any, **_: Any) -> tuple[Any, Any]:
    return args


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


def _choose_forward(arch: int, q: Any, kv: Any, *, causal: bool, scale: float) -> Mapping[str, Any]:
    return _settings(_choice(choose_forward, arch, q, kv, causal, scale))


def _queries_grid(*args: Any, BLOCK_QUERIES: int, **options: Any) -> int:  # noqa: N803 - a constant of the kernel
    q, _ = (_forward if len(args) == 2 else _backward)(*args, **options)
    return _blocks(q, BLOCK_QUERIES)


def _keys_grid(*args: Any, BLOCK_KEYS: int, **options: Any) -> int:  # noqa: N803 - a constant of the kernel
    return _blocks(_backward(*args, **options)[1][0], BLOCK_KEYS)


def _step(index: int, name: str, grid: Callable[..., int], **more: Any) -> TritonKernel:
    """Of the three launches of the backward pass."""

    def choose(arch: int, *args: Any, causal: bool, scale: float) -> Mapping[str, Any]:
        q, kv = _backward(*args)
        return _settings(_choice(choose_backward, arch, q, kv, causal, scale)[index])

    return TritonKernel(f"{_MODULES[1]}:attention_backward_{name}", grid, choose=choose, **more)


def _workspaces(grads: Any, args: Any, *_: Any, **__: Any) -> list[jax.ShapeDtypeStruct]:
    """The logarithms of the sums of a row's exponentials, and the products of its results and cotangents."""
    queries, heads, _ = args[0].shape[-3:]
    return [jax.ShapeDtypeStruct((_batch(args[0]), heads, queries), jnp.float32)] * 2


ATTENTION = TritonKernel(
    f"{_MODULES[0]}:attention_forward", _queries_grid, scalars=_scalars(_forward), choose=_choose_forward
)
ATTENTION_BACKWARD = _step(
    0,
    "rows",
    _queries_grid,
    scalars=_scalars(_backward),
    workspaces=_workspaces,
    then=[_step(1, "keys", _keys_grid), _step(2, "queries", _queries_grid)],
)
