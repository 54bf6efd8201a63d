"""The content of a fatbin: images for several architectures, of which the driver takes one."""

import dataclasses
import struct
from collections.abc import Iterator


_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
# An entry: its kind, its own size, the size of its content and of the used part of that, the architecture, flags.
_ENTRY = struct.Struct("<HxxIQIxxxxxxxxIxxxxxxxxQ")
_PTX, _CUBIN = 1, 2
_ARCHITECTURE_SPECIFIC = 0x100000
# By LZ4, and by zstd.
_COMPRESSED = 0x2000 | 0x8000


@dataclasses.dataclass(frozen=True)
class Entry:
    """**Attributes:**

    - `is_ptx`: whether it is PTX, or else a cubin.
    - `target`: such as `"sm_90a"`.
    - `image`: `None` where it is compressed.
    """

    is_ptx: bool
    target: str
    image: bytes | None


def is_fatbin(image: bytes) -> bool:
    return len(image) >= _HEADER.size and _HEADER.unpack_from(image)[0] == _MAGIC


def entries(image: bytes) -> Iterator[Entry]:
    """Yield the entries that a device may run. Raises `struct.error` if the image is not whole."""
    _, _, at, size = _HEADER.unpack_from(image)
    end = at + size
    if end > len(image):
        raise struct.error("a part of it")
    while at < end:
        kind, header, length, _, version, flags = _ENTRY.unpack_from(image, at)
        if header < _ENTRY.size:
            raise struct.error("an entry that is less than its own header")
        if kind in (_PTX, _CUBIN):
            target = f"sm_{version}{'a' if flags & _ARCHITECTURE_SPECIFIC else ''}"
            content = None if flags & _COMPRESSED else image[at + header : at + header + length]
            yield Entry(kind == _PTX, target, content)
        at += header + length
