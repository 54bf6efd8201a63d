"""The fake driver, built and put in place of CUDA's."""

import ctypes
import functools
import hashlib
import pathlib
import subprocess
import tempfile
from collections.abc import Mapping

from eqxcallback import xla
from eqxcallback.emulation import build


SOURCE = pathlib.Path(__file__).with_name("driver.cc")
HEADERS = [SOURCE.with_name(f"driver_{part}.h") for part in ("graphs", "hopper")]


@functools.cache
def build_driver() -> pathlib.Path:
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in (SOURCE, *HEADERS)), digest_size=8).hexdigest()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="eqxcallback-driver-"))
    path = folder / f"libcuda-{digest}.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(SOURCE), "-o", str(path), "-ldl"], check=True)
    return path


class Driver:
    """The view that tests have of the driver, and how they make it fail."""

    def __init__(self) -> None:
        self._path = build_driver()
        self._library = ctypes.CDLL(str(self._path))
        self._library.software_log.restype = ctypes.c_char_p
        self.reset()

    def reset(self) -> None:
        self._library.software_reset()
        self.reopen()

    def reopen(self) -> None:
        """As in a process that has not called it yet."""
        xla.launch_with(str(self._path))
        self._library.software_forget_contexts()

    def remove(self) -> None:
        """As on a machine that has none."""
        xla.launch_with("/nowhere.so")

    @property
    def log(self) -> list[str]:
        return self._library.software_log().decode().splitlines()

    @property
    def launches(self) -> list[str]:
        return [line for line in self.log if line.startswith("cuLaunchKernel")]

    @property
    def num_modules(self) -> int:
        """The number of modules that are loaded."""
        return self._library.software_modules()

    @property
    def num_graphs(self) -> int:
        """Streams and graphs that were made and not destroyed."""
        return self._library.software_graphs()

    @property
    def library(self) -> ctypes.CDLL:
        """For kernels that call the driver themselves."""
        return self._library

    def stand_in(self, image: bytes, source: str, kernels: Mapping[str, str]) -> None:
        """Let kernels that were built for the CPU of `source` run where `image`, compiled of `source`, is loaded.

        **Arguments:** `kernels`: `{name in the image: C++}`.
        """
        library = str(build(source, list(kernels.values()))).encode()
        self._library.software_stand_in(image, ctypes.c_size_t(len(image)), library, "\n".join(kernels).encode())

    def fail(self, call: str, code: int) -> None:
        """The next call of that name returns this error."""
        self._library.software_fail(call.encode(), code)

    def seed(self, value: int) -> None:
        """The order in which threads run."""
        self._library.software_seed(value)
