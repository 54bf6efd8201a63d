"""A language model over several processes: the same text as in one, and an end when one of them is killed or stopped."""

import contextlib
import io
import re
import signal
import subprocess
import sys
import time

import pytest

from models.generate.__main__ import main

from ..devices.test_processes import free_port
from .test_generate import ROOT
from .tiny import write_tiny


# A text over four devices, two of each process, and the gradients of a batch.
PROGRAM = """
import sys
import equinox as eqx, eqxcallback as eqxc, jax, jax.numpy as jnp, numpy as np
from models import llama
from models.parallel import processes
from models.parallel.data_parallel import replicate, split_rows
from models.decoding.answer import Answer
from models.decoding.batch import Batch, Request
from models.decoding.generator import Generator
from models.model_files import open_files
from models.parallel.sequence_parallel import SequenceLlama

path, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
with processes.joined(2, f"localhost:{port}", 2, process) as mesh:
    assert mesh.size == 4
    file, tokenizer = open_files(path)
    model = llama.load(file)
    tokens = np.random.default_rng(0).integers(0, 258, 200).astype(np.int32)

    texts = [
        list(Generator(which, room=250).generate(tokens.tolist(), max_tokens=20)) for which in (model, SequenceLlama(model, mesh))
    ]
    assert texts[0] == texts[1]

    rows = [[Answer(tokenizer) for _ in range(2)] for _ in range(2)]
    for which, answers in zip((model, SequenceLlama(model, mesh)), rows):
        batch = Batch(which, widths=[2], room=250)
        for answer, length in zip(answers, (90, 40)):
            batch.add(Request(tokens[:length].tolist(), answer, 8))
        assert len(list(batch.run())) == 2
    assert [answer.record() for answer in rows[0]] == [answer.record() for answer in rows[1]]

    layer = eqxc.nn.RMSNorm(25, use_bias=True)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda layer, rows: jnp.square(jax.vmap(layer)(rows) - 1).sum()))
    rows = tokens.reshape(8, 25).astype(np.float32)
    got, want = gradient(replicate(layer, mesh), split_rows(rows, mesh)), gradient(layer, rows)
    np.testing.assert_allclose(got.weight, want.weight, rtol=1e-5)
    np.testing.assert_allclose(got.bias, want.bias, rtol=1e-5, atol=1e-5)
print("finished")
"""


# The program, for which another one is silent after six seconds.
HASTY = """
import sys
from models.generate.__main__ import main
from models.parallel import processes

processes._SILENCE = 6
code = main(sys.argv[1:])
processes.leave(code)
sys.exit(code)
"""


# The program, which waits so many seconds for the others. With 0 it waits for 60, and is killed while JAX connects it.
IMPATIENT = """
import os, signal, sys
import jax
from models.generate.__main__ import main
from models.parallel import processes

processes._START, processes._LAST_WORDS = int(sys.argv[1]) or 60, 0
if sys.argv[1] == "0":
    jax.distributed.initialize = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
code = main(sys.argv[2:])
processes.leave(code)
sys.exit(code)
"""

# Two sums, before each of which one of two processes is slow.
SLOW = """
import sys, time
import jax, jax.numpy as jnp
from models.parallel import processes

def compile_for(seconds):
    end, count = time.monotonic() + seconds, 200
    while time.monotonic() < end:
        count *= 2
        def f(x):
            for i in range(count):
                x = jnp.sin(x @ x) + i
            return x
        jax.jit(f).lower(jnp.ones((8, 8))).compile()

def run_python_for(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))

port, process = sys.argv[1], int(sys.argv[2])
processes._SILENCE = 3
with processes.joined(1, f"localhost:{port}", 2, process) as mesh:
    for slow, work in enumerate((compile_for, run_python_for)):
        if process == slow:
            work(7)
        assert processes.total(mesh, process) == 1
print("finished")
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "speaks.gguf"
    # Two, three and four devices share the heads, and a vocabulary of 264 tokens.
    merges = ["t h", "h e", "i n", "e r", "a n", "r e", "o n"]
    write_tiny(path, context=8000, heads=12, kv_heads=12, speaks=True, merges=merges)
    return path


@contextlib.contextmanager
def started(*commands):
    """Processes that write to pipes. None is left over."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


def generate(weights, max_tokens, count):
    """The commands of processes that generate one text."""
    options = ["-m", "models.generate", "A fox", "--weights", weights, "--max-tokens", max_tokens]
    options += ["--processes", count, "--coordinator", f"localhost:{free_port()}"]
    return [[*options, "--process", process] for process in range(count)]


