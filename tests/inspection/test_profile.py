"""Profiles: what ran, how often, how long, and how much it read, wrote and computed."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import _ext, ops
from eqxcallback.transform import product

from .layers import AddOne, Scale


SECONDS = 0.02

saxpy = eqxc.Op(
    "saxpy",
    kernels={
        "cpu": eqxc.CKernel(
            "saxpy",
            source="""
void saxpy(long n, float a, const float* x, const float* y, float* out) {
  for (long i = 0; i < n; ++i) out[i] = a * x[i] + y[i];
}
""",
            parameters=("x.size", "float a", "const float* x", "const float* y", "float* out"),
        )
    },
    reference=lambda x, y, *, a: a * x + y,
    vmap_method="fold",
)


class Sleep(Scale):
    def kernel(self, ctx, out, x):
        time.sleep(SECONDS)
        super().kernel(ctx, out, x)


class Counted(eqxc.Layer):
    has_side_effect = True

    def kernel(self, ctx, out, x):
        COUNTED.append(1)
        np.copyto(np.asarray(out), np.asarray(x))

    def reference(self, x):
        return x


COUNTED = []


def step(x, weight, q):
    x = jax.vmap(Sleep(jnp.ones(64)))(ops.rms_norm(x) @ weight)
    with jax.named_scope("block"):
        x = jax.vmap(lambda x: saxpy(x, x + 1, a=2.0))(x)
    x = jax.lax.scan(lambda x, _: (ops.rms_norm(x), None), x, length=5)[0]
    return x, ops.attention(q, q, q)


def profiled(fn, *args, repeats=1):
    """The report, and the profile in it."""
    report = eqxc.inspect(fn, *args, profile=True, repeats=repeats)
    assert report.profile is not None
    return report, report.profile


@pytest.fixture(scope="module")
def report_and_profile():
    key = jax.random.key(0)
    x, weight, q = (jax.random.normal(key, shape) for shape in ((32, 48), (48, 64), (16, 2, 8)))
    return profiled(step, x, weight, q, repeats=3)


@pytest.fixture
def report(report_and_profile):
    return report_and_profile[0]


@pytest.fixture
def profile(report_and_profile):
    return report_and_profile[1]


def only(profile, name, path=""):
    (row,) = [row for row in profile.rows if row.name == name and path in row.path]
    return row


def test_a_row_for_each_call(report, profile):
    rows = [row for row in profile.rows if row.lane != "xla"]
    assert sorted(i for row in rows for i in row.calls) == list(range(5))
    for row in rows:
        for call in (report.calls[i] for i in row.calls):
            assert (row.name, row.lane, row.path) == (call.op, call.lane, call.path)
            assert row.count == call.times
    assert only(profile, "rms_norm", "scan").count == 5
    assert "block" in only(profile, "saxpy").path


def test_bytes(profile):
    assert only(profile, "rms_norm", "jit(step)/rms_norm").bytes == 4 * 2 * 32 * 48
    assert only(profile, "rms_norm", "scan").bytes == 5 * 4 * 2 * 32 * 64
    assert only(profile, "Sleep").bytes == 4 * (64 + 2 * 32 * 64)
    assert only(profile, "saxpy").bytes == 4 * 3 * 32 * 64
    # One array, though it is three operands; the results are the values and the logarithms of the sums.
    assert only(profile, "attention").bytes == 4 * (16 * 2 * 8 + 16 * 2 * 8 + 2 * 16)
    assert only(profile, "dot").bytes == 4 * (32 * 48 + 48 * 64 + 32 * 64)


def test_operations(profile):
    assert only(profile, "saxpy").flops == 2 * 32 * 64
    assert only(profile, "Sleep").flops == 32 * 64
    assert only(profile, "dot").flops == 2 * 32 * 48 * 64
    assert only(profile, "attention").flops > 2 * 2 * 2 * 16 * 16 * 8


def test_times(profile):
    assert only(profile, "Sleep").seconds >= SECONDS
    assert all(row.seconds > 0 for row in profile.rows)
    assert profile.seconds >= SECONDS
    assert [row.seconds for row in profile.rows] == sorted((row.seconds for row in profile.rows), reverse=True)
    assert all(0 <= span.start <= span.end for span in profile.spans)
    assert len(profile.spans) == sum(row.count for row in profile.rows)


def test_a_product_by_this_packages_kernel(monkeypatch):
    """Its row says that XLA does not compute it, though the program has no call of a kernel. Machines without tiles have to be
    told to use the kernel."""
    monkeypatch.setattr(_ext, "isas_of_bf16", lambda: {"linear_rows": "avx512_amx"})
    a, b = jnp.ones((64, 96), jnp.bfloat16), jnp.ones((128, 96), jnp.bfloat16)
    report, profile = profiled(lambda a, b: product("mk,nk->mn", a.dtype, a, b), a, b)
    (row,) = (row for row in profile.rows if row.lane != "xla")
    assert not report.calls
    assert (row.name, row.lane, row.count) == ("eqxcallback_matrix_product", "native", 1)
    assert row.flops == 2 * 64 * 128 * 96


def test_shares(profile):
    limits = profile.limits
    for row in profile.rows:
        needed = {"bytes": row.bytes / limits.bytes_per_second, "flops": (row.flops or 0) / limits.flops_per_second}
        assert needed[row.bound] == max(needed.values())
        assert row.share == pytest.approx(needed[row.bound] / row.seconds)


def test_the_parts_of_one_run_add_up():
    _, profile = profiled(step, jnp.ones((8, 16)), jnp.ones((16, 64)), jnp.ones((4, 1, 8)))
    parts = sum(row.seconds for row in profile.rows) + profile.other_seconds
    assert parts - profile.overlap_seconds == pytest.approx(profile.profiled_seconds)
    assert profile.other_seconds > 0


def jitted(n, x):
    return Scale(jnp.ones(3))(x) * n


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (Scale(jnp.ones(3)), (jnp.ones(3),)),
        (jax.jit(jitted, static_argnums=0), (2, jnp.ones(3))),
        (eqx.filter_jit(jitted), (2, jnp.ones(3))),
        (eqxc.jit_captured(jitted), (2, np.ones(3, np.float32))),
    ],
    ids=["layer", "jit", "filter_jit", "jit_captured"],
)
def test_programs(fn, args):
    assert only(profiled(fn, *args)[1], "Scale").count == 1


def test_gradients():
    scale = Scale(jnp.ones(3))
    _, profile = profiled(jax.grad(lambda x: jnp.sin(scale(x)).sum()), jnp.ones(3))
    rows = {row.kind: row for row in profile.rows if row.name == "Scale"}
    assert {kind: row.count for kind, row in rows.items()} == {"forward": 1, "vjp": 1}
    assert "\nScale vjp  python " in str(profile)


def test_what_is_donated_is_a_copy():
    x, cache = jnp.ones(2), jnp.ones((8, 2))
    program = jax.jit(lambda cache, x: AddOne()(ops.cache_append(cache, x[None], 0)), donate_argnums=0)
    _, profile = profiled(program, cache, x, repeats=2)
    assert not cache.is_deleted()
    assert only(profile, "cache_append").at_most  # one row of the cache is written
    assert not any(row.name == "copy" for row in profile.rows)


def test_it_runs_as_often_as_it_says():
    COUNTED.clear()
    _, profile = profiled(lambda x: (Counted()(x), x)[1], jnp.ones(2), repeats=3)
    assert len(COUNTED) == 1 + 2 * 3
    assert only(profile, "Counted").flops == 0


def test_examples_on_threads_are_timed_to_their_end():
    """The thread that starts them goes on at once."""
    pause = f"struct timespec t = {{0, {int(SECONDS * 1e9)}}}; nanosleep(&t, 0);"
    slow = eqxc.Op(
        "slow",
        kernels={
            "cpu": eqxc.CKernel(
                "slow",
                source=f"#include <time.h>\nvoid slow(const float* x, float* out) {{ {pause} out[0] = x[0]; }}",
                parameters=("const float* x", "float* out"),
            )
        },
        reference=lambda x: x,
        vmap_method="threads",
    )
    report, profile = profiled(jax.vmap(slow), jnp.ones((4, 1)))
    assert report.calls[0].note == ""
    row = only(profile, "slow")
    assert (row.count, row.bytes, row.flops) == (1, 2 * 4 * 4, 0)
    assert row.seconds >= SECONDS


def test_rows_of_one_name_are_told_apart_by_their_types():
    scale, wide = Scale(jnp.ones(3)), Scale(jnp.ones(5))
    _, profile = profiled(lambda x, y: (scale(x), wide(y)), jnp.ones(3), jnp.ones(5))
    lines = [line for line in str(profile).splitlines() if line.startswith("Scale ")]
    rows = [row for row in profile.rows if row.lane == "python"]
    for line, row in zip(lines, rows, strict=True):
        assert line.endswith(f"({', '.join(row.operands)}) -> ({', '.join(row.results)})")


def test_calls_that_xla_merges_have_one_row():
    scale = Scale(jnp.ones(3))
    _, profile = profiled(lambda x: scale(x) + scale(x), jnp.ones(3))
    row = only(profile, "Scale")
    assert (row.calls, row.count) == ((0, 1), 1)


def test_several_devices(mesh):
    sharded = jax.shard_map(Scale(jnp.ones(3)), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    row = only(profiled(sharded, jnp.ones(12))[1], "Scale")
    assert (row.count, row.bytes) == (4, 4 * 3 * 3 * 4)


def test_kernels_may_run_programs_of_their_own():
    inner = jax.jit(lambda x: jnp.sin(x) @ x)

    def kernel(ctx, out, x):
        np.asarray(out)[...] = inner(np.ones((8, 8), np.float32))[0, 0]

    _, profile = profiled(eqxc.buffer_callback(kernel, jnp.ones(3)), jnp.ones(3))
    assert [(row.lane, row.flops) for row in profile.rows] == [("python", None)]


def test_nothing_is_profiled_unless_asked():
    assert eqxc.inspect(jnp.sin, jnp.ones(2)).profile is None


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (
            (jax.ShapeDtypeStruct((2,), jnp.float32),),
            {},
            "expected arrays with profile=True, which runs the program; got Sha",
        ),
        ((jnp.ones(2),), {"platform": "cuda"}, "expected profile=True for a program on a CPU; got one for cuda"),
        ((jnp.ones(2),), {"repeats": 0}, "expected repeats of 1 or more; got 0"),
    ],
)
def test_errors(args, options, message):
    with pytest.raises(ValueError, match=message):
        eqxc.inspect(jnp.sin, *args, profile=True, **options)


def test_the_error_of_a_kernel_is_its_own_and_ends_the_profile():
    class Fails(Counted):
        def kernel(self, ctx, out, x):
            super().kernel(ctx, out, x)
            if len(COUNTED) > 2:
                raise RuntimeError("on purpose")

    for _ in range(2):  # the profiler of the first is not left running
        COUNTED.clear()
        with pytest.raises(eqxc.KernelError, match="on purpose"), eqxc.raising():
            eqxc.inspect(Fails(), jnp.ones(2), profile=True, repeats=2)
