"""Attention against cuDNN, XLA and PyTorch; and what one token over a cache reads of the copy bandwidth."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eqxcallback import ops

from .. import shapes
from .._contestants import Pass, normal, of_pass, to_torch, torch, torch_call
from .._rows import OURS, Goal, Row, Setting
from .._timing import Runner
from ..programs import decode_by_tensor_cores
from . import of_tokamax
from .probe import COPY, copy_runner
from .torch_timing import torch_runner


Shape = shapes.Attention


def _operands(shape: Shape) -> list[jax.Array]:
    """Queries, keys, values, and the cotangent of the result."""
    queries, *others = shape.operand_shapes
    return [
        normal(i, *operand_shape, dtype=jnp.bfloat16) for i, operand_shape in enumerate((queries, *others, queries))
    ]


# The most telling ones first.
SHAPES = [
    Shape(4, 16, 16, 4096, 128, causal=True),
    Shape(4, 16, 16, 4096, 128, causal=False),
    Shape(8, 32, 32, 1024, 64, causal=True),
    Shape(4, 32, 8, 2048, 128, causal=True),
    Shape(4, 16, 16, 2048, 128, causal=True),
    Shape(4, 16, 16, 2048, 128, causal=False),
    Shape(8, 32, 32, 1024, 64, causal=False),
]
TINY = [Shape(1, 4, 2, 64, 16, causal=True)]

# A backward pass is five products of the size of the two forward.
WITH_BACKWARD = 3.5


def measure(setting: Setting) -> Iterator[Row]:
    shapes = TINY if setting.tiny else SHAPES[:4] if setting.quick else SHAPES
    goal = Goal("XLA" if setting.tiny else "cuDNN", 0.8)
    for shape in shapes:
        for backward in (False, True):
            if not setting.has_time():
                return
            contestants = {
                name: functools.partial(jax_runner, setting, f, shape, backward)
                for name, f in {**peers(shape), **of_tokamax.attention(setting, shape.causal)}.items()
            }
            if setting.torch:
                contestants["torch SDPA"] = functools.partial(sdpa_runner, shape, backward)
            if setting.tiny:
                del contestants["cuDNN"]
            work = shape.flops * (WITH_BACKWARD if backward else 1)
            what = "forward + backward" if backward else "forward"
            yield Row(f"{what}, {shape}", "TFLOP/s", work, setting.race(contestants), (goal,))


def peers(shape: Shape) -> dict[str, Callable[..., jax.Array]]:
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=shape.causal)
    return {
        OURS: functools.partial(ops.attention, causal=shape.causal),
        "cuDNN": functools.partial(theirs, implementation="cudnn"),
        "XLA": functools.partial(theirs, implementation="xla"),
    }


def jax_runner(setting: Setting, f: Callable[..., jax.Array], shape: Shape, backward: bool) -> Runner:
    which: Pass = "forward + backward" if backward else "forward"
    *args, cotangent = _operands(shape)
    return setting.clock.runner(of_pass(f, which, (0, 1, 2)), *([cotangent] if backward else []), *args)


def sdpa_runner(shape: Shape, backward: bool) -> Runner:
    q, k, v, cotangent = _operands(shape)
    options = {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}
    attend = functools.partial(torch().nn.functional.scaled_dot_product_attention, **options)
    args = [x.swapaxes(1, 2) for x in ([cotangent] if backward else []) + [q, k, v]]
    which: Pass = "forward + backward" if backward else "forward"
    made = torch_runner(functools.partial(torch_call, attend, which, (0, 1, 2)), args)
    result = made.result
    assert result is not None
    return made._replace(result=lambda: jax.tree.map(lambda x: x.transpose(1, 2), result()))


# batch, heads, kv_heads, keys, size
DECODE: Sequence[tuple[int, int, int, int, int]] = [
    (8, 32, 8, 4096, 128),
    (1, 32, 8, 32_768, 128),
    (1, 32, 8, 4096, 128),
    (64, 9, 3, 4096, 64),
    (1, 32, 8, 131_072, 128),
    (8, 32, 32, 4096, 128),
    (8, 64, 4, 4096, 128),
]


def measure_decode(setting: Setting) -> Iterator[Row]:
    """Bytes of keys and values that are read, against a copy's read and written ones."""
    for batch, heads, kv_heads, keys, size in [(2, 6, 2, 48, 16)] if setting.tiny else DECODE:
        if not setting.has_time():
            return
        q = jax.random.normal(jax.random.key(0), (batch, heads, size), jnp.bfloat16)
        k, v = (jax.random.normal(jax.random.key(i), (batch, keys, kv_heads, size), jnp.bfloat16) for i in (1, 2))
        lengths = jnp.full(batch, keys, jnp.int32)

        def theirs(q: Any, k: Any, v: Any, lengths: Any) -> jax.Array:
            attend = functools.partial(jax.nn.dot_product_attention, implementation="xla")
            return attend(q[:, None], k, v, key_value_seq_lengths=lengths)[:, 0]

        copy, copied = copy_runner(setting)
        contestants = {
            OURS: lambda args=(q, k, v, lengths): setting.clock.runner(ops.decode_attention, *args),
            "XLA": lambda args=(q, k, v, lengths), f=theirs: setting.clock.runner(f, *args),
            COPY: copy,
        }
        if heads // kv_heads > 2:  # what it takes
            by_tensor_cores = functools.partial(setting.clock.runner, decode_by_tensor_cores, q, k, v, lengths)
            contestants["by tensor cores"] = by_tensor_cores
        if setting.torch:
            contestants["torch SDPA"] = functools.partial(_torch_decode, q, k, v)
        case = f"b{batch} h{heads}/{kv_heads} keys {keys} d{size}"
        race = setting.race(contestants)
        yield Row(case, "GB/s", k.nbytes + v.nbytes, race, (Goal(COPY, 0.85),), more_work={COPY: copied})


def _torch_decode(q: jax.Array, k: jax.Array, v: jax.Array) -> Runner:
    attend = torch().nn.functional.scaled_dot_product_attention

    def make(args: Sequence[jax.Array]) -> Callable[[], Any]:
        query, keys, values = map(to_torch, args)
        query, keys, values = query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)
        return lambda: attend(query, keys, values, enable_gqa=True)[:, :, 0]

    return torch_runner(make, (q, k, v))
