"""Programs that outlive the process: how they come back."""

import io
import os
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from .. import backends, xla
from ._program import Program


@runtime_checkable
class Readable(Protocol):
    """A file that is open for reading bytes. `typing.BinaryIO` has more, which `io.BytesIO` lacks."""

    def read(self) -> bytes: ...


def load(file: str | os.PathLike[str] | bytes | bytearray | Readable) -> Program:
    """Bring back a program of [`eqxcallback.export`][], and what it needs: its Python kernels are imported.

    **Arguments:**

    - `file`: what `serialize()` of the program gave: a path, a file that is open for reading bytes, or the bytes.

    **Returns:**

    The program, a `jax.export.Exported`. It is called with the arguments that it was exported with: `program(model, x)`, or
    `program.call(model, x)`, under `jit` as well.

    **Raises:**

    - `ValueError` for anything else than such a program, and if it calls a kernel of a library of yours that this process has not
        registered: import the module that defines the op, and call `op.register()`, or `register()` of the class of a layer.
        Also for machine code of a `NumbaKernel` that cannot run here: on another processor, or without the Numba that made it.
    - `ImportError` for a Python kernel that cannot be imported.
    """
    name, data = _read(file)
    who = f"eqxcallback.load({name})"
    try:
        exported = jax.export.deserialize(bytearray(data))
    except Exception as error:
        raise ValueError(
            f"{who}: expected what serialize() of an exported program gives; got something else "
            f"({type(error).__name__}: {error})."
        ) from error
    try:
        missing = xla.bring_back(bytes(exported.mlir_module_serialized), exported.platforms, backends.load_code)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from error
    if missing:
        raise ValueError(f"{who}: {_remedy(missing[0], exported.platforms)}")
    return Program.of(exported)


def _read(file: Any) -> tuple[str, bytes]:
    if isinstance(file, bytes | bytearray):
        return "bytes", bytes(file)
    if isinstance(file, io.IOBase) or hasattr(file, "read"):
        return getattr(file, "name", "file"), file.read()
    try:
        path = os.fspath(file)
    except TypeError:
        raise TypeError(
            f"eqxcallback.load: expected a path, bytes, or a file that is open for reading bytes; got {file!r} of type "
            f"{type(file).__name__}."
        ) from None
    with open(path, "rb") as stream:
        return path, stream.read()


def _remedy(target: str, platforms: Sequence[str]) -> str:
    where = f"a handler {target!r} for {' and '.join(platforms)}"
    # A library's targets end with the hash of its content.
    match = re.fullmatch(r"eqxcallback_(\w+)_([0-9a-f]{16})(?:_examples)?", target)
    if match is None:
        return f"expected {where}, which this version of the package does not have. Install the one that exported the program."
    symbol, digest = match.groups()
    if backends.is_of_addresses(target.removesuffix("_examples")):
        return (
            f"the program has the address of {symbol}, a function of the process that exported it. Export one with a kernel from "
            "a library, or in Numba without calls of Python."
        )
    others = [name for name in xla.target_names() if name.startswith(f"eqxcallback_{symbol}_")]
    rebuilt = f" This process has {others[0]!r}: a library that was built again is another kernel." if others else ""
    return (
        f"the program calls {symbol} of a library of yours, whose content has the hash {digest}; expected {where}, and nobody "
        f"has registered it.{rebuilt} Import the module that defines its Op or Layer, and call register() of it before."
    )
