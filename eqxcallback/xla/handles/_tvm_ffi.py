"""The handlers of functions of the TVM-FFI ABI."""

import ctypes

from ... import _ext
from ._libraries import address_of, register_front


def load_tvm_ffi(path: str) -> None:
    """Find what handlers call of `libtvm_ffi`, the library at `path`. It stays loaded."""
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    _ext.set_tvm_ffi_runtime(
        address_of(library.TVMFFIErrorMoveFromRaised),
        address_of(library.TVMFFIObjectDecRef),
        address_of(library.TVMFFIEnvSetStream),
    )


def register_tvm_ffi_function(
    target: str, name: str, address: int, set_threads: int, platform: str, may_be_captured: bool, op: str
) -> None:
    """Register a handler that calls functions of the TVM-FFI ABI, and name `op` in its errors.

    **Arguments:**

    - `address`, `set_threads`: as in `register_c_function`.
    - `platform`: `"cpu"` or `"cuda"`.
    - `may_be_captured`: whether XLA may record the calls.

    **Raises:** `RuntimeError` if there are too many.
    """
    handler = _ext.tvm_ffi_handlers()["cuda captured" if platform == "cuda" and may_be_captured else platform]
    register_front(target, platform, handler, name, set_threads, address, op)
