"""One launch of each kind, whose results are compared: what fails here spoils all that takes longer. `python -m
benchmarks.gpu.smoke`."""

import functools
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc
from eqxcallback import ops

from .._contestants import normal
from .launches import F32, add_one_op, with_cupy, with_numpy


def _cuda() -> None:
    x = jnp.zeros(F32.shape)
    np.testing.assert_array_equal(jax.jit(add_one_op())(x), x + 1)


def _norm() -> None:
    x, weight = normal(0, 8, 576, dtype=jnp.bfloat16), normal(1, 576)
    _same(ops.rms_norm, (x, weight))


def _triton() -> None:
    args = [normal(i, 2, 128, 4, 64, dtype=jnp.bfloat16) for i in range(3)]
    _same(functools.partial(ops.attention, causal=True), args)


def _gradients() -> None:
    args = [normal(i, 2, 128, 4, 64, dtype=jnp.bfloat16) for i in range(3)]

    def loss(*args: Any, **options: Any) -> jax.Array:
        return (ops.attention(*args, causal=True, **options).astype(jnp.float32) ** 2).sum()

    _same(lambda *args, **options: jax.grad(functools.partial(loss, **options), (0, 1, 2))(*args), args)


def _cupy() -> None:
    on_gpu = jax.default_backend() == "gpu"
    call = eqxc.buffer_callback(with_cupy if on_gpu else with_numpy, F32, command_buffer_compatible=True)
    x = jnp.zeros(F32.shape)
    np.testing.assert_array_equal(jax.jit(call)(x), x + 1)


def _captured() -> None:
    add = add_one_op()
    program = eqxc.jit_captured(lambda x: add(add(add(x))))
    x = jnp.zeros(F32.shape)
    for _ in range(3):
        x = program(x)
    np.testing.assert_array_equal(x, jnp.full(F32.shape, 9.0))


def _same(f: Callable[..., Any], args: Any) -> None:
    ours = jax.jit(f)(*args)
    theirs = jax.jit(functools.partial(f, implementation="reference"))(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


LAUNCHES = {
    "a kernel in CUDA C++": _cuda,
    "a norm": _norm,
    "attention, in Triton": _triton,
    "its gradients": _gradients,
    "a callback with CuPy": _cupy,
    "a captured program": _captured,
}


def main() -> int:
    failed = []
    for name, launch in LAUNCHES.items():
        start = time.monotonic()
        try:
            launch()
            said = "ok"
        except Exception:  # the others say more about why
            traceback.print_exc()
            failed.append(name)
            said = "FAILED"
        print(f"{name}: {said} in {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(LAUNCHES) - len(failed)} of {len(LAUNCHES)} on {jax.devices()[0].device_kind}", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
