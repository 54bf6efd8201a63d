"""What a callback costs: `python -m benchmarks.overhead [--quick] [--readme]`.

Calls: a chain of 100 on f32[128] in one jit, for each way to leave XLA. Sizes: identity and add-one from 4 KiB to 256 MiB,
in place and not; and how the cost grows from 4 to 32 MiB. Seconds are of this machine; the ratios are what means something.
"""

import argparse
import ctypes
import functools
import pathlib
import subprocess
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback as jax_buffer_callback

import eqxcallback as eqxc
from benchmarks import _report
from benchmarks._timing import Timing, interleaved


CALLS = 100
F32 = jax.ShapeDtypeStruct((128,), jnp.float32)


def empty(ctx, out, x):
    pass


def np_add(ctx, out, x):
    np.add(np.asarray(x), 1, out=np.asarray(out))


@functools.cache
def native_library() -> str:
    """A native kernel, compiled here against the headers of the jaxlib that runs."""
    folder = pathlib.Path(tempfile.mkdtemp())
    source = pathlib.Path(__file__).parent / "native_add.cc"
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, str(source), "-o", str(folder / "native.so")], check=True)
    return str(folder / "native.so")


@functools.cache
def bare_call() -> Callable[[jax.Array], jax.Array]:
    """As JAX's documentation does it."""
    capsule = jax.ffi.pycapsule(ctypes.CDLL(native_library()).NativeAddOne)
    jax.ffi.register_ffi_target("benchmark_add_one", capsule, platform="cpu")
    call = jax.ffi.ffi_call("benchmark_add_one", F32)
    return lambda x: call(x)


def native_op() -> eqxc.Op:
    kernel = eqxc.NativeKernel("NativeAddOne", library=native_library())
    return eqxc.Op("add_one", kernels={"cpu": kernel}, reference=lambda x: x + 1)


class Empty(eqxc.Layer):
    """Does nothing, with some arrays of its own."""

    fields: tuple[jax.Array, ...]

    def kernel(self, ctx, out, x):
        pass

    def out_type(self, x):
        return F32


class OneField(eqxc.Layer):
    weight: jax.Array

    def kernel(self, ctx, out, x):
        pass

    def out_type(self, x):
        return F32


def native_layer() -> eqxc.Layer:
    class AddOne(eqxc.Layer):
        kernels = {"cpu": eqxc.NativeKernel("NativeAddOne", library=native_library())}  # noqa: RUF012 - a declaration

        def reference(self, x):
            return x + 1

    return AddOne()


def with_operand(ctx, out, w, x):
    pass


def chain(call: Callable[[jax.Array], jax.Array]) -> Callable[[], object]:
    def program(x):
        for _ in range(CALLS):
            x = call(x)
        return x

    jitted, x = jax.jit(program), jnp.zeros(F32.shape)
    return lambda: jitted(x).block_until_ready()


def measure_calls(rounds: int) -> dict[str, Timing]:
    """Seconds for one call in a chain of 100."""
    x, y, w = np.zeros(128, np.float32), np.zeros(128, np.float32), jnp.zeros(128)
    contestants = {
        "eqxcallback, empty": chain(eqxc.buffer_callback(empty, F32)),
        "jax buffer_callback, empty": chain(jax_buffer_callback(empty, F32)),
        "eqxcallback, empty, 2 operands": chain(functools.partial(eqxc.buffer_callback(with_operand, F32), w)),
        "eqxcallback Layer, empty, 1 field": chain(OneField(w)),
        "eqxcallback Layer, empty, 8 fields": chain(Empty((w,) * 8)),
        "eqxcallback Layer, native add": chain(native_layer()),
        "eqxcallback, np.add": chain(eqxc.buffer_callback(np_add, F32)),
        "jax buffer_callback, np.add": chain(jax_buffer_callback(np_add, F32)),
        "jax pure_callback, np.add": chain(lambda x: jax.pure_callback(lambda a: np.add(a, np.float32(1)), F32, x)),
        "eqxcallback Op, native add": chain(native_op()),
        "eqxcallback ops.rms_norm": chain(eqxc.ops.rms_norm),
        "ffi_call, native add": chain(bare_call()),
        "XLA, x + 1": chain(lambda x: jax.lax.optimization_barrier(x + 1)),
        "probe: np.add alone": lambda: [np.add(x, 1, out=y) for _ in range(CALLS)],
    }
    times = interleaved(contestants, rounds=rounds, round_seconds=0.05)
    return {name: Timing(t.median / CALLS, t.low / CALLS, t.high / CALLS) for name, t in times.items()}


