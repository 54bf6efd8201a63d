"""`fuse` and `unfuse` on models of this file."""

import io
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxcallback as eqxc


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, size, key):
        first, second = jr.split(key)
        self.norm = eqx.nn.LayerNorm(size)
        self.attention = eqx.nn.MultiheadAttention(2, size, key=first)
        self.mlp = eqx.nn.MLP(size, size, 3 * size, 1, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(x)


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    last: Any
    head: dict[str, eqx.nn.Linear]

    def __init__(self, key):
        keys = jr.split(key, 5)
        block = Block(8, keys[1])
        self.embedding = eqx.nn.Embedding(11, 8, key=keys[0])
        self.blocks = [block, Block(8, keys[2]), block]
        self.last = eqx.nn.Sequential([eqx.nn.RMSNorm(8), eqx.nn.Lambda(jnp.tanh)])
        self.head = {"out": eqx.nn.Linear(8, 3, key=keys[3])}

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head["out"])(jax.vmap(self.last)(x))


@pytest.fixture(scope="module")
def model():
    return Model(jr.key(0))


TOKENS = jnp.arange(5)
NAMES = sorted(
    [
        "Embedding",
        "GroupNorm",
        "GRUCell",
        "LayerNorm",
        "Linear",
        "LSTMCell",
        "MLP",
        "MultiheadAttention",
        "RMSNorm",
        "RotaryPositionalEmbedding",
    ]
)


def instances(tree, cls):
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: type(node) is cls)
    return [node for node in nodes if type(node) is cls]


def test_every_layer_becomes_ours(model):
    fused, report = eqxc.fuse(model)
    assert type(fused) is Model
    for name in ("Embedding", "LayerNorm", "Linear", "MLP", "MultiheadAttention", "RMSNorm"):
        before = instances(model, getattr(eqx.nn, name))
        after = instances(fused, getattr(eqxc.nn, name))
        assert len(after) == len(before) > 0
        assert not instances(fused, getattr(eqx.nn, name))
    assert not report.left_alone
    np.testing.assert_allclose(eqx.filter_jit(fused)(TOKENS), eqx.filter_jit(model)(TOKENS), rtol=2e-5, atol=2e-6)


def test_arrays_are_the_very_same(model):
    fused, _ = eqxc.fuse(model)
    for (path, a), (other, b) in zip(
        jax.tree_util.tree_leaves_with_path(model), jax.tree_util.tree_leaves_with_path(fused), strict=True
    ):
        assert path == other
        assert a is b


def test_layers_stay_shared(model):
    fused, report = eqxc.fuse(model)
    assert fused.blocks[0] is fused.blocks[2]
    assert fused.blocks[0].norm is fused.blocks[2].norm
    assert fused.blocks[0] is not fused.blocks[1]
    paths = [change.path for change in report.replaced]
    assert ".blocks[0].norm" in paths
    assert ".blocks[2].norm" not in paths
    assert len(set(paths)) == len(paths)


def test_equinox_shared():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            embedding = eqx.nn.Embedding(7, 4, key=key)
            head = eqx.nn.Linear(4, 7, use_bias=False, key=key)
            self.shared = eqx.nn.Shared((embedding, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)

        def __call__(self, token):
            embedding, head = self.shared()
            return head(embedding(token))

    model = Tied(jr.key(0))
    fused, report = eqxc.fuse(model, example=jnp.asarray(3))
    assert [change.target for change in report.changes] == ["eqxcallback.nn.Embedding", "eqxcallback.nn.Linear"]
    embedding, head = fused.shared()
    assert head.weight is embedding.weight


def test_unfuse_undoes_it(model):
    fused = eqxc.fuse(model)
    for given in (fused, fused.model):
        back = eqxc.unfuse(given)
        assert jax.tree.structure(back) == jax.tree.structure(model)
        assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True))
        assert back.blocks[0] is back.blocks[2]


def test_what_is_changed_afterwards_is_kept_by_unfuse(model):
    fused, _ = eqxc.fuse(model)
    fused = eqx.tree_at(lambda m: m.head["out"].weight, fused, jnp.ones((3, 8)))
    assert jnp.all(eqxc.unfuse(fused).head["out"].weight == 1)


def test_nothing_to_do_is_the_same_object(model):
    fused, _ = eqxc.fuse(model)
    assert eqxc.fuse(fused).model is fused
    assert eqxc.unfuse(model) is model
    assert eqxc.fuse({"a": 1}).model == {"a": 1}


def test_the_pair_can_be_used_as_the_model(model):
    fused = eqxc.fuse(model)
    assert fused.head is fused.model.head
    want = fused.model(TOKENS)
    np.testing.assert_array_equal(fused(TOKENS), want)
    assert len(jax.tree.leaves(fused)) == len(jax.tree.leaves(model))
    np.testing.assert_allclose(eqx.filter_jit(lambda m, x: m(x))(fused, TOKENS), want, rtol=1e-5, atol=1e-6)
    with pytest.raises(AttributeError, match="nothing"):
        _ = fused.nothing


