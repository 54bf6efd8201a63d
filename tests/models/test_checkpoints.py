"""Weights in and out: safetensors and GGUF files, by a table of names."""

import json
import re
from typing import Any

import equinox as eqx
import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import eqxcallback as eqxc
from models import bert, gguf, gguf_format
from models._errors import ModelFileError
from models._names import Table
from models.checkpoints import CheckpointError, load, save_gguf, save_safetensors
from models.embedder import default_folder


CONFIG = bert.Config(
    num_layers=2,
    embedding_size=12,
    hidden_size=20,
    num_heads=3,
    vocab_size=30,
    num_positions=16,
    num_kinds=2,
    layer_norm_eps=1e-12,
)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def new(dtype=jnp.float32, seed=0):
    return bert.Bert(CONFIG, dtype, key=jax.random.key(seed))


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def tensors_of(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not iterable


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_there_and_back(dtype, tmp_path):
    model = new(dtype)
    odd = jnp.array([-0.0, jnp.nan, -jnp.inf, 1e-7, *range(8)], dtype)
    model = eqx.tree_at(lambda model: model.blocks[1].down.bias, model, odd)
    save_safetensors(tmp_path / "model.safetensors", model, bert.NAMES)
    assert_same_bits(load(tmp_path / "model.safetensors", new(dtype, seed=1), bert.NAMES), model)
    like = eqx.filter_eval_shape(bert.Bert, CONFIG, dtype, key=jax.random.key(0))
    assert_same_bits(load(tmp_path, like, bert.NAMES), model)  # the folder
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_published_file_there_and_back(tmp_path):
    published = default_folder() / "model.safetensors"
    config = bert.config_of(json.loads((default_folder() / "config.json").read_text()))
    like = eqx.filter_eval_shape(bert.Bert, config, jnp.float32, key=jax.random.key(0))
    save_safetensors(tmp_path / "copy", load(published, like, bert.NAMES, unused=bert.UNUSED), bert.NAMES)
    theirs, ours = tensors_of(published), tensors_of(tmp_path / "copy")
    unused = {"embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"}
    assert ours.keys() == theirs.keys() - unused
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert tensor.tobytes() == theirs[name].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gguf_there_and_back(dtype, tmp_path):
    model, path = new(dtype), tmp_path / "model.gguf"
    save_gguf(path, model, bert.GGUF_NAMES, architecture="bert", block_count=2)
    assert_same_bits(load(path, new(dtype, seed=1), bert.GGUF_NAMES), model)
    reader = gguf_package.GGUFReader(path)  # somebody else's
    field = reader.get_field("bert.block_count")
    assert field is not None
    assert field.contents() == 2
    weight = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_up.weight")
    assert weight.tensor_type.name == {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[jnp.dtype(dtype).name]
    assert weight.data.tobytes() == np.asarray(model.blocks[1].up.weight).tobytes()


@pytest.mark.parametrize(
    ("value", "types"),
    [
        (2, ["UINT32"]),
        (np.int64(2), ["UINT32"]),
        (2**31, ["UINT32"]),
        (2**32, ["UINT64"]),
        (-1, ["INT32"]),
        (-(2**40), ["INT64"]),
        (0.5, ["FLOAT32"]),
        (np.float32(0.5), ["FLOAT32"]),
        (True, ["BOOL"]),
        (np.bool_(True), ["BOOL"]),
        ("text", ["STRING"]),
        (["a", "b"], ["ARRAY", "STRING"]),
        ([1, 2], ["ARRAY", "INT32"]),
        (np.arange(3), ["ARRAY", "INT32"]),
        (np.ones(2), ["ARRAY", "FLOAT32"]),
    ],
)
def test_metadata_have_the_types_that_llama_cpp_reads(value, types, tmp_path):
    """It fails where a size is not UINT32."""
    save_gguf(tmp_path / "gguf", {"x": np.ones(4, np.float32)}, {"*": "*"}, architecture="llama", **{"a.b": value})
    field = gguf_package.GGUFReader(tmp_path / "gguf").get_field("llama.a.b")
    assert field is not None
    assert [kind.name for kind in field.types] == types
    assert field.contents() == (value.tolist() if isinstance(value, np.ndarray) else value)


def test_metadata_are_those_of_the_package(tmp_path):
    """Keys of a BERT: its writer, which llama.cpp's converter uses, has a method for each."""
    values = {
        "block_count": 2,
        "context_length": 16,
        "embedding_length": 12,
        "feed_forward_length": 20,
        "attention.head_count": 3,
        "attention.layer_norm_epsilon": 0.5,
        "attention.causal": False,
        "pooling_type": gguf_package.PoolingType.MEAN,
    }
    writer = gguf_package.GGUFWriter(tmp_path / "theirs", "bert")
    names = ("head_count", "layer_norm_eps", "causal_attention", "pooling_type")
    methods = dict(zip([*values][4:], names, strict=True))
    for key, value in values.items():
        getattr(writer, f"add_{methods.get(key, key)}")(value)
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values["pooling_type"] = int(values["pooling_type"])
    save_gguf(tmp_path / "ours", {"x": np.ones(4, np.float32)}, {"*": "*"}, architecture="bert", **values)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_integers_that_no_file_has(tmp_path):
    with pytest.raises(ValueError, match="save_gguf: expected integers of up to 64 bits; got 18446744073709551616"):
        save_gguf(tmp_path / "gguf", {"x": np.ones(4, np.float32)}, {"*": "*"}, architecture="llama", size=2**64)
    assert not list(tmp_path.iterdir())


class Quantised(eqx.Module):
    """Layers of all encodings, one of them with a bias, some as a CPU multiplies them fastest."""

    layers: dict[str, eqxc.nn.QuantizedLinear]

    def __init__(self, seed=0):
        rng, rows, features = np.random.default_rng(seed), 32, 512
        self.layers = {}
        sizes: Any = eqxc.ops.ENCODINGS
        for encoding, size in sizes.items():
            blocks = rng.integers(0, 256, (rows, features // (256 if encoding.endswith("_K") else 32) * size), np.uint8)
            bias = jnp.arange(rows, dtype=jnp.bfloat16) if encoding == "Q4_K" else None
            self.layers[encoding] = eqxc.nn.QuantizedLinear(jnp.asarray(blocks), encoding, bias=bias)


QUANTISED_NAMES = {"*.weight": "layers.*.blocks", "*.bias": "layers.*.bias"}


def test_quantised_layers_there_and_back(tmp_path):
    """Random blocks, so each bit of them counts. Files have rows apart, as everybody else reads them."""
    model, like = Quantised(), eqx.filter_eval_shape(Quantised)
    save_gguf(tmp_path / "model.gguf", model, QUANTISED_NAMES, architecture="anything")
    save_safetensors(tmp_path / "model.safetensors", model, QUANTISED_NAMES)
    for name in ("model.gguf", "model.safetensors"):
        assert_same_bits(load(tmp_path / name, like, QUANTISED_NAMES), model)
        assert_same_bits(load(tmp_path / name, Quantised(seed=1), QUANTISED_NAMES), model)
    theirs = {tensor.name: tensor for tensor in gguf_package.GGUFReader(tmp_path / "model.gguf").tensors}
    blocks = tensors_of(tmp_path / "model.safetensors")
    assert len(model.layers) == 10
    for encoding, layer in model.layers.items():
        plain = layer.unpacked()
        tensor = theirs[f"{encoding}.weight"]
        assert tensor.tensor_type.name == plain.encoding
        assert tuple(tensor.shape) == (512, 32)
        np.testing.assert_array_equal(tensor.data, plain.blocks)
        np.testing.assert_array_equal(blocks[f"{encoding}.weight"], plain.blocks)
    assert not np.array_equal(blocks["Q4_1_R16.weight"], model.layers["Q4_1_R16"].blocks)


def test_blocks_of_another_encoding_are_refused(tmp_path):
    """Also where they have as many bytes: a file's Q4_0 and Q4_K, Q5_0 and Q5_K."""
    path, layers = tmp_path / "model.gguf", Quantised().layers
    for one, other in (("Q4_0", "Q4_K"), ("Q5_K", "Q5_0"), ("Q8_0", "Q4_1"), ("Q4_1", "Q8_0_R16")):
        save_gguf(path, layers[one], {"x": "blocks", "bias": "bias"}, architecture="anything")
        like = eqx.tree_at(lambda layer: layer.bias, layers[other], None, is_leaf=lambda leaf: leaf is None)
        expected = rf"of another dtype: x \(expected {other.removesuffix('_R16')}, got {one}\)"
        with pytest.raises(CheckpointError, match=expected):
            load(path, like, {"x": "blocks"})
    with pytest.raises(CheckpointError, match=r"x \(expected float32, got Q4_1\)"):
        load(path, jnp.zeros(layers["Q4_1"].blocks.shape), {"x": ""})


def test_arrays_that_gguf_files_do_not_have(tmp_path):
    layer = eqxc.nn.Linear(32, 8, key=jax.random.key(0))
    layer = eqxc.nn.QuantizedLinear.from_linear(layer, encoding="int8")
    with pytest.raises(
        ValueError, match=r"of F32, F16, BF16, Q4_0, .*; got blocks of int8 and shape \(8, 32\)\. Use save_s"
    ):
        save_gguf(tmp_path / "model.gguf", layer, {"*": "*"}, architecture="anything")
    with pytest.raises(ValueError, match=r"got y of uint8"):
        save_gguf(tmp_path / "model.gguf", {"y": np.zeros(4, np.uint8)}, {"*": "*"}, architecture="anything")
    assert not list(tmp_path.iterdir())


def test_arrays_of_another_byte_order_keep_their_numbers(tmp_path):
    numbers = np.arange(1, 4, dtype=">f4")
    save_gguf(tmp_path / "gguf", {"x": numbers}, {"*": "*"}, architecture="anything")
    save_safetensors(tmp_path / "safetensors", {"x": numbers}, {"*": "*"})
    for name in ("gguf", "safetensors"):
        np.testing.assert_array_equal(load(tmp_path / name, {"x": np.zeros(3, np.float32)}, {"*": "*"})["x"], numbers)


def test_complex_numbers_there_and_back(tmp_path):
    numbers = {"x": jnp.array([1 + 2j, -3j], jnp.complex64)}
    save_safetensors(tmp_path / "model", numbers, {"*": "*"})
    assert_same_bits(load(tmp_path / "model", {"x": jnp.zeros(2, jnp.complex64)}, {"*": "*"}), numbers)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_64_bits_are_not_cast(dtype, tmp_path):
    numbers = {"x": np.array([2**40 + 5, 7], dtype)}
    save_safetensors(tmp_path / "model", numbers, {"*": "*"})
    like = {"x": jax.ShapeDtypeStruct((2,), np.dtype(dtype))}
    with pytest.raises(ModelFileError, match=rf"without jax_enable_x64; got x of {dtype}\. Enable it, or have"):
        load(tmp_path / "model", like, {"*": "*"})
    with jax.enable_x64(True):
        assert_same_bits(load(tmp_path / "model", like, {"*": "*"}), numbers)
    assert_same_bits(load(tmp_path / "model", numbers, {"*": "*"}), numbers)


def test_a_file_stays_if_the_new_one_could_not_be_loaded(tmp_path):
    save_safetensors(tmp_path / "safetensors", {"x": np.ones(4)}, {"*": "*"})
    save_gguf(tmp_path / "gguf", {"x": np.ones(4, np.float32)}, {"*": "*"}, architecture="anything")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4, np.complex128):
        name = np.dtype(dtype).name
        with pytest.raises(ValueError, match=f"arrays of one of bool, .*; got x of {name}. Cast it first"):
            save_safetensors(tmp_path / "safetensors", {"x": np.ones(4, dtype)}, {"*": "*"})
    with pytest.raises(ValueError, match=r"none of them empty; got x of F32 and shape \(0, 4\). Use save_safetensors"):
        save_gguf(tmp_path / "gguf", {"x": np.ones((0, 4), np.float32)}, {"*": "*"}, architecture="anything")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match=r"none/model: .*No such file"):
        save_safetensors(tmp_path / "none" / "model", {"x": np.ones(4)}, {"*": "*"})


def test_gguf_names_are_those_of_llama_cpp():
    theirs = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.BERT, 2)
    ours, safetensors = Table(bert.GGUF_NAMES), Table(bert.NAMES)
    leaves = jax.tree_util.tree_leaves_with_path(new())
    assert len(leaves) == 5 + 2 * 16
    for keys, _ in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        name = safetensors.name(path)
        assert name is not None
        assert ours.name(path) == theirs.get_name(name, try_suffixes=(".weight", ".bias"))


def test_quantised_tensors_are_blocks():
    """A GGUF file of a language model has them, and a layer of their encoding takes them."""
    path, name = gguf.default_path(), "blk.3.attn_k.weight"
    tensor = gguf_format.open_tensors(path)[name]
    assert tensor.encoding == "Q4_1"
    like = eqxc.nn.QuantizedLinear(jnp.zeros(tensor.data.shape, jnp.uint8), "Q4_1")
    layer = load(path, like, {name: "blocks"}, unused=["*.weight", "blk.*.*.weight"])
    x = jax.random.normal(jax.random.key(0), (tensor.shape[1],))
    weight = gguf_package.dequantize(tensor.data, gguf_package.GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(layer(x), weight @ np.asarray(x), rtol=1e-4, atol=1e-4)


def test_the_report_has_all_that_does_not_match(tmp_path):
    save_safetensors(tmp_path / "good", new(), bert.NAMES)
    tensors = tensors_of(tmp_path / "good")
    del tensors["embeddings.LayerNorm.bias"]
    query = "encoder.layer.1.attention.self.query"
    tensors[f"{query}.weight"] = tensors[f"{query}.weight"][:, :-1].copy()
    tensors[f"{query}.bias"] = tensors[f"{query}.bias"].astype(np.float16)
    tensors["embeddings.position_ids"] = np.arange(16)[None]
    extra = [f"encoder.layer.2.output.dense.{i}" for i in range(8)]
    save_file(tensors | {name: np.zeros(3, np.float32) for name in extra}, tmp_path / "bad")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "bad", new(), bert.NAMES, unused=bert.UNUSED)
    report = caught.value.report
    assert report.missing == ("embeddings.LayerNorm.bias",)
    assert sorted(report.unexpected) == extra
    assert report.shapes == (f"{query}.weight (expected (12, 12), got (12, 11))",)
    assert report.dtypes == (f"{query}.bias (expected float32, got float16)",)
    expected = (
        r".*bad: expected the tensors of Bert; got 1 missing: embeddings\.LayerNorm\.bias; 8 unexpected: .*, and 3 more; "
        r"1 of another shape: .*; 1 of another dtype: .*\. Use a file of this model, of this size and dtype\."
    )
    assert re.fullmatch(expected, str(caught.value))
    save_file(tensors_of(tmp_path / "good") | {"embeddings.position_ids": np.arange(3)}, tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"1 unexpected: embeddings\.position_ids"):
        load(tmp_path / "more", new(), bert.NAMES)


def test_tables_that_do_not_fit(tmp_path):
    without_norm = {name: path for name, path in bert.NAMES.items() if path != "norm.*"}
    for names in (without_norm, without_norm | {"norm": "norm.weight", "bias": "norm.weight"}):
        with pytest.raises(ValueError, match=r"expected one tensor's name for each array of Bert.*Extend the table"):
            save_safetensors(tmp_path / "model", new(), names)
    with pytest.raises(ValueError, match="expected one tensor's name for each array"):
        # Two arrays of one name.
        save_safetensors(tmp_path / "model", new(), {"a.*": "tokens.*", "a.weight": "positions.weight", **bert.NAMES})
    with pytest.raises(ValueError, match=r"expected as many \* on both sides; got 'a\.\*' and 'b'"):
        Table({"a.*": "b"})
    assert not list(tmp_path.iterdir())
    table = Table({"a.*.b.*": "x[*].*", "c+": "d"})
    assert (table.path("a.10.b.w"), table.name("x[10].w"), table.path("c+")) == ("x[10].w", "a.10.b.w", "d")
    assert (table.path("a.1.2.b.w"), table.path("cc"), table.name("e")) == (None, None, None)


def test_shards(tmp_path):
    model = new()
    save_safetensors(tmp_path / "whole", model, bert.NAMES)
    tensors = sorted(tensors_of(tmp_path / "whole").items())
    files = {"a.safetensors": dict(tensors[:9]), "b.safetensors": dict(tensors[9:])}
    for name, part in files.items():
        save_file(part, tmp_path / name)
    assert_same_bits(load(tmp_path, new(seed=1), bert.NAMES), model)
    save_file(files["a.safetensors"], tmp_path / "old.safetensors")
    with pytest.raises(ModelFileError, match=r"old.safetensors: expected each tensor in one file; got '.*' again"):
        load(tmp_path, new(), bert.NAMES)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in files.items() for name in part}}))
    assert_same_bits(load(tmp_path, new(seed=1), bert.NAMES), model)
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ModelFileError, match=r"index\.json: expected an index of files; got .*Get it again"):
            load(tmp_path, new(), bert.NAMES)


