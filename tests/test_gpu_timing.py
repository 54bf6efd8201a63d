"""The clock of the GPU benchmarks, by a stopwatch that is not there: how often a program has a call, and on what."""

import contextlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from benchmarks.gpu import timing
from benchmarks.gpu.repeated import Repeats, repeated
from benchmarks.gpu.timing import RepeatingClock
from benchmarks.gpu.torch_timing import torch_runner
from eqxcallback import ops


X = jnp.arange(12.0, dtype=jnp.float32).reshape(3, 4)
EACH_ITS_OWN = Repeats(cache_bytes=float("inf"))


@pytest.mark.parametrize("calls", [1, 5])
def test_all_calls_are_in_the_program(calls):
    sets = EACH_ITS_OWN.operand_sets((X, jnp.ones(4, jnp.float32)), calls)
    program = jax.jit(repeated(lambda x, weight: ops.rms_norm(x, weight), calls))
    text = program.lower(sets).compile().as_text()
    assert text is not None
    assert len(re.findall(r" custom-call\(", text)) == calls
    for result in program(sets):
        np.testing.assert_array_equal(result, ops.rms_norm(X, jnp.ones(4, jnp.float32)))


def test_each_call_waits_for_the_one_before():
    """Its operands come from a barrier with the results of that one; the values are those of its own set."""
    sets = [(X, 2 * X), (3 * X, 4 * X)]
    equations = jax.make_jaxpr(repeated(lambda x, y: (x + y,), 5))(sets).eqns
    assert [str(equation.primitive) for equation in equations] == ["add", *4 * ["optimization_barrier", "add"]]
    adds, barriers = equations[::2], equations[1::2]
    for before, barrier, after in zip(adds, barriers, adds[1:], strict=False):
        assert before.outvars[0] in barrier.invars
        assert set(after.invars) <= set(barrier.outvars)
    for i, (result,) in enumerate(repeated(lambda x, y: (x + y,), 5)(sets)):
        np.testing.assert_array_equal(result, (3 if i % 2 == 0 else 7) * X)


@pytest.mark.parametrize(
    ("seconds", "result_bytes", "calls"),
    [(6e-6, 1 << 20, 16), (100e-6, 1 << 20, 10), (200e-6, 1 << 20, 8), (100e-6, 1 << 30, 4), (6e-6, 1 << 40, 1)],
)
def test_how_many_calls_a_program_has(seconds, result_bytes, calls):
    assert Repeats().calls(seconds, result_bytes) == calls


@pytest.mark.parametrize(("cache_bytes", "sets"), [(1, 1), (48, 4), (50, 5), (1 << 30, 16)])
def test_operands_exceed_the_cache(cache_bytes, sets):
    """They have 48 bytes. The first set is the original, and all others have memory of their own."""
    made = Repeats(cache_bytes=cache_bytes).operand_sets((X,), 16)
    assert len(made) == sets
    assert made[0][0] is X
    assert len({x.unsafe_buffer_pointer() for (x,) in made}) == sets


def test_operands_of_all_kinds_are_copied():
    args = {"key": jax.random.key(3), "x": jnp.float32(2), "more": [X, np.ones(2), 7]}
    _, copy = EACH_ITS_OWN.operand_sets((args,), 2)
    assert jax.tree.structure(copy) == jax.tree.structure((args,))
    np.testing.assert_array_equal(jax.random.key_data(copy[0]["key"]), jax.random.key_data(args["key"]))
    assert copy[0]["key"].dtype == args["key"].dtype
    assert copy[0]["more"][2] == 7
    first, second = jax.jit(repeated(lambda args: jax.random.normal(args["key"], (3,)) + args["x"], 2))([(args,), copy])
    np.testing.assert_array_equal(first, second)


class Stopwatch:
    """Each call of the contestant takes `each`, and each program nothing on top. What it is asked for is kept."""

    name = "test"

    def __init__(self, each):
        self.each, self.asked = each, []

    def seconds(self, call, count, *, ahead):
        out = call()
        self.asked.append((len(out) if isinstance(out, list) else 1, count, ahead))
        return self.each * self.asked[-1][0] * count


