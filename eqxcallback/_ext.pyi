"""Types of the C++ extension (csrc/), for type checkers, and the docstrings of what is public."""

import enum
from collections.abc import Callable
from typing import Any

import numpy as np

class ExecutionStage(enum.Enum):
    """XLA's stages of a call. A Python kernel runs in `EXECUTE` only."""

    INSTANTIATE = 0
    PREPARE = 1
    INITIALIZE = 2
    EXECUTE = 3

class ExecutionContext:
    """What a kernel is told about the call it serves. `ExecutionContext()` makes one of a CPU, to call a kernel by hand.

    **Attributes:**

    - `stage`: an `ExecutionStage`.
    - `platform`: `"cpu"` or `"cuda"`.
    - `device_ordinal`: the number of the device among those of its platform in this process.
    - `stream`: the address of XLA's stream on a GPU, to launch on; `None` on a CPU.
    """

    def __init__(self) -> None: ...
    @property
    def stage(self) -> ExecutionStage: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_ordinal(self) -> int: ...
    @property
    def stream(self) -> int | None: ...

class Buffer:
    """XLA's memory for one operand or result, lent to a kernel for the length of one call.

    Row-major. Inputs are read-only. After the call every access raises `RuntimeError`. `Buffer(array, writeable=...)` makes
    one over a C-contiguous NumPy array, to call a kernel by hand.

    Elements of less than a byte (`int4`, `float4_e2m1fn`, ...) are packed in XLA's memory: `numpy()` unpacks them, one
    byte each, and what was written is packed again at the end of the call.

    **Attributes:** `shape`, `dtype` (a NumPy dtype), `ndim`, `size` (elements), `nbytes`, `strides` (in bytes), `writeable`.
    """

    def __init__(self, array: np.ndarray, *, writeable: bool | None = None) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def writeable(self) -> bool: ...
    @property
    def _address(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def write(self, value: Any) -> None:
        """Copy `value` into an output. Its shape and dtype must be those of the Buffer: nothing is broadcast or cast."""

    def numpy(self) -> np.ndarray:
        """A NumPy array over this memory (CPU). Read-only for an input."""

    def cupy(self) -> Any:
        """A CuPy array over this memory (GPU). Launch on `ctx.stream`."""

    def torch(self) -> Any:
        """A PyTorch tensor over this memory. PyTorch has no read-only tensors: do not write to those of inputs."""

class Handle:
    def __init__(self, key: int, body: Callable[..., None], owner: object = None, *, direct: bool) -> None: ...
    @property
    def owner(self) -> Any: ...
    @property
    def key(self) -> int: ...
    def __call__(self, *args: Any) -> None: ...
    @staticmethod
    def exists(key: int) -> bool: ...

def resume(*args: Any) -> None: ...
def set_jax_handler(capsule: object) -> None: ...
def on_unknown_key(hook: Callable[[int, str], None]) -> None: ...
def on_failure(hook: Callable[[BaseException, Any, tuple[Buffer, ...], tuple[Buffer, ...], str], str]) -> None: ...
def set_checked_call(
    hook: Callable[[Callable[..., None], bool, ExecutionContext, tuple[Buffer, ...], tuple[Buffer, ...]], None] | None,
) -> None: ...
def python_call_targets() -> dict[str, dict[str, Any]]: ...
def cpu_ops() -> dict[str, Any]: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
