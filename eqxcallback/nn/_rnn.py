"""Cells of recurrent networks."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from .. import ops
from ._arrays import are_floats


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
        dtype: Any = None,
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

    @jax.named_scope("eqxcallback.nn.GRUCell")
    def __call__(self, input: Array, hidden: Array, *, key: PRNGKeyArray | None = None) -> Array:
        """**Arguments:**

        - `input`: an array of shape `(input_size,)`.
        - `hidden`: the hidden state, of shape `(hidden_size,)`.
        - `key`: ignored, as in `equinox.nn.GRUCell`.

        **Returns:** the new hidden state, of shape `(hidden_size,)`.
        """
        biases = (self.bias, self.bias_n) if self.use_bias else ()
        if not _fits(self, 3, input, hidden, biases):
            return super().__call__(input, hidden, key=key)
        dtype = jnp.result_type(self.weight_ih, input, self.weight_hh, hidden, *biases)
        bias, bias_n = biases or (None, None)
        input_gates = _product(self, input, self.weight_ih, bias, dtype)
        hidden_gates = _product(self, hidden, self.weight_hh, None, dtype)
        hidden = jnp.asarray(hidden, dtype)
        return ops.gru_gates(input_gates, hidden_gates, hidden, bias_n, implementation=self.implementation)


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
        dtype: Any = None,
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

    @jax.named_scope("eqxcallback.nn.LSTMCell")
    def __call__(
        self, input: Array, hidden: tuple[Array, Array], *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, Array]:
        """**Arguments:**

        - `input`: an array of shape `(input_size,)`.
        - `hidden`: the hidden state and the cell state, both of shape `(hidden_size,)`.
        - `key`: ignored, as in `equinox.nn.LSTMCell`.

        **Returns:** the new ones.
        """
        h, c = hidden
        biases = (self.bias,) if self.use_bias else ()
        if not _fits(self, 4, input, h, biases) or not are_floats(c) or c.shape != h.shape:
            return super().__call__(input, hidden, key=key)
        dtype = jnp.result_type(self.weight_ih, input, self.weight_hh, h, *biases)
        cell_dtype = jnp.promote_types(dtype, c.dtype)
        (bias,) = biases or (None,)
        gates = _product(self, input, self.weight_ih, bias, dtype) + _product(self, h, self.weight_hh, None, dtype)
        return ops.lstm_gates(gates.astype(cell_dtype), jnp.asarray(c, cell_dtype), implementation=self.implementation)


def _fits(cell: GRUCell | LSTMCell, gates: int, input: Any, hidden: Any, biases: tuple[Any, ...]) -> bool:
    if not are_floats(cell.weight_ih, cell.weight_hh, input, hidden, *biases):
        return False
    rows = gates * cell.hidden_size
    shapes = [cell.weight_ih.shape, cell.weight_hh.shape, hidden.shape, *(bias.shape for bias in biases)]
    return input.ndim == 1 and shapes == [
        (rows, *input.shape),
        (rows, cell.hidden_size),
        (cell.hidden_size,),
        *[(rows,), (cell.hidden_size,)][: len(biases)],
    ]


def _product(cell: GRUCell | LSTMCell, x: Any, weight: Any, bias: Any, dtype: Any) -> Array:
    # The other choices are meant for the gates: there need not be such a kernel of products.
    implementation = "reference" if cell.implementation == "reference" else "auto"
    return ops.linear(jnp.asarray(x, dtype), weight.astype(dtype), bias, implementation=implementation)
