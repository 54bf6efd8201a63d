"""Activations rounded to int8: the bound of the error on real weights, and the option of the programs."""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from models import gguf, llama, lora
from models._errors import ModelFileError
from models.generate.__main__ import main
from models.parallel import tensor_parallel
from models.serve.__main__ import main as serve

from .tiny import write_tiny


TEXT = "The library of Alexandria was one of the largest of the ancient world, and nobody knows how many scrolls there were."
PROJECTIONS = ("qkv", "attention_out", "gate_up", "down")


@pytest.fixture(scope="module")
def rounding(file):
    return llama.load(file, activations="int8")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Files with quantised weights, and without."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder / "mixed.gguf", {"attn_v": "Q4_1", "ffn_up": "F32", "output": "Q8_0"}, "Q8_0", hidden=128)
    write_tiny(folder / "plain.gguf", {"output": "Q8_0"}, "F16", speaks=True)
    return folder


def quantised_layers(tree):
    is_layer = lambda x: isinstance(x, eqxc.nn.QuantizedLinear)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_layer) if is_layer(x)]


def weights_of(layer):
    return np.asarray(layer.rows(jnp.arange(layer.out_features)), np.float64)


@eqx.filter_jit
def logits_of(model, tokens):
    """Compute them for a prompt, of which all but four tokens are read at once."""
    x, cache = model(tokens[:-4], model.init_cache(len(tokens)))
    parts = [x]
    for token in tokens[-4:]:
        x, cache = model(token[None], cache)
        parts.append(x)
    return model.logits(jnp.concatenate(parts))


def bound(x, weights):
    """Half a step, a 127th of the highest magnitude of a block of 32, times the weights that it meets."""
    steps = np.abs(x).reshape(len(x), -1, 32).max(-1) / 127
    return steps / 2 @ np.abs(weights).reshape(len(weights), -1, 32).sum(-1).T


def rounding_error(layer, x):
    rounding = dataclasses.replace(layer, activations="int8")
    got, want = (np.asarray(jax.vmap(layer)(jnp.asarray(x)), np.float64) for layer in (rounding, layer))
    return np.abs(got - want)


@pytest.fixture(scope="module")
def inputs(model, tokenizer):
    """The inputs of each projection of some blocks, for a text."""
    recorded = {}

    def record(index, name, projection):
        def recording(function):
            def call(x):
                recorded[index, name] = x
                return function(x)

            return call

        call: Any = recording(projection)
        call.then_swiglu = recording(projection.then_swiglu)
        return call

    tokens = jnp.asarray(tokenizer.encode(TEXT), jnp.int32)
    table, x = model.rotary_table(jnp.arange(len(tokens))), model.embedding(tokens)
    residual = jnp.zeros_like(x)
    for index, block in enumerate(model.blocks):
        names = PROJECTIONS if index % 7 == 1 else ()
        block = dataclasses.replace(block, **{name: record(index, name, getattr(block, name)) for name in names})
        x, residual, _ = block(x, residual, table)
    return recorded


@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_bound_of_the_error(name, model, inputs):
    """The 0.1% more are for the rounding of sums in f32, of both."""
    blocks = [index for index, projection in inputs if projection == name]
    assert len(blocks) == 5
    for index in blocks:
        (layer,) = getattr(model.blocks[index], name).layers
        x = np.asarray(inputs[index, name], np.float64)
        for rows in (x, x[-1:]):
            error, limit = rounding_error(layer, rows.astype(np.float32)), bound(rows, weights_of(layer))
            assert (error <= 1.001 * limit).all()
            assert error.max() > 0.01 * limit.max()


def test_the_bound_is_reached(model):
    """By values just below the middle of two levels, which have the signs of their weights."""
    (layer,) = model.blocks[3].down.layers
    weights = weights_of(layer)[7]
    rng = np.random.default_rng(0)
    x = np.copysign(rng.integers(0, 126, weights.size) + 0.499, weights).reshape(-1, 32)
    least = np.abs(weights).reshape(x.shape).argmin(-1)
    x[np.arange(len(x)), least] = 127  # levels are whole numbers
    x = x.reshape(1, -1).astype(np.float32)
    error, limit = rounding_error(layer, x)[0, 7], bound(x, weights[None])[0, 0]
    assert 0.97 * limit < error <= 1.001 * limit


