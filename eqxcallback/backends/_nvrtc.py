"""NVIDIA's run-time compiler: CuPy's if it is there, else that of the wheel or of the system. None of them needs a GPU."""

import ctypes
import functools
import importlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable


class CompileError(Exception):
    """The source does not compile. Its text is the compiler's log."""


@runtime_checkable
class Nvrtc(Protocol):
    version: tuple[int, ...]
    archs: tuple[int, ...]

    def compile(
        self, source: str, name: str, options: Sequence[str], entries: Sequence[str], is_cubin: bool
    ) -> tuple[bytes, list[str], str]:
        """The image, the names that the entries have in it, and the log."""
        ...


@functools.cache
def find() -> Nvrtc:
    """Raises `ImportError`, with what to install, where there is none."""
    problems = []
    _load_builtins()
    for technology in (_CuPy, _Library):
        try:
            nvrtc = technology()
            nvrtc.compile("__global__ void empty() {}", "empty.cu", (), ("empty",), False)
            return nvrtc
        except Exception as error:  # CuPy raises anything when its libraries do not fit
            problems.append(f"{technology.__name__.strip('_')}: {error}")
    raise ImportError(
        f"there is no NVRTC, NVIDIA's run-time compiler ({'; '.join(problems)}). Install eqxcallback[cuda13], or "
        "nvidia-cuda-nvrtc and nvidia-cuda-runtime."
    )


class _CuPy:
    """NVRTC by way of `cupy.cuda.nvrtc`."""

    def __init__(self) -> None:
        nvrtc: Any = importlib.import_module("cupy").cuda.nvrtc
        self._nvrtc = nvrtc
        self.version: tuple[int, ...] = tuple(nvrtc.getVersion())
        self.archs: tuple[int, ...] = tuple(nvrtc.getSupportedArchs())

    def compile(
        self, source: str, name: str, options: Sequence[str], entries: Sequence[str], is_cubin: bool
    ) -> tuple[bytes, list[str], str]:
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(source, name, (), ())
        try:
            for entry in entries:
                nvrtc.addNameExpression(program, entry)
            try:
                nvrtc.compileProgram(program, tuple(options))
            except nvrtc.NVRTCError:
                raise CompileError(nvrtc.getProgramLog(program)) from None
            image = nvrtc.getCUBIN(program) if is_cubin else nvrtc.getPTX(program)
            names = [nvrtc.getLoweredName(program, entry) for entry in entries]
            # CuPy takes the last byte for the end of a text, also of a cubin, which is not whole without it.
            return bytes(image) + b"\0", [_text(name) for name in names], nvrtc.getProgramLog(program)
        finally:
            nvrtc.destroyProgram(program)


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode()


class _Library:
    """NVRTC by its C functions."""

    def __init__(self) -> None:
        self._library = _open()
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        self.version: tuple[int, ...] = (major.value, minor.value)
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", archs)
        self.archs: tuple[int, ...] = tuple(archs)

    def compile(
        self, source: str, name: str, options: Sequence[str], entries: Sequence[str], is_cubin: bool
    ) -> tuple[bytes, list[str], str]:
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        try:
            for entry in entries:
                self._call("AddNameExpression", program, entry.encode())
            flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), flags)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code != 0:
                raise CompileError(log or self._library.nvrtcGetErrorString(code).decode())
            names = []
            for entry in entries:
                lowered = ctypes.c_char_p()
                self._call("GetLoweredName", program, entry.encode(), ctypes.byref(lowered))
                names.append((lowered.value or b"").decode())
            return self._bytes(program, "CUBIN" if is_cubin else "PTX"), names, log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *args: object) -> None:
        code = getattr(self._library, f"nvrtc{function}")(*args)
        if code != 0:
            raise RuntimeError(f"nvrtc{function}: {self._library.nvrtcGetErrorString(code).decode()}")


def _load_builtins() -> None:
    """The compiler looks for them by name when it compiles, whoever has loaded it, and its wheel does not say where they are."""
    for folder in _folders("lib"):
        for path in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(path))


def _open() -> ctypes.CDLL:
    for folder in _folders("lib"):
        for path in sorted(folder.glob("libnvrtc.so.*"), reverse=True):
            return ctypes.CDLL(str(path))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError("no libnvrtc.so, neither of a wheel nor of the system")


def include_options(major: int) -> list[str]:
    """Return the options for the folders of CUDA's headers, such as `cuda_bf16.h`. Those that fit the compiler come first."""
    # All of them: the wheel of the runtime lacks what others have, `mma.h` and `cub/` among it, and a toolkit has everything.
    names = (f"cu{major}",) if major >= 13 else _OF_CUDA_12
    wheels = [folder for folder in _folders("include") if folder.parent.name in names]
    toolkits = [
        folder
        for folder in _system_folders()
        if (folder / "cuda_fp16.h").is_file() and _major_of(folder) in (major, None)
    ]
    folders = []
    for folder in dict.fromkeys([*wheels, *toolkits]):
        folders += [folder, *(path for path in (folder / "cccl", folder.parent / "cccl") if path.is_dir())]
    return [f"--include-path={path}" for path in folders]


def _major_of(folder: pathlib.Path) -> int | None:
    """The version of a toolkit's headers."""
    header = folder / "cuda.h"
    match = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace")) if header.is_file() else None
    return int(match[1]) // 1000 if match else None


# From CUDA 13 on, all wheels share one folder.
_OF_CUDA_12 = ("cuda_nvrtc", "cuda_runtime", "cuda_nvcc", "cuda_cccl")


def _folders(kind: str) -> Iterator[pathlib.Path]:
    """Yield the folders called `kind` in NVIDIA's wheels, newest major version first."""
    for root in _roots():
        for folder in (*sorted(root.glob("cu[0-9]*"), reverse=True), *(root / name for name in _OF_CUDA_12)):
            if (folder / kind).is_dir():
                yield folder / kind


def _roots() -> Iterable[pathlib.Path]:
    """Return the folders that hold NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    return map(pathlib.Path, (spec and spec.submodule_search_locations) or ())


def _system_folders() -> Iterator[pathlib.Path]:
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            yield pathlib.Path(os.environ[variable]) / "include"
    yield pathlib.Path("/usr/local/cuda/include")
