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
        return xla.library_function(path, digest_of(path), symbol)
    except OSError as error:
        raise ValueError(
            f"{who}: the library {path} cannot be loaded ({error}). Build it, or correct the path."
        ) from None
    except AttributeError:
        raise ValueError(f"{who}: the library {path} has no symbol {symbol!r}. {remedy}") from None


def digest_of(library: str | os.PathLike[str]) -> str:
    """Digest the content of a library, which is read once for as long as the file stays as it is.

    **Raises:** `OSError` if it cannot be read, or its end is missing.
    """
    status = os.stat(library)
    return _digest(os.fspath(library), (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))


@functools.lru_cache(maxsize=256)
def _digest(path: str, version: tuple[int, ...]) -> str:
    del version  # a rebuilt library is another one
    content = pathlib.Path(path).read_bytes()
    _check_whole(path, content)
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _check_whole(path: str, content: bytes) -> None:
    """Loading an ELF file whose end is missing is a bus error, which ends the process. Its last part is the table of sections."""
    place, size, count = (
        int.from_bytes(content[part], "little") for part in (slice(40, 48), slice(58, 60), slice(60, 62))
    )
    if content.startswith(b"\x7fELF") and len(content) < place + size * count:
        raise OSError(f"{path} is not whole")
