"""Waiting for programs."""

import threading

import jax

# `jax._src.dispatch.runtime_tokens`: what programs of a thread are waited for by. `jax.effects_barrier` knows no timeout.
# Noticed by: tests/xla/test_private_jax.py.
from jax._src import dispatch as _dispatch


def wait_for_effects(timeout: float | None) -> bool:
    """Wait for programs that this thread has started. True if they came to their end in `timeout` seconds."""
    if timeout is None:
        jax.effects_barrier()
        return True
    tokens = [
        *_dispatch.runtime_tokens.current_tokens.values(),
        *_dispatch.runtime_tokens.output_runtime_tokens.values(),
    ]
    if not tokens:
        return True

    def wait() -> None:
        for token in tokens:
            token.block_until_ready()

    waiter = threading.Thread(target=wait, name="eqxcallback-barrier", daemon=True)
    waiter.start()
    waiter.join(timeout)
    return not waiter.is_alive()
