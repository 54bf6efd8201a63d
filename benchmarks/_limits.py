"""Reasons why goals are not met on the first processor of `docs/performance.md`, which says what was tried."""

import re


# The first that is found in "suite: case: goal" says it.
_LIMITS = {
    r"^cross_entropy: forward \+ backward,": "the gradient is written, and the probe reads alone",
    r"^cross_entropy: ": "the exponential, 1.2 ns for 16 logits, of which 16 bits come in 0.8",
    r"^norms: softmax backward,": "JAX's step to a program: 5 us, but 60 to 80 where other contestants have used the caches",
    r"^norms: layer_norm of an ensemble": "memory: it takes as long as one model with as many rows",
    r"^linear: one token, ": "memory: rows that are apart are read at 0.8 to 0.93 of the speed of a plain read",
    r"^linear: 512 tokens, int8": "the multiply-adds of f32, as XLA's product, whose weights need no decoding",
    r"^linear: 512 tokens, bfloat16": "PyTorch's product on two cores; on one ours is as fast",
    r"^attention: .*(causal|backward)": "half of the tiles on the diagonal is thrown away, and exponentials are no multiply-adds",
    r"^attention: ": "exponentials are no multiply-adds",
    r"^overhead: .*TVM-FFI": "a DLTensor is made for each operand of its convention, and none for an ffi_call",
    r"^embed: a query": "memory of the weights: a second thread reads no faster",
    r"^(embed|training): ": "products of f32 that XLA has at 0.98 of the multiply-adds",
}


def limit_of(suite: str, case: str, goal: str) -> str | None:
    """Return what limits a goal, if that is known."""
    text = f"{suite}: {case}: {goal}"
    return next((limit for pattern, limit in _LIMITS.items() if re.search(pattern, text)), None)
