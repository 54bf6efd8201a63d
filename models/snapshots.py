"""Snapshots of a program that goes on where the last one was, to the bit.

A snapshot is a file: a line of JSON with the step, the options of the run and the dtypes, the arrays as Equinox writes them, and
the CRC-32 of all that. Of a PRNG key, the line has the implementation, and the arrays have the key's data. A snapshot appears
under its name when it is whole and on the disk. The last two are kept, in case the disk spoils one.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._errors import ModelFileError
from ._replacing import sync


_KEPT = 2
_SUFFIX, _UNFINISHED = ".snapshot", ".unfinished"
_CHECKSUM_BYTES, _CHUNK = 4, 1_000_000

_T = TypeVar("_T")


class _Summed:
    """A file that is written, and the CRC-32 of what was written to it."""

    def __init__(self, file: IO[bytes]):
        self._file, self.checksum = file, 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


def save(folder: pathlib.Path, step: int, state: Any, options: Mapping[str, Any]) -> None:
    """Write a snapshot, and remove all but the last two.

    **Arguments:**

    - `step`: the number of steps behind it.
    - `state`: a PyTree of arrays, PRNG keys among them.
    - `options`: which a run must have to go on from it: anything that JSON keeps.

    **Raises:** `OSError` if it cannot be written. Then nothing of it is left.
    """
    path = folder / f"step-{step:08}{_SUFFIX}"
    unfinished = path.with_suffix(_UNFINISHED)
    for old in folder.glob(f"*{_UNFINISHED}"):  # of a process that was killed: this one may need the room
        old.unlink()
    try:
        with unfinished.open("wb") as file:
            summed = _Summed(file)
            header = {"step": step, "options": options, "dtypes": [_recorded(leaf) for leaf in jax.tree.leaves(state)]}
            summed.write(json.dumps(header).encode() + b"\n")
            _write_arrays(summed, jax.tree.map(_without_key, state))
            file.write(summed.checksum.to_bytes(_CHECKSUM_BYTES, "big"))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(folder)  # the new name too
    for old in _paths(folder)[:-_KEPT]:
        old.unlink()


def load_last(
    folder: pathlib.Path,
    like: _T,
    options: Mapping[str, Any],
    report: Callable[[str], None],
    progress: Callable[..., Iterable[Any]] = lambda items, **_: items,
) -> tuple[int, _T] | None:
    """Read the last snapshot that is whole.

    **Arguments:**

    - `like`: the structure of the state: `ShapeDtypeStruct`s in place of arrays.
    - `options`: of the run.
    - `report`: gets a line for each snapshot that is not whole, if there is an older one.
    - `progress`: as `_program.progress`.

    **Returns:** the number of steps behind it, and the state; None if there is no snapshot.

    **Raises:**

    - `ModelFileError` if no snapshot is whole, or the last one that is has other options.
    """
    problem = None
    for path in reversed(_paths(folder)):
        if problem is not None:
            report(f"{problem}; the one before is taken")
        try:
            _check_whole(path, progress)
        except (ModelFileError, OSError) as error:
            problem = str(error)
            continue
        return _load(path, like, options)
    if problem is not None:
        raise ModelFileError(f"{problem}, and there is no other one. Remove it to begin with step 0.")
    return None


def checksum(tree: Any) -> int:
    """Return the CRC-32 of all arrays of a tree, for the options of a run that depends on them."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array | np.ndarray):
            total = zlib.crc32(np.asarray(leaf).reshape(-1).view(np.uint8).data, total)
    return total


def _write_arrays(file: _Summed, state: Any) -> None:
    try:
        eqx.tree_serialise_leaves(file, state, _write_array)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:  # Equinox's, which name an array, around that of a disk which is full
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        raise cause or error from None


def _paths(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"step-*{_SUFFIX}"))


def _check_whole(path: pathlib.Path, progress: Callable[..., Iterable[Any]]) -> None:
    summed, checksum = path.stat().st_size - _CHECKSUM_BYTES, 0
    with path.open("rb") as file:
        for start in progress(range(0, summed, _CHUNK), desc="checking the snapshot", unit="MB"):
            checksum = zlib.crc32(file.read(min(summed - start, _CHUNK)), checksum)
        if summed < 0 or file.read() != checksum.to_bytes(_CHECKSUM_BYTES, "big"):
            raise ModelFileError(f"expected {path} to be whole; its checksum is another: it was cut or changed")


def _load(path: pathlib.Path, like: _T, options: Mapping[str, Any]) -> tuple[int, _T]:
    with path.open("rb") as file:
        header = json.loads(file.readline())
        for name, value in header["options"].items():
            if name not in options or options[name] != value:
                raise ModelFileError(
                    f"expected {name} {value!r}, which {path} was written with; got {options.get(name)!r}. "
                    "Put the run's options and data back, or begin in another folder."
                )
        try:
            dtypes = header.get("dtypes", [])  # snapshots of older versions have none, and no keys
            return header["step"], _read_arrays(file, like, dtypes)
        except (RuntimeError, ValueError, EOFError) as error:
            raise ModelFileError(f"expected the arrays of this model in {path}; got {error}") from None


def _read_arrays(file: IO[bytes], like: _T, dtypes: Sequence[str]) -> _T:
    arrays = eqx.tree_deserialise_leaves(file, jax.tree.map(_without_key, like), _read_array)
    leaves, structure = jax.tree.flatten(arrays)
    for index, (name, expected) in enumerate(zip(dtypes, jax.tree.leaves(like), strict=False)):
        if _is_key(expected):
            leaves[index] = jax.random.wrap_key_data(leaves[index], impl=name)
            name = str(leaves[index].dtype)
        if name != _dtype(expected):
            raise ValueError(f"{name} in place of {_dtype(expected)}")
    return structure.unflatten(leaves)


def _write_array(file: Any, leaf: Any) -> None:
    nameless = _is_nameless(leaf)
    eqx.default_serialise_filter_spec(file, np.asarray(leaf).view(f"V{leaf.dtype.itemsize}") if nameless else leaf)


def _read_array(file: IO[bytes], like: Any) -> Any:
    if not _is_nameless(like):
        return eqx.default_deserialise_filter_spec(file, like)
    array = np.load(file).view(like.dtype)
    return array if isinstance(like, np.ndarray) else jnp.asarray(array)


def _is_nameless(leaf: Any) -> bool:
    """True if NumPy's format has no name for the dtype, such as bf16, float8 and int4: it gets the bytes alone."""
    return _is_array(leaf) and leaf.dtype.isbuiltin != 1


def _recorded(leaf: Any) -> str:
    return str(jax.random.key_impl(leaf)) if _is_key(leaf) else _dtype(leaf)


def _without_key(leaf: Any) -> Any:
    """Return what a file has of a leaf, or the structure of that for a `ShapeDtypeStruct`."""
    if not _is_key(leaf):
        return leaf
    data = jax.random.key_data
    return jax.eval_shape(data, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else data(leaf)


def _is_key(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray)


def _dtype(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", type(leaf).__name__))
