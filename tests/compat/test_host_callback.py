"""`compat.host_callback` does what the old module did: its behaviours, and the texts that it printed."""

import functools
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback.compat import host_callback as hcb


class Stream:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def expect(self, text):
        hcb.barrier_wait()
        lines = [line.strip() for line in self.text.splitlines()]
        assert lines == [line.strip() for line in textwrap.dedent(text).strip().splitlines()]
        self.text = ""


@pytest.fixture
def stream():
    return Stream()


@pytest.fixture
def show(stream):
    """`id_print` to the stream."""
    return functools.partial(hcb.id_print, output_stream=stream)


@pytest.fixture(params=[False, True], ids=["eager", "jit"])
def compiled(request):
    return jax.jit if request.param else lambda f: f


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


def fun1(a, show):
    y = show(a * 2.0, what="a * 2")
    y = show(y * 3.0, what="y * 3", result=y)
    return y**2


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


def test_while_and_cond(stream, show, compiled):
    def func(x):
        x2 = show(x + 1, where="2")

        def body(x):
            x3 = show(x, where="w_b_1")
            x4 = jax.lax.cond(
                x % 2 == 0,
                lambda x: show(x, where="w_b_t"),
                lambda x: show(-1, where="w_b_f", result=x),
                x3 + 1,
            )
            return show(x4, where="w_b_2")

        return show(jax.lax.while_loop(lambda x: x <= 3, body, x2), where="end")

    assert compiled(func)(1) == 4
    stream.expect("""
        where: 2
        2
        where: w_b_1
        2
        where: w_b_t
        3
        where: w_b_2
        3
        where: w_b_1
        3
        where: w_b_f
        -1
        where: w_b_2
        4
        where: end
        4""")


def test_while_condition(stream, show):
    f = lambda x: jax.lax.while_loop(lambda x: show(x < 3, where="w_p"), lambda x: show(x + 1, where="w_b"), x)
    assert jax.jit(f)(1) == 3
    stream.expect("""
        where: w_p
        True
        where: w_b
        2
        where: w_p
        True
        where: w_b
        3
        where: w_p
        False""")


def test_scan(stream, show):
    def func(x):
        _, ys = jax.lax.scan(lambda c, x: (c, show(x + 1, where="s_2")), x, jnp.arange(3))
        return show(ys, where="10")

    np.testing.assert_array_equal(jax.jit(func)(1), [1, 2, 3])
    stream.expect("""
        where: s_2
        1
        where: s_2
        2
        where: s_2
        3
        where: 10
        [1 2 3]""")


def power3(x, show):
    y = x * x
    show((x, y), what="x,x^2")
    return y * x


def test_derivatives(stream, show):
    """The examples of the old documentation."""
    f = lambda x: power3(x, show)
    once = """
        what: x,x^2
        ( 3. 9. )"""
    f(3.0)
    stream.expect(once)
    jax.jvp(f, (3.0,), (0.1,))
    stream.expect(once)
    jax.grad(f)(3.0)
    stream.expect(once)
    jax.grad(jax.grad(f))(3.0)
    stream.expect(once)
    jax.grad(lambda x: f(jax.checkpoint(f)(x)))(3.0)
    stream.expect(
        once
        + """
        what: x,x^2
        ( 27. 729. )"""
        + once
    )


def test_tangents_and_cotangents(stream, show):
    @jax.custom_jvp
    def print_tangents(arg):
        return arg

    @print_tangents.defjvp
    def rule(primals, tangents):
        show(tangents[0], what="tangents")
        return primals[0], tangents[0]

    def f(x):
        y = show(x * x, what="x^2")
        print_tangents((x, y))
        return y * x

    jax.jvp(f, (3.0,), (0.5,))
    stream.expect("""
        what: x^2
        9.
        what: tangents
        ( 0.5 3. )""")

    @jax.custom_vjp
    def print_cotangents(arg):
        return arg

    print_cotangents.defvjp(lambda arg: (arg, None), lambda _, g: (show(g, what="cotangents"),))

    def g(x):
        y = x * x
        show((x, y), what="x,x^2")
        x1, y1 = print_cotangents((x, y))
        return y1 * x1

    jax.grad(g)(3.0)
    stream.expect("""
        what: x,x^2
        ( 3. 9. )
        what: cotangents
        ( 9. 3. )""")
    jax.vmap(jax.grad(g))(np.array([2.0, 3.0], np.float32))
    stream.expect("""
        transforms: [('batch', {'batch_dims': (0, 0)})] what: x,x^2
        ( [2. 3.] [4. 9.] )
        transforms: [('batch', {'batch_dims': (0, 0)})] what: cotangents
        ( [4. 9.] [2. 3.] )""")


def summed(f, x):
    return jax.lax.scan(lambda carry, inp: (carry + f(inp), None), jnp.float32(0), x)[0]


