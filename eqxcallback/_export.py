"""Programs that outlive the process."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import xla


def export(fn: Callable[..., Any], *, platforms: Sequence[str] | None = None) -> Callable[..., jax.export.Exported]:
    """`jax.export.export` for functions that call external kernels.

    !!! example

        ```python
        data = eqxcallback.export(layer)(jax.ShapeDtypeStruct((3,), jnp.float32)).serialize()

        # in another process
        y = jax.export.deserialize(data).call(x)
        ```

    The other process imports `eqxcallback` first. Kernels of the native lane are found by name; one from your own library must
    have been lowered there before. Python kernels are imported by the names of their module and class, when they are first
    called, and may not run JAX themselves. As with any exported program, load only those that you trust: they say what is
    imported. On several devices, each one runs kernels on whole arrays.

    **Arguments:**

    - `fn`: a function, jitted or not, or a Module. The arrays of a Module become constants of the program.
    - `platforms`: to lower for, such as `("cpu", "cuda")`. By default that of this process.

    **Returns:**

    A function of the arguments, or of `jax.ShapeDtypeStruct`s in their place, that returns a `jax.export.Exported`.

    **Raises:** `ValueError` for a Python kernel that cannot be imported by name.
    """
    if not callable(fn):
        raise TypeError(f"eqxcallback.export: expected a function; got {fn!r} of type {type(fn).__name__}.")
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(lambda *args, **kwargs: fn(*args, **kwargs))

    def exported(*args: Any, **kwargs: Any) -> jax.export.Exported:
        # Lowering registers the handlers of users' libraries, whose names the safety checks must know.
        jitted.trace(*args, **kwargs).lower(lowering_platforms=tuple(platforms) if platforms else None)
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in xla.target_names()]
        return jax.export.export(jitted, platforms=platforms, disabled_checks=checks)(*args, **kwargs)

    return exported
