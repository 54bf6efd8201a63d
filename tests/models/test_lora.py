"""Low-rank adapters of two blocks of SmolLM2: gradients, merging, and files."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open

import eqxcallback as eqxc
from benchmarks import plain_llama
from models import adapter_files, gguf, huggingface, llama, lora
from models._errors import ModelFileError
from models.checkpoints import CheckpointError
from models.finetune.examples import Batch
from models.finetune.token_losses import token_losses
from models.finetune.tuner import Tuner, stacked, total_loss

from . import families


RANK, SCALE = 3, 1.5


@pytest.fixture(scope="module")
def short(model):
    """The model with its first two blocks."""
    config = dataclasses.replace(model.config, num_layers=2)
    return dataclasses.replace(model, blocks=model.blocks[:2], config=config)


@pytest.fixture(scope="module")
def adapters(short):
    """Adapters that do change something: `B` is random as well."""
    adapters = lora.init(short.config, rank=RANK, scale=SCALE, key=jax.random.key(0))
    leaves, tree = jax.tree.flatten(adapters)
    rng = np.random.default_rng(0)
    return tree.unflatten([jnp.asarray(rng.normal(scale=0.05, size=leaf.shape), jnp.float32) for leaf in leaves])


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 49152, (2, 12)).astype(np.int32)
    targets[0, :5] = targets[1, 9:] = -1
    return Batch(rng.integers(0, 49152, (2, 12)).astype(np.int32), targets)


def arrays(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@jax.jit
def logits(model, tokens):
    x, _ = model(tokens, model.init_cache(len(tokens)))
    return model.logits(x)


@jax.jit
def our_loss(adapters, model, batch):
    rest = eqx.tree_at(lambda model: model.blocks, model, [])
    return total_loss([stacked(adapters.blocks)], [stacked(model.blocks)], rest, batch)


def pairs_from_halves(rows, heads):
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def plain_loss(adapters, params, config, batch):
    """The loss of plain JAX, whose weights are dequantised and have the updates added to them."""
    layers = []
    for layer, of_block in zip(params.layers, adapters.blocks, strict=True):
        update = {name: SCALE * low.b @ low.a for of in of_block.values() for name, low in of.updates.items()}
        assert update.keys() == {*lora.TARGETS}
        update["q_proj"] = pairs_from_halves(update["q_proj"], config.num_heads)
        update["k_proj"] = pairs_from_halves(update["k_proj"], config.num_kv_heads)
        layers.append(
            layer._replace(
                attn_qkv=layer.attn_qkv + jnp.concatenate([update[f"{name}_proj"] for name in "qkv"]),
                attn_output=layer.attn_output + update["o_proj"],
                ffn_gate_up=layer.ffn_gate_up + jnp.concatenate([update["gate_proj"], update["up_proj"]]),
                ffn_down=layer.ffn_down + update["down_proj"],
            )
        )
    params = params._replace(layers=layers)
    total = jnp.zeros(())
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            plain_llama.logits(params, config, jnp.asarray(tokens)), jnp.asarray(np.maximum(targets, 0))
        )
        total = total + losses[targets >= 0].sum()
    return total


def test_gradients_are_those_of_dequantised_weights(short, adapters, batch):
    params = plain_llama.load(gguf.default_path())
    params = params._replace(layers=params.layers[:2])
    expected, theirs = jax.value_and_grad(plain_loss)(adapters, params, short.config, batch)
    value, ours = jax.value_and_grad(our_loss)(adapters, short, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * float(jnp.abs(b).max()))


def test_gradients_are_finite_differences(short, adapters, batch):
    gradients = jax.grad(our_loss)(adapters, short, batch)
    length = optax.tree.norm(gradients)
    step = 0.02 / length  # along the gradient
    moved = [jax.tree.map(lambda x, g, sign=sign: x + sign * step * g, adapters, gradients) for sign in (1, -1)]
    above, below = (our_loss(adapters, short, batch) for adapters in moved)
    np.testing.assert_allclose((above - below) / (2 * step), length**2, rtol=5e-3)


@pytest.mark.parametrize("size", [2500, 700])  # three chunks with a rest, and one
@pytest.mark.parametrize("encoding", [None, "Q8_0"])
def test_token_losses(size, encoding):
    keys = jax.random.split(jax.random.key(0), 3)
    layer = eqx.nn.Linear(64, size, use_bias=False, key=keys[0])
    layer = layer if encoding is None else eqxc.nn.QuantizedLinear.from_linear(layer, encoding=encoding)
    x = 20 * jax.random.normal(keys[1], (6, 64))
    targets = jnp.array([0, size - 1, -1, 5, 650, 11], jnp.int32)

    def plain(x):
        losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(layer)(x), jnp.maximum(targets, 0))
        return jnp.where(targets < 0, 0.0, losses)

    (ours, pull), (theirs, pull_plain) = (
        jax.vjp(function, x) for function in (lambda x: token_losses(x, layer, targets), plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    weights = jnp.arange(1.0, 7.0)
    np.testing.assert_allclose(pull(weights)[0], pull_plain(weights)[0], rtol=1e-4, atol=1e-5)


def test_new_adapters_change_nothing(short, batch):
    tokens = jnp.asarray(batch.tokens[0])
    new = lora.init(short.config, rank=RANK, scale=SCALE, targets=["v_proj", "up_proj"], key=jax.random.key(0))
    assert {name for of in new.blocks[1].values() for name in of.updates} == {"v_proj", "up_proj"}
    np.testing.assert_array_equal(logits(lora.attach(short, new), tokens), logits(short, tokens))


def test_merge_and_unmerge(short, adapters, batch):
    before, tokens = arrays(short), jnp.asarray(batch.tokens[0])
    model = lora.attach(short, adapters)
    expected, base = logits(model, tokens), logits(short, tokens)
    merged = lora.merge(model)
    assert all(isinstance(layer, eqx.nn.Linear) for block in merged.blocks for layer in block.down.layers)
    np.testing.assert_allclose(logits(merged, tokens), expected, rtol=0, atol=1e-3)
    # Requantised, it is near, by what 8 bits lose.
    requantised = lora.merge(model, encoding="Q8_0")
    assert getattr(requantised.blocks[0].qkv.layers[0], "encoding", None) == "Q8_0"
    off = np.abs(logits(requantised, tokens) - expected).max()
    assert 0 < off < 0.25 * np.abs(base - expected).max()
    for model_again in (lora.unmerge(merged), lora.unmerge(requantised)):
        assert jax.tree.structure(model_again) == jax.tree.structure(model)
        pairs = zip(jax.tree.leaves(model_again), jax.tree.leaves(model), strict=True)
        assert all(one is other for one, other in pairs)
    detached = lora.detach(merged)
    assert jax.tree.structure(detached) == jax.tree.structure(short)
    assert arrays(detached) == arrays(short) == before


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3"])
def test_families(family, tmp_path):
    """Biases, norms of heads and scaled rotations are those of the model, in its adapters' loss and after a merge."""
    settings = families.settings_of(family)
    folder = families.write_folder(tmp_path / "folder", settings, families.random_weights(settings))
    model = llama.load(huggingface.open_folder(folder))
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(lora.init(model.config, rank=2, scale=1.0, key=jax.random.key(0)))
    adapters = tree.unflatten([jnp.asarray(rng.normal(scale=0.05, size=leaf.shape), jnp.float32) for leaf in leaves])
    tokens = rng.integers(0, model.config.vocab_size, (1, 24)).astype(np.int32)

    merged = lora.merge(lora.attach(model, adapters))
    expected = logits(merged, jnp.asarray(tokens[0, :-1]))
    np.testing.assert_allclose(logits(lora.attach(model, adapters), jnp.asarray(tokens[0, :-1])), expected, atol=1e-4)
    loss = optax.softmax_cross_entropy_with_integer_labels(expected, tokens[0, 1:]).sum()
    got = our_loss(adapters, model, Batch(tokens[:, :-1], tokens[:, 1:]))
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    assert arrays(lora.detach(merged)) == arrays(model)


