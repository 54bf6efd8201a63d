"""`load`: programs come back in another process, with what they need, or an error says what is missing."""

import io
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc

from .. import one_device
from ..layer import exported
from ..transform.library import build
from . import effects_of_a_user


ROOT = pathlib.Path(__file__).parents[2]
X = jnp.arange(6.0).reshape(2, 3)
TYPE = jax.ShapeDtypeStruct(X.shape, X.dtype)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("library") / "libsaxpy.so")


def run(code, *arguments, **environment):
    """In another process, which imports no op or layer of a user's by itself."""
    prelude = "import sys, jax, jax.numpy as jnp, numpy as np, eqxcallback as eqxc\n"
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    environment = {**one_device.environment(), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_paths_files_and_bytes(tmp_path):
    data = eqxc.export(exported.program)(TYPE).serialize()
    path = tmp_path / "program.bin"
    path.write_bytes(data)
    with path.open("rb") as stream:
        programs = [eqxc.load(file) for file in (path, str(path), stream, io.BytesIO(data), data, bytes(data))]
    for program in programs:
        assert isinstance(program, jax.export.Exported)
        np.testing.assert_allclose(program(X), exported.program(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(programs[0].call)(X), exported.program(X), rtol=1e-6)


def test_a_model_that_is_an_argument():
    model = eqxc.nn.MultiheadAttention(1, 3, key=jax.random.key(0))
    attend = lambda model, x: model(x, x, x)
    program = eqxc.load(eqxc.export(attend)(model, TYPE).serialize())
    np.testing.assert_allclose(program(model, X), attend(model, X), rtol=1e-5)
    np.testing.assert_allclose(eqxc.load(program.serialize())(model, X), attend(model, X), rtol=1e-5)
    with pytest.raises(
        TypeError, match=r"<lambda>: expected the arguments that the program was exported with; missing"
    ):
        program(X, X)


def test_what_is_no_program(tmp_path):
    (tmp_path / "other").write_bytes(b"something else")
    for file, name in ((tmp_path / "other", "other"), (b"", "bytes")):
        with pytest.raises(
            ValueError, match=rf"eqxcallback\.load\(.*{name}\): expected what serialize\(\) of an exported"
        ):
            eqxc.load(file)
    with pytest.raises(FileNotFoundError):
        eqxc.load(tmp_path / "nothing")
    with pytest.raises(TypeError, match=r"eqxcallback\.load: expected a path, bytes, or a file .*; got 3 of type int"):
        eqxc.load(3)  # type: ignore[arg-type]


def test_kernels_of_this_package_need_nothing(tmp_path):
    path = tmp_path / "program"
    path.write_bytes(eqxc.export(lambda x: eqxc.ops.softmax(eqxc.ops.rms_norm(x)))(TYPE).serialize())
    done = run("print(eqxc.load(sys.argv[1])(jnp.ones((2, 3))).sum())", path)
    assert done.stdout == "2.0\n", done.stderr


def test_python_kernels_are_imported_at_once(tmp_path):
    path = tmp_path / "program"
    path.write_bytes(eqxc.export(exported.program)(TYPE).serialize())
    done = run("eqxc.load(sys.argv[1]); print('tests.layer.exported' in sys.modules)", path)
    assert done.stdout == "True\n", done.stderr
    done = run("sys.modules['tests.layer.exported'] = None; eqxc.load(sys.argv[1])", path)
    assert "the Python kernel of an exported program cannot be imported (ModuleNotFoundError: " in done.stderr


EFFECTS = {
    "unordered": "kernel [1.0, 1.0]\n[2.0, 2.0]\n",
    "ordered": "what: first\n[1. 1.]\ntap [2.0, 2.0]\nwhat: last\n[3. 3.]\n[3.0, 3.0]\n",
    "both": "kernel [1.0, 1.0]\nwhat: first\n[2. 2.]\ntap [3.0, 3.0]\nwhat: last\n[4. 4.]\n[4.0, 4.0]\n",
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_run_in_the_other_process(name, tmp_path):
    path = tmp_path / "program"
    path.write_bytes(eqxc.export(getattr(effects_of_a_user, name))(jnp.ones(2)).serialize())
    call = "y = {}(jnp.ones(2)).tolist(); eqxc.debug.barrier_wait(); print(y)\n"
    done = run(
        "program = eqxc.load(sys.argv[1])\n" + call.format("program") + call.format("jax.jit(program.call)"), path
    )
    assert done.stdout == 2 * EFFECTS[name], done.stderr


USE = """
missing, saxpy = None, None
try:
    eqxc.load(sys.argv[1])
except ValueError as error:
    missing = error
from tests.program import kernels_of_a_user as user
getattr(user, sys.argv[2]).register()
x = jnp.arange(6.0).reshape(2, 3)
print(missing)
print(np.asarray(eqxc.load(sys.argv[1])(x)).tolist())
"""


@pytest.mark.parametrize("name", ["saxpy", "Saxpy"])
def test_a_library_of_the_user(name, library, tmp_path, monkeypatch):
    """Registered without a first call, an op's and a layer's."""
    monkeypatch.setenv("EQXCALLBACK_TEST_LIBRARY", str(library))
    from . import kernels_of_a_user as user

    f = {"saxpy": lambda x: user.saxpy(x, X, a=2.0), "Saxpy": lambda x: user.Saxpy(X)(x, a=2.0)}[name]
    path = tmp_path / "program"
    path.write_bytes(eqxc.export(f)(TYPE).serialize())
    done = run(USE, path, name, EQXCALLBACK_TEST_LIBRARY=str(library))
    assert done.returncode == 0, done.stderr
    error, result = done.stdout.splitlines()
    assert (
        f"eqxcallback.load({path}): the program calls Saxpy of a library of yours, whose content has the hash " in error
    )
    assert error.endswith("Import the module that defines its Op or Layer, and call register() of it before.")
    assert result == str(f(X).tolist())


def test_a_library_that_was_built_again(library, tmp_path):
    """It is another kernel: what was registered of the first does not serve."""
    other = build(tmp_path / "libsaxpy.so", "saxpy.cc", "-g")
    make = lambda path: eqxc.Op("saxpy", {"cpu": eqxc.NativeKernel("Saxpy", path)}, lambda x, y, *, a: a * x + y)
    program = eqxc.export(lambda x: make(library)(x, x, a=2.0))(TYPE)
    path = tmp_path / "program"
    path.write_bytes(program.serialize())
    use = "eqxc.Op('saxpy', {'cpu': eqxc.NativeKernel('Saxpy', sys.argv[2])}, lambda x, y, *, a: x).register()\n"
    done = run(use + "eqxc.load(sys.argv[1])", path, other)
    assert "This process has 'eqxcallback_Saxpy_" in done.stderr
    assert "a library that was built again is another kernel" in done.stderr
    done = run(use + "print(eqxc.load(sys.argv[1])(jnp.ones((2, 3))).sum())", path, library)
    assert done.stdout == "18.0\n", done.stderr


def test_registering_what_is_not_there(tmp_path):
    gone = eqxc.Op("gone", {"cpu": eqxc.NativeKernel("Gone", tmp_path / "gone.so")}, lambda x: x)
    with pytest.raises(ValueError, match=r"gone\[native\]: the library .* cannot be loaded"):
        gone.register()
    eqxc.Op("none", {"cpu": eqxc.PythonKernel(lambda ctx, out, x: None)}, lambda x: x).register()


def test_a_newer_version(monkeypatch):
    from eqxcallback.xla.handles import _targets

    data = eqxc.export(eqxc.ops.softmax)(TYPE).serialize()
    monkeypatch.delitem(_targets.CPU_OPS, "softmax")
    monkeypatch.setattr(_targets, "_registered", set())  # other tests register handlers of their own under such names
    with pytest.raises(
        ValueError, match=r"'eqxcallback_softmax' for cpu, which this version of the package does not have"
    ):
        eqxc.load(data)


def test_a_module_that_loads_a_program_itself(tmp_path):
    """The kernel of the program that is loaded is in a module that loads another one as it is imported."""
    kernel = "import numpy as np\n\ndef kernel(ctx, out, x):\n    out.write(np.asarray(x) * {})\n"
    (tmp_path / "inner_kernel.py").write_text(kernel.format(2))
    loads = "import os\nif 'INNER' in os.environ:\n    import eqxcallback\n    INNER = eqxcallback.load(os.environ['INNER'])\n"
    (tmp_path / "outer_kernel.py").write_text(loads + kernel.format(3))
    path = {"PYTHONPATH": str(tmp_path)}
    save = (
        "import inner_kernel, outer_kernel, pathlib\n"
        "like = jax.ShapeDtypeStruct((3,), jnp.float32)\n"
        "for module in (inner_kernel, outer_kernel):\n"
        "    data = eqxc.export(jax.jit(eqxc.buffer_callback(module.kernel, like)))(like).serialize()\n"
        "    pathlib.Path(sys.argv[1], module.__name__).write_bytes(data)\n"
    )
    done = run(save, tmp_path, **path)
    assert done.returncode == 0, done.stderr
    load = (
        "outer = eqxc.load(sys.argv[1])\n"
        "import outer_kernel\n"
        "print(outer(jnp.ones(3)).tolist(), outer_kernel.INNER(jnp.ones(3)).tolist())\n"
    )
    done = run(load, tmp_path / "outer_kernel", INNER=str(tmp_path / "inner_kernel"), **path)
    assert done.stdout == "[3.0, 3.0, 3.0] [2.0, 2.0, 2.0]\n", done.stderr
