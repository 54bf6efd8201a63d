"""Programs with a kernel in CUDA C++. It is compiled when a program is lowered, which needs no GPU."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback.backends._description import description

from ..gpu.saxpy import Saxpy
from .cuda_programs import F32, SAXPY, attributes, lowered, saxpy, simple


pytestmark = pytest.mark.usefixtures("own_cache")


def test_lowered_for_cuda():
    program = lowered(saxpy(), F32, F32, a=2.0)
    assert "@eqxcallback_launch_captured(" in program.as_text()
    launch = attributes(program)
    assert launch["entries"] == "saxpy"
    assert launch["geometry"].tolist() == [4, 1, 1, 256, 1, 1, 0, 0]
    assert launch["scalars"].view("u4").tolist() == [1000, 0, np.float32(2).view("u4"), 0]
    assert launch["sizes"].tolist() == [launch["images"].size]


def test_geometry_under_vmap():
    batch = jax.ShapeDtypeStruct((3, 1000), jnp.float32)
    launch = attributes(lowered(saxpy(), batch, batch, a=2.0, vmap=True))
    assert launch["geometry"][0] == 12
    assert launch["scalars"][0] == 3000


def test_not_compatible_with_command_buffers():
    assert "@eqxcallback_launch(" in lowered(saxpy(command_buffer_compatible=False), F32, F32, a=2.0).as_text()


def test_aliases_are_in_the_program():
    program = lowered(saxpy(aliases={1: 0}), F32, F32, a=2.0)
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 1" in program.as_text()


def test_workspaces_are_hidden_results():
    source = 'extern "C" __global__ void entry(const float* x, float* out, double* work, int* more) {}'
    work = [jax.ShapeDtypeStruct((7,), jnp.int8), jax.ShapeDtypeStruct((2, 3), jnp.int32)]
    text = lowered(simple(source.replace("double", "char"), workspaces=work), F32).as_text()
    assert "-> (tensor<1000xf32>, tensor<7xi8>, tensor<2x3xi32>)" in text
    assert "return %0#0 : tensor<1000xf32>" in text


def test_exported_programs_have_their_kernels(tmp_path):
    op = eqxc.Op("op", kernels={"cuda": saxpy(arch="sm_90")})
    exported = eqxc.export(lambda x, y: op(x, y, a=2.0), platforms=["cuda"])(F32, F32)
    (tmp_path / "program").write_bytes(exported.serialize())
    code = f"""
import pathlib, jax, eqxcallback
program = jax.export.deserialize(pathlib.Path({str(tmp_path / "program")!r}).read_bytes())
assert program.platforms == ("cuda",)
assert "eqxcallback_launch_captured" in program.mlir_module()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=pathlib.Path(__file__).parents[2])


def test_kernels_are_equal_by_what_they_are():
    def size(x, y, *, a):
        return x.size

    launch = eqxc.Launch(grid=size, block=256)

    def make(**changed):
        return saxpy(launch=launch, out_type=None, **{"scalars": {"n": ("int32", size), "a": "float32"}, **changed})

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(scalars={"a": "float32", "n": ("int32", size)})  # the order is that of the parameters
    assert make() != make(options=["-lineinfo"])


def test_in_a_layer():
    layer = Saxpy(jnp.ones(1000), 0.5)
    text = jax.jit(lambda y, x: Saxpy(y, 0.5)(x)).trace(F32, F32).lower(lowering_platforms=("cuda",))
    assert attributes(text)["scalars"].view("u4").tolist() == [1000, 0, np.float32(0.5).view("u4"), 0]
    np.testing.assert_allclose(layer(jnp.ones(1000)), 1.5)  # on a CPU, the reference


BLOCKS = 7


def test_kernels_are_described_by_what_their_functions_do():
    """Two that differ in a global, a default or an inner function are two in programs that are split between devices."""
    globals()["BLOCKS"] = 7

    def described(grid):
        return description(saxpy(launch=eqxc.Launch(grid, 32)), "op")

    def make(size=3):
        return lambda x, y, *, a: max(size, *[(lambda: BLOCKS)() for _ in range(1)])

    before = described(make())
    assert described(make()) == before
    assert described(make(size=4)) != before
    globals()["BLOCKS"] = 8
    assert described(make()) != before
    assert description(saxpy(source=SAXPY + "\n"), "op") != description(saxpy(), "op")
