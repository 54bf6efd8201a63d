"""The gates of recurrent cells, after their products."""

from types import ModuleType

from ...kernel import PythonKernel
from .._numpy import XpArray, on_arrays, store, wide


@on_arrays
def lstm_gates(xp: ModuleType, out: XpArray, gates: XpArray, cell: XpArray) -> None:
    enter, keep, candidate, leave = xp.split(wide(gates), 4, axis=-1)
    new = _sigmoid(xp, keep) * wide(cell) + _sigmoid(xp, enter) * xp.tanh(candidate)
    store(out[0], _sigmoid(xp, leave) * xp.tanh(new))
    store(out[1], new)


@on_arrays
def gru_gates(
    xp: ModuleType,
    out: XpArray,
    input_gates: XpArray,
    hidden_gates: XpArray,
    hidden: XpArray,
    bias_n: XpArray | None = None,
) -> None:
    i_reset, i_update, i_new = xp.split(wide(input_gates), 3, axis=-1)
    h_reset, h_update, h_new = xp.split(wide(hidden_gates), 3, axis=-1)
    h_new = h_new if bias_n is None else h_new + bias_n
    new = xp.tanh(i_new + _sigmoid(xp, i_reset + h_reset) * h_new)
    store(out, new + _sigmoid(xp, i_update + h_update) * (wide(hidden) - new))


def _sigmoid(xp: ModuleType, x: XpArray) -> XpArray:
    return 1 / (1 + xp.exp(-x))


GRU_GATES = PythonKernel(gru_gates, only_if_chosen=True)
LSTM_GATES = PythonKernel(lstm_gates, only_if_chosen=True)
