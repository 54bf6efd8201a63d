"""Python callables in exported programs: by a name that another process can import."""

import base64
import hashlib
import pickle
import pickletools
import threading
from typing import NoReturn

import numpy as np
from jax.interpreters import mlir

from ... import _ext
from ...core import callable_name
from ._body import PythonBody


# Keys of exported programs are hashes from here on.
_FIRST_KEY = 2**62

_imported: dict[int, _ext.Handle] = {}
_lock = threading.Lock()


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    return bool(getattr(ctx.module_context.lowering_parameters, "for_export", False))


def portable_attributes(body: PythonBody) -> dict[str, object]:
    """Return the attributes of an exported call: how to import its body, and a key for it."""
    name = callable_name(body.callback)
    try:
        data = pickle.dumps(body.portable())
        if any(argument == "__main__" for _, argument, _ in pickletools.genops(data)):
            raise pickle.PicklingError("it is defined in the main program, which is another one elsewhere")
    except Exception as error:
        raise ValueError(
            f"{name} cannot be exported: another process finds a Python kernel by the name of its module, and this one has "
            f"none ({error}). Define it at the top of a module that can be imported."
        ) from None
    text = base64.b64encode(data).decode()
    return {"key": np.uint64(_key(text)), "portable": text}


def _key(text: str) -> int:
    return _FIRST_KEY + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _FIRST_KEY


def import_exported(text: str) -> None:
    """Make the callable of an exported program now, and not when it is first called."""
    _import(_key(text), text)


def _import(key: int, text: str) -> None:
    """Make the callable of an exported program. It stays: nobody tells when the program is gone."""
    if key in _imported:
        return
    try:
        # Without the lock: the module may load programs itself, or wait for a thread that imports it.
        body = PythonBody.of_portable(pickle.loads(base64.b64decode(text)))
    except Exception as error:
        raise ImportError(
            f"eqxcallback: the Python kernel of an exported program cannot be imported ({type(error).__name__}: {error}). "
            "Make the module that it was exported from importable, with the names that it had."
        ) from error
    with _lock:
        if key not in _imported:
            _imported[key] = _ext.Handle(key, body, body, direct=False)


def _refuse_to_pickle(handle: _ext.Handle) -> NoReturn:
    """Refuse `jax.experimental.serialize_executable` of a program that owns Python callables."""
    name = repr(handle.owner)
    raise TypeError(
        f"{name} is a Python kernel of this process, and so a compiled program that calls it cannot be serialized. Export the "
        "function instead, with eqxcallback.export, which finds Python kernels by name in the other process."
    )


def register() -> None:
    _ext.on_unknown_key(_import)
    setattr(_ext.Handle, "__reduce__", _refuse_to_pickle)  # noqa: B010 - a type checker knows no such method
