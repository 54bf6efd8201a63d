"""Read what a compiled image says of its kernels: sections of a cubin, an ELF file, that the driver reads as well."""

import dataclasses
import math
import re
import struct
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Declared:
    """The demands of a kernel on its launches.

    **Attributes:**

    - `parameters`: the size of each in bytes, in order.
    - `block`: the threads that a block has to have, in x, y and z, if the kernel says so.
    - `most_threads`: how many a block may have.
    """

    parameters: tuple[int, ...]
    block: tuple[int, int, int] | None = dataclasses.field(default=None, kw_only=True)
    most_threads: int = dataclasses.field(default=1024, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Compiled(Declared):
    """**Attributes:**

    - `registers`: of a thread.
    - `stack_bytes`: local memory of a thread: what does not fit its registers, and arrays that are indexed.
    - `shared_bytes`: static shared memory of a block.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int


# The entries of a `.nv.info` section: how their value is stored, and which attributes we read. As `cuobjdump -elf` names
# them: EIATTR_KPARAM_INFO, and with more than 4,096 bytes of parameters EIATTR_KPARAM_INFO_V2; EIATTR_REGCOUNT,
# EIATTR_FRAME_SIZE, EIATTR_REQNTID, EIATTR_MAX_THREADS.
_EM_CUDA = 190
_SIZED = 4
_KPARAM_INFO, _KPARAM_INFO_V2, _REGCOUNT, _FRAME_SIZE, _REQNTID, _MAX_THREADS = 0x17, 0x45, 0x2F, 0x11, 0x10, 0x05


def kernels_of(image: bytes) -> Mapping[str, Compiled] | None:
    """The kernels of a cubin by name, or `None` if it is none, but PTX."""
    if not image.startswith(b"\x7fELF") or struct.unpack_from("<H", image, 0x12)[0] != _EM_CUDA:
        return None
    sections = dict(_sections(image))
    names = dict(enumerate(_symbol_names(sections)))
    registers, frames = {}, {}
    for attribute, value in _entries(sections.get(".nv.info", b"")):
        if attribute in (_REGCOUNT, _FRAME_SIZE) and len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            (registers if attribute == _REGCOUNT else frames)[names.get(symbol)] = number
    kernels = {}
    for section, data in sections.items():
        if not section.startswith(".nv.info."):
            continue
        name = section.removeprefix(".nv.info.")
        parameters, asked = {}, {}
        for attribute, value in _entries(data):
            if attribute in (_KPARAM_INFO, _KPARAM_INFO_V2) and len(value) == 12:
                _, ordinal, _, packed = struct.unpack("<IHHI", value)
                parameters[ordinal] = packed >> 18 if attribute == _KPARAM_INFO else packed
            elif attribute == _REQNTID and len(value) == 12:
                asked["block"] = struct.unpack("<III", value)
            elif attribute == _MAX_THREADS and len(value) == 12:
                asked["most_threads"] = math.prod(struct.unpack("<III", value))
        shared = len(sections.get(f".nv.shared.{name}", b""))
        sizes = tuple(parameters[i] for i in sorted(parameters))
        kernels[name] = Compiled(sizes, registers.get(name, 0), frames.get(name, 0), shared, **asked)
    return kernels


# The header says which way of numbering its flags follow.
_ABI_AT, _NEW_ABI, _FLAGS_AT = 8, 8, 0x30


def version_of_cubin(image: bytes) -> int:
    """90 of one that is compiled for sm_90."""
    (flags,) = struct.unpack_from("<I", image, _FLAGS_AT)
    return (flags >> 8 if image[_ABI_AT] >= _NEW_ABI else flags) & 0xFF


def readable(entry: str) -> str:
    """The name in the source, without namespaces and template arguments. A C++ compiler writes a length before each part."""
    prefix = re.match(r"_ZN?", entry)
    if prefix is None:
        return entry
    at, name = prefix.end(), entry
    while (length := re.match(r"\d+", entry[at:])) is not None:
        at += length.end()
        name = entry[at : at + int(length[0])]
        at += int(length[0])
    return name


def _entries(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size


def _header(image: bytes) -> tuple[int, int, int, int]:
    """Return where the sections are, how large each entry is, how many there are, and which section has their names."""
    (offset,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    return offset, size, count, names


_NOBITS = 8


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    offset, size, count, names_at = _header(image)
    raw = [struct.unpack_from("<IIQQQQ", image, offset + i * size) for i in range(count)]
    names = image[raw[names_at][4] :]
    for name, kind, _, _, start, length in raw:
        # What has no content in the file, such as shared memory, has only a size.
        data = bytes(length) if kind == _NOBITS and length < 1 << 20 else image[start : start + length]
        yield names[name : names.index(b"\0", name)].decode(), data


def _symbol_names(sections: Mapping[str, bytes]) -> Iterator[str]:
    strings, symbols = sections.get(".strtab", b""), sections.get(".symtab", b"")
    for at in range(0, len(symbols), 24):
        (name,) = struct.unpack_from("<I", symbols, at)
        yield strings[name : strings.index(b"\0", name)].decode()
