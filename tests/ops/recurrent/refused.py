"""The calls that the functions refuse, and what they say."""

import jax.numpy as jnp

from eqxcallback import ops


F32, F16 = jnp.ones((2, 4)), jnp.ones((2, 4), jnp.float16)

REFUSED = [
    (lambda: ops.lstm_gates(F32, F16), r"lstm_gates: expected gates, cell of one floating dtype"),
    (lambda: ops.lstm_gates(F32, F32), r"lstm_gates: expected gates of shape \(\*batch, 4 \* size\)"),
    (lambda: ops.lstm_gates(F32[0, 0], F32[0, 0]), r"lstm_gates: expected gates of shape"),
    (lambda: ops.gru_gates(F32, F16, F32), r"gru_gates: expected input_gates, hidden_gates, hidden of one floating"),
    (lambda: ops.gru_gates(F32[:, :3], F32, F32[:, :1]), r"gru_gates: expected gates of shape \(\*batch, 3 \* size\)"),
    (
        lambda: ops.gru_gates(F32[:, :3], F32[:, :3], F32[:, :1], F32[0]),
        r"gru_gates: expected bias_n of shape \(size,\); got bias_n: float32\[4\], hidden: float32\[2,1\]",
    ),
]
