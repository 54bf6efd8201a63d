"""Programs that outlive the process: the persistent compilation cache, and what cannot be exported."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import eqxcallback as eqxc

from .. import one_device
from ..persistent_cache import COUNT_HITS
from .kernels import add_one, callback_like


# Two callbacks of one name, and one whose body is given from outside. Prints the results and the number of cache hits.
PROGRAM = (
    COUNT_HITS
    + """
import json, sys
import jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc

F32 = jax.ShapeDtypeStruct((2,), jnp.float32)


def make(amount):
    return eqxc.buffer_callback(lambda ctx, out, x: out.write(np.asarray(x) + np.float32(amount)), F32)


def kernel(ctx, out, x):
    out.write(np.asarray(x) * np.float32(sys.argv[2]))


def compiled(f):
    return jax.jit(lambda x: f(x) * 2.0).lower(F32).compile()


x = jnp.ones(2)
hits.clear()
programs = [compiled(make(float(amount))) for amount in sys.argv[3:]] + [compiled(eqxc.buffer_callback(kernel, F32))]
found = len(hits)
print(json.dumps({"results": [float(program(x)[0]) for program in programs], "hits": found}))
"""
)


def run(folder, *arguments):
    environment = one_device.environment()
    command = [sys.executable, "-c", PROGRAM, str(folder), *arguments]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def test_the_persistent_cache_never_calls_the_wrong_function(tmp_path):
    first = run(tmp_path, "3", "10", "20")
    assert first == {"results": [22.0, 42.0, 6.0], "hits": 0}
    second = run(tmp_path, "3", "10", "20")
    assert second["results"] == first["results"]
    # Another body under the same name, and the two lambdas in another order.
    third = run(tmp_path, "5", "20", "10")
    assert third["results"] == [42.0, 22.0, 10.0]
    # JAX 0.10 never writes programs that own host callbacks to its cache; 0.11 and later do.
    expected = 3 if jax.__version_info__ >= (0, 11) else 0
    assert (second["hits"], third["hits"]) == (expected, expected)


def test_export_is_refused_and_not_wrong():
    f = callback_like(add_one, jnp.zeros(2))
    with pytest.raises(Exception, match=r"host_callbacks|custom calls"):
        jax.export.export(jax.jit(f))(jnp.zeros(2)).serialize()


def test_a_compiled_program_with_a_callback_is_not_serialized():
    compiled = jax.jit(callback_like(add_one, jnp.zeros(2))).lower(jnp.zeros(2)).compile()
    with pytest.raises(TypeError) as caught:
        serialize_executable.serialize(compiled)
    assert str(caught.value) == (
        "add_one is a Python kernel of this process, and so a compiled program that calls it cannot be serialized. Export the "
        "function instead, with eqxcallback.export, which finds Python kernels by name in the other process."
    )


def test_a_compiled_program_of_native_kernels_is():
    x = jnp.arange(16.0).reshape(2, 8)
    f = jax.jit(lambda x: eqxc.ops.rms_norm(x, jnp.ones(8), implementation="native"))
    compiled = f.lower(x).compile()
    assert "custom-call" in str(compiled.as_text())
    parts = serialize_executable.serialize(compiled)
    again = serialize_executable.deserialize_and_load(*parts, execution_devices=jax.devices("cpu")[:1])
    np.testing.assert_array_equal(again(x), f(x))


def test_an_exiting_interpreter_is_clean(tmp_path):
    """Programs, handles and failures are alive when Python exits."""
    code = (
        "import jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc\n"
        "F32 = jax.ShapeDtypeStruct((2,), jnp.float32)\n"
        "f = eqxc.buffer_callback(lambda ctx, out, x: out.write(x), F32)\n"
        "g = jax.jit(f); print(g(jnp.ones(2)), f(jnp.ones(2)))\n"
        "def broken(ctx, out, x): raise ValueError('no')\n"
        "try: jax.block_until_ready(jax.jit(eqxc.buffer_callback(broken, F32))(jnp.ones(2)))\n"
        "except Exception as error: kept = error\n"
        "compiled = jax.jit(lambda x: f(x)).lower(F32).compile(); compiled(jnp.ones(2))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "leaked" not in result.stderr  # nanobind reports what is still alive
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("devices", [1, 2])
def test_exit_waits_for_kernels_that_run(devices, tmp_path):
    """On threads of XLA's: those of several devices, and that of an exported program."""
    (tmp_path / "slow_kernels.py").write_text("""
import time

begun = []

def slow(ctx, out, x):
    begun.append(1)
    time.sleep(0.3)
    out.write(x)
    print("written", flush=True)
""")
    code = """
import time, jax, jax.numpy as jnp, eqxcallback as eqxc
from jax.sharding import NamedSharding, PartitionSpec
from slow_kernels import begun, slow

def f(x):
    return eqxc.buffer_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype))(jnp.sin(x @ x.T) @ x)

x = jnp.ones((600, 600))  # a small program runs on the thread that calls it
if jax.device_count() > 1:
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
else:
    program = jax.jit(eqxc.export(f)(x).call)
jax.block_until_ready(program(x))
kept = program(x)
while len(begun) < 2 * jax.device_count():
    time.sleep(0.001)
print("end", flush=True)
"""
    environment = one_device.environment() | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("written") == 2 * devices
    assert "end\nwritten" in result.stdout
