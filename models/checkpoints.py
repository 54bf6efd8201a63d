"""Weights in and out: safetensors and GGUF files into Equinox Modules and back, by a table of names.

A table says which array of a Module a tensor of a file is. A `*` stands for any one part of a name, and for the same on the
other side:

    {"encoder.layer.*.attention.self.query.*": "blocks.*.projections.0.*"}

It is strict: each array of the Module has a tensor of its shape and dtype, and each tensor of the file an array. The blocks of
a `QuantizedLinear` are quantised tensors of its encoding; if they are packed, files have them unpacked.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc

from . import gguf_format
from ._errors import ModelFileError
from ._names import Table
from ._safetensors import DTYPES, Stored, open_tensors, write_tensors
from .gguf_writer import ENCODING_OF_DTYPE, Encoded, field_of, write_gguf


_M = TypeVar("_M")

_UNPACKED: dict[str, str] = {**eqxc.ops.DEINTERLEAVED}

# So many names of each kind are in a message; the report has all.
_SHOWN = 5


@dataclass(frozen=True)
class Report:
    """All that did not match, as lines of text that begin with a tensor's name."""

    missing: tuple[str, ...]
    """Arrays of the Module that the file has no tensor for."""
    unexpected: tuple[str, ...]
    """Tensors that the Module has no array for."""
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.shapes, self.dtypes))

    def __str__(self) -> str:
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.shapes,
            "of another dtype": self.dtypes,
        }
        return "; ".join(f"{len(lines)} {kind}: {_some(lines)}" for kind, lines in kinds.items() if lines)


class CheckpointError(ModelFileError):
    """A file whose tensors are not those of a Module."""

    def __init__(self, message: str, report: Report):
        super().__init__(message)
        self.report = report


