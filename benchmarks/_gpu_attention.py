"""Attention against cuDNN, XLA and PyTorch; and what one token over a cache reads of the copy bandwidth."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eqxcallback import ops

from ._gpu_probe import COPY, copy_runner
from ._gpu_rows import OURS, Goal, Row, Setting
from ._gpu_timing import Runner, torch_runner


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    causal: bool

    def __str__(self) -> str:
        groups = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        causal = ", causal" if self.causal else ""
        return f"b{self.batch} h{self.heads}{groups} s{self.length} d{self.size}{causal}"

    @property
    def flops(self) -> float:
        full = 4 * self.batch * self.heads * self.length**2 * self.size
        return full / 2 if self.causal else full

    def operands(self) -> list[jax.Array]:
        """Queries, keys, values, and the cotangent of the result."""
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [
            jax.random.normal(jax.random.key(i), (self.batch, self.length, count, self.size), jnp.bfloat16)
            for i, count in enumerate(heads)
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
_WITH_BACKWARD = 3.5


def measure(setting: Setting) -> Iterator[Row]:
    shapes = TINY if setting.tiny else SHAPES[:4] if setting.quick else SHAPES
    goal = Goal("XLA" if setting.tiny else "cuDNN", 0.8)
    for shape in shapes:
        for backward in (False, True):
            if not setting.has_time():
                return
            contestants = {
                name: functools.partial(jax_runner, setting, f, shape, backward) for name, f in peers(shape).items()
            }
            if setting.torch:
                contestants["torch SDPA"] = functools.partial(sdpa_runner, shape, backward)
            if setting.tiny:
                del contestants["cuDNN"]
            work = shape.flops * (_WITH_BACKWARD if backward else 1)
            what = "forward + backward" if backward else "forward"
            yield Row(f"{what}, {shape}", "TFLOP/s", work, setting.race(contestants), goal)


def peers(shape: Shape) -> dict[str, Callable[..., jax.Array]]:
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=shape.causal)
    return {
        OURS: functools.partial(ops.attention, causal=shape.causal),
        "cuDNN": functools.partial(theirs, implementation="cudnn"),
        "XLA": functools.partial(theirs, implementation="xla"),
    }


def jax_runner(setting: Setting, f: Callable[..., jax.Array], shape: Shape, backward: bool) -> Runner:
    def gradients(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, vjp = jax.vjp(f, q, k, v)
        return *vjp(cotangent), out

    q, k, v, cotangent = shape.operands()
    return setting.clock.runner(gradients, q, k, v, cotangent) if backward else setting.clock.runner(f, q, k, v)


def to_torch(x: jax.Array) -> Any:
    torch: Any = importlib.import_module("torch")
    return torch.from_dlpack(x)


def sdpa_runner(shape: Shape, backward: bool) -> Runner:
    torch: Any = importlib.import_module("torch")
    q, k, v, cotangent = (to_torch(x).transpose(1, 2).contiguous() for x in shape.operands())
    options = {"is_causal": shape.causal, "enable_gqa": shape.heads != shape.kv_heads}
    attend = torch.nn.functional.scaled_dot_product_attention
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def run() -> Any:
        out = attend(*inputs, **options)
        return torch.autograd.grad(out, inputs, cotangent) if backward else (out,)

    runner = torch_runner(run)
    return runner._replace(result=lambda: [x.transpose(1, 2) for x in run()])


# batch, heads, kv_heads, keys, size
DECODE: Sequence[tuple[int, int, int, int, int]] = [
    (8, 32, 8, 4096, 128),
    (1, 32, 8, 32_768, 128),
    (1, 32, 8, 4096, 128),
    (64, 9, 3, 4096, 64),
]


def measure_decode(setting: Setting) -> Iterator[Row]:
    """Bytes of keys and values that are read, against a copy's read and written ones."""
    for batch, heads, kv_heads, keys, size in [(2, 4, 2, 48, 16)] if setting.tiny else DECODE:
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
        if setting.torch:
            contestants["torch SDPA"] = functools.partial(_torch_decode, q, k, v)
        case = f"b{batch} h{heads}/{kv_heads} keys {keys} d{size}"
        race = setting.race(contestants)
        yield Row(case, "GB/s", k.nbytes + v.nbytes, race, Goal(COPY, 0.85), more_work={COPY: copied})


def _torch_decode(q: jax.Array, k: jax.Array, v: jax.Array) -> Runner:
    torch: Any = importlib.import_module("torch")
    query = to_torch(q)[:, :, None]
    keys, values = (to_torch(x).transpose(1, 2) for x in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch_runner(lambda: attend(query, keys, values, enable_gqa=True)[:, :, 0])