def measure_eager(rounds: int) -> dict[str, Timing]:
    x = jnp.zeros(F32.shape)
    ours, theirs = eqxc.buffer_callback(empty, F32), jax_buffer_callback(empty, F32)
    native, op = bare_call(), native_op()
    layer, empty_layer = native_layer(), OneField(jnp.zeros(128))
    return interleaved(
        {
            "eqxcallback Layer, python lane": lambda: empty_layer(x).block_until_ready(),
            "eqxcallback Layer, native add": lambda: layer(x).block_until_ready(),
            "eqxcallback, empty": lambda: ours(x).block_until_ready(),
            "jax buffer_callback, empty": lambda: theirs(x).block_until_ready(),
            "eqxcallback Op, native add": lambda: op(x).block_until_ready(),
            "ffi_call, native add": lambda: native(x).block_until_ready(),
        },
        rounds=rounds,
        round_seconds=0.05,
    )


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


def report_calls(calls: dict[str, Timing], eager: dict[str, Timing]) -> str:
    def ratio(times: dict[str, Timing], name: str, peer: str) -> str:
        return f"{times[name].median / times[peer].median:.2f}" if peer in times else ""

    def peer_of(name: str) -> str:
        if "native" in name or "ops." in name or "python lane" in name:
            return "ffi_call, native add"
        return "jax buffer_callback, " + ("empty" if "empty" in name else "np.add")

    rows = []
    for name, timing in calls.items():
        spread = f"{microseconds(timing.low)} to {microseconds(timing.high)}"
        rows.append([name, microseconds(timing.median), spread, ratio(calls, name, peer_of(name)), peer_of(name)])
    for name, timing in eager.items():
        spread = f"{microseconds(timing.low)} to {microseconds(timing.high)}"
        peer = peer_of(name)
        rows.append([f"eager: {name}", microseconds(timing.median), spread, ratio(eager, name, peer), peer])
    header = ["one call on f32[128]", "median, us", "quartiles", "ratio", "to"]
    return _report.table(header, rows)


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


def keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back to the system. By default it does from 32 MiB on, and each result then costs
    a page fault for each 4 KiB, which is far more than the copy. For the rest of the process."""
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, 2**31 - 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes; nothing is written")
    parser.add_argument("--readme", action="store_true", help="also put the tables into the README")
    options = parser.parse_args()
    rounds = 5 if options.quick else 21
    calls, eager = measure_calls(rounds), measure_eager(rounds)
    exponents = (12, 18, 22, 25) if options.quick else (12, 16, 20, 22, 25, 28)
    times = {"rounds": 5 if options.quick else 9, "seconds": 0.02 if options.quick else 0.2}
    sizes = {1 << e: measure_size(1 << e, **times) for e in exponents}
    keep_freed_memory()  # last: it stays so
    kept = {1 << e: measure_size(1 << e, **times) for e in exponents if e >= 22}
    about = ", ".join(f"{value}" if key == "cpu" else f"{key} {value}" for key, value in _report.machine().items())
    tables = [report_calls(calls, eager), report_sizes(sizes), report_growth(sizes, kept)]
    markdown = "\n\n".join([*tables, f"Measured on {about}."])
    print(markdown)
    if not options.quick:
        data = {
            "calls": {name: vars(t) for name, t in calls.items()},
            "eager": {name: vars(t) for name, t in eager.items()},
            "sizes": {str(n): {name: vars(t) for name, t in row.items()} for n, row in sizes.items()},
            "sizes, malloc keeps memory": {
                str(n): {name: vars(t) for name, t in row.items()} for n, row in kept.items()
            },
        }
        _report.write("overhead", markdown, data, readme=options.readme)


if __name__ == "__main__":
    main()
