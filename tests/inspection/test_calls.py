"""`eqxcallback.inspect`: which calls a program has, in which lane, and which fallback runs."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .layers import AddOne, Scale


X = jnp.ones(3)
scale, add_one = Scale(X), AddOne()


def only(report):
    (call,) = report.calls
    return call


def test_forward():
    report = eqxc.inspect(lambda x: ops.rms_norm(scale(x)), X)
    first, second = report.calls
    assert (report.platform, report.stage) == ("cpu", "compiled")
    assert (first.op, first.kind, first.lane, first.target) == ("Scale", "forward", "python", "eqxcallback_python")
    assert (second.op, second.kind, second.lane, second.target) == (
        "rms_norm",
        "forward",
        "native",
        "eqxcallback_norm",
    )
    assert first.operands == ("float32[3]", "float32[3]")
    assert first.results == ("float32[3]",)
    assert (first.times, first.fallback, first.note, first.captured) == (1, "", "", False)


def test_no_calls():
    report = eqxc.inspect(jnp.sin, X)
    assert report.calls == ()
    assert str(report) == "sin: no external calls, compiled for cpu"


def test_nothing_runs():
    add_one.addresses.clear()
    eqxc.inspect(add_one, X)
    assert add_one.addresses == []


def test_the_gradient_has_the_backward_kernel():
    report = eqxc.inspect(eqx.filter_grad(lambda layer, x: jnp.sin(layer(x)).sum()), scale, X)
    forward, backward = report.calls
    assert (forward.kind, backward.kind) == ("forward", "vjp")
    assert backward.op == "Scale"
    assert backward.lane == "python"
    assert "transpose(jvp" in backward.path


def test_the_second_derivative_is_of_the_reference():
    report = eqxc.inspect(lambda x: jax.jvp(scale, (x,), (x,)), X)
    forward, jvp = report.calls
    assert (forward.lane, jvp.lane, jvp.kind) == ("python", "reference", "jvp")
    assert jvp.fallback == "forward mode is the derivative of the reference"


def test_unused_calls_are_left_out():
    assert eqxc.inspect(lambda x: (scale(x), x)[1], X).calls == ()


def test_effects_are_not():
    class Log(Scale):
        has_side_effect = True

    assert only(eqxc.inspect(lambda x: (Log(X)(x), x)[1], X)).op.endswith("Log")


def test_vmap_shows_what_the_kernel_sees():
    call = only(eqxc.inspect(jax.vmap(jax.vmap(scale)), jnp.ones((2, 5, 3))))
    assert call.operands == ("float32[3]", "float32[10,3]")
    assert call.results == ("float32[10,3]",)


def test_64_bit_types_stay():
    def kernel(ctx, out, x):
        pass

    wide = jax.ShapeDtypeStruct((3,), np.float64)
    assert only(eqxc.inspect(eqxc.buffer_callback(kernel, wide), X)).results == ("float64[3]",)
    with jax.enable_x64(True):
        op = eqxc.Op("wide", kernels={"cpu": eqxc.PythonKernel(kernel, out_type=lambda x: wide)})
        assert only(eqxc.inspect(op, X)).results == ("float64[3]",)


def test_a_dtype_that_no_kernel_takes():
    with jax.enable_x64(True):
        x = jnp.ones((2, 3), jnp.float64)
        call = only(eqxc.inspect(ops.rms_norm, x))
        (first,) = eqxc.inspect(jax.grad(lambda x: ops.rms_norm(x).sum()), x).calls[-1:]
    assert (call.op, call.lane, call.operands) == ("rms_norm", "reference", ("float64[2,3]",))
    why = "native kernel norm: x has to be float32, bfloat16 or float16; it is float64"
    assert call.fallback == first.fallback == f'{why}; python kernel norm: runs only with implementation="python"'


def test_an_op_that_xla_does_best():
    weight = jnp.ones((4, 3))
    call = only(eqxc.inspect(ops.linear, X, weight))
    assert (call.op, call.lane) == ("linear", "reference")
    assert (
        "native kernel linear: x of float32 needs two rows and weights of 16384 numbers, else XLA is as"
        in call.fallback
    )


def test_loops():
    def loop(x):
        return jax.lax.scan(lambda c, _: (jax.lax.fori_loop(0, 3, lambda _, c: scale(c), c), None), x, length=4)[0]

    call = only(eqxc.inspect(loop, X))
    assert call.times == 12
    assert call.path == "jit(loop)/scan/scan/Scale"
    assert (
        only(eqxc.inspect(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: scale(c), x), X)).times is None
    )


def test_paths():
    def inner(x):
        return scale(x)

    def step(x):
        with jax.named_scope("block"):
            x = jax.jit(inner)(x)
        x = jax.checkpoint(inner)(x)
        x = jax.nn.relu(x)
        return jax.lax.cond(x.sum() > 0, inner, lambda x: x, x)

    assert [call.path for call in eqxc.inspect(step, X).calls] == [
        "jit(step)/block/jit(inner)/Scale",
        "jit(step)/checkpoint/Scale",
        "jit(step)/cond/branch_1/Scale",
    ]


def test_custom_derivatives_and_partitioning():
    from jax.experimental.custom_partitioning import custom_partitioning

    rule = jax.custom_vjp(lambda x: scale(x))
    rule.defvjp(lambda x: (scale(x), x), lambda x, ct: (ct,))
    partitioned = custom_partitioning(lambda x: add_one(x))
    partitioned.def_partition(partition=lambda *_: None, sharding_rule="i -> i")
    report = eqxc.inspect(lambda x: partitioned(rule(x)), X)
    assert [call.op for call in report.calls] == ["Scale", "AddOne"]


def test_only_the_solver_of_a_linear_solve_runs():
    """Its derivatives run the other functions: the product with the matrix, its transpose, and the transposed solver."""
    report = eqxc.inspect(lambda b: jax.scipy.sparse.linalg.cg(scale, b)[0], X)
    assert [call.path.rpartition("custom_linear_solve/")[2] for call in report.calls] == ["Scale", "while/body/Scale"]
    assert [call.operands for call in report.calls] == [("float32[3]", "float32[3]")] * 2


def test_shard_map(mesh):
    sharded = jax.shard_map(scale, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    call = only(eqxc.inspect(sharded, jnp.ones(12)))
    assert call.operands == ("float32[3]", "float32[3]")
    assert call.path.endswith("shard_map/Scale")


def test_what_xla_does_to_equal_calls():
    for call in eqxc.inspect(lambda x: scale(x) + scale(x), X).calls:
        assert call.note == "XLA has merged 2 equal calls into 1"
    hoisted = eqxc.inspect(lambda x: jax.lax.scan(lambda c, _: (c + scale(x), None), x, length=4), X)
    assert only(hoisted).times == 4
    assert only(hoisted).note == "XLA has moved this call out of its loop: it runs once"


@pytest.mark.parametrize(
    ("platform", "lane", "fallback"),
    [
        ("cpu", "native", ""),
        ("cuda", "reference", "no kernel for cuda (there are kernels for cpu)"),
        ("tpu", "reference", "no kernel for tpu (there are kernels for cpu)"),
    ],
)
def test_ops_on_platforms(platform, lane, fallback):
    op = eqxc.Op("norm", kernels={"cpu": eqxc.NativeKernel("norm")}, reference=lambda x, *, eps: x * eps)
    call = only(eqxc.inspect(lambda x: op(x, eps=1e-5), X, platform=platform))
    assert (call.lane, call.fallback) == (lane, fallback)


def test_layers_on_platforms(without_plugin):
    cuda = eqxc.inspect(add_one, X, platform="cuda")
    assert (cuda.platform, cuda.stage) == ("cuda", "lowered")
    assert cuda.not_compiled == "JAX's CUDA plugin is not installed"
    assert (only(cuda).lane, only(cuda).captured) == ("python", False)
    assert only(cuda).captured_reason == "not declared command_buffer_compatible"
    assert eqxc.inspect(add_one, X, platform="tpu").not_compiled == "there is no compiler for tpu here"
    tpu = only(eqxc.inspect(add_one, X, platform="tpu"))
    assert tpu.fallback == "no kernel for tpu (there are kernels for cpu, cuda)"
    assert tpu.target is None


def test_the_backward_kernel_on_a_platform_without():
    op = eqxc.Op(
        "double",
        kernels=dict.fromkeys(["cpu", "cuda"], eqxc.PythonKernel(lambda ctx, out, x: None)),
        reference=lambda x: x * 2,
        backward={"cpu": eqxc.PythonKernel(lambda ctx, grads, args, out, cotangents: None)},
    )
    gradient = jax.grad(lambda x: jnp.sin(op(x)).sum())
    assert [call.lane for call in eqxc.inspect(gradient, X).calls] == ["python", "python"]
    forward, backward = eqxc.inspect(gradient, X, platform="cuda").calls
    assert (forward.lane, backward.lane, backward.kind) == ("python", "reference", "vjp")
    assert backward.fallback == "no backward kernel for cuda"


def test_capture_is_declared_and_not_promised(without_plugin):
    class Captured(Scale):
        command_buffer_compatible = True

    call = only(eqxc.inspect(Captured(X), X, platform="cuda"))
    assert (call.target, call.captured) == ("eqxcallback_python_captured", None)
    assert call.captured_reason == "declared compatible: XLA decides"
    on_cpu = only(eqxc.inspect(Captured(X), X))
    assert (on_cpu.target, on_cpu.captured) == ("eqxcallback_python", False)
    assert on_cpu.captured_reason == "a CPU has no command buffers"


def test_the_chosen_platform_alone():
    def step(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: scale(x), default=lambda x: x + 1)

    assert only(eqxc.inspect(step, X)).op == "Scale"
    assert eqxc.inspect(step, X, platform="cuda").calls == ()


def test_callbacks():
    def kernel(ctx, out, x):
        pass

    call = only(eqxc.inspect(eqxc.buffer_callback(kernel, X, input_output_aliases={0: 0}), X))
    assert (call.op.rpartition(".")[2], call.kind, call.lane) == ("kernel", "callback", "python")
    assert len(call.in_place) == 1
    with pytest.raises(ValueError, match="cannot be lowered for tpu"):
        eqxc.inspect(eqxc.buffer_callback(kernel, X), X, platform="tpu")


def test_effects_and_taps():
    """Calls with the same operands, in and out of a loop; taps are callbacks without results."""

    def f(x):
        eqxc.buffer_callback(lambda ctx, out, x: None, [], has_side_effect=True)(x)
        x = eqxc.debug.tap(lambda x, transforms: None, 2 * x)

        def step(x, _):
            return eqxc.debug.tap(lambda x, transforms: None, x + 1, ordered=True), None

        return jax.lax.scan(step, eqxc.debug.tap_tangents(print, x), length=3)[0]

    calls = eqxc.inspect(f, X).calls
    assert [(call.kind, call.lane, call.operands, call.results) for call in calls] == [
        ("callback", "python", ("float32[3]",), ())
    ] * 3
    assert [(call.times, call.note) for call in calls] == [(1, ""), (1, ""), (3, "")]


def test_calls_of_jax_itself():
    def step(x):
        y = jax.pure_callback(np.sin, x, x)
        return jax.ffi.ffi_call("elsewhere", jax.ShapeDtypeStruct.like(y), input_output_aliases={0: 0})(y)

    report = eqxc.inspect(step, X, platform="cuda")
    callback, ffi = report.calls
    assert report.stage == "traced"
    assert report.not_compiled == "JAX lowers its own callbacks for devices that are there only"
    assert (callback.op, callback.lane, callback.captured) == ("sin", "jax callback", False)
    assert (ffi.op, ffi.lane, ffi.target) == ("elsewhere", "ffi", "elsewhere")
    assert [(alias.operand, alias.result) for alias in ffi.in_place] == [(0, 0)]
    assert [call.lane for call in eqxc.inspect(lambda x: jax.pure_callback(np.sin, x, x), X).calls] == ["jax callback"]


def test_arguments_may_be_types_and_trees_with_what_is_static():
    class Model(eqx.Module):
        layer: Scale
        activation: Callable[..., jax.Array]

        def __call__(self, x, name):
            assert name == "static"
            return {"y": self.activation(self.layer(x["x"])), "n": name}

    x = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    model = Model(scale, jax.nn.relu)
    for function in (model, eqx.filter_jit(model)):
        report = eqxc.inspect(function, x, "static")
        assert report.program == "Model"
        assert only(report).op == "Scale"
    assert only(eqxc.inspect(jax.jit(lambda x: scale(x["x"])), x)).op == "Scale"


def test_what_is_not_callable():
    with pytest.raises(TypeError, match=r"inspect: expected a function, a layer, .*; got 3 of type int"):
        eqxc.inspect(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("platform", ["gpu", "CPU", 3])
def test_unknown_platforms(platform):
    with pytest.raises(
        ValueError, match=r"expected platform to be one of \('cpu', 'cuda', 'rocm', 'tpu'\) or None; got"
    ):
        eqxc.inspect(jnp.sin, X, platform=platform)


def test_errors_of_the_program_are_its_own():
    with pytest.raises(TypeError, match=r"Scale: a call takes \(x\); got 2 positional arguments"):
        eqxc.inspect(scale, X, X)
