"""GGUF files of any architecture, written by the `gguf` package."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from ._replacing import replace_file
from .gguf_format import NUMBERS


ENCODING_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The encodings of tensors that are not quantised."""

_TYPE_OF_DTYPE = {dtype: kind for kind, dtype in NUMBERS.items()}
_INTEGERS = (GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.UINT64, GGUFValueType.INT64)


class Encoded(NamedTuple):
    """A tensor to write: a `models._files.Weight`."""

    encoding: str
    data: np.ndarray
    """The values; if quantised, uint8 whose last axis has the bytes of a row."""


class Field(NamedTuple):
    """A value of a file's metadata, as `models.gguf.ModelFile` has it, and the type that it has in the file."""

    value: Any
    type: GGUFValueType


def field_of(value: Any) -> Field:
    """A value in the type that llama.cpp reads it in, if nothing else says which: it takes a size as UINT32 alone.

    **Arguments:**

    - `value`: of Python or NumPy: a boolean, a number, a text, or a list or an array of them.

    **Raises:** `ValueError` if it is of another type, or an integer of more than 64 bits.
    """
    value = value.tolist() if isinstance(value, np.generic | np.ndarray) else value
    if type(value) is int:
        for kind in _INTEGERS:
            bounds = np.iinfo(NUMBERS[kind])
            if bounds.min <= value <= bounds.max:
                return Field(value, kind)
        raise ValueError(f"save_gguf: expected integers of up to 64 bits; got {value}.")
    # Of a list's elements the package finds the type, INT32 for integers, which llama.cpp takes there.
    return Field(value, GGUFValueType.get_type(value))


def write_gguf(
    path: str | os.PathLike[str], architecture: str, fields: Mapping[str, Field], tensors: Mapping[str, Encoded]
) -> None:
    """Write a file, which is replaced once the new one is whole.

    **Arguments:**

    - `path`: the file.
    - `architecture`: its `general.architecture`.
    - `fields`: the rest of the metadata. Empty arrays, which the package does not write, are left out.
    - `tensors`: by their names, in the order in which the file has them.
    """

    def write(partial: pathlib.Path) -> None:
        writer = GGUFWriter(partial, architecture)
        for key, (value, kind) in fields.items():
            _add(writer, key, value, kind)
        for name, (encoding, data) in tensors.items():
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[encoding])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    replace_file(path, write)


def _add(writer: GGUFWriter, key: str, value: Any, kind: GGUFValueType) -> None:
    if key == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, np.ndarray):
        if len(value):
            writer.add_key_value(key, value.tolist(), kind, _TYPE_OF_DTYPE[value.dtype])
    elif value != []:
        writer.add_key_value(key, value, kind)