def test_scan_custom_jvp(stream, show):
    @jax.custom_jvp
    def f(x):
        return x * show(x, what="x")

    @f.defjvp
    def rule(primals, tangents):
        (x,), (x_dot,) = primals, tangents
        return f(x), 3.0 * x * show(x_dot, what="x_dot")

    arg = np.full(2, 0.7, np.float32)
    np.testing.assert_allclose(summed(f, arg), 0.98, rtol=1e-6)
    values = """
        what: x
        0.7
        what: x
        0.7"""
    stream.expect(values)
    np.testing.assert_allclose(jax.grad(lambda x: summed(f, x))(arg), [2.1, 2.1], rtol=1e-6)
    stream.expect(
        values
        + """
        transforms: ['transpose'] what: x_dot
        2.1
        transforms: ['transpose'] what: x_dot
        2.1"""
    )


def test_scan_custom_vjp(stream, show):
    @jax.custom_vjp
    def f(x):
        return x * show(x, what="x")

    f.defvjp(lambda x: (f(x), 3.0 * x), lambda res, g: (res * show(g, what="ct_b"),))
    arg = np.full(2, 0.7, np.float32)
    np.testing.assert_allclose(jax.grad(lambda x: summed(f, x))(arg), [2.1, 2.1], rtol=1e-6)
    stream.expect("""
        what: x
        0.7
        what: x
        0.7
        what: ct_b
        1.
        what: ct_b
        1.""")


def test_vmap(stream, show):
    jax.vmap(lambda x: fun1(x, show))(jnp.array([4.0, 5.0]))
    stream.expect("""
        transforms: [('batch', {'batch_dims': (0,)})] what: a * 2
        [ 8. 10.]
        transforms: [('batch', {'batch_dims': (0,)})] what: y * 3
        [24. 30.]""")
    jax.vmap(lambda y: show((3.0, y)))(jnp.array([4.0, 5.0]))
    stream.expect("""
        transforms: [('batch', {'batch_dims': (None, 0)})]
        ( 3. [4. 5.] )""")
    rows = lambda xv, y: jax.vmap(lambda x, y: show(x + y), in_axes=(0, None))(xv, y)
    jax.vmap(rows, in_axes=(None, 0))(jnp.arange(5), jnp.arange(3))
    stream.expect("""
        transforms: [('batch', {'batch_dims': (0,)}), ('batch', {'batch_dims': (0,)})]
        [[0 1 2 3 4]
        [1 2 3 4 5]
        [2 3 4 5 6]]""")


def test_vmap_of_while(stream, show):
    def func(x):
        x1 = show(x, where="before:x")
        x2 = jax.lax.while_loop(lambda x: x < 2, lambda x: show(x + 1, where="body:x+1"), x1)
        return show(x2, where="after:x")

    jax.jit(jax.vmap(func))(np.arange(5, dtype=np.int32))
    hcb.barrier_wait()
    # Of examples at their end, JAX has another value by now in the body, which nobody uses.
    stream.text = stream.text.replace("[2 3 4 5 6]", "[2 3 3 4 5]")
    stream.expect("""
        transforms: [('batch', {'batch_dims': (0,)})] where: before:x
        [0 1 2 3 4]
        transforms: [('batch', {'batch_dims': (0,)})] where: body:x+1
        [1 2 3 4 5]
        transforms: [('batch', {'batch_dims': (0,)})] where: body:x+1
        [2 3 3 4 5]
        transforms: [('batch', {'batch_dims': (0,)})] where: after:x
        [2 2 2 3 4]""")


def by_device(stream):
    """The text, sorted by device."""
    hcb.barrier_wait()
    blocks = ["device: " + block for block in stream.text.split("device: ")[1:]]
    stream.text = "".join(sorted(blocks))


def test_pmap(stream, show):
    first, second = jax.devices()[:2]
    jax.pmap(lambda x: show((x, x * x), what="x,x^2", tap_with_device=True))(np.array([3, 4], np.int32))
    by_device(stream)
    stream.expect(f"""
        device: {first} what: x,x^2
        ( 3 9 )
        device: {second} what: x,x^2
        ( 4 16 )""")
    matrix = np.array([[0.0, 2.0, 4.0], [20.0, 22.0, 24.0]], np.float32)
    jax.pmap(jax.vmap(lambda x: show(x, what="x * 2", tap_with_device=True)))(matrix)
    by_device(stream)
    stream.expect(f"""
        device: {first} transforms: [('batch', {{'batch_dims': (0,)}})] what: x * 2
        [0. 2. 4.]
        device: {second} transforms: [('batch', {{'batch_dims': (0,)}})] what: x * 2
        [20. 22. 24.]""")


@pytest.mark.parametrize("device_index", [0, 1])
def test_a_split_program(stream, show, mesh, device_index):
    x = jax.device_put(np.arange(4, dtype=np.int32), jax.NamedSharding(mesh, jax.P("d")))
    jax.block_until_ready(jax.jit(lambda x: show(x * 3, what="z", tap_with_device=True, device_index=device_index))(x))
    stream.expect(f"""
        device: {jax.devices()[device_index]} what: z
        [0 3 6 9]""")


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
