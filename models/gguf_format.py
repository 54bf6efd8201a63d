"""GGUF files of any architecture: their metadata, and their tensors where the file is mapped.

The `gguf` package has a reader of its own. It takes two seconds over a vocabulary, and trusts every length in the file.
"""

import contextlib
import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ._errors import ModelFileError
from ._rounding import round_up


Encoding = Literal["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]

_T = TypeVar("_T")

CORRUPT = "The file is truncated or corrupt: get it again."
_JOIN_PARTS = "Keep all parts in one folder by their names, or join them with `llama-gguf-split --merge`."
NUMBERS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_FLOATS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
_ENCODING_OF: Mapping[int, Encoding] = {GGMLQuantizationType[name].value: name for name in ENCODINGS}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. Nothing is copied: `data` is read-only, and is the file itself."""

    name: str
    shape: tuple[int, ...]
    """In NumPy's order: `(out_features, in_features)`."""
    encoding: Encoding
    data: np.ndarray
    """An array of `shape`; if quantised, uint8 of shape `(rows, bytes_per_row)`."""


def open_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Map a GGUF file of any architecture.

    **Arguments:**

    - `path`: the file, or the first of its parts. It stays mapped for as long as any tensor's `data` lives.

    **Returns:**

    Its tensors, by their names.

    **Raises:**

    - `ModelFileError` if the file is broken, or has a tensor of an encoding that is not one of `Encoding`.
    """
    with naming(path):
        return read_tensors(path, read_header(path))[0]


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors begin with the path."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{os.fspath(path)}: {error}") from None


def field(metadata: Mapping[str, Any], key: str, kind: type[_T], default: _T | None = None) -> _T:
    """A value of a file's metadata.

    **Arguments:**

    - `metadata`: of a `ModelFile`.
    - `key`: the name of the value.
    - `kind`: the type that it has to have: `bool`, `int`, `float`, `str`, `list` (of strings) or `np.ndarray`.
    - `default`: what to return if the file has no such value. `None` if it must have one.

    **Returns:**

    The value.

    **Raises:**

    - `ModelFileError` if it is missing, or of another type.
    """
    value = metadata.get(key, default)
    if value is None:
        raise ModelFileError(f"expected the metadata to have {key}; got none. Use a file of a Llama-family model.")
    if isinstance(value, np.ndarray) and kind in (int, float, bool):
        raise ModelFileError(
            f"expected {key} to be one value for all layers; got {len(value)}, which is not supported."
        )
    if type(value) is not kind:  # a bool is not an int here
        raise ModelFileError(f"expected {key} to be of type {kind.__name__}; got {type(value).__name__}. {CORRUPT}")
    return value


class _Cursor:
    """Reads a mapped file from its beginning, and never past its end."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.offset = 0

    def skip(self, size: int) -> int:
        """Returns the offset of the next `size` bytes, which the file has, and steps over them."""
        start = self.offset
        if size > len(self.data) - start:
            raise ModelFileError(
                f"expected {size} bytes at offset {start}; got the end of the file, of {len(self.data)} bytes. {CORRUPT}"
            )
        self.offset = start + size
        return start

    def number(self, size: int) -> int:
        start = self.skip(size)
        return int.from_bytes(self.data[start : start + size], "little")

    def string(self) -> str:
        size = self.number(8)
        start = self.skip(size)
        try:
            return self.data[start : start + size].decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"expected text at offset {start}; got bytes that are not UTF-8. {CORRUPT}") from None

    def strings(self, count: int) -> list[str]:
        """Read several strings. Of a vocabulary's 100,000 the calls in between would take as long again as the work."""
        data, start, texts = self.data, self.offset, []
        with contextlib.suppress(UnicodeDecodeError):
            while len(texts) < count:
                first = start + 8
                end = first + int.from_bytes(data[start:first], "little")
                if end > len(data):
                    break
                texts.append(data[first:end].decode())
                start = end
        self.offset = start
        # Where one is wrong, `string` says how.
        return texts + [self.string() for _ in range(count - len(texts))]

    def array(self, dtype: np.dtype[Any], count: int) -> np.ndarray:
        start = self.skip(dtype.itemsize * count)
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind in NUMBERS:
            return self.array(NUMBERS[GGUFValueType(kind)], 1).item()
        if kind == GGUFValueType.ARRAY:
            kind, count = self.number(4), self.number(8)
            if kind in NUMBERS:
                return self.array(NUMBERS[GGUFValueType(kind)], count)
            if kind == GGUFValueType.STRING:
                return self.strings(count)
        raise ModelFileError(
            f"expected a scalar, a string or an array of these before offset {self.offset}; got type {kind}. {CORRUPT}"
        )