def gone(process, program, count=2, what="is gone"):
    """Match the one line of a process that another one has left: of two lines, as it may not wait for that one just then."""
    line = f"{program}: error: process {process} expected the programs of {count} processes to run until all have ended; got: .*"
    return f"(?:{line}|process {process} ends, because .* {what}. See what it says, and start all of them again.)\n".encode()


@pytest.fixture(scope="module")
def text(weights):
    """Return the words that one process prints, without the end of the line."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert main(["A fox", "--weights", str(weights), "--max-tokens", "40"]) == 0
    return written.getvalue().rstrip("\n").encode()


ENDED = [(2, 0, signal.SIGKILL), (2, 1, signal.SIGKILL), (3, 2, signal.SIGKILL), (4, 1, signal.SIGKILL)]


@pytest.mark.parametrize(("count", "ended", "by"), [*ENDED, (3, 2, signal.SIGSTOP)])
def test_the_same_text_until_one_is_killed(count, ended, by, weights, text):
    """One that is stopped closes no connection. Its end is SIGKILL."""
    what = {signal.SIGKILL: "is gone", signal.SIGSTOP: "(?:is gone|was silent for 6 seconds)"}[by]
    commands = generate(weights, 7000, count)
    if by == signal.SIGSTOP:
        commands = [["-c", HASTY, *command[2:]] for command in commands]
    with started(*commands) as processes:
        assert processes[0].stdout.read(len(text)) == text
        processes[ended].send_signal(by)  # in the middle
        start = time.monotonic()
        left = {i: process.communicate(timeout=60) for i, process in enumerate(processes) if i != ended}
    assert time.monotonic() - start < 60
    for i, (output, errors) in left.items():
        assert i == 0 or output == b""  # process 0 alone prints
        assert processes[i].returncode == 2, errors
        waits = rf"process {i} of {count} waits for the others at .*\n".encode()
        assert re.fullmatch(waits + gone(i, "generate", count, what), errors), errors


def test_one_that_is_slow_is_not_silent():
    """While one compiles, or runs Python, the other one waits for it, twice as long as a process may be silent."""
    port = free_port()
    with started(*[["-c", SLOW, port, process] for process in range(2)]) as processes:
        results = [process.communicate(timeout=120) for process in processes]
    assert [(process.returncode, out) for process, (out, _) in zip(processes, results, strict=True)] == [
        (0, b"finished\n")
    ] * 2, results


def test_one_that_never_comes(weights):
    """JAX would abort the others, with a trace."""
    first, second = (
        [IMPATIENT, seconds, *command[2:]]
        for seconds, command in zip(("2", "60"), generate(weights, 10, 3)[:2], strict=True)
    )
    with started(["-c", *second]) as [late]:
        waits = late.stderr.readline()  # it is there before process 0 counts
        with started(["-c", *first]) as [early]:
            results = [early.communicate(timeout=120), late.communicate(timeout=120)]
    results[1] = results[1][0], waits + results[1][1]
    processes = early, late
    assert [process.returncode for process in processes] == [2, 2], results
    reason = "expected 3 processes after 2 seconds at most; got: process 2 did not come. Start all of them again.\n"
    for i, line in enumerate((reason, f"expected process 0 to say that all have come; got: {reason}")):
        assert results[i][0] == b""
        waits, error = results[i][1].decode().split("\n", 1)
        assert waits.startswith(f"process {i} of 3 waits for the others at localhost:")
        assert error == f"generate: error: process {i} {line}"


def test_one_that_is_killed_while_jax_connects_it(weights):
    commands = generate(weights, 10, 2)
    with started(
        *[["-c", IMPATIENT, which, *command[2:]] for which, command in zip(("60", "0"), commands, strict=True)]
    ) as processes:
        _, errors = processes[0].communicate(timeout=120)
        assert processes[0].returncode == 2, errors
    assert errors.decode().split("\n", 1)[1] == (
        "process 0 ends, because process 1 is gone. See what it says, and start all of them again.\n"
    )


def test_long_prompts_and_training(weights):
    port = free_port()
    with started(*[["-c", PROGRAM, weights, port, process] for process in range(2)]) as processes:
        results = [process.communicate(timeout=120) for process in processes]
    assert [(process.returncode, out) for process, (out, _) in zip(processes, results, strict=True)] == [
        (0, b"finished\n")
    ] * 2, results
