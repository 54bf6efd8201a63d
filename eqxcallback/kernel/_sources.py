"""Texts and files that kernels are made of."""

import os
from collections.abc import Sequence
from typing import Any


def freeze_source(kernel: Any, language: str, who: str) -> None:
    """`source`, a text or a path, and `options`, those of the compiler."""
    if isinstance(kernel.source, str):
        if "\n" not in kernel.source and "{" not in kernel.source:
            raise ValueError(
                f"{who}: expected source to be {language}; got {kernel.source!r}. Pass a pathlib.Path for a file."
            )
    elif kernel.source is not None:
        object.__setattr__(kernel, "source", _Path(absolute(kernel.source, "source to be a text or a path", who)))
    options = (kernel.options,) if isinstance(kernel.options, str) else kernel.options
    if not isinstance(options, Sequence) or not all(isinstance(option, str) for option in options):
        raise TypeError(f"{who}: expected options to be strings; got {kernel.options!r}.")
    if any("\0" in option for option in options):  # compilers would take what is before it
        raise ValueError(f"{who}: expected options without the character NUL; got {kernel.options!r}.")
    object.__setattr__(kernel, "options", tuple(options))


def freeze_image(kernel: Any, who: str) -> None:
    """`image`: bytes, a text in PTX, or a path."""
    if isinstance(kernel.image, str):
        if "\n" not in kernel.image:
            raise ValueError(f"{who}: expected image to be PTX; got {kernel.image!r}. Pass a pathlib.Path for a file.")
        object.__setattr__(kernel, "image", kernel.image.encode())
    elif isinstance(kernel.image, bytearray | memoryview):
        object.__setattr__(kernel, "image", bytes(kernel.image))
    elif not isinstance(kernel.image, bytes):
        object.__setattr__(kernel, "image", _Path(absolute(kernel.image, "image to be bytes, PTX or a path", who)))


def freeze_library(kernel: Any, who: str) -> None:
    if kernel.library is not None:
        object.__setattr__(kernel, "library", absolute(kernel.library, "library to be a path", who))


def absolute(path: Any, expected: str, who: str) -> str:
    """Another working directory must not make it another kernel."""
    try:
        text = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise TypeError(f"{who}: expected {expected}; got {path!r}.") from None
    if "\0" in text:
        raise ValueError(f"{who}: expected {expected}; got {path!r}, whose character NUL no path has.")
    return text


class _Path(os.PathLike[str]):
    """Told from a text, and compared by what it names."""

    def __init__(self, path: str):
        self._path = path

    def __fspath__(self) -> str:
        return self._path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Path) and self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __repr__(self) -> str:
        return repr(self._path)