def load(
    path: str | os.PathLike[str],
    like: _M,
    names: Mapping[str, str],
    *,
    unused: Sequence[str] = (),
    progress: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> _M:
    """A Module with the tensors of a file, which are read one after the other.

    **Arguments:**

    - `path`: a safetensors file, a folder of them, or a GGUF file, whose quantised tensors are arrays of bytes.
    - `like`: a Module, whose arrays say shapes and dtypes; or what `equinox.filter_eval_shape` makes of one.
    - `names`: for names of tensors, paths of arrays in the Module.
    - `unused`: names of tensors that the file may have and the Module does not use.
    - `progress`: wraps the iteration over the names of tensors, as `tqdm` does.

    **Returns:**

    `like` with the file's tensors in place of its arrays. Nothing is cast.

    **Raises:**

    - `CheckpointError` if anything does not match, with all of it in its `report`.
    - `ModelFileError` if the file cannot be read.
    """
    stored = _open(path)
    leaves, tree = jax.tree.flatten(like)
    wanted = _leaves(like, Table(names))
    leave_out = Table({pattern: pattern for pattern in unused})
    extra = (name for name in stored if name not in wanted and leave_out.path(name) is None)
    report = _compare(stored, wanted, extra)
    if report:
        raise CheckpointError(
            f"{os.fspath(path)}: expected the tensors of {type(like).__name__}; got {report}. "
            "Use a file of this model, of this size and dtype.",
            report,
        )
    for name in progress(wanted):
        position, like_leaf, encoding = wanted[name]
        array = stored[name].read()
        if not isinstance(like_leaf, np.ndarray) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise ModelFileError(
                f"{os.fspath(path)}: expected tensors of up to 32 bits without jax_enable_x64; got {name} of {array.dtype}. "
                "Enable it, or have a NumPy array in `like`."
            )
        if encoding in eqxc.ops.DEINTERLEAVED:
            leaves[position] = eqxc.ops.interleave_rows(array, encoding=eqxc.ops.DEINTERLEAVED[encoding])
        else:
            leaves[position] = array if isinstance(like_leaf, np.ndarray) else jnp.asarray(array)
    return jax.tree.unflatten(tree, leaves)


def save_safetensors(
    path: str | os.PathLike[str], module: Any, names: Mapping[str, str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the arrays of a Module to a safetensors file, which `load` reads with the same table.

    **Arguments:**

    - `path`: the file. It is replaced once the new one is whole.
    - `module`: of which all leaves that are arrays are written.
    - `names`: as for `load`.
    - `metadata`: texts in the file's header; by default that its tensors are laid out as PyTorch's, which some readers ask for.

    **Raises:** `OSError` if the file cannot be written.
    """
    arrays = {name: tensor.data for name, tensor in _tensors(module, names).items()}
    for name, array in arrays.items():
        if array.dtype not in DTYPES.values():
            raise ValueError(
                f"save_safetensors: expected arrays of one of {', '.join(dtype.name for dtype in DTYPES.values())}; got {name} "
                f"of {array.dtype}. Cast it first."
            )
    write_tensors(path, arrays, {"format": "pt"} if metadata is None else metadata)


def save_gguf(
    path: str | os.PathLike[str], module: Any, names: Mapping[str, str], *, architecture: str, **metadata: Any
) -> None:
    """Write the arrays of a Module to a GGUF file, which `load` reads with the same table.

    **Arguments:**

    - `path`, `module`, `names`: as for `save_safetensors`. Arrays are of f32, f16 or bf16, or the blocks of a
        `QuantizedLinear` in an encoding that GGUF files have.
    - `architecture`: the file's `general.architecture`.
    - `metadata`: values that the file has after the architecture's name and a dot: booleans, numbers, texts, or lists or arrays
        of them. Their types are those that llama.cpp reads: UINT32 for an integer, FLOAT32 for a float.

    **Raises:** `ValueError` for what such files do not have, and `OSError` if the file cannot be written.
    """
    tensors = _tensors(module, names)
    for name, (encoding, array) in tensors.items():
        if encoding not in gguf_format.ENCODINGS or not 1 <= array.ndim <= 4 or 0 in array.shape:
            raise ValueError(
                f"save_gguf: expected arrays of one of {', '.join(gguf_format.ENCODINGS)}, with 1 to 4 axes, none of them empty; "
                f"got {name} of {encoding} and shape {array.shape}. Use save_safetensors."
            )
    fields = {f"{architecture}.{key}": field_of(value) for key, value in metadata.items()}
    write_gguf(path, architecture, fields, tensors)


def _open(path: str | os.PathLike[str]) -> dict[str, Stored]:
    path = pathlib.Path(path)
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            # Copied: the file may change, an array of JAX may not.
            return {
                name: Stored(tensor.data.shape, tensor.data.dtype, tensor.data.copy, tensor.encoding)
                for name, tensor in gguf_format.open_tensors(path).items()
            }
    return open_tensors(path)


class _Leaf(NamedTuple):
    """An array of a Module."""

    position: int
    """Its index among the leaves."""
    array: Any
    """The array, or its shape and dtype."""
    encoding: str | None
    """Its encoding, if it is the blocks of a `QuantizedLinear`."""

    @property
    def stored_encoding(self) -> str:
        """The encoding or the dtype that it has in a file."""
        if self.encoding is None:
            return self.array.dtype.name
        return _UNPACKED.get(self.encoding, self.encoding)


def _leaves(module: Any, table: Table) -> dict[str, _Leaf]:
    """The arrays of a Module, by the names of their tensors."""
    leaves: dict[str, _Leaf] = {}
    encodings = _encodings(module)
    for position, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(module)):
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray):
            path = jax.tree_util.keystr(keys, simple=True, separator=".")
            name = table.name(path)
            if name is None or table.path(name) != path or name in leaves:
                raise ValueError(
                    f"names: expected one tensor's name for each array of {type(module).__name__}, and the other way round; "
                    f"got {name!r} for {path!r}, and {name and table.path(name)!r} for that name. Extend the table."
                )
            leaves[name] = _Leaf(position, leaf, encodings.get(position))
    return leaves


def _encodings(module: Any) -> dict[int, str]:
    """The encodings of all blocks of quantised layers, by their positions among the leaves."""
    encodings: dict[int, str] = {}
    position = 0
    for node in jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqxc.nn.QuantizedLinear)):
        if isinstance(node, eqxc.nn.QuantizedLinear):
            encodings[position] = node.encoding  # of `blocks`, the first of its leaves
        position += len(jax.tree.leaves(node))
    return encodings


def _compare(stored: Mapping[str, Stored], wanted: Mapping[str, _Leaf], extra: Iterable[str]) -> Report:
    pairs = [(name, leaf, stored[name]) for name, leaf in wanted.items() if name in stored]
    return Report(
        missing=tuple(name for name in wanted if name not in stored),
        unexpected=tuple(extra),
        shapes=tuple(
            f"{name} (expected {leaf.array.shape}, got {tensor.shape})"
            for name, leaf, tensor in pairs
            if leaf.array.shape != tensor.shape
        ),
        dtypes=tuple(
            f"{name} (expected {leaf.stored_encoding}, got {tensor.encoding or tensor.dtype})"
            for name, leaf, tensor in pairs
            if not _fits(leaf, tensor)
        ),
    )


def _fits(leaf: _Leaf, tensor: Stored) -> bool:
    """True if dtypes are the same, and encodings where both sides have one: safetensors files do not say theirs."""
    same_encoding = None in (leaf.encoding, tensor.encoding) or leaf.stored_encoding == tensor.encoding
    return leaf.array.dtype == tensor.dtype and same_encoding


def _tensors(module: Any, names: Mapping[str, str]) -> dict[str, Encoded]:
    return {name: _tensor(leaf) for name, leaf in _leaves(module, Table(names)).items()}


def _tensor(leaf: _Leaf) -> Encoded:
    array = leaf.array
    if leaf.encoding in eqxc.ops.DEINTERLEAVED:
        array = eqxc.ops.deinterleave_rows(array, encoding=leaf.encoding)
    encoding = leaf.stored_encoding
    # In rows, and in native byte order: the memory is written as it lies.
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return Encoded(ENCODING_OF_DTYPE.get(encoding, encoding), array)


def _some(lines: Sequence[str]) -> str:
    return ", ".join(_shown(lines))


def _shown(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"and {len(lines) - _SHOWN} more"
