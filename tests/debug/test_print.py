"""`debug.print`: labels, then the value, each line in one piece."""

import re
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import debug


class Stream:
    """Keeps what is written, one entry for each call."""

    def __init__(self):
        self.writes = []

    def write(self, text):
        self.writes.append(text)

    def taken(self):
        debug.barrier_wait()
        writes, self.writes = self.writes, []
        return writes


@pytest.fixture
def stream():
    return Stream()


def printed(stream, value, /, **options):
    debug.print(value, output_stream=stream, **options)
    return stream.taken()


ONE = np.float32(1)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (1.0, "1."),
        (3, "3"),
        (True, "True"),
        (np.arange(3), "[0 1 2]"),
        ((), "(  )"),
        ([], "[  ]"),
        ({}, "{  }"),
        (None, "None"),
        ((1.0, np.ones((2, 0))), "( 1. [] )"),
        ([1, (2, 3)], "[ 1 ( 2 3 ) ]"),
        ({"b": 1, "a": [2.5]}, "{ a=[ 2.5 ] b=1 }"),
        (np.ones((2, 2)), "[[1. 1.]\n [1. 1.]]"),
    ],
    ids=str,
)
def test_layout(stream, x, text):
    assert printed(stream, x) == [text + "\n"]


def test_what_has_no_room_on_a_line(stream):
    row = np.arange(20)
    text = np.array2string(row)
    assert printed(stream, (row, [row, 1])) == [f"( {text}\n  [ {text} 1 ] )\n"]
    assert printed(stream, ([row, row], 1)) == [f"( [ {text}\n    {text} ]\n  1 )\n"]


def test_threshold(stream):
    x = np.arange(2000)
    assert printed(stream, x) == ["[   0    1    2 ... 1997 1998 1999]\n"]
    assert printed(stream, x[:10], threshold=5) == ["[0 1 2 ... 7 8 9]\n"]
    assert "..." not in printed(stream, x, threshold=3000)[0]
    assert "..." in printed(stream, x, threshold=None)[0]  # NumPy's own


def test_labels_are_sorted_and_come_first(stream):
    assert printed(stream, ONE, what="loss", step=3, a="x y") == ["a: x y step: 3 what: loss\n", "1.\n"]


def test_transforms_and_device(stream):
    jax.jit(jax.vmap(lambda x: debug.print(x, what="x", with_device=True, output_stream=stream)))(jnp.arange(2))
    (label, value) = stream.taken()
    assert label == f"device: {jax.devices()[0]} transforms: [('batch', {{'batch_dims': (0,)}})] what: x\n"
    assert value == "[0 1]\n"
    jax.grad(debug.tap_cotangents, argnums=1)(debug.Printer({"what": "g"}, output_stream=stream), 2.0)
    assert stream.taken() == ["transforms: ['transpose'] what: g\n", "1.\n"]


def test_it_is_the_identity(stream):
    assert debug.print(2.0, output_stream=stream) == 2.0
    assert debug.print(2.0, result=(3,), output_stream=stream) == (3,)
    assert stream.taken() == ["2.\n", "2.\n"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_to_stdout(capsys, mode):
    jax.block_until_ready(jax.jit(lambda x: debug.print(x, what="x", mode=mode))(2))
    debug.barrier_wait()
    assert capsys.readouterr().out == "what: x\n2\n"


def test_lines_do_not_interleave(stream):
    program = jax.jit(lambda x: debug.print(x, output_stream=stream, label="here"))
    program(0)
    stream.taken()
    threads = [threading.Thread(target=lambda i=i: [program(i) for _ in range(20)]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    writes = stream.taken()
    assert writes[::2] == ["label: here\n"] * 80
    assert sorted(writes[1::2]) == sorted(f"{i}\n" for i in range(4) for _ in range(20))


def test_a_stream_that_prints_itself(stream):
    class Loud:
        def write(self, text):
            debug.print(jnp.zeros(0), what=f"got {text.strip()}", output_stream=stream)

    debug.print(1, output_stream=Loud())
    assert stream.taken() == ["what: got 1\n", "[]\n"]


def test_the_same_print_is_one_program(stream):
    def f(x):
        return debug.print(x, what="the same", output_stream=stream)

    first, second = (jax.jit(lambda x: f(x)).lower(1.0) for _ in range(2))
    assert first.as_text() == second.as_text()


def test_bad_options():
    number: Any = 3
    text: Any = "x"
    with pytest.raises(TypeError, match=r"debug\.print: expected output_stream to have a method write\(text\); got 3"):
        debug.print(1, output_stream=number)
    with pytest.raises(
        TypeError, match=r"debug\.print: expected threshold to be a number of elements, or None; got 'x'"
    ):
        debug.print(1, threshold=text)
    with pytest.raises(TypeError, match=r"debug\.print: expected x\['a'\] to be an array or a number; got 'text'"):
        debug.print({"a": "text"})


@pytest.mark.parametrize(
    ("args", "labels", "got"),
    [
        pytest.param(("loss",), {}, "the text 'loss'", id="text"),
        pytest.param(("x={x}",), {"x": ONE}, "the text 'x={x}'", id="format"),
        pytest.param(("loss", ONE), {}, "the text 'loss'", id="text and value"),
        pytest.param((ONE, ONE), {}, "several values", id="values"),
    ],
)
def test_it_is_not_the_print_of_jax(args, labels, got):
    with pytest.raises(
        TypeError, match=rf"expected one value .*; got {re.escape(got)}\. This is not jax\.debug\.print"
    ):
        debug.print(*args, **labels)


def test_x_is_a_label_like_others(stream):
    assert printed(stream, ONE, **{"x": 3}) == ["x: 3\n", "1.\n"]


@pytest.mark.parametrize("label", [lambda x: x.max(), lambda x: (1, x), lambda x: np.arange(3)])
def test_labels_are_static(label):
    error = r"debug\.print: expected the label step to be static, .*Put arrays into the tree: debug\.print\({'step': step}\)"
    with pytest.raises(TypeError, match=error):
        jax.jit(lambda x: debug.print(x, step=label(x)))(jnp.arange(3))
    with pytest.raises(TypeError, match=error):
        debug.Printer({"step": label(jnp.arange(3))})


def test_a_stream_is_no_label():
    with pytest.raises(
        TypeError, match=r"expected the label file to be static, .* a stream\. Pass it as output_stream"
    ):
        debug.print(ONE, file=sys.stderr)
