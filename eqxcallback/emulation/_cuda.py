"""CUDA C++ on a CPU: what was built, loaded and launched."""

import ctypes
import functools
import re
import subprocess
from collections.abc import Sequence

from ._build import build, compiler, cuda_include_dir
from ._errors import NotEmulated


Dims = tuple[int, int, int]

_NEEDS_HEADERS = re.compile("cuda_(fp16|bf16|fp8)|half|bfloat16|__nv_")
_HEADERS = "CUDA's headers, which have the types of 8 and 16 bits, are in eqxcallback[emulate]."

_MOST_TEXT = 1000  # bytes in the error of a launch


def unavailable() -> str | None:
    """Why CUDA C++ cannot be emulated here: `None` if it can."""
    try:
        compiler()
    except (OSError, subprocess.SubprocessError) as error:
        return f"CUDA C++ is emulated by g++, which cannot be run ({error}). Install it."
    return None


class CudaLibrary:
    """The kernels of one source."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)

    @staticmethod
    def built(text: str, entries: tuple[str, ...], flags: tuple[str, ...]) -> "CudaLibrary":
        """**Raises:** `NotEmulated` if g++ is not there or refuses it."""
        if (reason := unavailable()) is not None:
            raise NotEmulated(reason)
        outcome = _built(text, entries, flags)
        if isinstance(outcome, str):
            raise NotEmulated(outcome)
        return outcome

    def wrong(self, entry: int, pointers: Sequence[int], want: Sequence[int], size: Sequence[int]) -> int:
        """A number that says which parameter of the kernel is another one than this: 0 is none.

        **Arguments:** for each parameter, whether it is a pointer, of which kind, and of how many bytes.
        """
        numbers = ctypes.c_int * len(want)
        return getattr(self._library, f"soft_wrong_{entry}")(
            len(want), numbers(*pointers), numbers(*want), numbers(*size)
        )

    def launch(
        self, entry: int, grid: Dims, block: Dims, shared_bytes: int, parameters: Sequence[int], seed: int
    ) -> str | None:
        """Run a grid. Returns what went wrong, or `None`.

        **Arguments:**

        - `parameters`: the address of the value of each parameter.
        - `seed`: of the order in which threads run; 0 is in order.
        """
        if 0 in grid:
            return None
        error = ctypes.create_string_buffer(_MOST_TEXT)
        sizes = ctypes.c_uint * 3
        failed = getattr(self._library, f"soft_launch_{entry}")(
            (ctypes.c_void_p * len(parameters))(*parameters),
            sizes(*grid),
            sizes(*block),
            ctypes.c_uint(shared_bytes),
            ctypes.c_uint(seed),
            error,
            ctypes.c_size_t(_MOST_TEXT),
        )
        return error.value.decode(errors="replace") if failed else None


@functools.lru_cache(maxsize=512)
def _built(text: str, entries: tuple[str, ...], flags: tuple[str, ...]) -> CudaLibrary | str:
    """Or why not, which is known as well once it was tried."""
    try:
        return CudaLibrary(str(build(text, entries, flags=flags)))
    except (RuntimeError, OSError) as error:
        # The assembler's errors count too: inline PTX gets that far.
        lines = [line for line in str(error).splitlines() if "error: " in line.lower()] or str(error).splitlines()
        hint = "" if cuda_include_dir() or not _NEEDS_HEADERS.search(text) else f" {_HEADERS}"
        return f"g++ does not build it for the emulator: {lines[0].removesuffix('.')}.{hint}"
