"""Peers of the GPU benchmarks that need not be installed."""

import importlib.metadata
import sys
import types

import jax.numpy as jnp
import pytest

from benchmarks._rows import Setting
from benchmarks._timing import WaitingClock
from benchmarks.gpu import __main__ as gpu, of_tokamax


pytestmark = pytest.mark.any_jax_version


def setting(*, tiny):
    return Setting(WaitingClock(), tiny=tiny)


def test_tokamax_that_is_not_installed(monkeypatch):
    """It is no contestant, and the results say so."""
    monkeypatch.setattr(of_tokamax.importlib.util, "find_spec", lambda name: None)
    assert of_tokamax.attention(setting(tiny=False), causal=True) == {}
    assert of_tokamax.gated_linear(setting(tiny=False)) == {}
    assert of_tokamax.norms(setting(tiny=False)) == {"rms_norm": {}, "layer_norm": {}}

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert gpu.device()["tokamax"] == "not installed"


@pytest.mark.parametrize("tiny", [False, True], ids=["on a GPU", "tiny"])
def test_tokamax_is_called_with_one_implementation_each(tiny, monkeypatch):
    """Several implementations would be XLA's too. The command line is not tokamax's."""
    asked, parsed = [], []

    def called(name):
        return lambda *args, implementation, **options: (
            asked.append((name, len(args), implementation, options)) or args[0]
        )

    functions = {name: called(name) for name in ("dot_product_attention", "gated_linear_unit", "layer_norm")}
    fake = types.ModuleType("tokamax")
    vars(fake).update(functions, __spec__=object())
    flags = types.ModuleType("absl.flags")
    vars(flags).update(FLAGS=parsed.append)
    monkeypatch.setitem(sys.modules, "tokamax", fake)
    monkeypatch.setitem(sys.modules, "absl.flags", flags)
    monkeypatch.setitem(sys.modules, "absl", types.ModuleType("absl"))
    of_tokamax._tokamax.cache_clear()
    x, kinds = jnp.ones(3), ["xla"] if tiny else ["mosaic", "triton"]
    how = setting(tiny=tiny)
    for f in of_tokamax.attention(how, causal=True).values():
        f(x, x, x)
    for f in of_tokamax.gated_linear(how).values():
        f(x, x, x)
    norms = of_tokamax.norms(how)
    for f in norms["rms_norm"].values():
        f(x, x)
    for f in norms["layer_norm"].values():
        f(x, x, x)
    of_tokamax._tokamax.cache_clear()
    norm = kinds[-1]
    assert [call[:3] for call in asked] == [
        *(("dot_product_attention", 3, kind) for kind in kinds),
        *(("gated_linear_unit", 2, kind) for kind in kinds),
        ("layer_norm", 3, norm),
        ("layer_norm", 3, norm),
    ]
    assert [call[3]["subtract_mean"] for call in asked[-2:]] == [False, True]
    assert asked[0][3] == {"is_causal": True}
    assert parsed == [["tokamax"]]
