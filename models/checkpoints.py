"""Weights in and out: safetensors and GGUF files into Equinox Modules and back, by a table of names.

A table says which array of a Module a tensor of a file is. A `*` stands for any one part of a name, and for the same on the
other side:

    {"encoder.layer.*.attention.self.query.*": "blocks.*.query.*"}

It is strict: each array of the Module has a tensor of its shape and dtype, and each tensor of the file an array.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFValueType, GGUFWriter
from safetensors.numpy import save_file

from . import gguf_format
from ._errors import ModelFileError
from ._names import Table
from ._safetensors import Stored, open_tensors


_M = TypeVar("_M")

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
    wanted = _positions(like, Table(names))
    leave_out = Table({pattern: pattern for pattern in unused})
    extra = (name for name in stored if name not in wanted and leave_out.path(name) is None)
    report = _compare(stored, {name: leaves[position] for name, position in wanted.items()}, extra)
    if report:
        raise CheckpointError(
            f"{os.fspath(path)}: expected the tensors of {type(like).__name__}; got {report}. "
            "Use a file of this model, of this size and dtype.",
            report,
        )
    for name in progress(wanted):
        array = stored[name].read()
        leaves[wanted[name]] = array if isinstance(leaves[wanted[name]], np.ndarray) else jnp.asarray(array)
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
    """
    arrays = _arrays(module, names)
    header = {"format": "pt"} if metadata is None else dict(metadata)
    _replace(path, lambda partial: save_file(arrays, partial, header))


def save_gguf(
    path: str | os.PathLike[str], module: Any, names: Mapping[str, str], *, architecture: str, **metadata: Any
) -> None:
    """Write the arrays of a Module, of f32 or f16, to a GGUF file, which `load` reads with the same table.

    **Arguments:**

    - `path`, `module`, `names`: as for `save_safetensors`.
    - `architecture`: the file's `general.architecture`, before whose name and a dot `metadata` goes.
    """
    arrays = _arrays(module, names)
    for name, array in arrays.items():
        if array.dtype not in (np.float32, np.float16) or not 1 <= array.ndim <= 4:
            raise ValueError(
                f"save_gguf: expected arrays of float32 or float16, with 1 to 4 axes; got {name} of {array.dtype} and shape "
                f"{array.shape}. Use save_safetensors."
            )

    def write(partial: pathlib.Path) -> None:
        writer = GGUFWriter(partial, architecture)
        for key, value in metadata.items():
            writer.add_key_value(f"{architecture}.{key}", value, GGUFValueType.get_type(value))
        for name, array in arrays.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    _replace(path, write)


def _open(path: str | os.PathLike[str]) -> dict[str, Stored]:
    path = pathlib.Path(path)
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        if is_gguf:
            # Copied: the file may change, an array of JAX may not.
            return {
                name: Stored(tensor.data.shape, tensor.data.dtype, tensor.data.copy)
                for name, tensor in gguf_format.open_tensors(path).items()
            }
    return open_tensors(path)


def _positions(module: Any, table: Table) -> dict[str, int]:
    """The position among the leaves of each array, by the name of its tensor."""
    positions: dict[str, int] = {}
    for position, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(module)):
        if eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct | np.ndarray):
            path = jax.tree_util.keystr(keys, simple=True, separator=".")
            name = table.name(path)
            if name is None or table.path(name) != path or name in positions:
                raise ValueError(
                    f"names: expected one tensor's name for each array of {type(module).__name__}, and the other way round; "
                    f"got {name!r} for {path!r}, and {name and table.path(name)!r} for that name. Extend the table."
                )
            positions[name] = position
    return positions


def _compare(stored: Mapping[str, Stored], wanted: Mapping[str, Any], extra: Iterable[str]) -> Report:
    pairs = [(name, leaf, stored[name]) for name, leaf in wanted.items() if name in stored]
    return Report(
        missing=tuple(name for name in wanted if name not in stored),
        unexpected=tuple(extra),
        shapes=tuple(
            f"{name} (expected {leaf.shape}, got {tensor.shape})"
            for name, leaf, tensor in pairs
            if leaf.shape != tensor.shape
        ),
        dtypes=tuple(
            f"{name} (expected {leaf.dtype}, got {tensor.dtype})"
            for name, leaf, tensor in pairs
            if leaf.dtype != tensor.dtype
        ),
    )


def _arrays(module: Any, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(module)
    # In rows: safetensors writes the memory as it lies.
    return {
        name: np.asarray(leaves[position], order="C") for name, position in _positions(module, Table(names)).items()
    }


def _replace(path: str | os.PathLike[str], write: Callable[[pathlib.Path], None]) -> None:
    """Write in two steps: who has the old file mapped keeps it, and nobody reads half of the new one."""
    path = pathlib.Path(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _some(lines: Sequence[str]) -> str:
    return ", ".join(_shown(lines))


def _shown(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"and {len(lines) - _SHOWN} more"