def test_files_are_read_by_either(model):
    fused, _ = eqxc.fuse(model)
    other = Model(jr.key(1))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, fused)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, other)
    np.testing.assert_array_equal(loaded.head["out"].weight, model.head["out"].weight)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"only": eqx.nn.LayerNorm}, {"LayerNorm"}),
        ({"only": (eqx.nn.LayerNorm, ".head['out']", ".head")}, {"LayerNorm", "Linear"}),
        ({"only": ".blocks[1].mlp"}, {"Linear", "MLP"}),
        ({"only": ".blocks[*].norm"}, {"LayerNorm"}),
        ({"only": Block}, {"LayerNorm", "Linear", "MLP", "MultiheadAttention"}),
        ({"exclude": Block}, {"Embedding", "Linear", "RMSNorm"}),
        ({"exclude": [eqx.nn.MultiheadAttention, ".head"]}, {"Embedding", "LayerNorm", "Linear", "MLP", "RMSNorm"}),
        ({"only": lambda path, layer: getattr(layer, "out_features", 0) == 3}, {"Linear"}),
        ({"only": Block, "exclude": eqx.nn.MLP}, {"LayerNorm", "Linear", "MultiheadAttention"}),
    ],
    ids=["a class", "paths", "a path", "any index", "a module", "no module", "a list", "a function", "both"],
)
def test_only_and_exclude(model, options, expected):
    fused, report = eqxc.fuse(model, **options)
    assert {(change.target or "").rpartition(".")[2] for change in report.replaced} == expected
    assert all(change.reason in ("not in `only`", "in `exclude`") for change in report.left_alone)
    np.testing.assert_allclose(fused(TOKENS), model(TOKENS), rtol=2e-5, atol=2e-6)


def test_each_path_is_a_pattern_once(monkeypatch):
    """More paths than `re` keeps were compiled anew for each layer."""
    layers = [eqx.nn.LayerNorm(2)] * 600
    layers = [eqx.tree_at(lambda norm: norm.bias, layers[0], jnp.zeros(2)) for _ in layers]
    compile, texts = re.compile, []
    monkeypatch.setattr("re.compile", lambda text, *flags: texts.append(text) or compile(text, *flags))
    monkeypatch.setattr("re.match", lambda text, path: re.compile(text).match(path))
    paths = [f"[{i}]" for i in range(600)]
    assert len(eqxc.fuse(layers, only=paths).report.replaced) == 600
    assert len(texts) == 600


@pytest.mark.parametrize(
    "where",
    [".blocks[2]", ".blocks[2].norm", lambda path, _: path == ".blocks[2].norm"],
    ids=["above", "path", "function"],
)
def test_only_and_exclude_of_any_place(model, where):
    """Blocks 0 and 2 are one."""
    fused, report = eqxc.fuse(model, only=where)
    assert type(fused.blocks[2].norm) is eqxc.nn.LayerNorm
    assert fused.blocks[0] is fused.blocks[2]
    fused, report = eqxc.fuse(model, exclude=where)
    assert fused.blocks[0].norm is fused.blocks[2].norm is model.blocks[2].norm
    (reason,) = [change.reason for change in report.left_alone if change.path == ".blocks[0].norm"]
    assert reason == "in `exclude`, as .blocks[2].norm"


def test_nodes_that_are_made_anew_when_they_are_flattened():
    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, both):
            self.both = both

        def tree_flatten(self):
            return ({"both": list(self.both)},), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(tuple(children[0]["both"]))

    norm = eqx.nn.LayerNorm(3)
    fused, _ = eqxc.fuse([Pair((norm, norm)), norm])
    assert type(fused[1]) is eqxc.nn.LayerNorm
    assert fused[0].both == (fused[1], fused[1])


@pytest.mark.parametrize("option", ["only", "exclude"])
def test_a_selection_that_is_none(model, option):
    wrong: Any = {option: [eqx.nn.Linear, 3]}
    with pytest.raises(
        TypeError, match=f"fuse: expected {option} to be classes, paths or functions.*got 3 of type int"
    ):
        eqxc.fuse(model, **wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"only": ".blocks[1].ml"},
            r"expected only to have paths of the model.*got '\.blocks\[1\]\.ml', at which there",
        ),
        (
            {"only": [eqx.nn.Linear, ".heads"]},
            r"got '\.heads', at which there is nothing. There are layers at \.embedding, ",
        ),
        ({"exclude": ".blocks[7]"}, r"expected exclude to have paths .*'\.blocks\[7\]'"),
        ({"only": eqx.nn.GRUCell}, "expected only to match a layer that has a fused one; got .*GRUCell.* matches none"),
        ({"only": lambda path, layer: False}, "which matches none"),
        ({"only": ".blocks[0].norm.weight"}, "which matches none"),
    ],
    ids=["part of a name", "one of a list", "an index", "a class", "a function", "an array"],
)
def test_a_selection_that_matches_nothing(model, options, message):
    with pytest.raises(ValueError, match=f"fuse: .*{message}"):
        eqxc.fuse(model, **options)


