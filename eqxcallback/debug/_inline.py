"""Python kernels under a debugger."""

import contextlib
from collections.abc import Iterator

from .. import xla


@contextlib.contextmanager
def inline() -> Iterator[None]:
    """Within this context, in this thread, Python kernels on a CPU run where they are called, like any Python function.

    No program is compiled, and XLA is not involved: Buffers are over NumPy arrays, breakpoints in a kernel stop there with the
    caller's frames above, and what it raises escapes as it is, no [`eqxcallback.KernelError`][] around it.

    It is [`jax.disable_jit`](https://docs.jax.dev/en/latest/_autosummary/jax.disable_jit.html) too. So functions under
    `jax.jit` and `eqx.filter_jit`, loops and branches run as Python, and the kernels in them inline. Compiled in spite of it
    are what was compiled by hand (`.lower(...).compile()`), and the bodies of `jax.shard_map`. Native kernels, and kernels on a
    GPU, run in programs of their own.

    !!! example

        ```python
        with eqxcallback.debug.inline():
            y = model(x)  # breakpoint() in a kernel stops in this thread
        ```

    Operands that are split over several devices arrive whole, in one call. Together with [`eqxcallback.debug.checked`][] calls
    are checked.
    """
    with xla.inline():
        yield
