"""Cells of recurrent networks."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from .. import ops
from ..core import AnyArray, Value
from ._arrays import are_floats, others_of
from ._compiled import compiled


class GRUCell(eqx.nn.GRUCell):
    """`equinox.nn.GRUCell`, with everything after the products as one op, computed in f32.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call for all of it.
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: of the vectors of a step.
        - `use_bias`: whether to add biases.
        - `dtype`: of all weights; by default JAX's default float.
        - `key`: initialises them.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        super().__init__(input_size, hidden_size, use_bias, dtype, key=key)
        self.implementation = implementation

    def __call__(self, input: AnyArray, hidden: AnyArray, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `input`: an array of shape `(input_size,)`.
        - `hidden`: the hidden state, of shape `(hidden_size,)`.
        - `key`: ignored, as in `equinox.nn.GRUCell`.

        **Returns:** the new hidden state, of shape `(hidden_size,)`.
        """
        weights, biases = (self.weight_ih, self.weight_hh), (self.bias, self.bias_n) if self.use_bias else ()
        if not _fits(self.hidden_size, 3, input, hidden, *weights, biases):
            equinox: Any = super()
            return equinox.__call__(input, hidden, key=key)
        return _gru_step(input, hidden, *weights, *(biases or (None, None)), implementation=self.implementation)


class LSTMCell(eqx.nn.LSTMCell):
    """`equinox.nn.LSTMCell`, with everything after the products as one op, computed in f32.

    The same constructor, fields and call. A batch goes through `jax.vmap`, which is one call for all of it.
    """

    implementation: ops.Implementation = eqx.field(static=True, default="auto")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        implementation: ops.Implementation = "auto",
    ):
        """**Arguments:**

        - `input_size`, `hidden_size`: of the vectors of a step.
        - `use_bias`: whether to add biases.
        - `dtype`: of all weights; by default JAX's default float.
        - `key`: initialises them.
        - `implementation`: see [`eqxcallback.Op.using`][].
        """
        super().__init__(input_size, hidden_size, use_bias, dtype, key=key)
        self.implementation = implementation

    def __call__(
        self, input: AnyArray, hidden: tuple[AnyArray, AnyArray], *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, Array]:
        """**Arguments:**

        - `input`: an array of shape `(input_size,)`.
        - `hidden`: the hidden state and the cell state, both of shape `(hidden_size,)`.
        - `key`: ignored, as in `equinox.nn.LSTMCell`.

        **Returns:** the new ones.
        """
        h, c = hidden
        weights, biases = (self.weight_ih, self.weight_hh), (self.bias,) if self.use_bias else ()
        if not _fits(self.hidden_size, 4, input, h, *weights, biases) or not are_floats(c) or c.shape != h.shape:
            equinox: Any = super()
            return equinox.__call__(input, hidden, key=key)
        return _lstm_step(input, h, c, *weights, *(biases or (None,)), implementation=self.implementation)


def _fits(
    size: int,
    gates: int,
    input: Value,
    hidden: Value,
    weight_ih: Value,
    weight_hh: Value,
    biases: tuple[Value, ...],
) -> bool:
    if not are_floats(weight_ih, weight_hh, input, hidden, *biases):
        return False
    rows = gates * size
    shapes = [weight_ih.shape, weight_hh.shape, hidden.shape, *(bias.shape for bias in biases)]
    return input.ndim == 1 and shapes == [
        (rows, *input.shape),
        (rows, size),
        (size,),
        *[(rows,), (size,)][: len(biases)],
    ]


@compiled
@jax.named_scope("eqxcallback.nn.GRUCell")
def _gru_step(
    input: Array,
    hidden: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias: Array | None,
    bias_n: Array | None,
    *,
    implementation: ops.Implementation,
) -> Array:
    biases = () if bias is None else (bias, bias_n)
    dtype = jnp.result_type(weight_ih, input, weight_hh, hidden, *biases)
    input_gates = _product(input, weight_ih, bias, dtype, implementation)
    hidden_gates = _product(hidden, weight_hh, None, dtype, implementation)
    return ops.gru_gates(input_gates, hidden_gates, jnp.asarray(hidden, dtype), bias_n, implementation=implementation)


@compiled
@jax.named_scope("eqxcallback.nn.LSTMCell")
def _lstm_step(
    input: Array,
    hidden: Array,
    cell: Array,
    weight_ih: Array,
    weight_hh: Array,
    bias: Array | None,
    *,
    implementation: ops.Implementation,
) -> tuple[Array, Array]:
    dtype = jnp.result_type(weight_ih, input, weight_hh, hidden, *(() if bias is None else (bias,)))
    cell_dtype = jnp.promote_types(dtype, cell.dtype)
    input_gates = _product(input, weight_ih, bias, dtype, implementation)
    gates = input_gates + _product(hidden, weight_hh, None, dtype, implementation)
    return ops.lstm_gates(gates.astype(cell_dtype), jnp.asarray(cell, cell_dtype), implementation=implementation)


def _product(
    x: Array, weight: Array, bias: Array | None, dtype: DTypeLike, implementation: ops.Implementation
) -> Array:
    # The other choices are meant for the gates: there need not be such a kernel of products.
    of_products = others_of(implementation)
    return ops.linear(jnp.asarray(x, dtype), weight.astype(dtype), bias, implementation=of_products)
