"""The plugin with which scripts/run_equinox_tests has Equinox's own tests run on our layers."""

import os
import pathlib
import subprocess
import sys


THEIRS = """
import equinox as eqx
import equinox.nn._mlp
import jax
import jax.numpy as jnp


def test_layers_are_ours():
    names = "LayerNorm RMSNorm GroupNorm MultiheadAttention RotaryPositionalEmbedding Embedding Linear MLP GRUCell LSTMCell"
    for name in names.split():
        assert getattr(eqx.nn, name).__module__.startswith("eqxcallback.nn.")
    assert equinox.nn._mlp.Linear is eqx.nn.Linear
    assert eqx.nn.Linear(2, 3, key=jax.random.key(0))(jnp.ones(2)).shape == (3,)


def test_speed_of_nothing():
    raise AssertionError
"""


def run(folder, *arguments):
    here = pathlib.Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "equinox_in_place",
        "-c",
        os.devnull,
    ]
    environment = {**os.environ, "PYTHONPATH": str(here), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [*command, "--rootdir", ".", "test_theirs.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_plugin(tmp_path):
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    # The whole run has to call every layer, which this one does not.
    whole = run(tmp_path)
    assert "1 passed" in whole.stdout, whole.stdout + whole.stderr
    assert "calls of our ops: layer_norm: 0, " in whole.stdout
    assert ", linear: 1, " in whole.stdout
    assert whole.returncode == 1
    assert run(tmp_path, "-k", "ours").returncode == 0
