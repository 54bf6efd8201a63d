"""Programs that outlive the process: exported ones, those of the persistent cache, and ahead-of-time compilation."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .. import one_device
from ..persistent_cache import COUNT_HITS
from . import exported


ROOT = pathlib.Path(__file__).parents[2]
X = jnp.arange(6.0).reshape(2, 3)
TYPE = jax.ShapeDtypeStruct((2, 3), jnp.float32)

LOAD = """
import sys
import jax, jax.numpy as jnp, numpy as np, eqxcallback
call = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call
x = jnp.arange(6.0).reshape(2, 3)
print(np.asarray(jax.jit(call)(x)).tolist(), np.asarray(call(x)).tolist(), sep="\\n")
"""

CACHED = (
    COUNT_HITS
    + """
import json, sys
import jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc
from tests.layer import exported
x = jnp.arange(6.0).reshape(2, 3)
found = {}
for name, f in {"python": jax.vmap(exported.LAYER), "native": lambda x: eqxc.ops.rms_norm(x) * 2}.items():
    program = jax.jit(f).lower(x)
    hits.clear()
    compiled = program.compile()
    found[name] = {"hits": len(hits), "result": np.asarray(compiled(x)).tolist()}
print(json.dumps(found))
"""
)


def run(code, *arguments, folder=ROOT, **environment):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**one_device.environment(), **environment}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "program"
    path.write_bytes(eqxc.export(exported.program)(TYPE).serialize())
    return path


def test_an_exported_program_in_another_process(file):
    done = run(LOAD, file)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        np.testing.assert_allclose(np.asarray(json.loads(line)), exported.program(X), rtol=1e-5)


def test_an_exported_program_in_this_process(file):
    call = jax.export.deserialize(bytearray(file.read_bytes())).call
    np.testing.assert_allclose(call(X), exported.program(X), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(exported.LAYER)(X), jax.vmap(exported.LAYER.reference)(X), rtol=1e-5)


def test_kernels_that_cannot_be_imported(file):
    done = run("import sys; sys.modules['tests.layer.exported'] = None\n" + LOAD, file)
    assert done.returncode != 0
    assert "the Python kernel of an exported program cannot be imported (ModuleNotFoundError: " in done.stderr


def test_layers_without_a_name_are_refused():
    class Local(exported.Wave):
        def kernel(self, ctx, out, x, *, scale=1.0):
            out.write(np.asarray(x))

    with pytest.raises(
        ValueError, match=r"Local cannot be exported: another process finds a Python kernel by the name of its"
    ):
        eqxc.export(Local(exported.LAYER.weight))(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(TypeError, match=r"eqxcallback\.export: expected a function; got 3 of type int"):
        eqxc.export(3)  # type: ignore[arg-type]


def test_exporting_a_jitted_function_a_layer_and_several_platforms():
    for f in (exported.program, jax.jit(exported.program)):
        call = jax.export.deserialize(bytearray(eqxc.export(f)(X).serialize())).call
        np.testing.assert_allclose(call(X), exported.program(X), rtol=1e-6)
    layer = eqxc.export(exported.LAYER, platforms=("cpu", "cuda"))(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert layer.platforms == ("cpu", "cuda")
    np.testing.assert_allclose(layer.call(X[0]), exported.LAYER(X[0]), rtol=1e-6)


def test_an_exported_gradient():
    def loss(x):
        return (jax.vmap(exported.LAYER)(x) ** 2).sum()

    both = eqxc.export(jax.value_and_grad(loss))(TYPE)
    _, gradient = jax.export.deserialize(bytearray(both.serialize())).call(X)
    np.testing.assert_allclose(gradient, jax.grad(loss)(X), rtol=1e-5)


def test_the_persistent_cache(tmp_path):
    first, second, changed = (
        json.loads(run(CACHED, tmp_path, PYTHONPATH=str(ROOT), EQXCALLBACK_TEST_FACTOR=factor).stdout)
        for factor in ("2", "2", "5")
    )
    assert first["native"]["hits"] == first["python"]["hits"] == 0
    assert second["native"]["hits"] == 1
    # JAX 0.10 writes no program with host callbacks to its cache.
    cached = jax.__version_info__ >= (0, 11)
    assert second["python"]["hits"] == changed["python"]["hits"] == (1 if cached else 0)
    assert second == {name: {**first[name], "hits": second[name]["hits"]} for name in first}
    # The cached program calls what this process has under that name.
    np.testing.assert_allclose(changed["python"]["result"], np.asarray(first["python"]["result"]) * 2.5, rtol=1e-5)


def test_ahead_of_time():
    compiled = jax.jit(exported.program).trace(TYPE).lower().compile()
    np.testing.assert_allclose(compiled(X), exported.program(X), rtol=1e-6)
