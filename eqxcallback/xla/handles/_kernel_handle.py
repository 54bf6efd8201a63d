"""The handle of a kernel, as users see it: an opaque name, the same one in the next process."""

import dataclasses
import hashlib
from importlib import metadata
from typing import Any

from ._handles import handle_for
from ._lowering import LaunchLowering, NativeLowering, PythonLowering


@dataclasses.dataclass(frozen=True)
class KernelHandle:
    """A handle of a kernel, as a compiled program refers to it, in a form that stands in its text.

    Opaque: it says which kernel, and cannot call it. Handles are equal if the text of programs is, in another process too;
    they can be hashed, printed, pickled and weakly referred to. They come from the rows of [`eqxcallback.inspect`][].

    The handle of a Python kernel belongs to the kernel. It lives as long as anything that can call that: every program that
    was compiled with it, and the function that it was made for. Holding a handle keeps no kernel alive.

    **Attributes:**

    - `kind`: `"python"`; `"native"`, a handler in C++; or `"device"`, code that our launcher launches on a GPU.
    - `name`: of the callback, the layer, or the op.
    - `content_hash`: 16 hexadecimal digits. Of a Python kernel, its module, name and types of arguments: its code is what the
        process has under that name. Of a handler, its library. Of code for a GPU, its sources and declarations.
    """

    kind: str
    name: str
    content_hash: str


def python_handle(body: Any) -> KernelHandle:
    """The one of `body`, or of an equal body that programs have already."""
    entry = handle_for(body)
    if entry.owner.kernel_handle is None:
        entry.owner.kernel_handle = KernelHandle("python", repr(entry.owner), f"{entry.key:016x}")
    return entry.owner.kernel_handle


def kernel_handle(lowering: NativeLowering | PythonLowering, name: str) -> KernelHandle:
    """Return the handle of the kernel that `lowering` calls, for the op `name`."""
    if isinstance(lowering, PythonLowering):
        return python_handle(lowering.body)
    if isinstance(lowering, LaunchLowering):
        # The target of a user's library has its hash. Ours are as old as this package.
        return KernelHandle("native", name, _digest(f"{lowering.target} {metadata.version('eqxcallback')}"))
    return KernelHandle("device", name, _digest(lowering.description))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
