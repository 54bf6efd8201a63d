"""The text of a kernel, with what it includes from beside it: all that tells one image from another."""

import os
import pathlib
import re


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)


def read_source(source: str | os.PathLike[str], who: str) -> tuple[str, str]:
    """The text, and the name of its file for the compiler's messages."""
    if isinstance(source, str):
        return source, "source.cu"
    path = pathlib.Path(source)
    return _expanded(path, who, set()), path.name


def read_image(image: bytes | str | os.PathLike[str], who: str) -> bytes:
    """The content of a compiled image."""
    if isinstance(image, bytes):
        return image
    try:
        return pathlib.Path(image).read_bytes()
    except OSError as error:
        raise ValueError(f"{who}: the image {os.fspath(image)} cannot be read ({error}).") from None


def _expanded(path: pathlib.Path, who: str, seen: set[pathlib.Path]) -> str:
    """Each file is included once. Lines keep the numbers that they have in their files."""
    seen.add(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{who}: the source {path} cannot be read ({error}).") from None

    def replace(match: re.Match[str]) -> str:
        included = (path.parent / match[1]).resolve()
        if not included.is_file():
            return match[0]  # the compiler may find it elsewhere
        line = text.count("\n", 0, match.start()) + 2
        inner = "" if included in seen else _expanded(included, who, seen)
        return f'#line 1 "{included.name}"\n{inner}\n#line {line} "{path.name}"'

    return _INCLUDE.sub(replace, text)
