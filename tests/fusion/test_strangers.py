"""`fuse` on models that others have published for Equinox: what they give, and how they are used, does not change."""

import collections
import dataclasses
import functools
import importlib
import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxcallback as eqxc

from . import equimo_rules


KEY = jr.key(0)
# Compiling takes the time of these tests.
QUICK: Any = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A published model, the arguments of a call for each of a batch, and what `fuse` finds in it."""

    package: str
    make: Any
    batch: Any
    replaced: dict[str, int]
    left_alone: dict[str, int] = dataclasses.field(default_factory=dict)
    more: tuple[Any, ...] = ()  # arguments of a call that the batch shares
    rules: Any = None

    def __str__(self) -> str:
        return f"{self.package}-{self.make.__name__}{'-rules' if self.rules else ''}"

    def fused(self, model: Any, **options: Any) -> Any:
        return eqxc.fuse(model, rules=self.rules, **options)


def esm2(package: Any) -> Any:
    return package.ESM2(num_layers=3, embed_size=32, num_heads=4, token_dropout=True, key=KEY)


def proteins(package: Any) -> Any:
    # Some residues are masked, and the shorter protein has padding.
    return jnp.asarray(package.tokenise(["SP#DERMAN", "FOO"]))


def unet(package: Any) -> Any:
    options = {"hidden_channels": 8, "num_levels": 2, "activation": jax.nn.relu, "use_norm": True}
    return package.arch.ClassicUNet(1, 1, 1, **options, key=KEY)


def mlp(package: Any) -> Any:
    return package.arch.MLP(1, 1, 1, num_points=32, width_size=16, depth=2, key=KEY)


def vit(package: Any) -> Any:
    sizes = {"img_size": 32, "in_channels": 3, "dim": 48, "patch_size": 8, "num_heads": 4, "depths": [3]}
    return package.VisionTransformer(**sizes, num_classes=10, key=KEY)


def images(*shape: int) -> Any:
    return lambda package: jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


STRANGERS = [
    # Its three layers are one, whose arrays have an axis more, and which a scan takes apart.
    Stranger(
        "esm2quinox",
        esm2,
        proteins,
        {"LayerNorm": 4, "Linear": 8, "MultiheadAttention": 1, "RotaryPositionalEmbedding": 1},
    ),
    # Its convolutions are of subclasses, with paddings of their own.
    Stranger(
        "pdequinox",
        unet,
        images(2, 1, 32),
        {"GroupNorm": 10},
        {"PhysicsConv": 10, "LinearConvDownBlock": 2, "LinearConvUpBlock": 2, "LinearChannelAdjustBlock": 1},
    ),
    Stranger("pdequinox", mlp, images(2, 1, 32), {"Linear": 3, "MLP": 1}),
    Stranger(
        "equimo.models.vit",
        vit,
        images(2, 3, 32, 32),
        {"LayerNorm": 7, "Linear": 13},
        {"Conv": 1, "LearnedPosEmbed": 1, "VisionTransformer": 1},
        (KEY, True),
    ),
    Stranger(
        "equimo.models.vit",
        vit,
        images(2, 3, 32, 32),
        {"LayerNorm": 7, "Linear": 13, "Attention": 3},
        {"Conv": 1, "LearnedPosEmbed": 1, "VisionTransformer": 1},
        (KEY, True),
        equimo_rules.RULES,
    ),
]
every_stranger = pytest.mark.parametrize("stranger", STRANGERS, ids=str)


@functools.cache
def made(name: str) -> tuple[Any, Any]:
    """The model and a batch. Its own initialisation takes half a minute: here its arrays are random ones of their shapes."""
    (it,) = (it for it in STRANGERS if str(it) == name)
    package = importlib.import_module(it.package)
    rng = np.random.default_rng(0)

    def filled(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jnp.asarray(rng.standard_normal(x.shape) / max(x.shape[-1:], default=1) ** 0.5, x.dtype)

    return jax.tree.map(filled, eqx.filter_eval_shape(it.make, package)), it.batch(package)


def batched(stranger: Stranger) -> Any:
    return lambda model, batch: jax.vmap(lambda x: model(x, *stranger.more))(batch)


def compiled(function: Any, model: Any, *args: Any) -> Any:
    arrays, static = eqx.partition(model, eqx.is_array)
    whole = lambda arrays, *args: function(eqx.combine(arrays, static), *args)
    return jax.jit(whole, compiler_options=QUICK)(arrays, *args)


def instances(tree: Any, cls: Any) -> Any:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: type(node) is cls)
    return [node for node in nodes if type(node) is cls]


def close(got: Any, want: Any, tolerance: float) -> None:
    """Relative to the largest value of all arrays: some gradients are nothing but rounding errors."""
    assert jax.tree.structure(got) == jax.tree.structure(want) or len(jax.tree.leaves(got)) == len(
        jax.tree.leaves(want)
    )
    pairs = list(zip(*map(jax.tree.leaves, (got, want)), strict=True))
    largest = max(float(jnp.max(jnp.abs(w))) for _, w in pairs)
    assert largest > 0
    for g, w in pairs:
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * largest)


@every_stranger
def test_layers_become_ours(stranger):
    model, _ = made(str(stranger))
    fused, report = stranger.fused(model)
    assert type(fused) is type(model)
    count = collections.Counter(str(change.target).rpartition(".")[2] for change in report.replaced)
    assert count == stranger.replaced
    for name, number in stranger.replaced.items():
        assert len(instances(fused, getattr(eqxc.nn, name, equimo_rules.Attention))) == number
        assert not instances(fused, getattr(eqx.nn, name, equimo_rules.Theirs))
    left = collections.Counter(change.source.rpartition(".")[2] for change in report.left_alone)
    assert left == stranger.left_alone
    for (path, a), (other, b) in zip(
        *(jax.tree_util.tree_leaves_with_path(tree) for tree in (model, fused)), strict=True
    ):
        assert path == other
        assert a is b


@every_stranger
def test_unfuse_gives_it_back(stranger):
    model, _ = made(str(stranger))
    fused = stranger.fused(model)
    for back in (eqxc.unfuse(fused), eqxc.unfuse(fused.model, rules=stranger.rules)):
        assert jax.tree.structure(back) == jax.tree.structure(model)
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (back, model)), strict=True))


@every_stranger
def test_an_example_is_the_same(stranger):
    """A call for one of the batch, as a user would compile it."""
    model, batch = made(str(stranger))
    _, report = stranger.fused(model, example=(batch[0], *stranger.more))
    assert report.error is not None
    assert 0 <= report.error <= 1


@every_stranger
def test_the_same_results_and_gradients(stranger):
    """Results and gradients of a batch, with respect to all parameters."""
    model, batch = made(str(stranger))

    def loss(parts, rest, batch):
        out = batched(stranger)(eqx.combine(parts, rest), batch)
        sums = [jnp.sum(jnp.sin(3 * x)) for x in jax.tree.leaves(out)]
        return sum(sums, jnp.zeros(())), out

    def value_and_gradients(model, batch):
        return jax.value_and_grad(loss, has_aux=True)(*eqx.partition(model, eqx.is_inexact_array), batch)

    (_, got), got_gradients = compiled(value_and_gradients, stranger.fused(model).model, batch)
    (_, want), want_gradients = compiled(value_and_gradients, model, batch)
    assert type(got) is type(want)
    close(got, want, 1e-5)
    close(got_gradients, want_gradients, 1e-4)


@every_stranger
def test_files_of_one_are_read_by_the_other(stranger):
    model, _ = made(str(stranger))
    fused, _ = stranger.fused(model)
    for source, target in ((model, fused), (fused, model)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, target)
        read = eqx.tree_deserialise_leaves(file, zeros)
        assert type(read) is type(target)
        assert jax.tree.structure(read) == jax.tree.structure(target)
        for a, b in zip(*map(jax.tree.leaves, (read, source)), strict=True):
            if eqx.is_array(a):
                np.testing.assert_array_equal(a, b)


# What else their users call.


def test_esm2_takes_text():
    model, _ = made("esm2quinox-esm2")
    fused, _ = eqxc.fuse(model)
    got, want = (compiled(lambda model: model("SP#DERMAN"), variant) for variant in (fused, model))
    assert type(got) is type(want)
    close(got, want, 1e-5)


def test_esm2_makes_a_layer_in_each_call():
    """`fuse` cannot see that layer: it shares the head's weight, and stays Equinox's."""
    model, _ = made("esm2quinox-esm2")
    fused, report = eqxc.fuse(model)
    assert type(fused.embedding) is eqx.nn.Embedding
    assert fused.embedding.weight is model.logit_head.linear2.weight
    assert not any("embedding" in change.path for change in report.changes)


def test_unet_says_what_it_sees():
    model, _ = made("pdequinox-unet")
    assert eqxc.fuse(model).receptive_field == model.receptive_field


def test_vit_gives_features():
    model, batch = made("equimo.models.vit-vit")
    fused, _ = eqxc.fuse(model)
    got, want = (
        compiled(lambda model, x: model.forward_features(x, key=KEY, inference=True), variant, batch[0])
        for variant in (fused, model)
    )
    assert got.keys() == want.keys()
    close(got, want, 1e-5)


def test_vit_is_fused_in_part():
    model, _ = made("equimo.models.vit-vit")
    fused, report = eqxc.fuse(model, only=eqx.nn.LayerNorm, exclude=".blocks[0].blocks[1]")
    assert len(report.replaced) == len(instances(fused, eqxc.nn.LayerNorm)) == 5
    assert fused.blocks[0].blocks[1] is model.blocks[0].blocks[1]
