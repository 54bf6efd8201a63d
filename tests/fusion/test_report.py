"""The report of `fuse` on a model, and rules for classes that it does not know."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqxcallback as eqxc

from ..layers import Scale


KEY = jr.key(0)


class Linear(eqx.Module):
    """A layer of the user's own, with a name that Equinox has too."""

    weight: jax.Array

    def __call__(self, x):
        return self.weight @ x


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: Linear
    down: Linear
    gains: list[jax.Array]

    def __call__(self, x):
        return x + self.gains[0] * self.down(jnp.tanh(self.up(self.norm(x))))


class Model(eqx.Module):
    blocks: list[Block]
    state: eqx.nn.StateIndex
    seed: jax.Array
    size: int

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def made(depth: int = 3) -> Model:
    ups, downs = jr.normal(KEY, (depth, 12, 8)), jr.normal(KEY, (depth, 8, 12))
    blocks = [
        Block(eqx.nn.LayerNorm(8), Linear(up), Linear(down), [jnp.ones(2)[:1]])
        for up, down in zip(ups, downs, strict=True)
    ]
    return Model(blocks, eqx.nn.StateIndex(jnp.zeros(99)), jnp.arange(5), 8)


def test_a_line_for_each_layer():
    class MyLinear(eqx.nn.Linear):
        pass

    linear: Any = MyLinear  # type checkers make up another constructor
    tree = {"a": linear(2, 2, key=KEY), "b": eqx.nn.Conv1d(2, 2, 1, key=KEY), "c": eqx.nn.LayerNorm(3)}
    fused, report = eqxc.fuse(tree)
    assert fused["a"] is tree["a"]
    assert fused["b"] is tree["b"]
    lines = str(report).splitlines()
    assert lines[0] == "fuse: 1 layer replaced, 2 left alone (12 parameters, 66.7%)"
    assert "MyLinear left alone: a subclass, which may do something else (6 parameters, 33.3%)" in lines[1]
    assert "['a']" in lines[1]
    assert "equinox.nn.Conv1d left alone: there is no fused layer for it (6 parameters, 33.3%)" in lines[2]
    assert "equinox.nn.LayerNorm -> eqxcallback.nn.LayerNorm" in lines[3]


def test_modules_of_the_user():
    """With parameters of their own: a model is not a line for what its layers have, nor for state and integers."""
    _, report = eqxc.fuse(made(1))
    assert [(change.path, change.parameters) for change in report.left_alone] == [
        (".blocks[0].up", 96),
        (".blocks[0].down", 96),
        (".blocks[0]", 1),
    ]
    assert report.parameters == 16 + 2 * 96 + 1
    assert "test_report.Linear left alone: there is no fused layer for it (96 parameters, 45.9%)" in str(report)


def test_layers_that_are_alike_are_one_line():
    _, report = eqxc.fuse(made())
    assert len(report.changes) == 12
    head, norm, up, *rest = str(report).splitlines()
    assert head == "fuse: 3 layers replaced, 9 left alone (579 parameters, 92.3%)"
    assert norm == "  .blocks[*].norm  3 x equinox.nn.LayerNorm -> eqxcallback.nn.LayerNorm"
    assert up.startswith("  .blocks[*].up    3 x ")
    assert up.endswith("Linear left alone: there is no fused layer for it (288 parameters, 45.9%)")
    assert len(rest) == 2


def test_our_own_layers_have_no_line():
    model = [Scale(jnp.ones(3)), eqxc.nn.SwiGLU(4, 8, key=KEY), eqxc.nn.Linear(2, 2, key=KEY)]
    fused, report = eqxc.fuse(model)
    assert fused is model
    assert str(report) == "fuse: 0 layers replaced, 0 left alone"


def test_a_model_that_is_one_array_and_one_of_types():
    _, report = eqxc.fuse(Linear(jnp.ones((2, 3))))
    assert "(the model)" in str(report)
    assert "(6 parameters, 100%)" in str(report)
    types = eqx.filter_eval_shape(made)
    assert eqxc.fuse(types).report.changes == eqxc.fuse(made()).report.changes
    weight = jnp.ones(4)
    assert eqxc.fuse([weight, weight]).report.parameters == 4


def as_ours(layer: Linear) -> eqxc.nn.Linear:
    out_features, in_features = layer.weight.shape
    new = eqx.filter_eval_shape(eqxc.nn.Linear, in_features, out_features, use_bias=False, key=KEY)
    return eqx.tree_at(lambda new: new.weight, new, layer.weight)


def test_rules():
    model, x = made(), jnp.arange(8.0)
    fused, report = eqxc.fuse(model, rules={Linear: as_ours}, example=x)
    assert type(fused.blocks[2].up) is eqxc.nn.Linear
    assert fused.blocks[2].up.weight is model.blocks[2].up.weight
    assert report.error is not None
    assert {change.source.rpartition(".")[2] for change in report.left_alone} == {"Block"}
    assert "6 x" not in str(report)
    assert "  .blocks[*].up    3 x " in str(report)
    part = eqxc.fuse(model, rules={Linear: as_ours}, only=Linear, exclude=".blocks[1]").model
    assert [type(block.up) is eqxc.nn.Linear for block in part.blocks] == [True, False, True]
    assert type(part.blocks[0].norm) is eqx.nn.LayerNorm


def test_a_rule_in_place_of_ours():
    linear = eqx.nn.Linear(32, 32, key=KEY)
    quantized, _ = eqxc.fuse([linear], rules={eqx.nn.Linear: eqxc.nn.QuantizedLinear.from_linear})
    assert type(quantized[0]) is eqxc.nn.QuantizedLinear
    same, report = eqxc.fuse([linear], rules={eqx.nn.Linear: lambda layer: layer})
    assert same[0] is linear
    assert "its rule leaves it" in str(report)


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_nothing_is_replaced_where_no_kernel_runs(platform):
    model = made()
    fused, report = eqxc.fuse(model, platform=platform)
    assert not report.replaced
    assert {change.reason for change in report.left_alone if change.source == "equinox.nn.LayerNorm"} == {
        f"there are no kernels for {platform}"
    }
    assert eqx.tree_equal(fused, model)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda", None])
def test_layers_whose_weights_no_kernel_takes_are_left_alone(platform, x64):
    narrow, wide = eqx.nn.Linear(3, 4, dtype=jnp.float32, key=KEY), eqx.nn.Linear(3, 4, dtype=jnp.float64, key=KEY)
    (fused, left), report = eqxc.fuse((narrow, wide), platform=platform).model, eqxc.fuse((narrow, wide)).report
    assert (type(fused), type(left)) == (eqxc.nn.Linear, eqx.nn.Linear)
    assert [change.reason for change in report.left_alone] == ["no kernel takes float64"]
    assert "no kernel takes float64" in str(report)
    types = eqx.filter_eval_shape(lambda: eqx.nn.LayerNorm(4, dtype=jnp.float64))
    assert not eqxc.fuse(types, platform=platform).report.replaced


def test_a_rule_of_the_users_own_is_followed_on_any_platform():
    rules = {eqx.nn.LayerNorm: lambda layer: Scale(layer.weight)}
    assert type(eqxc.fuse(eqx.nn.LayerNorm(4), rules=rules, platform="tpu").model) is Scale


def test_a_platform_is_a_name():
    with pytest.raises(TypeError, match=r"fuse: expected platform to be the name of a platform, such as 'gpu'; got 3"):
        eqxc.fuse(eqx.nn.LayerNorm(4), platform=3)  # pyright: ignore[reportArgumentType]
