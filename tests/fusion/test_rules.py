"""Rules of users and of installed packages, in `fuse` and `unfuse`."""

import importlib
import pathlib
import sys
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.fusion._packages import of_packages

from . import equimo_rules


KEY = jr.key(0)


class Norm(eqx.Module):
    """A norm of a user's own."""

    weight: jax.Array
    bias: jax.Array
    how: str = eqx.field(static=True, default="")

    def __call__(self, x):
        return self.weight * x + self.bias


class Sub(Norm):
    def __call__(self, x):
        return x * self.weight + self.bias


class Wrong(Norm):
    """A class of no use in the place of `Norm`."""

    def __call__(self, x):
        if self.how == "raises":
            raise ArithmeticError("sums are off")
        return {"tree": {"y": x}, "names": (x,), "shape": x[:1], "values": x + 1}[self.how]


class Other(eqx.Module):
    arrays: tuple[jax.Array, jax.Array]

    def __call__(self, x):
        return self.arrays[0] * x + self.arrays[1]


SUB: Any = eqxc.FuseRule(replaces=Norm, by=Sub)
OTHER: Any = eqxc.FuseRule(
    replaces=Norm,
    by=Other,
    make=lambda norm: Other((norm.weight, norm.bias)),
    back=lambda other: Norm(*other.arrays),
)
X = jnp.arange(3.0)


def model(**options: Any) -> list[Any]:
    norm = Norm(jnp.ones(3), jnp.zeros(3), **options)
    return [norm, norm, eqx.nn.LayerNorm(3)]


def call(norms):
    return sum(norm(X) for norm in norms)


@pytest.mark.parametrize("rule", [SUB, OTHER], ids=["a subclass", "another class"])
def test_a_rule_and_its_undoing(rule):
    given = model()
    fused = eqxc.fuse(given, rules=rule)
    assert [type(norm) for norm in fused.model] == [rule.by, rule.by, eqxc.nn.LayerNorm]
    assert fused.model[0] is fused.model[1]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (given, fused.model)), strict=True))
    np.testing.assert_allclose(call(fused.model), call(given), rtol=1e-6)
    assert [change.rule for change in fused.report.changes] == ["in `rules`", ""]
    assert f"test_rules.Norm -> tests.fusion.test_rules.{rule.by.__name__} (in `rules`)" in str(fused.report)
    assert eqxc.fuse(fused.model, rules=[rule]).model is fused.model
    trained = jax.tree.map(lambda x: x + 1, fused)
    for back in (eqxc.unfuse(trained), eqxc.unfuse(trained.model, rules=[rule])):
        assert jax.tree.structure(back) == jax.tree.structure(given)
        np.testing.assert_array_equal(back[0].weight, given[0].weight + 1)
    assert type(eqxc.unfuse(trained.model)[0]) is rule.by


def test_why_a_layer_is_left_alone():
    rule = eqxc.FuseRule(Norm, Sub, unless=lambda norm: "not of this kind" if norm.how == "else" else None)
    (fused, left), report = eqxc.fuse([model()[0], model(how="else")[0]], rules=[rule])
    assert (type(fused), type(left)) == (Sub, Norm)
    assert "test_rules.Norm left alone: not of this kind (in `rules`) (6 parameters, 50%)" in str(report)
    _, report = eqxc.fuse(model(), rules={Norm: lambda norm: "no better one"})
    assert [change.reason for change in report.left_alone] == ["no better one"]
    (norm,), report = eqxc.fuse([Sub(X, X)], rules={Norm: Other})
    assert type(norm) is Sub
    assert "a subclass, which may do something else" in str(report)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tree", "expected results of one structure"),
        ("names", "expected results of one structure"),
        ("shape", r"expected the result to be float32\[3\]; the fused model gives"),
        ("values", "expected the result to differ by at most .* for this example; got 1. Leave layers out"),
        ("raises", "the fused model raises ArithmeticError for this example, and .* does not: sums are off"),
    ],
)
def test_a_rule_that_is_wrong(how, message):
    rule = eqxc.FuseRule(replaces=Norm, by=Wrong)
    with pytest.raises(ValueError, match=f"fuse: {message}.* Rules replaced .*Norm -> .*Wrong .in `rules`.") as error:
        eqxc.fuse(model(how=how)[0], rules=[rule], example=X)
    assert how != "raises" or isinstance(error.value.__cause__, ArithmeticError)


def failing(norm: Norm) -> Any:
    raise KeyError("size")


def other(norm: Norm) -> Any:
    return Other((norm.weight, norm.bias))


