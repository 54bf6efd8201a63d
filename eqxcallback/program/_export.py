"""Programs that outlive the process: how they are made."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from .. import xla
from ..core import PyTree, path_text, ref_text
from ._portable import portable, portable_results, restore
from ._program import Program


# What programs are lowered for, in JAX's spelling.
PLATFORMS = (*xla.PLATFORMS, "tpu")


def export(fn: Callable[..., PyTree], *, platforms: Sequence[str] | None = None) -> Callable[..., jax.export.Exported]:
    """`jax.export.export` for functions that call external kernels, with Modules and static values among their arguments.

    !!! example

        ```python
        program = eqxcallback.export(lambda model, x: model(x))(model, jax.ShapeDtypeStruct((3,), jnp.float32))
        pathlib.Path("program.bin").write_bytes(program.serialize())

        # in another process
        program = eqxcallback.load("program.bin")
        y = program(model, x)
        ```

    As in `equinox.filter_jit`, arrays are arguments of the program, and anything else is part of it, Python's numbers as well.
    Tuples, lists and dicts of arrays go in and out as they are. An argument or result of another kind, such as a Module, is a
    dict of its arrays by their paths, `{".weight": weight}`, and of what is static, in keys: `{".use_bias = True": None}`. The
    program makes it from a Module that it is called with. A result stays one, and may be passed on in place of the Module.

    Kernels of the native lane are found by name. Python kernels are imported by the names of their module and class, and may not
    run JAX themselves. As with any exported program, load only those that you trust: they say what is imported. On several
    devices, each one runs kernels on whole arrays.

    **Arguments:**

    - `fn`: a function, jitted or not, or a Module. The arrays of a Module become constants of the program.
    - `platforms`: to lower for, such as `("cpu", "cuda")`. By default that of this process.

    **Returns:**

    A function of the arguments, or of `jax.ShapeDtypeStruct`s in place of arrays, that returns a `jax.export.Exported`.

    **Raises:** `ValueError` for unknown platforms, and for a Python kernel that cannot be imported by name.
    """
    if not callable(fn):
        raise TypeError(f"eqxcallback.export: expected a function; got {fn!r} of type {type(fn).__name__}.")
    # A text is a sequence too, of letters.
    if platforms is not None and (
        not isinstance(platforms, Iterable)
        or isinstance(platforms, str)
        or not all(platform in PLATFORMS for platform in platforms)
    ):
        raise ValueError(
            f"eqxcallback.export: expected platforms to be a list of some of {PLATFORMS} or None; got {platforms!r}."
        )

    def exported(*args: PyTree, **kwargs: PyTree) -> jax.export.Exported:
        _check_no_refs(args, kwargs)
        given, named = tuple(map(portable, args)), {name: portable(value) for name, value in kwargs.items()}
        jitted = _jitted(fn, args, kwargs)
        # Lowering registers the handlers of users' libraries, whose names the safety checks must know.
        jitted.trace(*given, **named).lower(lowering_platforms=tuple(platforms) if platforms else None)
        names = (*xla.target_names(), *xla.CUDNN_TARGETS)
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
        return Program.of(jax.export.export(jitted, platforms=platforms, disabled_checks=checks)(*given, **named))

    return exported


def _check_no_refs(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
    for name, argument in (("args", args), ("kwargs", kwargs)):
        for path, leaf in tree_flatten_with_path(argument)[0]:
            if (text := ref_text(leaf)) is not None:
                raise TypeError(
                    f"eqxcallback.export: expected arrays; {path_text(name, path)} is {text}, which a program of another process "
                    "cannot change. Pass the array ref[...], and make the Ref inside of the function."
                )


def _jitted(fn: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
    """`fn` as a jitted function of what stands for its arguments. One that is jitted already keeps its options."""

    def program(*given: PyTree, **named: PyTree) -> PyTree:
        restored = {name: restore(value, named[name]) for name, value in kwargs.items()}
        return portable_results(fn(*map(restore, args, given), **restored))

    if hasattr(fn, "trace") and all(portable(x) is x for x in (*args, *kwargs.values())):
        results = fn.eval_shape(*args, **kwargs)
        if portable(results) is results:
            return fn
    functools.update_wrapper(program, fn, assigned=("__name__", "__qualname__"), updated=())
    return jax.jit(program)
