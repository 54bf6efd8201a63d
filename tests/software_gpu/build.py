"""Builds CUDA sources for the CPU, with cuda_cpu.h in front of them."""

import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence


_HERE = pathlib.Path(__file__).parent
_HEADERS = sorted(_HERE.glob("cuda_cpu*.h"))
_INCLUDE = re.compile(r'^[ \t]*#include[ \t]+"([^"\n]+)"', re.MULTILINE)
# -O1 is built faster than it is slower. Aliasing: kernels read elements in packs of 16 bytes. longjmp between stacks is
# what _FORTIFY_SOURCE takes for an attack.
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    # Kernels that run one after the other have the same parameters.
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-parameter"),
)
_EXPORT = """
extern "C" int soft_launch_{index}(void** params, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                                   unsigned seed, char* error, size_t error_size) {{
  return cuda_cpu::launch({entry}, params, grid, block, shared_bytes, seed, error, error_size);
}}
"""


def build(
    source: str | pathlib.Path, entries: Sequence[str], *, flags: Sequence[str] = (), sanitize: str | None = None
) -> pathlib.Path:
    """The path of a shared library that exports, for entry `i`,

        int soft_launch_i(void** params, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                          unsigned seed, char* error, size_t error_size)

    which runs the grid on the CPU and returns 0, or 1 and a text in `error`. `params` are those of `cuLaunchKernel`: pointers to
    the values. Seed 0 runs threads in order, another one shuffles them.

    **Arguments:**

    - `source`: CUDA C++: a text, or the path of a file, whose quoted includes are put into it.
    - `entries`: kernels as C++ expressions, such as `eqxcallback::rms_norm<float>`.
    - `flags`: more flags of g++.
    - `sanitize`: `"address"`, say. The process that loads the library needs the runtime of that sanitizer.
    """
    text = _expanded(source, set()) if isinstance(source, pathlib.Path) else source
    text += "".join(_EXPORT.format(index=index, entry=entry) for index, entry in enumerate(entries))
    include = cuda_include_dir()
    if include is None:
        raise FileNotFoundError(
            "no cuda_fp16.h: neither a wheel of nvidia-cuda-runtime nor a CUDA toolkit is installed"
        )
    command = ["g++", *_FLAGS, *flags, *(["-g1", f"-fsanitize={sanitize}"] if sanitize else [])]
    command += ["-isystem", str(include), "-include", str(_HERE / "cuda_cpu.h"), "-x", "c++", "-"]
    parts = [*(header.read_text() for header in _HEADERS), text, *command, _compiler()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    library = pathlib.Path(tempfile.gettempdir()) / f"eqxcallback-software-gpu-{os.getuid()}" / f"{digest[:32]}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        # Another process may be building it as well: the last one wins, and none sees half a file.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = pathlib.Path(folder) / library.name
            result = subprocess.run([*command, "-o", str(made)], input=text, capture_output=True, text=True)
            if result.returncode != 0:
                raise RuntimeError(f"g++ refused {entries}:\n{result.stderr}")
            made.replace(library)
    return library


@functools.cache
def cuda_include_dir() -> pathlib.Path | None:
    """Where cuda_fp16.h is: in a wheel of NVIDIA's, or in a toolkit."""
    candidates = []
    spec = importlib.util.find_spec("nvidia")
    for place in [] if spec is None else spec.submodule_search_locations or []:
        candidates += [pathlib.Path(place, "cu13/include"), pathlib.Path(place, "cuda_runtime/include")]
    compiler = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), compiler and os.path.dirname(os.path.dirname(os.path.realpath(compiler)))]
    candidates += [pathlib.Path(root, "include") for root in (*roots, "/usr/local/cuda") if root]
    return next((path for path in candidates if (path / "cuda_fp16.h").is_file()), None)


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _expanded(path: pathlib.Path, seen: set[pathlib.Path]) -> str:
    """The text of a file with its quoted includes in it, each once, and the lines that errors shall name."""
    seen.add(path.resolve())

    def included(match: re.Match[str]) -> str:
        inner = path.parent / match[1]
        text = "" if inner.resolve() in seen else _expanded(inner, seen)
        line = match.string.count("\n", 0, match.start()) + 2
        return f'{text}\n#line {line} "{path}"'

    return f'#line 1 "{path}"\n' + _INCLUDE.sub(included, path.read_text())