def test_a_model_of_several_encodings(short, batch):
    """Its blocks are two stacks. A step lowers the loss, and the adapters keep their order."""
    first = lora.init(dataclasses.replace(short.config, num_layers=1), rank=1, scale=1.0, key=jax.random.key(0))
    expanded = lora.merge(lora.attach(dataclasses.replace(short, blocks=short.blocks[:1]), first)).blocks[0]
    expanded = jax.tree.map(
        lambda part: dataclasses.replace(part, unmerged=None) if hasattr(part, "unmerged") else part,
        expanded,
        is_leaf=lambda part: hasattr(part, "unmerged"),
    )
    model = dataclasses.replace(short, blocks=[expanded, short.blocks[1]])
    adapters = lora.init(model.config, rank=RANK, scale=SCALE, targets=["o_proj"], key=jax.random.key(1))
    tuner = Tuner(model, adapters, learning_rate=1e-2, steps=3)
    assert arrays(tuner.adapters) == arrays(adapters)
    assert jax.tree.structure(tuner.adapters) == jax.tree.structure(adapters)
    losses = [tuner.step(batch) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert np.log(tuner.perplexity([batch, batch])) < losses[-1]


def test_files_are_those_of_peft(short, adapters, tmp_path):
    adapter_files.save(tmp_path, adapters, alpha=SCALE * RANK)
    with safe_open(tmp_path / "adapter_model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, SCALE * RANK)
    assert config["target_modules"] == sorted(lora.TARGETS)
    prefix = "base_model.model.model.layers"
    assert len(tensors) == 2 * 7 * 2
    assert tensors[f"{prefix}.0.self_attn.q_proj.lora_A.weight"].shape == (RANK, 576)
    assert tensors[f"{prefix}.1.self_attn.k_proj.lora_B.weight"].shape == (192, RANK)
    np.testing.assert_array_equal(
        tensors[f"{prefix}.1.mlp.down_proj.lora_A.weight"], adapters.blocks[1]["down"].updates["down_proj"].a
    )
    again = adapter_files.load(tmp_path, short.config)
    assert jax.tree.structure(again) == jax.tree.structure(adapters)
    assert arrays(again) == arrays(adapters)
    # Some of the layers, and the other scale.
    few = lora.init(short.config, rank=4, scale=2.0, targets=["up_proj"], key=jax.random.key(0))
    adapter_files.save(tmp_path, few, alpha=8)
    change_config(tmp_path, use_rslora=True)
    again = adapter_files.load(tmp_path, short.config)
    assert again.blocks[0]["gate_up"].scale == 4.0
    # Both kinds of scale are kept, and no other is written.
    for alpha, uses_rslora in ((8, True), (16, False)):
        adapter_files.save(tmp_path, again, alpha=alpha)
        assert json.loads((tmp_path / "adapter_config.json").read_text()).get("use_rslora", False) == uses_rslora
        assert adapter_files.load(tmp_path, short.config).blocks[0]["gate_up"].scale == 4.0
    message = (
        r"^adapter_files.save: expected alpha to be the adapters' scale, 4\.0, times their rank, 4; got 4\.0\. Pass"
    )
    with pytest.raises(ValueError, match=message):
        adapter_files.save(tmp_path, again, alpha=4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "a rank of 1 or more; got 0."),
        ({"targets": ["query"]}, f"targets of {', '.join(lora.TARGETS)}; got ['query']."),
        ({"targets": []}, f"targets of {', '.join(lora.TARGETS)}; got []."),
    ],
)
def test_adapters_that_are_refused(options, message, short):
    with pytest.raises(ValueError, match=f"^lora.init: expected {re.escape(message)}$"):
        lora.init(short.config, **({"rank": RANK, "scale": SCALE, "key": jax.random.key(0)} | options))