def test_only_layers_of_blocks_round(model, rounding, tiny):
    assert {layer.activations for layer in quantised_layers(model)} == {"exact"}
    assert {layer.activations for layer in quantised_layers(rounding.blocks)} == {"int8"}
    assert rounding.embedding.table.activations == "exact"
    for index in (0, 29):
        for name in PROJECTIONS:
            pair = (getattr(loaded.blocks[index], name).layers[0].blocks for loaded in (model, rounding))
            np.testing.assert_array_equal(*pair)
    mixed = llama.load(gguf.open_model(tiny / "mixed.gguf"), activations="int8")
    assert [layer.activations for layer in quantised_layers(mixed.blocks[0].qkv)] == ["int8", "int8"]
    kinds = [type(layer) for layer in mixed.blocks[0].gate_up.layers]
    assert kinds == [eqxc.nn.QuantizedLinear, eqxc.nn.Linear]
    assert mixed.output is not None
    assert quantised_layers(mixed.output)[0].activations == "exact"


def test_logits(tokenizer, model, rounding):
    """Read a prompt, and then one token after the other."""
    tokens = jnp.asarray(tokenizer.encode(TEXT), jnp.int32)
    want, got = (np.asarray(logits_of(which, tokens)) for which in (model, rounding))
    error = np.sqrt(np.mean((got - want) ** 2)) / want.std()
    assert 0.01 < error < 0.1
    assert np.mean(got.argmax(-1) == want.argmax(-1)) > 0.9


def test_several_devices(tiny):
    """They round the same blocks. Sums in another order move a value across the middle of two levels now and then."""
    file, tokens = gguf.open_model(tiny / "mixed.gguf"), jnp.asarray([1, 17, 5, 60, 33], jnp.int32)

    @eqx.filter_jit
    def logits(model):
        return model.logits(model(tokens, model.init_cache(8))[0])

    mesh = tensor_parallel.mesh_of(jax.devices()[:2])
    exact, whole = (logits(llama.load(file, activations=activations)) for activations in ("exact", "int8"))
    split = logits(tensor_parallel.load(file, mesh, activations="int8"))
    assert np.abs(split - whole).max() < 0.1 * np.abs(exact - whole).max()


def test_adapters(file, tokenizer, rounding):
    """An adapter multiplies what is exact. Weights that have taken it in round as they did."""
    adapters = lora.init(file.config, rank=2, scale=1.0, targets=["down_proj"], key=jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.01, adapters)
    attached = lora.attach(rounding, adapters)
    x = jax.random.normal(jax.random.key(1), (3, rounding.config.hidden_size))
    down, adapter = attached.blocks[0].down, adapters.blocks[0]["down"]
    np.testing.assert_allclose(down(x), rounding.blocks[0].down(x) + adapter(x), rtol=1e-5, atol=1e-5)
    one = dataclasses.replace(attached, blocks=attached.blocks[:1])
    (merged,) = lora.merge(one, encoding="Q8_0").blocks[0].down.layers
    assert isinstance(merged, eqxc.nn.QuantizedLinear)
    assert (merged.encoding, merged.activations) == ("Q8_0", "int8")


def test_the_program(capsys):
    assert main(["Name the capital of Japan.", "--activations", "int8", "--profile"]) == 0
    written = capsys.readouterr()
    assert written.out == "The capital of Japan is Tokyo.\n"
    assert re.search(r"^gate and up +30 ", written.err, re.MULTILINE)


@pytest.mark.parametrize(("program", "arguments"), [(main, ["hi"]), (serve, ["--port", "0", "--no-embeddings"])])
def test_weights_that_are_not_quantised(program, arguments, tiny, capsys):
    path = str(tiny / "plain.gguf")
    assert program([*arguments, "--weights", path, "--activations", "int8"]) == 2
    written = capsys.readouterr()
    message = "expected blocks with quantised weights, for activations of int8; got F16 and F32. Use a GGUF file that has some, "
    assert written.err.endswith(f": error: {message}or exact activations.\n")
    assert written.out == ""


def test_wrong_names(file, capsys):
    assert main(["hi", "--activations", "int4"]) == 2
    assert "argument --activations: invalid choice: 'int4'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected activations to be one of exact, int8; got 'int4'"):
        llama.load(file, activations="int4")  # pyright: ignore[reportArgumentType]


def test_several_devices_say_it_too(tiny):
    with pytest.raises(ModelFileError, match="expected blocks with quantised weights"):
        tensor_parallel.load(
            gguf.open_model(tiny / "plain.gguf"), tensor_parallel.mesh_of(jax.devices()[:2]), activations="int8"
        )
