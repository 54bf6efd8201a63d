"""XLA records calls of the python lane into command buffers, or not, and `inspect` says so."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import ops

from .programs import ONE, X, callback, calls_of, captured, plain, reports


LIST = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION"


def repeated(fn, count):
    def program(x):
        for _ in range(count):
            x = fn(x)
        return x

    return program


def scanned(fn):
    return lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, length=100)[0]


@pytest.mark.parametrize("compatible", [True, False])
def test_callbacks(compatible):
    assert calls_of(lambda x: callback(x, compatible), **ONE) == [compatible]


@pytest.mark.parametrize(("layer", "compatible"), [(captured, True), (plain, False)])
def test_layers(layer, compatible):
    assert calls_of(layer, **ONE) == [compatible]


def test_the_default_threshold():
    assert calls_of(repeated(callback, 4)) == [False] * 4
    assert calls_of(repeated(callback, 5)) == [True] * 5


def test_a_plan_that_says_yes():
    assert (
        reports(repeated(captured, 5))
        == [(True, "recorded into a command buffer of 6 thunks, 4 other external calls among them")] * 5
    )
    # Of two, as Equinox's filter_jit has a result of its own.
    assert reports(eqxc.jit_captured(captured, donate="all")) == [(True, "recorded into a command buffer of 2 thunks")]


def test_a_run_that_is_too_small():
    assert (
        reports(jax.jit(repeated(captured, 3), donate_argnums=0))
        == [
            (
                False,
                "its run has 3 thunks; XLA records those of at least 5 (xla_gpu_graph_min_graph_size), with "
                "eqxcallback.jit_captured of 1",
            )
        ]
        * 3
    )
    (call,) = reports(eqxc.jit_captured(captured, min_graph_size=3, donate="all"))
    assert call[1].startswith("its run has 2 thunks; XLA records those of at least 3 ")


def test_a_run_that_a_call_breaks():
    def step(x):
        with jax.named_scope("block"):
            x = plain(captured(x))
        return captured(repeated(captured, 4)(x))

    first, broken, *others = reports(jax.jit(step, donate_argnums=0))
    assert first[1].startswith(
        "its run has 1 thunk, ended by what is not recorded: jit(step)/block/Plain; XLA records "
    )
    assert broken == (False, "not declared command_buffer_compatible")
    assert [call[0] for call in others] == [True] * 5
    assert [call[0] for call in reports(eqxc.jit_captured(step))] == [True, False, *[True] * 5]


def test_a_run_that_xla_breaks():
    first, second = reports(lambda x: captured(jnp.fft.rfft(captured(x)).real))
    for call in (first, second):
        assert call[0] is False
        assert "(kFft); XLA records" in call[1]


def test_one_graph_for_each_iteration():
    call = "recorded into a command buffer of 2 thunks, one graph for each iteration of its loop: "
    assert reports(eqxc.jit_captured(scanned(captured), loops=False)) == [
        (True, f"{call}WHILE is not among the recorded commands, eqxcallback.jit_captured adds it")
    ]
    first, _ = reports(eqxc.jit_captured(scanned(lambda x: plain(captured(x)))))
    assert first[1].endswith(
        "one graph for each iteration of its loop: jit(<lambda>)/scan/Plain in the loop is not recorded"
    )


def test_one_graph_around_the_loop():
    assert reports(eqxc.jit_captured(scanned(captured))) == [
        (True, "recorded into a command buffer of 4 thunks: its loop is one of them, one graph for all iterations")
    ]
    nested = reports(eqxc.jit_captured(scanned(scanned(captured))))
    assert nested[0][1].endswith("one graph for all iterations")


def stacked(call):
    """A scan that reads a slice in each iteration, and writes one."""

    def scan(x):
        return jax.lax.scan(lambda carry, row: (call(carry) * row, carry.sum()), x, jnp.ones((12, *x.shape)))

    return scan


def test_a_scan_with_stacked_arrays():
    [(is_captured, reason)] = reports(eqxc.jit_captured(stacked(captured)))
    assert is_captured
    assert "one graph for each iteration of its loop: the host computes where " in reason
    assert reason.endswith(" lies, eqxcallback.jit_captured(scans=True) does not")
    [(is_captured, reason)] = reports(eqxc.jit_captured(stacked(captured), scans=True))
    assert is_captured
    assert reason.endswith("its loop is one of them, one graph for all iterations")


def test_the_size_of_a_loop():
    """Before JAX 0.12 it is one. So what is recorded with all in it may be too small, though its body is not."""

    def loop(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, repeated(captured, 7), x)

    def with_loops(smallest):
        options = {"xla_gpu_enable_command_buffer": f"{LIST},WHILE", "xla_gpu_graph_min_graph_size": smallest}
        (said,) = set(reports(jax.jit(loop, compiler_options=options)))
        return said

    size = 11 if jax.__version_info__ >= (0, 12) else 2
    assert with_loops(size)[0] is True
    reason = f"its run has {size} thunks; XLA records those of at least {size + 1} "
    assert with_loops(size + 1)[1].startswith(reason)
    assert {call[0] for call in reports(loop)} == {True}


def test_the_condition_of_a_loop():
    def loop(x):
        return jax.lax.while_loop(lambda c: captured(c).sum() < 9.0, captured, x)

    condition, body = reports(eqxc.jit_captured(loop, loops=False))
    assert condition == (
        False,
        "the condition of a loop is recorded only together with the loop: WHILE is not among the recorded commands, "
        "eqxcallback.jit_captured adds it",
    )
    assert body[0] is True
    assert [call[0] for call in reports(eqxc.jit_captured(loop))] == [True, True]


def test_branches():
    both = eqxc.jit_captured(lambda x: jax.lax.cond(x.sum() > 0, captured, captured, x))
    assert [call[0] for call in reports(both)] == [True, True]
    one = eqxc.jit_captured(lambda x: jax.lax.cond(x.sum() > 0, captured, plain, x))
    plain_call, captured_call = reports(one)
    assert plain_call == (False, "not declared command_buffer_compatible")
    assert captured_call[0] is True


def test_commands_that_are_not_recorded():
    options = {"xla_gpu_enable_command_buffer": "FUSION"}
    assert reports(jax.jit(captured, compiler_options=options)) == [
        (False, "CUSTOM_CALL is not among the recorded commands (xla_gpu_enable_command_buffer)")
    ]


def test_calls_that_are_gone():
    merged = reports(eqxc.jit_captured(lambda x: callback(x) + callback(x)))
    assert [call[0] for call in merged] == [True, True]


def test_a_call_joined_with_the_slice_that_it_reads():
    """One thunk of both, which has not the name of the call. Beside it one with other operands."""

    def program(x, keys):
        attended = ops.attention(x, x, x, causal=True)
        return attended, ops.decode_attention(x[-1], keys, keys, jnp.int32(100))

    x, keys = (jax.ShapeDtypeStruct((rows, 4, 64), jnp.bfloat16) for rows in (32, 200))
    calls = eqxc.inspect(eqxc.jit_captured(program), x, keys, platform="cuda").calls
    assert {call.op: call.captured for call in calls} == {"attention": True, "decode_attention": True}


def test_copies():
    def alias(fn):
        (call,) = eqxc.inspect(fn, X, platform="cuda").calls
        return [(alias.state, alias.reason) for alias in call.in_place]

    assert alias(captured) == [("copied", "not donated")]
    assert alias(jax.jit(captured, donate_argnums=0)) == [("in place", "")]
    assert alias(scanned(captured)) == [("in place", "copied once, before the loop: not donated")]


def test_the_table():
    text = str(eqxc.inspect(eqxc.jit_captured(captured), X, platform="cuda"))
    assert text.startswith("Captured: 1 external call, compiled for cuda (NVIDIA H200, described)\n")
    assert text.endswith("captured: yes, recorded into a command buffer of 3 thunks")


def test_what_the_compile_refuses_is_said():
    report = eqxc.inspect(lambda x: jax.ffi.ffi_call("nobody", x)(captured(x)), X, platform="cuda")
    assert report.stage == "lowered"
    assert report.not_compiled.startswith("NOT_FOUND: No FFI handler registered for nobody on a platform CUDA")
    assert [call.captured for call in report.calls] == [None, None]
    assert "    not compiled: NOT_FOUND: No FFI handler" in str(report)
