"""Libraries compiled from a text by the machine's own compiler, and kept on disk by what they are made of."""

import ctypes
import functools
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from .. import xla
from ..core import run_compiler
from ._cache import cache_folder, key_of
from ._library import digest_of
from ._source import read_source


_FLAGS = ("-O2", "-fPIC", "-shared")
_COMPILERS = {"c": ("CC", ("cc", "gcc", "clang")), "c++": ("CXX", ("c++", "g++", "clang++"))}

# Headers of C say it for C++ alone, and may be part of the text.
_GUARDED = re.compile(r'^[ \t]*#[ \t]*if[^\n]*\b__cplusplus\b[^\n]*\s+extern "C"', re.MULTILINE)


def built(source: str | os.PathLike[str], options: Sequence[str], who: str, *, is_handler: bool) -> pathlib.Path:
    """The path of the library: of C++ if it is a handler, if its file says so, or if `extern "C"` has no guard for C; else of C.

    **Raises:** `ValueError` with what the compiler says, or where there is none.
    """
    text, file = read_source(source, who, options)
    says_so = 'extern "C"' in _GUARDED.sub("", text) and not file.endswith(".c")
    is_cpp = is_handler or says_so or file.endswith((".cc", ".cpp", ".cxx"))
    language = "c++" if is_cpp else "c"
    file = file if not isinstance(source, str) else "source.cc" if is_cpp else "source.c"
    folder = [] if isinstance(source, str) else ["-I", os.path.dirname(os.path.abspath(source))]
    compiler = _compiler(language, who)
    arguments = [*(["-std=c++17"] if is_cpp else []), *_FLAGS, *options, *folder]
    headers, headers_version = xla.headers() if is_handler else ("", "")
    version = _version(compiler, who)
    # What is made for this processor is not for another one that shares the folder.
    processor = xla.device_text("cpu") if any("native" in option for option in options) else platform.machine()
    key = key_of(("library", text, file, compiler, arguments, version, processor, headers_version))
    library = cache_folder() / f"{key}.so"
    # One that was cut off, as where the machine stopped, is made again.
    if not library.exists() or _why_not_loaded(library) is not None:
        arguments += ["-isystem", headers] if headers else []
        # Libraries that options name come after what needs them.
        command = [*compiler, "-x", language, "-", "-x", "none", *arguments]
        _build(command, f'#line 1 "{file}"\n{text}', library, who)
        if (error := _why_not_loaded(library)) is not None:
            raise ValueError(
                f"{who}: the library that was compiled from the source cannot be loaded ({error}). Name what it lacks in "
                f"options, as -lNAME; or, if {library.parent} does not allow to run files, set EQXCALLBACK_CACHE_DIR."
            )
    return library


def _why_not_loaded(library: pathlib.Path) -> OSError | None:
    try:
        _load(str(library), digest_of(library))
    except OSError as error:
        return error
    return None


@functools.lru_cache(maxsize=256)
def _load(path: str, digest: str) -> None:
    del digest  # one that was made again is another one
    ctypes.CDLL(path)


def _build(command: Sequence[str], text: str, library: pathlib.Path, who: str) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Others see it whole or not at all.
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".new-") as folder:
            made = pathlib.Path(folder, "library.so")
            done = run_compiler([*command, "-o", str(made)], text)
            log = done.stderr.decode(errors="replace").strip()
            if done.returncode != 0 and log:
                raise ValueError(f"{who}: the source does not compile:\n{log}")
            if done.returncode != 0 or not made.exists():
                raise ValueError(
                    f"{who}: expected the compiler to write a library; {shlex.join(command)} ended with the code "
                    f"{done.returncode} and {f'wrote none: {log}' if log else 'without a message'}. Correct options, or name "
                    "another compiler by the environment variable CC or CXX."
                )
            os.replace(made, library)
    except subprocess.TimeoutExpired as error:
        raise _hangs(error, who) from None
    except OSError as error:
        raise ValueError(
            f"{who}: the library cannot be kept in {library.parent} ({error}). Set EQXCALLBACK_CACHE_DIR to a folder of yours."
        ) from None


def _hangs(error: subprocess.TimeoutExpired, who: str) -> ValueError:
    return ValueError(
        f"{who}: expected the compiler to end within {error.timeout:g} seconds; {shlex.join(error.cmd)} did not. Run it by hand "
        "to see what it waits for, or name another compiler by the environment variable CC or CXX."
    )


def _compiler(language: str, who: str) -> tuple[str, ...]:
    """The path of the compiler, and arguments that the environment gives it, as in `CC="ccache gcc"`."""
    variable, names = _COMPILERS[language]
    try:
        asked = shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise ValueError(f"{who}: the environment variable {variable} cannot be read as a command ({error}).") from None
    if asked:
        names = (asked[0],)
    for name in names:
        if path := shutil.which(name):
            return path, *asked[1:]
    raise ValueError(
        f"{who}: expected a compiler of {language.upper()} to compile the source; found none of {', '.join(names)}. Install "
        f"one, or say where it is by the environment variable {variable}."
    )


def _version(compiler: tuple[str, ...], who: str) -> str:
    try:
        return _version_text(compiler)
    except OSError as error:
        raise ValueError(f"{who}: the compiler {compiler[0]} cannot be run ({error}). Install another one.") from None
    except subprocess.TimeoutExpired as error:
        raise _hangs(error, who) from None


@functools.cache
def _version_text(compiler: tuple[str, ...]) -> str:
    # Without input: one that asks for more waits for nobody.
    return run_compiler([*compiler, "--version"]).stdout.decode(errors="replace")
