"""Layers that are right. Those that are wrong differ from them in one thing."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from ..layers import Scale


class Dense(eqxc.Layer):
    r"""$\tanh(W x) + b$, with two results and a backward kernel."""

    weight: jax.Array
    bias: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        weight, bias, x = np.asarray(self.weight), np.asarray(self.bias), np.asarray(x)
        self.write(out[0], self.act(np.matmul(weight, x[..., None])[..., 0]) + bias)
        self.write(out[1], (x * x).sum(-1, keepdims=True))

    def reference(self, x):
        return jnp.tanh(self.weight @ x) + self.bias, jnp.sum(x * x, keepdims=True)

    def backward(self, ctx, grads, args, out, cotangents):
        weight, x = np.asarray(self.weight), np.asarray(args[0])
        d_out, d_squares = (np.asarray(ct) for ct in cotangents)
        # Not from the result in 16 bits: where the weights are saturated, its difference from 1 is what rounding left of it.
        wide = np.result_type(x, np.float32)
        act = np.tanh(np.matmul(weight.astype(wide), x.astype(wide)[..., None])[..., 0])
        d_sum = ((1 - act * act) * d_out).astype(x.dtype)
        self.add(grads[0].weight, d_sum[..., :, None] * x[..., None, :])
        self.add(grads[0].bias, d_out)
        self.add(grads[1], np.matmul(np.swapaxes(weight, -1, -2), d_sum[..., None])[..., 0] + 2 * x * d_squares)

    @staticmethod
    def act(x):
        return np.tanh(x)

    @staticmethod
    def write(out, value):
        np.asarray(out)[...] = value

    @staticmethod
    def add(grad, value):
        """Summed over the leading axis if the gradient has none."""
        if grad is not None:
            grad = np.asarray(grad)
            grad[...] = value.sum(0) if value.ndim > grad.ndim else value


class Accumulate(eqxc.Layer):
    """Overwrites an argument."""

    input_output_aliases: ClassVar = {"total": 0}
    vmap_method = "fold"

    def kernel(self, ctx, out, total, x):
        np.asarray(out)[...] += np.asarray(x)

    def reference(self, total, x):
        return total + x


class NoReference(eqxc.Layer):
    """Reverse mode alone, and differences to compare with."""

    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.sin(np.asarray(x) * np.asarray(self.weight), out=np.asarray(out))

    def out_type(self, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    def backward(self, ctx, grads, args, out, cotangents):
        x, weight = np.asarray(args[0]), np.asarray(self.weight)
        inner = np.cos(x * weight) * np.asarray(cotangents)
        Dense.add(grads[0].weight, inner * x)
        Dense.add(grads[1], inner * weight)


def normal(seed, *shape, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype))


def dense(cls=Dense):
    return cls(normal(1, 4, 3), normal(2, 4)), normal(3, 3)


def scale(cls=Scale):
    return cls(normal(1, 3)), normal(2, 3)