def test_files_that_cannot_be_read(tmp_path):
    save_safetensors(tmp_path / "model", new(), bert.NAMES)
    data = (tmp_path / "model").read_bytes()
    (tmp_path / "cut").write_bytes(data[:-10])
    (tmp_path / "text").write_text("hello")
    save_file({"x": np.zeros(4, jnp.float8_e4m3fn)}, tmp_path / "float8")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "cut": "expected a safetensors file that is whole; got: .*Get it again",
        "text": "expected a safetensors file that is whole",
        "none": "expected a file that can be read; got No such file",
        "empty": "expected a folder with safetensors files; got none in it",
        "float8": "expected tensor 'x' to be of one of BOOL, .*; got F8_E4M3, which is not supported",
    }.items():
        with pytest.raises(ModelFileError, match=f"{name}: {message}"):
            load(tmp_path / name, new(), bert.NAMES)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelFileError, match="truncated or corrupt"):
        load(tmp_path / "cut.gguf", new(), bert.GGUF_NAMES)


def test_a_file_stays_if_the_new_one_fails(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path, new(), bert.GGUF_NAMES, architecture="bert")
    before = path.read_bytes()
    wrong = eqx.tree_at(lambda model: model.blocks[1].down.bias, new(), jnp.zeros(12, jnp.int32))
    with pytest.raises(ValueError, match=r"expected arrays of one of F32.* of int32.*Use save_safetensors"):
        save_gguf(path, wrong, bert.GGUF_NAMES, architecture="bert")
    with pytest.raises(ValueError, match="Unknown type"):
        save_gguf(path, new(), bert.GGUF_NAMES, architecture="bert", other=object())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