def test_a_gradient_that_is_not_finite_is_told(short, batch):
    """The loss is, as `B` is zero."""
    tuner = Tuner(
        short, lora.init(short.config, rank=1, scale=1e30, key=jax.random.key(0)), learning_rate=1e-3, steps=1
    )
    assert np.isfinite(tuner.perplexity([batch]))
    assert np.isnan(tuner.step(batch))


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "expected peft_type to be 'LORA'; got 'IA3', which is not supported"),
        ({"r": 0}, "expected r to be a positive integer; got 0"),
        ({"lora_alpha": None}, "expected lora_alpha to be a number; got None"),
        ({"target_modules": "all-linear"}, "expected target_modules to be a list of q_proj, .*; got 'all-linear'"),
        ({"target_modules": ["lm_head"]}, r"expected target_modules to be a list of q_proj, .*; got \['lm_head'\]"),
        ({"bias": "all"}, "expected bias to be 'none'; got 'all'"),
        ({"init_lora_weights": "pissa"}, "expected init_lora_weights to be true, false or 'gaussian'; got 'pissa'"),
        ({"use_dora": True}, "expected use_dora to be off; got True, which is not supported. Use plain LoRA"),
        ({"rank_pattern": {"q_proj": 2}}, "expected rank_pattern to be off; got {'q_proj': 2}"),
        ({"something_new": 1}, "expected something_new to be off; got 1"),
    ],
)
def test_configurations_that_are_refused(changes, message, short, adapters, tmp_path):
    adapter_files.save(tmp_path, adapters, alpha=SCALE * RANK)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=f"adapter_config.json: {message}"):
        adapter_files.load(tmp_path, short.config)


def test_files_that_are_refused(short, adapters, tmp_path):
    adapter_files.save(tmp_path, adapters, alpha=SCALE * RANK)
    with pytest.raises(CheckpointError, match=r"expected the tensors of Adapters; got 14 unexpected: .*layers\.1\."):
        adapter_files.load(tmp_path, dataclasses.replace(short.config, num_layers=1))
    change_config(tmp_path, r=RANK + 1)
    with pytest.raises(CheckpointError, match=re.escape("lora_A.weight (expected (4, 576), got (3, 576))")):
        adapter_files.load(tmp_path, short.config)
    for text in ("{", "[]"):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"expected (a JSON object|the configuration of an adapter); got"):
            adapter_files.load(tmp_path, short.config)
