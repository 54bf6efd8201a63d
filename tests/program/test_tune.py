"""`eqxcallback.tune`: the fastest of several kernels runs from then on, and nowhere else is anything measured."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EQXCALLBACK_CUDA_ARCH", raising=False)
    return tmp_path


def slow(ctx, out, x):
    time.sleep(0.002)
    out.write(2 * np.asarray(x))


def fast(ctx, out, x):
    out.write(2 * np.asarray(x))


def double(x):
    return 2 * x


def slow_gradient(ctx, grads, args, out, cotangents):
    time.sleep(0.002)
    grads[0].write(2 * np.asarray(cotangents))


def fast_gradient(ctx, grads, args, out, cotangents):
    grads[0].write(2 * np.asarray(cotangents))


def op_of(*bodies, **more):
    return eqxc.Op("double", {"cpu": [eqxc.PythonKernel(body) for body in bodies]}, double, "fold", **more)


def runs(fn, *args):
    """The names of the kernels that a program has now."""
    handles = [call.handle for call in eqxc.inspect(lambda *args: fn(*args), *args).calls]
    return [handle and handle.name for handle in handles]


X = jnp.arange(12.0).reshape(3, 4)


def test_the_fastest_kernel_runs_from_then_on():
    op = op_of(slow, fast)
    assert runs(op, X) == ["slow"]
    (tuned,) = eqxc.tune(op, X)
    assert tuned.winner == 1
    assert tuned.seconds[0] > 0.002 > tuned.seconds[1] > 0
    assert runs(op, X) == ["fast"]
    (call,) = eqxc.inspect(lambda x: op(x), X).calls
    assert call.passed_over == (("python kernel slow", "was measured, and lost"),)
    np.testing.assert_array_equal(op(X), 2 * X)
    assert str(tuned).splitlines()[1:] == [
        f"   python kernel slow: {tuned.seconds[0] * 1e6:.1f} us",
        f" * {tuned.kernels[1]}: {tuned.seconds[1] * 1e6:.1f} us",
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda op: (op, jnp.ones((3, 5))), id="shape"),
        pytest.param(lambda op: (op, X.astype(jnp.bfloat16)), id="dtype"),
        pytest.param(lambda op: (jax.vmap(op), jnp.ones((2, 3, 4))), id="mapped"),
        pytest.param(lambda op: (dataclasses.replace(op, name="other"), X), id="name"),
        pytest.param(lambda op: (op_of(slow, lambda ctx, out, x: fast(ctx, out, x)), X), id="kernel"),
    ],
)
def test_other_calls_keep_the_order_that_was_declared(other):
    op = op_of(slow, fast)
    eqxc.tune(op, X)
    assert runs(op, X) == ["fast"]
    assert runs(*other(op)) == ["slow"]


def test_another_process_knows_it(cache):
    eqxc.tune(op_of(slow, fast), X)
    code = "import tests.program.test_tune as t; print(t.runs(t.op_of(t.slow, t.fast), t.X))"
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert process.stdout == "['fast']\n"


def test_a_gradient_is_a_call_of_its_own():
    backward = {"cpu": [eqxc.PythonKernel(slow_gradient), eqxc.PythonKernel(fast_gradient)]}
    op = op_of(fast, slow, backward=backward, backward_reads_results=False)

    def loss(x):
        return (op(x) ** 2).sum()

    assert [tuned.winner for tuned in eqxc.tune(jax.grad(loss), X)] == [0, 1]
    assert runs(jax.grad(loss), X) == ["fast", "fast_gradient"]
    np.testing.assert_array_equal(jax.grad(loss)(X), 8 * X)


@pytest.mark.parametrize(
    ("transform", "shapes"),
    [
        pytest.param(jax.vmap, ["(3, 4)"], id="mapped"),
        # The gradient is the reference's, and nobody uses what the kernel returns.
        pytest.param(lambda op: jax.vmap(jax.grad(lambda x: op(x).sum())), [], id="gradient"),
    ],
)
def test_only_calls_that_the_program_makes_are_measured(transform, shapes):
    tuned = eqxc.tune(transform(op_of(fast, slow)), X)
    assert [result.winner for result in tuned] == [0] * len(shapes)
    assert all(f"shape={shape}" in result.call for shape, result in zip(shapes, tuned, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda op: eqxc.tune(op, jax.ShapeDtypeStruct((3,), jnp.float32)), id="type"),
        pytest.param(lambda op: jax.jit(lambda x: (eqxc.tune(op, x), x)[1])(X), id="jit"),
    ],
)
def test_it_needs_arrays(call):
    with pytest.raises(ValueError, match=r"eqxcallback\.tune: expected arrays, called outside of jit; got "):
        call(op_of(fast, slow))


def test_modules_and_jax_kernels():
    class Double(eqxc.Layer):
        scale: jax.Array
        kernels: ClassVar = {"cpu": (eqxc.JaxKernel(lambda self, x: self.reference(x)), "slow")}

        def slow(self, ctx, out, x):
            time.sleep(0.002)
            np.multiply(np.asarray(x), np.asarray(self.scale), out=np.asarray(out))

        def reference(self, x):
            return x * self.scale

    (tuned,) = eqxc.tune(Double(jnp.float32(2.0)), X)
    assert tuned.winner == 0
    assert tuned.kernels[1].endswith("Double.slow")
    # The product is really computed each time: 4 million numbers take longer than a thousandth of the kernel that sleeps.
    (tuned,) = eqxc.tune(Double(jnp.float32(2.0)), jnp.ones((2048, 2048)))
    assert tuned.seconds[0] > 1e-4


def test_a_kernel_that_fails_is_passed_over():
    def broken(x):
        raise ValueError("this one is broken")

    kernels = {"cpu": [eqxc.JaxKernel(broken), eqxc.PythonKernel(fast)]}
    op = eqxc.Op("double", kernels, double)
    (tuned,) = eqxc.tune(op, X)
    assert (tuned.winner, tuned.seconds[0]) == (1, float("inf"))
    assert "this one is broken" in tuned.failed[0]
    assert "this one is broken" in str(tuned)
    assert runs(op, X) == ["fast"]


def refusing(ctx, out, x):
    raise ValueError("no more than 3 rows")


def test_a_kernel_in_python_that_fails_says_why():
    (tuned,) = eqxc.tune(op_of(fast, refusing), X)
    assert tuned.failed == ("", "ValueError: no more than 3 rows")
    with pytest.raises(
        ValueError, match=r"tune: no kernel of double runs this call: ValueError: no more than 3 rows; Val"
    ):
        eqxc.tune(op_of(refusing, lambda ctx, out, x: refusing(ctx, out, x)), X)


def test_where_none_runs_the_error_says_why():
    def broken(x):
        raise ValueError("this one is broken")

    op = eqxc.Op("double", {"cpu": [eqxc.JaxKernel(broken), eqxc.JaxKernel(lambda x: broken(x))]}, double)
    with pytest.raises(ValueError, match=r"tune: no kernel of double runs this call: .*this one is broken"):
        eqxc.tune(op, X)


calls = 0
log = []


def counted(ctx, out, x):
    global calls
    calls += 1
    log.append("counted")
    slow(ctx, out, x)


def test_a_kernel_that_changes_what_it_refers_to():
    op = op_of(counted, fast)
    (tuned,) = eqxc.tune(op, X)
    assert tuned.winner == 1
    assert calls == len(log) > 0
    assert runs(op, X) == ["fast"]


def test_a_cache_that_cannot_be_written(monkeypatch):
    """The process that measured knows the winner."""
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", "/proc/nowhere")
    op = op_of(slow, fast)
    assert runs(op, X) == ["slow"]
    (tuned,) = eqxc.tune(op, X)
    assert tuned.winner == 1
    assert runs(op, X) == ["fast"]


def test_results_that_are_keys():
    op = op_of(slow, fast)
    (tuned,) = eqxc.tune(lambda x, key: (op(x), jax.random.split(key)), X, jax.random.key(0))
    assert tuned.winner == 1


def test_one_kernel_is_no_contest(cache):
    assert eqxc.tune(op_of(slow), X) == []
    assert not list(cache.rglob("*"))
    with pytest.raises(TypeError, match="expected a function; got 3"):
        eqxc.tune(3, X)  # type: ignore[arg-type]


def test_never_for_a_device_that_is_not_here(monkeypatch, cache):
    kernels = [eqxc.JaxKernel(lambda x: x + x), eqxc.JaxKernel(double)]
    op = eqxc.Op("double", {"cpu": kernels, "cuda": kernels}, double)
    eqxc.tune(op, X)
    (file,) = (cache / "tuned" / "double").iterdir()
    about = json.loads(file.read_text())
    assert about["op"] == "double"
    assert len(about["seconds"]) == 2
    # Whatever won, the order on a GPU that is not there is the declared one.
    (call,) = eqxc.inspect(lambda x: op(x), X, platform="cuda").calls
    assert call.passed_over == ()


def test_a_file_that_is_not_whole_is_not_there(cache):
    op = op_of(slow, fast)
    eqxc.tune(op, X)
    (file,) = (cache / "tuned" / "double").iterdir()
    file.write_bytes(file.read_bytes()[:40])
    fresh = "import tests.program.test_tune as t; print(t.runs(t.op_of(t.slow, t.fast), t.X))"
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", fresh], cwd=root, capture_output=True, text=True, check=True)
    assert process.stdout == "['slow']\n"


def test_a_kernel_that_was_chosen_by_kind_stays():
    kernels = [eqxc.PythonKernel(slow), eqxc.JaxKernel(double)]
    op = eqxc.Op("double", {"cpu": kernels}, double)
    (tuned,) = eqxc.tune(op, X)
    assert tuned.winner == 1
    assert runs(op.using("python"), X) == ["slow"]


def wrong(ctx, out, x):
    out.write(2 * np.asarray(x) + (np.asarray(x) == 11))


def not_finite(ctx, out, x):
    out.write(np.full(x.shape, np.nan, x.dtype))


def coarse(ctx, out, x):
    out.write(2.04 * np.asarray(x))


@pytest.mark.parametrize("body", [wrong, not_finite])
def test_a_wrong_kernel_never_wins(body):
    op = op_of(slow, body)
    (tuned,) = eqxc.tune(op, X)
    assert (tuned.winner, tuned.seconds[1]) == (0, float("inf"))
    assert "wrong results: " in tuned.failed[1]
    assert "differ from those of the reference, most at (" in str(tuned)
    assert runs(op, X) == ["slow"]


def wrong_gradient(ctx, grads, args, out, cotangents):
    grads[0].write(3 * np.asarray(cotangents))


def test_a_wrong_gradient_never_wins():
    backward = {"cpu": [eqxc.PythonKernel(slow_gradient), eqxc.PythonKernel(wrong_gradient)]}
    op = op_of(fast, backward=backward, backward_reads_results=False)
    (tuned,) = eqxc.tune(jax.grad(lambda x: (op(x) ** 2).sum()), X)
    assert tuned.winner == 0
    assert "wrong results: 11 of 12 elements differ from those of the reference" in tuned.failed[1]


@pytest.mark.parametrize(
    ("bodies", "winner", "failed"),
    [
        pytest.param((slow, wrong), 0, 1, id="differs"),
        pytest.param((not_finite, slow), 1, 0, id="not-finite-first"),
        pytest.param((slow, not_finite), 0, 1, id="not-finite"),
        pytest.param((refusing, slow, wrong), 1, 2, id="after-one-that-fails"),
    ],
)
def test_without_a_reference_kernels_are_compared_with_each_other(bodies, winner, failed):
    def out_type(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    kernels = [eqxc.PythonKernel(body, out_type=out_type) for body in bodies]
    (tuned,) = eqxc.tune(eqxc.Op("double", {"cpu": kernels}, None, "fold"), X)
    assert tuned.winner == winner
    assert f"differ from those of python kernel {bodies[winner].__name__}" in tuned.failed[failed]


def test_where_all_are_wrong_the_error_says_why():
    text = r"no kernel of double runs this call: wrong results: .* of the reference, .*\. For kernels that round .* pass rtol"
    with pytest.raises(ValueError, match=text):
        eqxc.tune(op_of(wrong, not_finite), X)


def test_kernels_that_round_by_design_have_a_tolerance():
    op = op_of(slow, coarse)
    assert eqxc.tune(op, X)[0].winner == 0
    (tuned,) = eqxc.tune(op, X, rtol=0.05)
    assert (tuned.winner, tuned.failed) == (1, ("", ""))
    assert eqxc.tune(op_of(slow, not_finite), X, rtol=np.inf)[0].winner == 1
    with pytest.raises(ValueError, match=r"eqxcallback\.tune: expected rtol .*; got -1"):
        eqxc.tune(op, X, rtol=-1)


def test_values_that_are_not_finite_in_the_reference_too_are_right():
    op = op_of(slow, fast)
    (tuned,) = eqxc.tune(op, X.at[0, 0].set(jnp.nan).at[0, 1].set(jnp.inf))
    assert (tuned.winner, tuned.failed) == (1, ("", ""))


def test_integers_are_equal():
    (tuned,) = eqxc.tune(op_of(slow, wrong), X.astype(jnp.int32))
    assert tuned.winner == 0
    assert "1 of 12 elements differ from those of the reference, most at (2, 3): got 23, expected 22" in tuned.failed[1]


def test_arrays_without_elements():
    """XLA leaves out the calls, and no number of them takes long enough."""
    (tuned,) = eqxc.tune(op_of(slow, fast), jnp.zeros((0, 3)))
    assert tuned.failed == ("", "")


def test_a_ref_is_left_as_it_is():
    """Each call has a Ref of its own: a shared one would change from call to call, and with it the results."""
    op = op_of(slow, fast)

    def doubled_in_place(ref):
        ref[...] = op(ref[...])
        return ref[...]

    ref = jax.new_ref(X)
    (tuned,) = eqxc.tune(doubled_in_place, ref)
    assert (tuned.winner, tuned.failed) == (1, ("", ""))
    np.testing.assert_array_equal(ref[...], X)


def test_a_wrong_kernel_is_not_the_fault_of_another_op():
    """Forward, backward and the other op have wrong first kernels, with which all results are wrong."""
    backward = {"cpu": [eqxc.PythonKernel(wrong_gradient), eqxc.PythonKernel(slow_gradient)]}
    first, second = op_of(coarse, fast, backward=backward), op_of(coarse, slow, fast)
    value_and_grad = jax.value_and_grad(lambda x, _: second(first(x)).sum(), argnums=(0, 1), allow_int=True)
    results = eqxc.tune(value_and_grad, X, jnp.arange(3))  # the gradient of integers has no values
    assert sorted(tuned.winner for tuned in results) == [1, 1, 2]
    assert all("of the reference" in tuned.failed[0] for tuned in results)


def test_what_only_changes_a_ref_is_compared_too():
    op = op_of(slow, wrong)

    def doubled_in_place(ref):
        ref[...] = op(ref[...])

    (tuned,) = eqxc.tune(doubled_in_place, jax.new_ref(X))
    assert tuned.winner == 0
    assert "wrong results" in tuned.failed[1]