def runner_of(each, f=lambda x: x + 1, args=(X,), **jit_options):
    stopwatch = Stopwatch(each)
    made = RepeatingClock(stopwatch, Repeats()).runner(f, *args, **jit_options)
    made.run(1)
    stopwatch.asked.clear()
    return made, stopwatch.asked


def test_a_short_call_is_many_in_one_program():
    """A program of 16 calls, and no more programs than the host can launch ahead."""
    made, asked = runner_of(10e-6)
    assert [made.run(count) for count in (1, 16, 40, 500)] == pytest.approx([10e-6, 160e-6, 400e-6, 5e-3])
    assert asked == [(16, 1, True), (16, 1, True), (16, 3, True), (16, 16, True)]
    assert made.result is not None
    assert made.temporary is not None
    np.testing.assert_array_equal(made.result(), X + 1)  # of one call
    assert made.temporary() == 0


@pytest.mark.parametrize(("each", "options"), [(400e-6, {}), (10e-6, {"compiler_options": {}, "inline": True})])
def test_a_long_call_is_timed_by_itself(each, options):
    """So is one whose options of `jax.jit` are what is measured."""
    made, asked = runner_of(each, **options)
    assert made.run(50) == pytest.approx(50 * each)
    assert asked == [(1, 50, False)]


def test_a_call_that_no_program_can_repeat(capsys):
    traced = []

    def once(x):
        traced.append(x)
        if len(traced) > 1:
            raise NotImplementedError("only once")
        return x + 1

    made, asked = runner_of(10e-6, once)
    assert made.run(50) == pytest.approx(50 * 10e-6)
    assert asked == [(1, 16, True)]
    assert capsys.readouterr().out == "16 calls in one program: NotImplementedError: only once; timed one by one\n"


def test_results_of_all_programs_have_room():
    """XLA may keep them until the device has come to the next program: 8 GiB in all."""
    asked = Stopwatch(10e-6)
    for result_bytes, most in ((0, 16), (1 << 28, 2), (1 << 30, 2), (1 << 31, 2), (1 << 33, 1)):
        calls = Repeats().calls(10e-6, result_bytes)
        timed = timing.Timed(lambda calls=calls: [X] * calls, calls, most=timing.most_programs(calls * result_bytes))
        timed.run(asked.seconds, 1000)
        assert asked.asked[-1] == (calls, most, True)


def test_without_a_gpu_each_path_is_walked():
    clock, why = timing.find_clock(on_gpu=False)
    assert (clock.name, why) == ("host", "there is no GPU")
    assert clock.runner(lambda x: x + 1, X).run(3) > 0