def test_a_selection_of_what_is_fused_already(model):
    fused = eqxc.fuse(model, only=eqx.nn.LayerNorm).model
    assert eqxc.fuse(fused, only=eqx.nn.LayerNorm, exclude=(eqx.nn.GRUCell, eqx.nn.Linear)).model is fused


def test_a_saved_optimizer_state_is_fused_with_the_model(model):
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    (fused, fused_state), report = eqxc.fuse((model, state))
    assert jax.tree.structure(fused_state) == jax.tree.structure(
        optimizer.init(eqx.filter(fused, eqx.is_inexact_array))
    )
    assert not report.left_alone
    grads = eqx.filter_grad(lambda model: model(TOKENS).sum())(fused)
    with pytest.raises(ValueError, match="structure"):
        optimizer.update(grads, state)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        updates, _ = optimizer.update(grads, fused_state)
    assert jax.tree.structure(eqx.apply_updates(fused, updates)) == jax.tree.structure(fused)


def test_an_example_is_compared(model):
    _, report = eqxc.fuse(model, example=TOKENS)
    assert report.error is not None
    assert 0 <= report.error <= 1
    assert "of the tolerance" in str(report)
    assert eqxc.fuse(model, example=(TOKENS,)).report.error == report.error
    with pytest.raises(ValueError, match=r"fuse: expected the result to differ by at most .* for this example; got"):
        eqxc.fuse(Wrong(eqx.nn.LayerNorm(4)), example=jnp.arange(4.0))
    with pytest.raises(ValueError, match=r"fuse: expected the result\['y'\] to be float32\[4\]"):
        eqxc.fuse(Wrong(eqx.nn.LayerNorm(4), "shape"), example=jnp.arange(4.0))


class Wrong(eqx.Module):
    """Asks which layer it has, and does something else with ours."""

    norm: eqx.nn.LayerNorm
    how: str = eqx.field(static=True, default="value")

    def __call__(self, x):
        ours = isinstance(self.norm, eqxc.nn.LayerNorm)
        if self.how == "shape":
            return {"y": self.norm(x)[:2] if ours else self.norm(x)}
        return self.norm(x) + (0.5 if ours else 0.0)


def test_example_and_tolerance():
    model = Wrong(eqx.nn.LayerNorm(4))
    x = jnp.arange(4.0)
    assert eqxc.fuse(model, example=x, tolerance=0.4).report.error == pytest.approx(0.5 / 0.4 / 1.34, rel=0.01)
    with pytest.raises(ValueError, match="Leave layers out with `exclude`, or pass a larger `tolerance`"):
        eqxc.fuse(model, example=x, tolerance=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_keeps_its_fields(name):
    key = jr.key(0)
    make = {
        "Embedding": lambda cls: cls(5, 3, key=key),
        "GroupNorm": lambda cls: cls(2, 4),
        "GRUCell": lambda cls: cls(3, 4, key=key),
        "LayerNorm": lambda cls: cls(3, eps=0.25),
        "Linear": lambda cls: cls(3, 4, key=key),
        "LSTMCell": lambda cls: cls(3, 4, key=key),
        "MLP": lambda cls: cls(2, 3, 4, 2, key=key),
        "MultiheadAttention": lambda cls: cls(2, 4, dropout_p=0.5, key=key),
        "RMSNorm": lambda cls: cls(3, eps=0.25),
        "RotaryPositionalEmbedding": lambda cls: cls(4, theta=500.0),
    }[name]
    plain, ours = make(getattr(eqx.nn, name)), make(getattr(eqxc.nn, name))
    fused, _ = eqxc.fuse(plain)
    assert type(fused) is type(ours)
    assert eqx.tree_equal(fused, ours)
    assert eqx.tree_equal(eqxc.unfuse(ours), plain)


def test_an_ensemble():
    """Layers whose arrays have an axis more than their class says."""
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 2, key=key))(jr.split(jr.key(0), 4))
    fused, _ = eqxc.fuse(layers)
    x = jnp.arange(12.0).reshape(4, 3)
    call = eqx.filter_vmap(lambda layer, x: layer(x))
    np.testing.assert_allclose(call(fused, x), call(layers, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        pytest.param(eqx.nn.MLP, r"got a class, equinox\.nn\.MLP\. Make an instance", id="class"),
        pytest.param(None, r"got None of type NoneType, which has no parts", id="None"),
        pytest.param(3, r"got 3 of type int, which has no parts", id="number"),
        pytest.param(jax.nn.relu, r"got the function relu, which hides its layers\. Pass the model", id="function"),
    ],
)
def test_what_has_no_layers_is_no_model(wrong, got):
    with pytest.raises(TypeError, match=r"fuse: expected a model, a PyTree with layers in it; " + got):
        eqxc.fuse(wrong)


def test_a_model_may_have_functions_and_none_in_it():
    linear = eqx.nn.Linear(2, 2, key=jr.key(0))
    for model in ([linear, jax.nn.relu, None, eqx.nn.MLP], eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.relu)])):
        fused, report = eqxc.fuse(model)
        assert type(fused[0]) is eqxc.nn.Linear
        assert len(report.changes) == 1
    assert eqxc.fuse([linear, jax.nn.relu]).model[1] is jax.nn.relu
