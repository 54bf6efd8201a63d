"""The count of the host's calls of kernels when a program is run. That replays are not counted, a GPU has to show: tests/gpu."""

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc

from .layers import Scale


def two(x):
    layer = Scale(jnp.ones(2))
    return layer(layer(x))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, eqxc.jit_captured], ids=["plain", "jit", "jit_captured"])
def test_each_run_is_counted(wrap):
    report = eqxc.inspect(wrap(two), jnp.ones(2), runs=3)
    assert report.host_calls == (2, 2, 2)
    assert "\n    calls from the host in each run: 2, 2, 2\n" in str(report)


def test_what_is_donated_is_a_copy():
    x = jnp.ones(2)
    assert eqxc.inspect(jax.jit(two, donate_argnums=0), x, runs=2).host_calls == (2, 2)
    assert not x.is_deleted()


def test_a_layer():
    assert eqxc.inspect(Scale(jnp.ones(2)), jnp.ones(2), runs=1).host_calls == (1,)


def test_nothing_runs_unless_asked():
    assert eqxc.inspect(two, jnp.ones(2)).host_calls == ()


@pytest.mark.parametrize("runs", [-1, 1.5, "1", True])
def test_runs_are_counted_in_integers(runs):
    with pytest.raises(ValueError, match=r"inspect: expected runs of 0 or more; got "):
        eqxc.inspect(two, jnp.ones(2), runs=runs)


def test_another_platform_cannot_run():
    with pytest.raises(ValueError, match="expected no runs for cuda, which is not in use; got 2"):
        eqxc.inspect(two, jnp.ones(2), platform="cuda", runs=2)
