"""CUDA C++ built for the CPU, by g++ with cuda_cpu.h in front of it."""

import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from ..core import run_compiler


_HERE = pathlib.Path(__file__).parent
_HEADERS = sorted(_HERE.glob("cuda_cpu*.h"))
# Shared memory whose size the launch says.
_ALIGN = r"(?:(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_DYNAMIC = re.compile(
    rf"\bextern\s+(volatile\s+)?{_ALIGN}__shared__\s+{_ALIGN}([\w:<>]+(?:\s+[\w:<>]+)*)\s+(\w+)\s*\[\s*\]\s*;"
)
# What else g++ has another word for: CUDA says some of them twice.
_SAID_TWICE = re.compile(r"\bstatic\s+(?=__shared__)|\binline\b(?=[^;{}()]*\b__forceinline__\b)")
_SCOPES = re.compile(
    r"""//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])*'|(?P<named>\bnamespace\b[\w:\s]*\{|\bextern\s*"C"\s*\{)|"(?:\\.|[^"\\\n])*"|[{}]""",
    re.DOTALL,
)
# -O1 is built faster than it is slower. Aliasing: kernels read elements in packs of 16 bytes. longjmp between stacks is
# what _FORTIFY_SOURCE takes for an attack. A kernel may have the name of a function of the process, or of another build.
# GPUs refuse a vector at an address that is not a multiple of its alignment: the trap is a signal, see cuda_cpu_faults.h.
_FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    *("-fno-gnu-unique", "-Wl,-Bsymbolic"),
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
    "-fstack-clash-protection",  # large arrays end at the guard of a stack, and do not skip it
    # Kernels that run one after the other have the same parameters.
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-parameter"),
)
# The first has the version of all but the last, which is of another wheel.
_CUDA_HEADERS = ("cuda_runtime_api.h", "cuda_fp16*", "cuda_bf16*", "vector_types.h", "crt/host_defines.h")
_EXPORT = """
extern "C" int soft_launch_{index}(void** params, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                                   unsigned seed, char* error, size_t error_size) {{
  return cuda_cpu::launch({entry}, params, grid, block, shared_bytes, seed, error, error_size);
}}
"""


def build(
    source: str, entries: Sequence[str], *, flags: Sequence[str] = (), sanitize: str | None = None
) -> pathlib.Path:
    """The path of a shared library that exports, for entry `i`,

        int soft_launch_i(void** params, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                          unsigned seed, char* error, size_t error_size)

    which runs the grid on the CPU and returns 0, or 1 and a text in `error`. `params` are those of `cuLaunchKernel`: pointers to
    the values. Seed 0 runs threads in order, another one shuffles them.

    **Arguments:**

    - `source`: CUDA C++.
    - `entries`: kernels as C++ expressions, such as `eqxcallback::cross_entropy<float>`.
    - `flags`: more flags of g++.
    - `sanitize`: `"address"`, say. The process that loads the library needs the runtime of that sanitizer.

    **Raises:** `RuntimeError` with what g++ says, or that it does not end, and `OSError` where it is not installed.
    """
    text = source + "".join(_EXPORT.format(index=index, entry=entry) for index, entry in enumerate(entries))
    text = _SAID_TWICE.sub("", _with_dynamic_memory(text))
    include = cuda_include_dir()
    command = ["g++", *_FLAGS, *flags, *(["-g1", f"-fsanitize={sanitize}"] if sanitize else [])]
    # What is built depends on the headers, and not on where they are: environments side by side share it.
    parts = [*(header.read_text() for header in _HEADERS), text, *command, _digest_of(include), compiler()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    command += [] if include is None else ["-isystem", str(include)]
    command += ["-include", str(_HERE / "cuda_cpu.h"), "-x", "c++", "-"]
    library = _folder() / f"{digest[:32]}.so"
    if not library.exists():
        # Another process may be building it as well: the last one wins, and none sees half a file.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = pathlib.Path(folder) / library.name
            environment = {**os.environ, "LC_ALL": "C"}  # its messages are read
            asked = [*command, "-o", str(made)]
            try:
                result = run_compiler(asked, text, environment=environment)
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(
                    f"expected g++ to build {', '.join(entries)} within {error.timeout:g} seconds; {shlex.join(asked)} did not "
                    "end. Run it by hand to see what it waits for."
                ) from None
            if result.returncode != 0:
                raise RuntimeError(f"g++ refused {', '.join(entries)}:\n{result.stderr.decode(errors='replace')}")
            made.replace(library)
    return library


def _with_dynamic_memory(text: str) -> str:
    """Declare it as cuda_cpu.h does, which differs for what all functions of a file share."""
    ends = [match for match in _SCOPES.finditer(text) if match[0][-1] in "{}"]

    def replace(match: re.Match[str]) -> str:
        inside: list[bool] = []  # of what is open, whether it is a function
        for end in ends:
            if end.start() > match.start():
                break
            if end[0] != "}":
                inside.append(end["named"] is None)
            elif inside:
                inside.pop()
        return f"DYN_SHARED{'' if any(inside) else '_OF_FILE'}({match[1] or ''}{match[2]}, {match[3]});"

    return _DYNAMIC.sub(replace, text)


@functools.cache
def cuda_include_dir() -> pathlib.Path | None:
    """Find the folder of cuda_fp16.h: in a wheel of NVIDIA's, or in a toolkit."""
    candidates = []
    spec = importlib.util.find_spec("nvidia")
    for place in [] if spec is None else spec.submodule_search_locations or []:
        candidates += [pathlib.Path(place, "cu13/include"), pathlib.Path(place, "cuda_runtime/include")]
    compiler = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), compiler and os.path.dirname(os.path.dirname(os.path.realpath(compiler)))]
    candidates += [pathlib.Path(root, "include") for root in (*roots, "/usr/local/cuda") if root]
    needed = "cuda_fp16.h", "crt/host_defines.h"  # the two are in different wheels
    return next((path for path in candidates if all((path / name).is_file() for name in needed)), None)


@functools.cache
def _digest_of(include: pathlib.Path | None) -> str:
    """Digest the headers of CUDA that are read."""
    read = [] if include is None else [path for name in _CUDA_HEADERS for path in sorted(include.glob(name))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in read)).hexdigest()


@functools.cache
def compiler() -> str:
    """The version of g++.

    **Raises:** `OSError` where there is none, and `subprocess.SubprocessError` if it fails or does not end.
    """
    done = run_compiler(["g++", "--version"])
    done.check_returncode()
    return done.stdout.decode(errors="replace")


def _folder() -> pathlib.Path:
    """Return the folder of builds, kept until the machine restarts. Its files are loaded, so it has to be this user's own."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"eqxcallback-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not folder.is_dir() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to others, or others may write to it. Remove it.")
    return folder