@pytest.fixture
def cupy(monkeypatch):
    """CuPy on a CPU: its events have the host's time, and are done as often as `late` says."""
    late, waits = [], []
    monkeypatch.setattr(timing.Events, "_check", lambda self: None)

    class Event:
        def __init__(self):
            self.is_recorded = False

        def record(self, stream):
            assert stream == "XLA's"
            self.is_recorded = True

        @property
        def done(self):
            assert self.is_recorded
            return late.pop()

        def synchronize(self):
            assert self.is_recorded

    cuda = types.SimpleNamespace(
        Event=Event,
        Device=lambda: types.SimpleNamespace(attributes={"L2CacheSize": 50 << 20}),
        get_elapsed_time=lambda start, end: 2.5,
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    real = eqxc.buffer_callback

    def buffer_callback(body, *args, **options):
        ctx = types.SimpleNamespace(cupy_stream=lambda: "XLA's")

        def on_a_cpu(_, out, x):
            out[...] = 0  # who writes nothing is told so
            body(ctx, out, x)

        return real(on_a_cpu, *args, **options)

    monkeypatch.setattr(timing.eqxc, "buffer_callback", buffer_callback)
    start = timing.Events._between_events

    def between_events(self, call, count, wait):
        waits.append(wait)
        return start(self, call, count, wait)

    monkeypatch.setattr(timing.Events, "_between_events", between_events)
    return late, waits


@pytest.mark.parametrize(
    ("late", "ahead", "waits"),
    [
        ([False], True, [3e-3]),
        ([True, False], True, [3e-3, 6e-3]),
        ([True, True, True], True, [3e-3, 6e-3, 12e-3]),
        ([True], False, [0.0]),
    ],
)
def test_the_device_waits_for_the_host(cupy, late, ahead, waits):
    """Twice as long where it had begun before all was enqueued; not where a call is long."""
    cupy[0][:] = reversed(late)
    events, calls = timing.Events(), []

    def call():
        calls.append(1)
        return jax.block_until_ready(X + 1)

    assert events.seconds(call, 10, ahead=ahead) == 2.5e-3
    assert cupy[1] == pytest.approx(waits)
    assert len(calls) == 10 * len(waits)
    assert cupy[0] == []
    assert events.cache_bytes == 50 << 20


def test_what_the_waiting_kernel_returns():
    assert timing.wait_op()(jnp.int32(5)) == 0


class Torch:
    """PyTorch of which each call takes `each`. A graph has what is called while it records."""

    def __init__(self, each, captures=True):
        self.time, self.recorded, self.captures = 0.0, None, captures
        self.each, self.calls, self.replays = each, [], 0
        torch, nothing = self, lambda *_, **__: None
        side = types.SimpleNamespace(wait_stream=nothing)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = torch.time

            def query(self):
                return False

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class CUDAGraph:
            calls: list[object] = []  # noqa: RUF012

            def replay(self):
                torch.replays += 1
                torch.time += torch.each * len(self.calls)

        @contextlib.contextmanager
        def graph(made, capture_error_mode):
            assert capture_error_mode == "thread_local"
            if not torch.captures:
                raise RuntimeError("not permitted when stream is capturing")
            torch.recorded = made.calls = []
            yield
            torch.recorded = None

        self.cuda = types.SimpleNamespace(
            Event=Event,
            CUDAGraph=CUDAGraph,
            graph=graph,
            Stream=lambda: side,
            stream=lambda _: contextlib.nullcontext(),
            current_stream=lambda: side,
            current_device=lambda: 0,
            get_device_properties=lambda _: types.SimpleNamespace(L2_cache_size=48),
            synchronize=nothing,
            _sleep=nothing,
        )

    def call(self, args):
        def run():
            if self.recorded is None:
                self.time += self.each
                self.calls.append(args)
            else:
                self.recorded.append(args)
            return args[0]

        return run


def torch_run(monkeypatch, each, **options):
    torch = Torch(each, **options)
    monkeypatch.setitem(sys.modules, "torch", torch)
    recorded = []
    graph = torch.cuda.graph

    @contextlib.contextmanager
    def kept(made, capture_error_mode):
        with graph(made, capture_error_mode):
            yield
        recorded.extend(made.calls)

    torch.cuda.graph = kept
    made = torch_runner(torch.call, (X,))
    made.run(1)
    torch.calls.clear()
    torch.replays = 0
    return made, torch, recorded


def test_pytorch_is_timed_alike(monkeypatch):
    """Sixteen calls in a graph, of four sets of operands, one after the other."""
    made, torch, recorded = torch_run(monkeypatch, 10e-6)
    assert made.run(40) == pytest.approx(400e-6)
    assert torch.replays == 3
    assert torch.calls == []
    pointers = [x.unsafe_buffer_pointer() for (x,) in recorded]
    assert len(pointers) == 16
    assert pointers == 4 * pointers[:4]
    assert len(set(pointers)) == 4
    assert made.result is not None
    assert made.result() is X


def test_a_long_call_of_pytorch(monkeypatch):
    made, torch, recorded = torch_run(monkeypatch, 400e-6)
    assert made.run(40) == pytest.approx(16e-3)
    assert (len(torch.calls), torch.replays, recorded) == (40, 0, [])


def test_what_no_graph_of_pytorch_can_have(monkeypatch, capsys):
    made, torch, _ = torch_run(monkeypatch, 10e-6, captures=False)
    assert made.run(40) == pytest.approx(400e-6)
    assert (len(torch.calls), torch.replays) == (16, 0)
    assert "PyTorch's CUDA graph: RuntimeError: not permitted" in capsys.readouterr().out
