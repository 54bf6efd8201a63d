"""Train an MLP whose activation is a NumPy kernel on scikit-learn's digits: `python -m models.digits`.

The kernel and its derivative work in place on XLA's own buffers; everything else is ordinary Equinox.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import eqxcallback as eqxc

from . import _program


def swish_kernel(ctx, out, x):
    """`y = x s(x)`, and the sigmoid `s(x)`, which the derivative needs."""
    y, sigmoid = (np.asarray(buffer) for buffer in out)
    np.negative(x, out=sigmoid)
    np.exp(sigmoid, out=sigmoid)
    sigmoid += 1
    np.reciprocal(sigmoid, out=sigmoid)
    np.multiply(x, sigmoid, out=y)


def swish_backward_kernel(ctx, grad, cotangent, sigmoid, y):
    """`ct (s + y (1 - s))`, written over the cotangent."""
    s = np.asarray(sigmoid)
    np.asarray(grad)[...] *= s + np.asarray(y) * (1 - s)


@jax.custom_vjp
def swish(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return _forward(x)[0]


def _forward(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y, sigmoid = eqxc.buffer_callback(swish_kernel, (like, like), vmap_method="broadcast_all")(x)
    return y, (sigmoid, y)


def _backward(residuals, cotangent):
    like = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    backward = eqxc.buffer_callback(
        swish_backward_kernel, like, vmap_method="broadcast_all", input_output_aliases={"cotangent": 0}
    )
    return (backward(cotangent, *residuals),)


swish.defvjp(_forward, _backward)


class Swish(eqx.Module):
    """The activation as a layer."""

    def __call__(self, x: Float[Array, " size"]) -> Float[Array, " size"]:
        return swish(x)


class Classifier(eqx.Module):
    layers: list[eqx.Module]

    def __init__(self, width: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Linear(64, width, key=keys[0]),
            Swish(),
            eqx.nn.Linear(width, width, key=keys[1]),
            Swish(),
            eqx.nn.Linear(width, 10, key=keys[2]),
        ]

    def __call__(self, image: Float[Array, "64"]) -> Float[Array, "10"]:
        x = image
        for layer in self.layers:
            x = layer(x)  # pyright: ignore[reportCallIssue]
        return x


def train(
    *,
    epochs: int = 30,
    batch_size: int = 64,
    width: int = 64,
    learning_rate: float = 3e-3,
    seed: int = 0,
    progress: Callable[..., Iterable[Any]] = lambda items, **_: items,
) -> tuple[float, float]:
    """Train a `Classifier` with Adam.

    **Arguments:**

    - `seed`: of the weights and of the order of the images.
    - `progress`: as `_program.progress`.

    **Returns:** the accuracy on images that were not trained on (360 of 1,797), and the seconds that training took.
    """
    digits = load_digits()
    images = np.asarray(digits.data, np.float32) / 16  # pyright: ignore[reportAttributeAccessIssue]
    labels = np.asarray(digits.target, np.int32)  # pyright: ignore[reportAttributeAccessIssue]
    x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)

    model = Classifier(width, key=jax.random.key(seed))
    optimizer = optax.adam(learning_rate)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    def loss(model: Classifier, x: Float[Array, "batch 64"], y: Int[Array, " batch"]) -> Float[Array, ""]:
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

    @eqx.filter_jit(donate="all")
    def step(model, state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    order = np.random.default_rng(seed)
    start = time.perf_counter()
    bar = progress(range(epochs), desc="training", unit="epoch")
    for _ in bar:
        shuffled = order.permutation(len(x_train))
        value = jnp.nan
        for first in range(0, len(shuffled) - batch_size + 1, batch_size):
            batch = shuffled[first : first + batch_size]
            model, state, value = step(model, state, jnp.asarray(x_train[batch]), jnp.asarray(y_train[batch]))
        _program.annotate(bar, loss=f"{float(value):.4f}")
    seconds = time.perf_counter() - start
    predicted = jax.vmap(model)(jnp.asarray(x_test)).argmax(axis=1)
    return float(np.mean(np.asarray(predicted) == y_test)), seconds


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _program.Parser(
        prog="python -m models.digits", description="Train an MLP with a NumPy kernel on scikit-learn's digits."
    )
    parser.add_argument("--epochs", type=int, default=30, help="how often each image is seen (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"expected --epochs of 1 or more; got {options.epochs}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"expected --seed from 0 to 2**32 - 1; got {options.seed}")
    return options


def _digits(arguments: list[str] | None) -> None:
    options = _parse(arguments)
    accuracy, seconds = train(epochs=options.epochs, seed=options.seed, progress=_program.progress)
    result = f"accuracy on 360 images that were not trained on: {accuracy:.1%}"
    _program.write([f"{result} ({options.epochs} epochs, {seconds:.1f} s)\n"])


def main(arguments: list[str] | None = None) -> int:
    return _program.run("digits", _digits, arguments)


if __name__ == "__main__":
    sys.exit(main())