def _map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    """Return the bytes of a GGUF file, which are not read yet."""
    path = pathlib.Path(path)
    remedy = "Pass the path of a GGUF file."
    try:
        if not path.exists():
            raise ModelFileError(f"expected a file; got a path that does not exist. {remedy}")
        if not path.is_file():
            what = "a directory" if path.is_dir() else "something that is not a regular file"
            raise ModelFileError(f"expected a file; got {what}. {remedy}")
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                what = f"bytes that start with {magic!r}" if magic else "an empty file"
                raise ModelFileError(f"expected a GGUF file, which starts with b'GGUF'; got {what}. {remedy}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # a ValueError: NUL in the path, or a file that is empty by now
        raise ModelFileError(f"expected a file that can be read; got {error}. {remedy}") from None


class Header(NamedTuple):
    """All that a file has before its tensors."""

    cursor: _Cursor
    """After the metadata."""
    num_tensors: int
    metadata: dict[str, Any]
    types: dict[str, GGUFValueType]
    """The types that the file has the metadata in."""


def read_header(path: str | os.PathLike[str]) -> Header:
    """Map a GGUF file, and read what is before its tensors. It has to be the first part, if llama.cpp has split the file."""
    header = _read_header(path)
    number, count = _part(header.metadata)
    if number > 1:
        raise ModelFileError(f"expected the first of {count} parts of a file; got part {number}. Pass the first one.")
    return header


def read_tensors(path: str | os.PathLike[str], header: Header) -> tuple[dict[str, Tensor], list[mmap.mmap]]:
    """Return the tensors of a file, by their names, and its bytes.

    **Arguments:**

    - `path`: the file, or the first of its parts, such as `model-00001-of-00003.gguf`. The others are beside it.
    - `header`: from `read_header`.
    """
    path, maps = pathlib.Path(path), [header.cursor.data]
    tensors = _read_tensors(header)
    _, count = _part(header.metadata)
    ending = f"-00001-of-{count:05}.gguf"
    if count > 1 and not path.name.endswith(ending):
        raise ModelFileError(f"expected a name that ends with {ending!r}, as it is part 1 of {count}. {_JOIN_PARTS}")
    for number in range(2, count + 1):
        part = path.with_name(f"{path.name.removesuffix(ending)}-{number:05}-of-{count:05}.gguf")
        if not part.exists():
            raise ModelFileError(f"expected part {number} of {count} beside it, {part.name}; got none. {_JOIN_PARTS}")
        with naming(part.name):
            another = _read_header(part)
            if (got := _part(another.metadata)) != (number, count):
                raise ModelFileError(f"expected part {number} of {count}; got part {got[0]} of {got[1]}. {CORRUPT}")
            more = _read_tensors(another)
            if again := tensors.keys() & more.keys():
                raise ModelFileError(f"expected tensor {min(again)!r} in one part; got it again. {CORRUPT}")
        tensors |= more
        maps.append(another.cursor.data)
    expected = field(header.metadata, "split.tensors.count", int, len(tensors))
    if count > 1 and len(tensors) != expected:
        raise ModelFileError(f"expected {expected} tensors in {count} parts; got {len(tensors)}. {CORRUPT}")
    return tensors, maps


def _part(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """The number of a part, from 1 on, and how many there are."""
    return field(metadata, "split.no", int, 0) + 1, field(metadata, "split.count", int, 1)


def _read_header(path: str | os.PathLike[str]) -> Header:
    cursor = _Cursor(_map_file(path))
    cursor.skip(4)  # the magic
    version = cursor.number(4)
    if version not in (2, 3):
        raise ModelFileError(
            f"expected version 2 or 3 of GGUF, little-endian; got {version:#x}. Convert the model again."
        )
    num_tensors, num_fields = cursor.number(8), cursor.number(8)
    metadata: dict[str, Any] = {}
    types: dict[str, GGUFValueType] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in metadata:
            raise ModelFileError(f"expected {key!r} once in the metadata; got it again. {CORRUPT}")
        kind = cursor.number(4)
        metadata[key] = cursor.value(kind)
        types[key] = GGUFValueType(kind)
    return Header(cursor, num_tensors, metadata, types)


def _read_tensors(header: Header) -> dict[str, Tensor]:
    cursor, num_tensors, metadata, _ = header
    alignment = field(metadata, "general.alignment", int, 32)
    if alignment <= 0 or alignment % 8:
        raise ModelFileError(f"expected general.alignment to be a multiple of 8; got {alignment}. {CORRUPT}")
    headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        num_axes = cursor.number(4)
        if not 1 <= num_axes <= 4:
            raise ModelFileError(f"expected tensor {name!r} to have 1 to 4 axes; got {num_axes}. {CORRUPT}")
        if name in headers:
            raise ModelFileError(f"expected tensor {name!r} once; got it again. {CORRUPT}")
        shape = tuple(cursor.number(8) for _ in range(num_axes))[::-1]
        headers[name] = shape, cursor.number(4), cursor.number(8)
    tensors, start = {}, round_up(cursor.offset, alignment)
    cursor.skip(start - cursor.offset)
    for name, (shape, kind, offset) in headers.items():
        padded = round_up(cursor.offset, alignment)
        if start + offset != padded:
            raise ModelFileError(
                f"expected tensor {name!r} right after the one before, at {padded}; got it at {start + offset}. {CORRUPT}"
            )
        cursor.skip(padded - cursor.offset)
        tensors[name] = _read_tensor(cursor, name, shape, kind)
    return tensors


def _read_tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> Tensor:
    if kind not in _ENCODING_OF:
        known = {member.value: member.name for member in GGMLQuantizationType}
        raise ModelFileError(
            f"expected tensor {name!r} to be encoded as one of {', '.join(ENCODINGS)}; got {known.get(kind, kind)}, "
            "which is not supported. Use a file of another quantisation."
        )
    encoding = _ENCODING_OF[kind]
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block or 0 in shape:
        raise ModelFileError(
            f"expected tensor {name!r} to have rows of blocks of {block}; got shape {shape}. {CORRUPT}"
        )
    row_bytes = shape[-1] // block * block_bytes
    if block > 1:
        data = cursor.array(np.dtype("<u1"), math.prod(shape[:-1]) * row_bytes).reshape(-1, row_bytes)
    else:
        data = cursor.array(_FLOATS[encoding], math.prod(shape)).reshape(shape)
    return Tensor(name, shape, encoding, data)
