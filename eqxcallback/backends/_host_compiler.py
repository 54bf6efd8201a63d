"""Libraries compiled from a text by the machine's own compiler, and kept on disk by what they are made of."""

import functools
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from .. import xla
from ._cache import cache_folder, key_of
from ._source import read_source


_FLAGS = ("-O2", "-fPIC", "-shared")
_COMPILERS = {"c": ("CC", ("cc", "gcc", "clang")), "c++": ("CXX", ("c++", "g++", "clang++"))}


def built(source: str | os.PathLike[str], options: Sequence[str], who: str, *, is_handler: bool) -> pathlib.Path:
    """The path of the library. It is C++ if it is a handler, if it says `extern "C"`, or if its file says so; else C.

    **Raises:** `ValueError` with what the compiler says, or where there is none.
    """
    text, file = read_source(source, who, options)
    is_cpp = is_handler or 'extern "C"' in text or file.endswith((".cc", ".cpp", ".cxx"))
    language = "c++" if is_cpp else "c"
    file = file if not isinstance(source, str) else "source.cc" if is_cpp else "source.c"
    folder = [] if isinstance(source, str) else ["-I", os.path.dirname(os.path.abspath(source))]
    command = [_compiler(language, who), *(["-std=c++17"] if is_cpp else []), *_FLAGS, *options, *folder]
    headers, headers_version = xla.headers() if is_handler else ("", "")
    version = _version(command[0])
    # What is made for this processor is not for another one that shares the folder.
    processor = xla.device_text("cpu") if any("native" in option for option in options) else platform.machine()
    key = key_of(("library", text, file, command, version, processor, headers_version))
    library = cache_folder() / f"{key}.so"
    if not library.exists():
        _build(
            [*command, *(["-isystem", headers] if headers else [])], language, f'#line 1 "{file}"\n{text}', library, who
        )
    return library


def _build(command: Sequence[str], language: str, text: str, library: pathlib.Path, who: str) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Others see it whole or not at all.
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".new-") as folder:
            made = pathlib.Path(folder, "library.so")
            # Libraries that options name come after what needs them.
            arguments = [command[0], "-x", language, "-", "-x", "none", *command[1:], "-o", str(made)]
            done = subprocess.run(arguments, input=text, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ValueError(f"{who}: the source does not compile:\n{done.stderr.strip()}")
            os.replace(made, library)
    except OSError as error:
        raise ValueError(
            f"{who}: the library cannot be kept in {library.parent} ({error}). Set EQXCALLBACK_CACHE_DIR to a folder of yours."
        ) from None


def _compiler(language: str, who: str) -> str:
    variable, names = _COMPILERS[language]
    for name in (os.environ.get(variable), *names):
        if name and (path := shutil.which(name)):
            return path
    raise ValueError(
        f"{who}: expected a compiler of {language.upper()} to compile the source; found none of {', '.join(names)}. Install "
        f"one, or say where it is by the environment variable {variable}."
    )


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
