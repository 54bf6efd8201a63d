"""The text of a kernel, with all that it includes: what tells one image from another."""

import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence


_BESIDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"[^\n]*$', re.MULTILINE)
_ANYWHERE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once\b", re.MULTILINE)
# Of GCC, Clang and NVRTC: joined to a folder, or before it.
_FOLDER_OPTIONS = ("--include-path", "-isystem", "-iquote", "-idirafter", "-I")
_FILE_OPTIONS = ("--pre-include", "-include", "-imacros")
_HERE = pathlib.Path()  # compilers look for `#include "..."` in the working directory too


def read_source(source: str | os.PathLike[str], who: str, options: Sequence[str] = ()) -> tuple[str, str]:
    """The text, and the name of its file for the compiler's messages.

    A file that a file includes from beside it is in the text. A comment at the end of the text differs with what is in other
    files: headers in the working directory and where `options` of the compiler say, and objects and static libraries that
    these name. The system's are not looked at.
    """
    if isinstance(source, str):
        text, file, beside = source, "source.cu", [_HERE]
    else:
        path = pathlib.Path(source)
        text, file, beside = _expanded(path.resolve(), who, (), set(), path.name), path.name, [path.parent, _HERE]
    if "\0" in text:
        raise ValueError(
            f"{who}: expected the source {file} to be a text; got one with the character NUL, which ends it for compilers."
        )
    read = [
        *_headers(text, beside, _given(options, _FOLDER_OPTIONS), _given(options, _FILE_OPTIONS)),
        *(path.read_bytes() for path in _linked(options) if os.path.isfile(path)),  # pathlib's raises for long options
    ]
    if read:
        digest = hashlib.blake2b(b"\0".join(read), digest_size=16).hexdigest()
        text += f"\n/* Files: {digest} */\n"
    return text, file


def read_image(image: bytes | str | os.PathLike[str], who: str) -> bytes:
    """The content of a compiled image."""
    if isinstance(image, bytes):
        return image
    try:
        return pathlib.Path(image).read_bytes()
    except OSError as error:
        raise ValueError(f"{who}: the image {os.fspath(image)} cannot be read ({error}).") from None


def _expanded(
    path: pathlib.Path, who: str, inside: tuple[pathlib.Path, ...], once: set[pathlib.Path], name: str
) -> str:
    """Lines keep the numbers that they have in their files. `inside` are the files that include this one."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # compilers know the mark of UTF-8 at the beginning of a file alone
    except OSError as error:
        raise ValueError(f"{who}: the source {path} cannot be read ({error}).") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{who}: expected the source {path} to be in UTF-8; got {error}. Save it so.") from None
    inside = (*inside, path)
    if _ONCE.search(text):
        once.add(path)

    def replace(match: re.Match[str]) -> str:
        included = (path.parent / match[1]).resolve()
        if not included.is_file():
            return match[0]  # the compiler may find it elsewhere
        line = text.count("\n", 0, match.start()) + 2
        # A guard makes it end where files include each other.
        is_void = included in once or included in inside
        inner = "" if is_void else _expanded(included, who, inside, once, included.name)
        return f'#line 1 "{included.name}"\n{inner}\n#line {line} "{name}"'

    return _BESIDE.sub(replace, text)


def _given(options: Sequence[str], names: Sequence[str]) -> list[str]:
    """The values that `options` have for these names: `-Ifolder`, `--include-path=folder` or the next of the options."""
    values = []
    for option, following in itertools.zip_longest(options, options[1:], fillvalue=""):
        name = next((name for name in names if option.startswith(name)), None)
        if name is not None:
            values.append(option.removeprefix(name).removeprefix("=") or following)
    return values


def _linked(options: Sequence[str]) -> list[pathlib.Path]:
    """Return where objects and static libraries may be that `options` name, by a path or as `-lname`."""
    folders, names = _given(options, ("-L",)), _given(options, ("-l",))
    return [*map(pathlib.Path, options), *(pathlib.Path(place, f"lib{name}.a") for place in folders for name in names)]


def _headers(
    text: str, beside: Sequence[pathlib.Path], folders: Sequence[str], files: Sequence[str]
) -> Iterator[bytes]:
    """The content of each header that can be found."""
    seen: set[pathlib.Path] = set()
    waiting = [
        *((name, [_HERE, *beside]) for name in files),
        *((name, beside) for name in _ANYWHERE.findall(text)),
    ]
    while waiting:
        name, near = waiting.pop()
        # All of them: which one the compiler takes depends on how it searches.
        for path in {pathlib.Path(folder, name).resolve(): None for folder in (*near, *folders)}:
            if path in seen or not path.is_file():
                continue
            seen.add(path)
            content = path.read_bytes()
            yield content
            waiting += [(inner, [path.parent]) for inner in _ANYWHERE.findall(content.decode(errors="replace"))]
