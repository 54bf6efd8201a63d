"""Functions of the user's shared libraries."""

import functools
import hashlib
import os
import pathlib

from .. import xla


def function_of(library: str | os.PathLike[str], symbol: str, who: str, remedy: str) -> xla.LibraryFunction:
    """**Arguments:** `remedy`: how to export the symbol, a sentence that ends the error if the library does not."""
    path = os.fspath(library)
    try:
        status = os.stat(path)
        check_whole(path)
        digest = _digest(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
        return xla.library_function(path, digest, symbol)
    except OSError as error:
        raise ValueError(
            f"{who}: the library {path} cannot be loaded ({error}). Build it, or correct the path."
        ) from None
    except AttributeError:
        raise ValueError(f"{who}: the library {path} has no symbol {symbol!r}. {remedy}") from None


def check_whole(library: str | os.PathLike[str]) -> None:
    """Loading an ELF file whose end is missing is a bus error, which ends the process. Its last part is the table of sections."""
    with open(library, "rb") as file:
        header = file.read(64)
    place, size, count = (
        int.from_bytes(header[part], "little") for part in (slice(40, 48), slice(58, 60), slice(60, 62))
    )
    if header.startswith(b"\x7fELF") and os.stat(library).st_size < place + size * count:
        raise OSError(f"{os.fspath(library)} is not whole")


@functools.lru_cache(maxsize=256)
def _digest(path: str, version: tuple[int, ...]) -> str:
    del version  # a rebuilt library is another one
    return hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8).hexdigest()
