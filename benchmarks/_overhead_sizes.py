"""Measure the cost of a callback for more and more bytes, in place and not."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback as jax_buffer_callback

import eqxcallback as eqxc

from . import _report
from ._timing import Timing, interleaved


def identity_in_place(ctx, out, x):
    pass


def identity(ctx, out, x):
    np.copyto(np.asarray(out), np.asarray(x))


def add_in_place(ctx, out, x):
    array = np.asarray(out)
    np.add(array, np.float32(1), out=array)


def add_one(ctx, out, x):
    np.add(np.asarray(x), np.float32(1), out=np.asarray(out))


def in_place_on_itself(f: Callable[..., jax.Array], x: jax.Array) -> Callable[[], object]:
    """Calls that donate their argument: each one works on the result of the last."""
    jitted, state = jax.jit(f, donate_argnums=0), [x]

    def run() -> None:
        state[0] = jitted(state[0])
        state[0].block_until_ready()

    return run


def repeated(f: Callable[..., jax.Array], x: jax.Array) -> Callable[[], object]:
    jitted = jax.jit(f)
    return lambda: jitted(x).block_until_ready()


def measure_size(nbytes: int, rounds: int, seconds: float) -> dict[str, Timing]:
    like = jax.ShapeDtypeStruct((nbytes // 4,), jnp.float32)

    def ours(callback, **options):
        return eqxc.buffer_callback(callback, like, **options)

    x = jnp.zeros(like.shape, like.dtype)
    source, target = np.zeros(like.shape, np.float32), np.zeros(like.shape, np.float32)

    def pure(x):
        return jax.pure_callback(lambda a: a, like, x)

    contestants = {
        "identity, aliased + donated": in_place_on_itself(ours(identity_in_place, input_output_aliases={0: 0}), x + 0),
        "identity, aliased": repeated(ours(identity_in_place, input_output_aliases={0: 0}), x),
        "identity, neither": repeated(ours(identity), x),
        "add, aliased + donated": in_place_on_itself(ours(add_in_place, input_output_aliases={0: 0}), x + 0),
        "add, aliased": repeated(ours(add_in_place, input_output_aliases={0: 0}), x),
        "add, neither": repeated(ours(add_one), x),
        "jax buffer_callback, identity": repeated(jax_buffer_callback(identity, like), x),
        "jax pure_callback, identity": repeated(pure, x),
        "XLA, x + 1": repeated(lambda x: x + 1, x),
        "XLA, x + 1, donated": in_place_on_itself(lambda x: x + 1, x + 0),
        "probe: np.copyto": lambda: np.copyto(target, source),
    }
    return interleaved(contestants, rounds=rounds, round_seconds=seconds)


def microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def size_name(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def report_sizes(sizes: dict[int, dict[str, Timing]]) -> str:
    names = list(next(iter(sizes.values())))
    rows = [[name, *(microseconds(times[name].median) for times in sizes.values())] for name in names]
    return _report.table(["median, us", *map(size_name, sizes)], rows)


def report_growth(sizes: dict[int, dict[str, Timing]], kept: dict[int, dict[str, Timing]]) -> str:
    """JAX's issue 11371 asked why a copying callback takes 23 times as long for 8 times the bytes (4 to 32 MiB)."""
    names = ("identity, aliased + donated", "add, aliased + donated", "add, aliased", "add, neither", "XLA, x + 1")

    def growth(times: dict[int, dict[str, Timing]], name: str) -> str:
        return f"{times[32 << 20][name].median / times[4 << 20][name].median:.1f}"

    rows = [[name, growth(sizes, name), growth(kept, name)] for name in (*names, "probe: np.copyto")]
    return _report.table(["32 MiB over 4 MiB (8 times the bytes)", "as it comes", "malloc keeps memory"], rows)
