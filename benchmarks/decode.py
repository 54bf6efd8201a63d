"""One token after the other over a cache of keys and values: attention alone, and with the token written into the cache."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eqxcallback import ops

from . import shapes
from ._contestants import normal, to_torch, torch
from ._probes import READ, read_bytes, read_runner
from ._rows import BEST, OURS, Goal, Row, Setting
from ._timing import Runner, waited_for


class Cache(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    keys: int
    size: int

    def __str__(self) -> str:
        groups = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        return f"b{self.batch} h{self.heads}{groups} cache {self.keys} d{self.size}"

    def operands(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries of one token, keys and values."""
        keys = (self.batch, self.keys, self.kv_heads, self.size)
        return (
            normal(0, self.batch, self.heads, self.size, dtype=dtype),
            normal(1, *keys, dtype=dtype),
            normal(2, *keys, dtype=dtype),
        )


def cache_of(model: shapes.Model, batch: int, keys: int) -> Cache:
    return Cache(batch, model.heads, model.kv_heads, keys, model.head_size)


def keys_inside(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attend to a cache `(batch, keys, heads, size)`, which is read as it lies."""
    grouped = q.reshape(q.shape[0], k.shape[2], -1, q.shape[-1])
    logits = jnp.einsum("bhgd,bkhd->bhgk", grouped, k, preferred_element_type=jnp.float32)
    weights = _weights(logits, length, q)
    return jnp.einsum("bhgk,bkhd->bhgd", weights, v).reshape(q.shape)


def heads_first(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Attend to a cache `(batch, heads, keys, size)`."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    logits = jnp.einsum("bhgd,bhkd->bhgk", grouped, k, preferred_element_type=jnp.float32)
    weights = _weights(logits, length, q)
    return jnp.einsum("bhgk,bhkd->bhgd", weights, v).reshape(q.shape)


def _sums(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    """Products and sums in place of products of matrices, which XLA fuses into loops."""
    grouped = q.reshape(q.shape[0], 1, k.shape[2], -1, q.shape[-1]).astype(jnp.float32)
    logits = (grouped * k[:, :, :, None].astype(jnp.float32)).sum(-1)
    weights = _weights(jnp.moveaxis(logits, 1, -1), length, q).astype(jnp.float32)
    out = (jnp.moveaxis(weights, -1, 1)[..., None] * v[:, :, :, None].astype(jnp.float32)).sum(1)
    return out.reshape(q.shape).astype(q.dtype)


def _weights(logits: jax.Array, length: jax.Array, q: jax.Array) -> jax.Array:
    seen = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < length
    logits = jnp.where(seen, logits.astype(jnp.float32) / math.sqrt(q.shape[-1]), -jnp.inf)
    return jax.nn.softmax(logits, -1).astype(q.dtype)


def _jax_nn(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array) -> jax.Array:
    lengths = jnp.broadcast_to(length, q.shape[:1])
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths)[:, 0]


def attend_contestants(setting: Setting, cache: Cache, dtype: Any, length: int) -> dict[str, Callable[[], Runner]]:
    q, k, v = cache.operands(dtype)
    filled = jnp.int32(length)

    def of_torch() -> Runner:
        query = to_torch(q)[:, :, None]
        keys, values = (to_torch(x)[:, :length].transpose(1, 2) for x in (k, v))
        options = {"enable_gqa": cache.heads != cache.kv_heads}
        attend = functools.partial(torch().nn.functional.scaled_dot_product_attention, **options)
        return waited_for(lambda: attend(query, keys, values)[:, :, 0])

    fs: dict[str, Callable[..., jax.Array]] = {
        OURS: lambda q, k, v, length: ops.decode_attention(q, k, v, jnp.broadcast_to(length, q.shape[:1])),
        "XLA: keys inside": keys_inside,
        "XLA: sums": _sums,
        "jax.nn": _jax_nn,
    }
    made: dict[str, Callable[[], Runner]] = {
        name: functools.partial(setting.clock.runner, f, q, k, v, filled) for name, f in fs.items()
    }

    def transposed(of_cache: Any) -> Runner:
        keys, values = (jnp.array(x.swapaxes(1, 2), of_cache) for x in (k, v))
        return setting.clock.runner(heads_first, q.astype(of_cache), keys, values, filled)

    for name, of_cache in _caches(dtype).items():
        made[f"XLA: heads first{name}"] = functools.partial(transposed, of_cache)
    return made | ({"torch": of_torch} if setting.torch else {})


def _caches(dtype: Any) -> dict[str, Any]:
    """Return dtypes of XLA's caches, by what is said of them: it may read f32 faster than half as many bytes of bf16."""
    return {"": dtype} | ({} if dtype == jnp.float32 else {", f32 cache": jnp.float32})


def _loop(
    append: Callable[..., jax.Array], attend: Callable[..., jax.Array], steps: int
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The result of each step is the next one's query, and its key and value too, of the heads that there are."""

    def program(k: jax.Array, v: jax.Array, q: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def step(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            q, k, v = carry
            position = start + index
            k, v = append(k, q, position), append(v, q, position)
            return attend(q, k, v, position + 1), k, v

        return jax.lax.fori_loop(0, steps, step, (q, k, v))

    return program


def _loop_runner(program: Callable[..., Any], k: jax.Array, v: jax.Array, q: jax.Array, start: int) -> Runner:
    """Donated caches: each call works on those that the last one has left, and writes its tokens to the same places."""
    jitted = jax.jit(program, donate_argnums=(0, 1))
    state = [jnp.array(k), jnp.array(v)]
    first = jnp.int32(start)

    def call() -> None:
        _, *state[:] = jitted(*state, q, first)
        jax.block_until_ready(state)

    def temporary() -> int | None:
        analysis = jitted.lower(*state, q, first).compile().memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes

    # Of caches that nobody has written to yet.
    return waited_for(call)._replace(
        result=lambda: jitted(jnp.array(k), jnp.array(v), q, first)[0], temporary=temporary
    )


def loop_contestants(setting: Setting, cache: Cache, dtype: Any, steps: int) -> dict[str, Callable[[], Runner]]:
    """The last `steps` tokens of a cache. One key head for each query head, so that a result can be a key."""
    q, k, v = cache.operands(dtype)
    start = cache.keys - steps

    def ours() -> Runner:
        append = lambda kept, row, position: ops.cache_append(
            kept, row[:, None], jnp.broadcast_to(position, row.shape[:1]), batch_dims=1
        )
        attend = lambda q, k, v, length: ops.decode_attention(q, k, v, jnp.broadcast_to(length, q.shape[:1]))
        return _loop_runner(_loop(append, attend, steps), k, v, q, start)

    def xla(attend: Callable[..., jax.Array]) -> Runner:
        append = lambda kept, row, position: jax.lax.dynamic_update_slice_in_dim(kept, row[:, None], position, 1)
        return _loop_runner(_loop(append, attend, steps), k, v, q, start)

    def xla_heads_first(of_cache: Any) -> Runner:
        append = lambda kept, row, position: jax.lax.dynamic_update_slice_in_dim(kept, row[:, :, None], position, 2)
        turned_k, turned_v = (jnp.array(x.swapaxes(1, 2), of_cache) for x in (k, v))
        return _loop_runner(_loop(append, heads_first, steps), turned_k, turned_v, q.astype(of_cache), start)

    def of_torch() -> Runner:
        query = to_torch(q)
        attend = torch().nn.functional.scaled_dot_product_attention

        def generate(keys: Any, values: Any) -> Any:
            x = query
            for position in range(start, start + steps):
                keys[:, position], values[:, position] = x, x
                k, v = (kept[:, : position + 1].transpose(1, 2) for kept in (keys, values))
                x = attend(x[:, :, None], k, v)[:, :, 0]
            return x

        copies = [to_torch(x).clone() for x in (k, v)]
        return waited_for(lambda: generate(*copies))._replace(
            result=lambda: generate(*(to_torch(x).clone() for x in (k, v)))
        )

    made: dict[str, Callable[[], Runner]] = {
        OURS: ours,
        "XLA: keys inside": functools.partial(xla, keys_inside),
        "XLA: sums": functools.partial(xla, _sums),
        "jax.nn": functools.partial(xla, _jax_nn),
    }
    for name, of_cache in _caches(dtype).items():
        made[f"XLA: heads first{name}"] = functools.partial(xla_heads_first, of_cache)
    return made | ({"torch": of_torch} if setting.torch else {})


# The most telling ones first.
_ATTEND: list[tuple[str, Cache, Any]] = [
    ("GPT-2", cache_of(shapes.GPT2, 8, 1024), jnp.float32),
    ("GPT-2", cache_of(shapes.GPT2, 8, 1024), jnp.bfloat16),
    ("SmolLM2-135M", cache_of(shapes.SMOLLM2, 1, 8192), jnp.float32),
    ("SmolLM2-135M", cache_of(shapes.SMOLLM2, 1, 8192), jnp.bfloat16),
    ("SmolLM2-135M", cache_of(shapes.SMOLLM2, 32, 512), jnp.bfloat16),
]
_LOOPS: list[tuple[str, Cache, Any]] = [
    ("GPT-2", cache_of(shapes.GPT2, 1, 1024), jnp.float32),
    ("GPT-2", cache_of(shapes.GPT2, 4, 1024), jnp.float32),
    ("GPT-2", cache_of(shapes.GPT2, 4, 1024), jnp.bfloat16),
]
_STEPS = 32


def measure(setting: Setting) -> Iterator[Row]:
    tiny = [("tiny", cache_of(shapes.TINY, 2, 40), dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    for model, cache, dtype in tiny if setting.tiny else _ATTEND[:2] if setting.quick else _ATTEND:
        made = attend_contestants(setting, cache, dtype, cache.keys - (7 if setting.tiny else 0))
        made[READ] = functools.partial(read_runner, setting)
        is_wide = dtype == jnp.float32
        yield Row(
            f"attention, {jnp.dtype(dtype).name}, {model}: {cache}",
            "GB/s",
            2 * cache.batch * cache.keys * cache.kv_heads * cache.size * jnp.dtype(dtype).itemsize,
            setting.race(made),
            (Goal(BEST), Goal("probe", 0.8)),
            more_work={READ: read_bytes(setting)},
            tolerance=1e-4 if is_wide else 0.05,
        )
    steps = 4 if setting.tiny else _STEPS
    one_head_each = cache_of(shapes.TINY, 2, 40)._replace(kv_heads=shapes.TINY.heads)
    loops = [("tiny", one_head_each, jnp.float32)] if setting.tiny else _LOOPS[:1] if setting.quick else _LOOPS
    for model, cache, dtype in loops:
        yield Row(
            f"append and attend, {steps} steps at the end, {jnp.dtype(dtype).name}, {model}: {cache}",
            "us",
            steps,
            setting.race(loop_contestants(setting, cache, dtype, steps)),
            (Goal(BEST),),
            tolerance=1e-3 if dtype == jnp.float32 else 0.1,
        )