def back(other: Other) -> Any:
    return Norm(*other.arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make": failing, "back": back}, "KeyError: 'size'"),
        ({"make": other, "back": back, "unless": failing}, "KeyError: 'size'"),
        (
            {"make": other, "back": back, "unless": lambda norm: True},
            "expected unless to give a text or None; got True",
        ),
        ({"make": lambda norm: norm, "back": back}, r"expected .*Other; got Norm\(.* of type Norm"),
        (
            {"make": lambda norm: Other((norm.bias, norm.weight)), "back": back},
            r"expected make to give the very same arrays in the same order, \(.*32\[3\], .*32\[3\]\); got",
        ),
        ({"make": other, "back": lambda other: Norm(X, X)}, "expected back to give the very same arrays"),
        ({"make": other, "back": lambda other: other}, "expected .*Norm of back; got Other"),
    ],
)
def test_a_rule_that_fails(options, message):
    rule = eqxc.FuseRule(Norm, Other, **options)
    with pytest.raises(ValueError, match=rf"fuse: the rule for .*Norm at \[0\] failed .in `rules`.: .*{message}"):
        eqxc.fuse(model(), rules=[rule])
    with pytest.raises(ValueError, match=r"at \(the model\) failed .*Correct it, or leave the layer out"):
        eqxc.fuse(model()[0], rules=[rule])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"replaces": 3, "by": Sub}, TypeError, "expected replaces to be a class of Modules; got 3"),
        ({"replaces": Norm, "by": jax.Array}, TypeError, "expected by to be a class of Modules"),
        ({"replaces": Norm, "by": Sub, "unless": 3}, TypeError, "expected unless to be a function or None; got 3"),
        ({"replaces": Norm, "by": Norm}, ValueError, "expected by to be a class that stands for .*Norm alone"),
        ({"replaces": Norm, "by": eqxc.nn.RMSNorm}, ValueError, ".* got eqxcallback.nn.RMSNorm. Make a subclass of it"),
        ({"replaces": Norm, "by": Other}, ValueError, "expected by to be a subclass of .* Pass functions `make` and"),
        ({"replaces": Norm, "by": Other, "make": other}, ValueError, "expected make and back together; got make alone"),
    ],
)
def test_a_rule_that_is_none(arguments, error, message):
    with pytest.raises(error, match=f"FuseRule: {message}"):
        eqxc.FuseRule(**arguments)


def test_rules_that_are_none():
    wrong: Any = [SUB, 3]
    with pytest.raises(TypeError, match=r"fuse: expected rules to be FuseRules, or a mapping .*; got 3 of type int"):
        eqxc.fuse(model(), rules=wrong)
    with pytest.raises(ValueError, match=r"fuse: expected one rule for each class; got two with .*Norm"):
        eqxc.fuse(model(), rules=[SUB, OTHER])


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        pytest.param({"a": 1}, r"the entry 'a': 1", id="key"),
        pytest.param({"a": lambda layer: layer}, r"the entry 'a': <function", id="key of a function"),
        pytest.param({eqx.nn.Linear: 1}, r"the entry <class 'equinox.*Linear'>: 1", id="value"),
        pytest.param(eqx.nn.Linear, r"<class 'equinox.*Linear'> of type", id="class"),
        pytest.param(3, r"3 of type int", id="number"),
    ],
)
def test_rules_of_wrong_types(wrong, got):
    """Also where the model has no layer that a rule is for: the rules are checked all the same."""
    for any_model in (eqx.nn.MLP(2, 2, 2, 1, key=KEY), model()):
        with pytest.raises(TypeError, match=rf"fuse: expected rules to be FuseRules, or a mapping .*; got {got}"):
            eqxc.fuse(any_model, rules=wrong)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that installs a package with one module and an entry point."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, text: str, attribute: str = "RULES") -> None:
        tmp_path.joinpath(f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        info.joinpath("entry_points.txt").write_text(f"[eqxcallback.fuse]\nrules = {name}:{attribute}\n")
        importlib.invalidate_caches()
        of_packages.cache_clear()
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield install
    monkeypatch.undo()
    of_packages.cache_clear()


def attention(**options: Any) -> Any:
    return equimo_rules.Theirs(8, 2, **options, key=KEY)


def test_a_package_registers_its_rules(installed):
    installed("equimo_fuse", pathlib.Path(equimo_rules.__file__).read_text())
    layer = attention()
    assert "equimo_fuse" not in sys.modules
    fused, report = eqxc.fuse(layer)
    package = importlib.import_module("equimo_fuse")
    assert type(fused) is package.Attention
    want = "equimo.layers.attention.Attention -> equimo_fuse.Attention (a rule of equimo_fuse 1.2)"
    assert want in str(report)
    assert type(eqxc.unfuse(fused)) is type(layer)
    ours = eqxc.fuse(layer, rules=equimo_rules.RULES)
    assert type(ours.model) is equimo_rules.Attention
    assert [change.rule for change in ours.report.changes][-1] == "in `rules`"


def test_rules_are_read_once_and_broken_ones_are_a_warning(installed):
    installed("a_broken", "raise ImportError('no such symbol')")
    installed("b_wrong", "RULES = [3]")
    installed("c_mapping", "RULES = {}")
    plain = "import equinox as eqx, eqxcallback as eqxc\nclass Mine(eqx.nn.LayerNorm): pass\n"
    installed("d_right", plain + "RULES = eqxc.FuseRule(eqx.nn.LayerNorm, Mine)")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, report = eqxc.fuse([eqx.nn.LayerNorm(2)])
        eqxc.fuse([eqx.nn.LayerNorm(2)])
    assert [(warning.category, warning.filename) for warning in caught] == [(UserWarning, __file__)] * 3
    for warning, name, why in zip(
        caught,
        ("a_broken", "b_wrong", "c_mapping"),
        ("ImportError: no such symbol", "got 3 of type int", "got {} of type dict"),
        strict=True,
    ):
        assert f"the rules of the package {name} 1.2 are left out: its entry point 'rules'" in str(warning.message)
        assert why in str(warning.message)
    assert [change.rule for change in report.changes] == ["a rule of d_right 1.2"]


@pytest.mark.parametrize("masked", [False, True])
def test_equimos_attention(masked):
    """All that its call takes."""
    layer = attention(qk_norm=True, attn_drop=0.5)
    fused, _ = eqxc.fuse(layer, rules=equimo_rules.RULES)
    x, angles = jr.normal(KEY, (5, 8)), jr.normal(KEY, (3, 4))
    options = {"rope_sincos": (jnp.sin(angles), jnp.cos(angles)), "mask": jnp.tri(5) if masked else None}
    for inference in (True, False):
        got, want = (module(x, KEY, inference, **options) for module in (fused, layer))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
