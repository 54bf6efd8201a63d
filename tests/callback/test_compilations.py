"""The same callback is one compilation, whether called eagerly or under `jit`, and however often it is wrapped."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .kernels import add_one, callback_like


X = jnp.zeros(3)


@dataclasses.dataclass(frozen=True)
class Add:
    amount: float

    def __call__(self, ctx, out, x):
        np.add(x, np.float32(self.amount), out=np.asarray(out))


class Owner:
    def method(self, ctx, out, x):
        add_one(ctx, out, x)


OWNER = Owner()


def fill(value, ctx, out, x):
    out.write(np.full(3, value, np.float32))


@functools.partial(jax.jit, static_argnums=0)
def step(callback, x):
    return callback_like(callback, x)(x)


@pytest.mark.parametrize(
    "fresh", [lambda: add_one, lambda: Add(1.0), lambda: OWNER.method], ids=["function", "equal", "method"]
)
@pytest.mark.parametrize(
    "call",
    [
        lambda callback: callback_like(callback, X)(X),
        lambda callback: callback_like(callback, X, input_output_aliases={0: 0})(X),
        lambda callback: callback_like(callback, X, has_side_effect=True)(X),
        lambda callback: jax.vmap(callback_like(callback, X, vmap_method="broadcast_all"))(jnp.zeros((2, 3))),
        lambda callback: step(callback, X),
        lambda callback: jax.jit(step, static_argnums=0)(callback, X),
    ],
    ids=["eager", "aliased", "effect", "vmap", "static", "static, wrapped"],
)
def test_wrapped_anew_it_is_no_new_program(fresh, call, compilations):
    want = call(fresh())
    compilations.clear()
    for _ in range(3):
        np.testing.assert_array_equal(call(fresh()), want)
    assert compilations == []


def test_another_callback_is_another_program_under_jit(compilations):
    """The count above can grow: it does where it has to."""
    np.testing.assert_array_equal(step(Add(11.0), X), np.full(3, 11.0))
    compilations.clear()
    np.testing.assert_array_equal(step(Add(12.0), X), np.full(3, 12.0))
    assert len(compilations) == 1
    np.testing.assert_array_equal(step(functools.partial(fill, 13.0), X), np.full(3, 13.0))
    assert len(compilations) == 2


def test_another_shape_is_another_program_of_eager_calls(compilations):
    compilations.clear()
    x = np.zeros(91, np.float32)
    callback_like(add_one, x)(x)
    assert len(compilations) == 1


def test_a_fresh_partial_does_not_recompile_eager_calls(compilations):
    callback_like(functools.partial(fill, 0), X)(X)
    compilations.clear()
    for i in range(5):
        np.testing.assert_array_equal(callback_like(functools.partial(fill, i), X)(X), np.full(3, i))
    assert compilations == []


def test_a_fresh_lambda_does_not_recompile_eager_calls(compilations):
    def call(i):
        return callback_like(lambda ctx, out, x: out.write(np.full(3, i, np.float32)), X)(X)

    call(0)
    compilations.clear()
    for i in range(1, 20):
        np.testing.assert_array_equal(call(i), np.full(3, i))
    assert compilations == []


def test_equal_callbacks_are_the_same_text():
    """So the persistent cache finds the program of one for the other; and they share a handle in one program."""

    def program(*callbacks):
        def both(x):
            for callback in callbacks:
                x = callback_like(callback, x)(x)
            return x

        return jax.jit(both).lower(X).as_text()

    def keys(text):
        return {line.split("key = ")[1].split(" ")[0] for line in text.splitlines() if "key = " in line}

    assert program(Add(1.0)) == program(Add(1.0))
    assert len(keys(program(Add(1.0), Add(1.0)))) == 1
    assert len(keys(program(Add(1.0), Add(2.0)))) == 2
