"""The gates of recurrent cells."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import AnyArray, check, check_floats
from ...kernel import CudaKernel, Kernel, NativeKernel
from ...transform import Implementation, Op
from .._precision import wide
from .._supports import floats
from . import _cuda, _numpy, _reference


def _backward(symbol: str, cuda: CudaKernel) -> dict[str, Kernel]:
    return {"cpu": NativeKernel(symbol, attributes=("present", "needs_grad"), supports=floats), "cuda": cuda}


_lstm_gates = Op(
    "lstm_gates",
    kernels={
        "cpu": (NativeKernel("lstm_gates", supports=floats), _numpy.LSTM_GATES),
        "cuda": (_cuda.LSTM_GATES, _numpy.LSTM_GATES),
    },
    reference=_reference.lstm_gates,
    vmap_method={"gates": "broadcast_all", "cell": "broadcast_all"},
    backward=_backward("lstm_gates_backward", _cuda.LSTM_GATES_BACKWARD),
    backward_reads_results=False,
    sharding="... _, ... _ -> ... _, ... _",
)
_NATIVE_GRU = NativeKernel("gru_gates", attributes=("present",), supports=floats)
_gru_gates = Op(
    "gru_gates",
    kernels={"cpu": (_NATIVE_GRU, _numpy.GRU_GATES), "cuda": (_cuda.GRU_GATES, _numpy.GRU_GATES)},
    reference=_reference.gru_gates,
    vmap_method={"input_gates": "broadcast_all", "hidden_gates": "broadcast_all", "hidden": "broadcast_all"},
    backward=_backward("gru_gates_backward", _cuda.GRU_GATES_BACKWARD),
    backward_reads_results=False,
    sharding="... _, ... _, ... _, _ -> ... _",
)


def lstm_gates(
    gates: Float[AnyArray, "*batch four_sizes"],
    cell: Float[AnyArray, "*batch size"],
    *,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*batch size"], Float[Array, "*batch size"]]:
    r"""Apply an LSTM's gates, after its products: $c' = \sigma(f) c + \sigma(i) \tanh(g)$ and $h' = \sigma(o) \tanh(c')$,
    computed in f32.

    **Arguments:**

    - `gates`: $i$, $f$, $g$ and $o$ after each other, of shape `(*batch, 4 * size)`.
    - `cell`: $c$, of shape `(*batch, size)` and the same dtype.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** $h'$ and $c'$, both of the shape and dtype of `cell`.

    ??? cite

        [Long Short-Term Memory](https://www.bioinf.jku.at/publications/older/2604.pdf)
    """
    gates, cell = jnp.asarray(gates), jnp.asarray(cell)
    check_floats("lstm_gates", gates=gates, cell=cell)
    fits = cell.ndim > 0 and gates.shape == (*cell.shape[:-1], 4 * cell.shape[-1])
    check(
        fits, "lstm_gates", "gates of shape (*batch, 4 * size) and cell of shape (*batch, size)", gates=gates, cell=cell
    )
    return _lstm_gates.using(implementation)(gates, cell)


def gru_gates(
    input_gates: Float[AnyArray, "*batch three_sizes"],
    hidden_gates: Float[AnyArray, "*batch three_sizes"],
    hidden: Float[AnyArray, "*batch size"],
    bias_n: Float[AnyArray, " size"] | None = None,
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "*batch size"]:
    r"""Apply a GRU's gates, after its products: $n = \tanh(i_n + \sigma(i_r + h_r) (h_n + b_n))$, $z = \sigma(i_z + h_z)$ and
    $h' = n + z (h - n)$, computed in f32.

    **Arguments:**

    - `input_gates`: $i_r$, $i_z$ and $i_n$ after each other, of shape `(*batch, 3 * size)`.
    - `hidden_gates`: $h_r$, $h_z$ and $h_n$, of the same shape and dtype.
    - `hidden`: $h$, of shape `(*batch, size)` and the same dtype.
    - `bias_n`: $b_n$, of shape `(size,)`.
    - `implementation`: `"auto"` chooses; see [`eqxcallback.Op.using`][].

    **Returns:** $h'$, of the shape and dtype of `hidden`.

    ??? cite

        [Learning Phrase Representations using RNN Encoder-Decoder](https://arxiv.org/abs/1406.1078)
    """
    name = "gru_gates"
    input_gates, hidden_gates, hidden = jnp.asarray(input_gates), jnp.asarray(hidden_gates), jnp.asarray(hidden)
    check_floats(name, input_gates=input_gates, hidden_gates=hidden_gates, hidden=hidden)
    fits = (
        hidden.ndim > 0
        and input_gates.shape == (*hidden.shape[:-1], 3 * hidden.shape[-1])
        and hidden_gates.shape == input_gates.shape
    )
    expected = "gates of shape (*batch, 3 * size) and hidden of shape (*batch, size)"
    check(fits, name, expected, input_gates=input_gates, hidden_gates=hidden_gates, hidden=hidden)
    if bias_n is not None:
        bias_n = jnp.asarray(bias_n)
        check_floats(name, bias_n=bias_n)
        check(bias_n.shape == hidden.shape[-1:], name, "bias_n of shape (size,)", bias_n=bias_n, hidden=hidden)
        bias_n = bias_n.astype(wide(hidden.dtype))
    return _gru_gates.using(implementation)(input_gates, hidden_gates, hidden, bias_n)
