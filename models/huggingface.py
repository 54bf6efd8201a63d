"""A language model in a folder, as Hugging Face's transformers writes it: `config.json` and safetensors files."""

import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ._errors import ModelFileError
from ._json import read_object
from ._names import Table
from ._safetensors import Stored, open_tensors
from .gguf import Config, shapes


_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
# Names in safetensors files, and in GGUF files. `models.checkpoints.load` cannot put them into a `Llama`, in which several of
# these tensors are one array, and dtypes are those of the computation.
_NAMES = Table(
    {
        _EMBEDDING: "token_embd.weight",
        "model.layers.*.input_layernorm.weight": "blk.*.attn_norm.weight",
        "model.layers.*.self_attn.q_proj.*": "blk.*.attn_q.*",
        "model.layers.*.self_attn.k_proj.*": "blk.*.attn_k.*",
        "model.layers.*.self_attn.v_proj.*": "blk.*.attn_v.*",
        "model.layers.*.self_attn.q_norm.weight": "blk.*.attn_q_norm.weight",
        "model.layers.*.self_attn.k_norm.weight": "blk.*.attn_k_norm.weight",
        "model.layers.*.self_attn.o_proj.*": "blk.*.attn_output.*",
        "model.layers.*.post_attention_layernorm.weight": "blk.*.ffn_norm.weight",
        "model.layers.*.mlp.gate_proj.*": "blk.*.ffn_gate.*",
        "model.layers.*.mlp.up_proj.*": "blk.*.ffn_up.*",
        "model.layers.*.mlp.down_proj.*": "blk.*.ffn_down.*",
        "model.norm.weight": "output_norm.weight",
        _OUTPUT: "output.weight",
    }
)
# Old files have the frequencies of the rotary embedding, which follow from the config.
_UNUSED = Table({name: name for name in ("model.layers.*.self_attn.rotary_emb.inv_freq",)})
_ENCODINGS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_LIMIT = 2**63  # of all numbers in a config: Python has larger ones, and arrays have not
_QKV = ("attn_q", "attn_k", "attn_v")
_REMEDY = "Get the files again."
_UNSUPPORTED = "which is not supported. Use another model."


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a folder, which each use of `data` reads."""

    stored: Stored

    @property
    def encoding(self) -> str:
        return _ENCODINGS[self.stored.dtype.name]

    @property
    def data(self) -> np.ndarray:
        return self.stored.read()


@dataclass(frozen=True)
class Folder:
    """A model's folder, as `open_folder` read it: the `models._files.Files` of it."""

    config: Config
    tensors: Mapping[str, StoredWeight]
    """By their names in GGUF files."""
    path: pathlib.Path
    rotates_neighbours: bool = False

    def forget_pages(self) -> None:
        """Do nothing: tensors are read into memory of their own."""


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read the config of a Llama, Qwen2 or Qwen3, and check that its safetensors files are whole, and have its tensors.

    **Arguments:**

    - `path`: a folder with `config.json`, and `model.safetensors` or several files with `model.safetensors.index.json`.

    **Returns:**

    A `Folder`, with all tensors of the model, of the shapes that its `config` says. They stay in the files.

    **Raises:**

    - `ModelFileError`, whatever is wrong with a file.
    """
    path = pathlib.Path(path)
    settings = read_object(path / "config.json")
    try:
        config = _config_of(settings)
    except ModelFileError as error:
        raise ModelFileError(f"{path / 'config.json'}: {error}") from None
    one = path / "model.safetensors"
    tensors = open_tensors(one if one.exists() else path)
    try:
        stored = _check(tensors, config, ties=settings.get("tie_word_embeddings", False) and _are_one(tensors))
        # Now that the size of a head is known to be right.
        config = replace(config, rope_factors=_rope_factors(settings, config))
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from None
    return Folder(config, {name: StoredWeight(tensor) for name, tensor in stored.items()}, path)


def published_name(name: str) -> str:
    """The name in safetensors files of a tensor that is called `name` in GGUF files."""
    published = _NAMES.name(name)
    assert published is not None, name
    return published


def _config_of(settings: Mapping[str, Any]) -> Config:
    kind = settings.get("model_type")
    if kind not in ("llama", "qwen2", "qwen3"):
        raise ModelFileError(f"expected model_type to be 'llama', 'qwen2' or 'qwen3'; got {kind!r}, {_UNSUPPORTED}")
    rope = _rope(settings)
    settings = {**settings, "rope_theta": rope.get("rope_theta", settings.get("rope_theta"))}

    def positive(key: str, default: Any = None, *types: type) -> Any:
        value = default if settings.get(key) is None else settings[key]
        if type(value) not in (types or (int,)) or not 0 < value < _LIMIT:
            expected = "a positive number" if types else "a positive integer"
            raise ModelFileError(f"expected {key} to be {expected}; got {value!r}. {_REMEDY}")
        return value

    num_heads, embedding_size = positive("num_attention_heads"), positive("hidden_size")
    config = Config(
        num_layers=positive("num_hidden_layers"),
        context_length=positive("max_position_embeddings"),
        embedding_size=embedding_size,
        hidden_size=positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=positive("num_key_value_heads", num_heads),
        head_size=positive("head_dim", 128 if kind == "qwen3" else embedding_size // num_heads),
        rope_theta=float(positive("rope_theta", 10000.0, int, float)),
        rms_norm_eps=float(positive("rms_norm_eps", None, int, float)),
        vocab_size=positive("vocab_size"),
        head_norm=kind == "qwen3",
        biases=tuple(_biases(kind, settings)),
    )
    layers = settings.get("layer_types") or []
    layers = layers if isinstance(layers, list) else [layers]
    # Qwen's configs have one that is not used. A Llama's may be meant, and no layer here would see it.
    window = settings.get("sliding_window") if kind == "llama" else None
    seen = window is None or (type(window) is int and not 0 < window < config.context_length)
    part = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    rules = (
        (config.head_size % 2 == 0, "an even head size, for the rotary embedding", config.head_size),
        (num_heads % config.num_kv_heads == 0, f"kv heads that divide {num_heads} heads", config.num_kv_heads),
        (settings.get("hidden_act", "silu") == "silu", "hidden_act of 'silu'", settings.get("hidden_act")),
        (
            rope["rope_type"] in ("default", "linear", "llama3"),
            "rope_type 'default', 'linear' or 'llama3'",
            repr(rope["rope_type"]),
        ),
        (part in (None, 1), "a rotary embedding of whole heads", f"partial_rotary_factor {part}"),
        (settings.get("is_causal", True), "attention to earlier tokens alone", "is_causal false"),
        (not settings.get("use_sliding_window"), "attention to all tokens", "a sliding window"),
        (seen, "attention to all tokens", f"a sliding window of {window}"),
        (layers == ["full_attention"] * len(layers), "attention to all tokens", f"layer_types {layers}"),
        (settings.get("quantization_config") is None, "weights that are not quantised", "a quantization_config"),
    )
    for holds, expected, got in rules:
        if not holds:
            raise ModelFileError(f"expected {expected}; got {got}, {_UNSUPPORTED}")
    return config


def _biases(kind: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """The linear layers of a block that have a bias."""
    if kind == "qwen2":
        yield from _QKV
    elif settings.get("attention_bias"):
        yield from (*_QKV, "attn_output")
    if kind == "llama" and settings.get("mlp_bias"):
        yield from ("ffn_gate", "ffn_up", "ffn_down")


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary embedding, which older files have under other names."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ModelFileError(f"expected one rotary embedding for all layers; got {rope!r}, {_UNSUPPORTED}")
    return {"rope_type": rope.get("type", "default"), **rope}


def _rope_factors(settings: Mapping[str, Any], config: Config) -> tuple[float, ...]:
    """The numbers that divide the frequencies. A linear scaling makes all waves `factor` times as long. By the rule of Llama 3.1
    long waves become so, short ones stay, and between them it is a mixture of both."""
    rope = _rope(settings)
    kind = rope["rope_type"]
    if kind == "default":
        return ()
    names = ["factor"]
    if kind == "llama3":
        names += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
        length = settings.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", config.context_length)
        rope |= {} if length is None else {"original_max_position_embeddings": length}
    values: Any = [rope.get(name) for name in names]
    are_numbers = all(type(value) in (int, float) and 0 < value < _LIMIT for value in values)
    if not are_numbers or (kind == "llama3" and values[1] >= values[2]):
        raise ModelFileError(
            f"expected {', '.join(names)} of a {kind} rotary embedding, positive; got {rope}. {_REMEDY}"
        )
    if kind == "linear":
        return (float(values[0]),) * (config.head_size // 2)
    factor, low, high, length = map(float, values)
    waves = 2 * math.pi * config.rope_theta ** (np.arange(0, config.head_size, 2) / config.head_size)
    share = np.clip((length / waves - low) / (high - low), 0, 1)  # of what stays
    return tuple((1 / ((1 - share) / factor + share)).tolist())


def _are_one(tensors: Mapping[str, Stored]) -> bool:
    """False if the file of a model that ties the output to the embedding has another output, which is used then."""
    output, embedding = tensors.get(_OUTPUT), tensors.get(_EMBEDDING)
    if output is None or embedding is None:
        return True
    types = [(tensor.shape, tensor.dtype) for tensor in (output, embedding)]
    # By their bits, without copies: they may be a gigabyte each.
    return types[0] == types[1] and np.array_equal(output.read().view(np.uint8), embedding.read().view(np.uint8))


def _check(tensors: Mapping[str, Stored], config: Config, *, ties: bool) -> dict[str, Stored]:
    """The tensors of a model, by their names in GGUF files."""
    checked: dict[str, Stored] = {}
    output = [] if ties else [("output.weight", (config.vocab_size, config.embedding_size))]
    rest = set(tensors)
    for name, shape in itertools.chain(shapes(config), output):
        theirs = _NAMES.name(name) or name
        if theirs not in tensors:
            raise ModelFileError(f"expected tensor {theirs!r}; got {len(tensors)} tensors without it. {_REMEDY}")
        tensor = tensors[theirs]
        if tensor.shape != shape:
            raise ModelFileError(f"expected tensor {theirs!r} of shape {shape}; got {tensor.shape}. {_REMEDY}")
        if tensor.dtype.name not in _ENCODINGS:
            raise ModelFileError(
                f"expected tensor {theirs!r} of one of {', '.join(_ENCODINGS)}; got {tensor.dtype}, {_UNSUPPORTED}"
            )
        checked[name] = tensor
        rest.discard(theirs)
    unexpected = [name for name in rest if _UNUSED.path(name) is None and not (ties and name == _OUTPUT)]
    if unexpected:  # a bias, say, that would be left out of the computation
        raise ModelFileError(
            f"expected only the tensors of a model with {config.num_layers} layers; got {min(unexpected)!r} as well, "
            f"{_UNSUPPORTED}"
        )
    return checked
