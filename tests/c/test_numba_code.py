"""The machine code of a `NumbaKernel` goes with a program, to a file and to the persistent cache."""

import json
import math
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import NumbaKernel, Op
from eqxcallback.backends import _numba, _object_code

from .. import one_device
from ..persistent_cache import COUNT_HITS


# Numba takes its time to compile: once is enough.
pytestmark = pytest.mark.any_jax_version

numba: Any = pytest.importorskip("numba", reason="Numba is not installed")
X = jnp.arange(-6.0, 6.0).reshape(4, 3)


def sorted_rows(out, x, scale):
    """With scratch of Numba's own, mathematics, and an exception."""
    if x.size > 100:
        raise ValueError("too large")
    for row in range(x.shape[0]):
        scratch = np.empty(x.shape[1])
        for column in range(x.shape[1]):
            scratch[column] = math.exp(scale * x[row, column])
        scratch.sort()
        out[row] = scratch[::-1]


def expected(x, scale):
    return np.sort(np.exp(scale * np.asarray(x)), axis=-1)[..., ::-1]


def op(function=sorted_rows, **more):
    return Op("sorted", kernels={"cpu": NumbaKernel(function)}, reference=lambda x, *, scale: x, **more)


def run(program, *args, **environment):
    command = [sys.executable, "-c", program, *map(str, args)]
    done = subprocess.run(
        command, env=one_device.environment() | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADS = """
import json, sys, jax.numpy as jnp, eqxcallback as eqxc
program = eqxc.load(sys.argv[1])
x = jnp.arange(-6.0, 6.0).reshape(4, 3)
assert "tests" not in sys.modules
print(json.dumps(program.call(x if sys.argv[2] == "fold" else x[None]).tolist()))
"""


@pytest.mark.parametrize("method", ["fold", "threads"])
def test_a_file_has_it(method, tmp_path):
    """In a process that knows nothing of the function."""
    file = tmp_path / "program"
    function = lambda x: op(vmap_method=method)(x, scale=0.5)
    x = X if method == "fold" else X[None]
    exported = eqxc.export(jax.jit(function if method == "fold" else jax.vmap(function)))(x)
    file.write_bytes(exported.serialize())
    got = json.loads(run(LOADS, file, method))
    np.testing.assert_allclose(np.reshape(got, X.shape), expected(X, 0.5), rtol=1e-5)


CACHED = f"""{COUNT_HITS}
from tests.c import test_numba_code as here
for _ in range(int(sys.argv[2])):
    here.numba.njit(lambda x: x + 1)(1)
hits.clear()
out = jax.jit(lambda x: here.op()(x, scale=0.5))(here.X)
print(len(hits))
print(out.tolist())
"""


def test_another_process_finds_the_program_in_the_cache(tmp_path):
    """The programs that a process has compiled before do not matter: Numba counts them in its names."""
    first, second = (run(CACHED, tmp_path, count).splitlines() for count in (0, 12))
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] == second[1]


def test_the_same_code_is_in_memory_once():
    def make():
        def scaled(out, x, scale):
            for i in range(x.size):
                out.flat[i] = scale * x.flat[i]

        return scaled

    x = jnp.ones(3)
    op(make())(x, scale=2.0)
    loaded = len(_object_code._loaded)
    kept = len(_numba._kept)
    for _ in range(3):
        assert op(make())(x, scale=2.0).tolist() == [2, 2, 2]
    assert len(_object_code._loaded) == loaded
    assert len(_numba._kept) == kept


FACTORS = np.arange(3.0)


def with_a_global(out, x, scale):
    for i in range(x.size):
        out.flat[i] = FACTORS[i] * scale


def test_a_global_array_goes_along():
    code = exported_code(op(with_a_global), jnp.ones(3))
    assert code["needs"] == ["NRT_MemInfo_call_dtor"]


def exported_code(function, x):
    text = jax.jit(lambda x: function(x, scale=0.5)).lower(x).as_text()
    escaped = re.search(r'eqxcallback_code = "((?:[^"\\]|\\.)*)"', text)
    assert escaped is not None
    return json.loads(re.sub(r"\\([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), escaped[1]) or "{}")


def prints(out, x, scale):
    print("scale", scale)
    out[...] = x


def test_what_calls_python_stays(tmp_path):
    file = tmp_path / "program"
    function = op(prints)
    assert exported_code(function, jnp.ones(3)) == {}
    file.write_bytes(eqxc.export(jax.jit(lambda x: function(x, scale=1.0)))(jnp.ones(3)).serialize())
    program = "import sys, eqxcallback as eqxc\ntry: eqxc.load(sys.argv[1])\nexcept ValueError as error: print(error)"
    assert "the program has the address of prints, a function of the process that exported it" in run(program, file)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"numba": "0.1"},
            r"sorted\[numba\]: the program has .* of sorted_rows: expected Numba 0\.1, which made it; got",
        ),
        (
            {"processor": ["avx2048"]},
            r"expected a processor with avx2048; got one without\. Export it on such a machine",
        ),
        ({"needs": ["no_such_name"]}, "expected a process that has the function no_such_name; got one that lacks it"),
    ],
)
def test_code_that_cannot_run_here(change, error):
    code = exported_code(op(), X)
    code["function"] += "_other"  # this one is loaded
    with pytest.raises(ValueError, match=error):
        _object_code.load_object_code(json.dumps(code | change))


def test_a_machine_without_numba(monkeypatch):
    code = json.dumps(exported_code(op(), X))
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ValueError, match=r"it needs Numba here too: .* Install eqxcallback\[numba\]"):
        _object_code.load_object_code(code)


PORTABLE = """
from tests.c import test_numba_code as here
code = here.exported_code(here.op(), here.X)
assert code["processor"] == [], code["processor"]
"""


def test_code_for_any_processor():
    run(PORTABLE, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
