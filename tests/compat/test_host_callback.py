"""`compat.host_callback` does what the old module did: its behaviours, and the texts that it printed."""

import inspect

import jax
import numpy as np
import pytest

from eqxcallback.compat import host_callback as hcb

from .printed import fun1


def test_signatures():
    def names(f):
        return {name: p.default for name, p in inspect.signature(f).parameters.items() if p.kind != p.VAR_KEYWORD}

    empty, flavor = inspect.Parameter.empty, {"callback_flavor": hcb.CallbackFlavor.IO_CALLBACK}
    tap = {"result": None, "tap_with_device": False, "device_index": 0, **flavor}
    assert names(hcb.id_tap) == {"tap_func": empty, "arg": empty, **tap}
    assert names(hcb.id_print) == {"arg": empty, **tap, "output_stream": None, "threshold": None}
    call = {"result_shape": None, "call_with_device": False, "device_index": 0, **flavor}
    assert names(hcb.call) == {"callback_func": empty, "arg": empty, **call}
    assert names(hcb.barrier_wait) == {"logging_name": None}
    assert names(hcb.stop_outfeed_receiver) == {}
    assert hcb.TapFunctionException is hcb.CallbackException


def test_eval(stream, show, compiled):
    assert compiled(lambda x: fun1(x, show))(5.0) == 100
    stream.expect("""
        what: a * 2
        10.
        what: y * 3
        30.""")


def test_trees_and_results(stream, show):
    assert show((6.0, 9.0), result=12.0) == 12
    show({"b": 9.0, "a": 6.0})
    show(())
    show((1.0, np.ones((2, 0))), what="second")
    stream.expect("""
        ( 6. 9. )
        { a=6. b=9. }
        (  )
        what: second
        ( 1. [] )""")


@pytest.mark.parametrize("options", [{}, {"result": 3.0}], ids=["unused", "result"])
def test_no_argument(stream, options, compiled):
    def tap(arg, transforms):
        stream.write(f"called tap with {arg}")

    compiled(lambda x: (hcb.id_tap(tap, None, **options), x)[1])(3.0)
    stream.expect("called tap with None")


def test_with_device(stream, show):
    show((6.0, 9.0), tap_with_device=True)
    stream.expect(f"""
        device: {jax.devices()[0]}
        ( 6. 9. )""")


def test_exception(stream, show, compiled):
    def tap_err(*args, **kwargs):
        raise ValueError("Some user message")

    def func(x):
        x1 = show(x + 1, what="x1")
        x2 = hcb.id_tap(tap_err, x1 + 1)
        return show(x2 + 1, what="x3")

    assert compiled(func)(0) == 3
    with pytest.raises(
        hcb.CallbackException,
        match=r"(?s)There were exceptions during callback processing. Last one was:.*ValueError: Some user message",
    ):
        hcb.barrier_wait()
    stream.expect("""
        what: x1
        1
        what: x3
        3""")


def test_order_without_dependence(stream, show):
    """Also from one program to the next."""

    @jax.jit
    def func(x):
        show(x, where="1")
        jax.jit(lambda x: show(x + 1, where="nested"))(x)
        show(42, where="3")
        return x + 1

    assert (func(1), func(10)) == (2, 11)
    stream.expect("""
        where: 1
        1
        where: nested
        2
        where: 3
        42
        where: 1
        10
        where: nested
        11
        where: 3
        42""")


def test_threshold(stream, show):
    show(np.arange(2000), threshold=10)
    show(np.arange(8), threshold=10)
    stream.expect("""
        [   0    1    2 ... 1997 1998 1999]
        [0 1 2 3 4 5 6 7]""")


def test_removed_kwargs():
    with pytest.raises(TypeError, match=r"Support for \*\*kwargs in ``id_tap`` has been removed"):
        hcb.id_tap(lambda x, transforms, y: None, 1, y=2)


def test_random_key():
    @jax.jit
    def f(x):
        return hcb.id_tap(lambda x, _: None, x, result=x)

    assert f(jax.random.key(123)).dtype == jax.random.key(123).dtype


def test_call(stream):
    arg = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    f = lambda x: 3 * (1 + hcb.call(lambda x: 2 * x, x + 1, result_shape=x))
    np.testing.assert_array_equal(jax.jit(f)(arg), 3 * (1 + 2 * (arg + 1)))

    def with_device(x, device=None):
        stream.write(f"device: {device}\n Called with {x}")
        return x

    hcb.call(with_device, 3.0, result_shape=3.0, call_with_device=True)
    stream.expect(f"""
        device: {jax.devices()[0]}
         Called with 3.0""")


def test_call_errors():
    with pytest.raises(
        ValueError, match="The values must be either numeric scalars, or must have 'shape' and 'dtype' attributes"
    ):
        hcb.call(lambda x: x, 3.0, result_shape="string")
    with pytest.raises(NotImplementedError, match="batching rules are implemented only for id_tap, not for call"):
        jax.vmap(lambda x: hcb.call(lambda x: x, x, result_shape=x))(np.ones((2, 3)))
    with pytest.raises(RuntimeError, match=r"Callback func .* should have returned a result with pytree"):
        hcb.call(lambda x: (x, x), 3.0, result_shape=3.0)
    with pytest.raises(RuntimeError, match="ValueError: user exception"):
        hcb.call(lambda x: (_ for _ in ()).throw(ValueError("user exception")), 3.0, result_shape=3.0)


def test_stop_and_go_on(stream, show):
    show(1)
    hcb.stop_outfeed_receiver()
    show(2)
    stream.expect("""
        1
        2""")
