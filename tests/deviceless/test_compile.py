"""The compile for a described GPU, what of JAX it needs that is not public, and what it says where something is missing."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from eqxcallback import xla
from eqxcallback.xla.programs import _deviceless

from ..persistent_cache import COUNT_HITS
from .programs import ONE, X, callback, captured, thunks


def kinds(compiled):
    return [thunk.kind for thunk in thunks(compiled)]


def test_what_comes_back():
    compiled = xla.compile_deviceless(lambda x: jnp.sin(callback(x)), X, compiler_options=ONE)
    assert compiled.hlo_text.startswith("HloModule jit__lambda")
    assert 'custom_call_target="eqxcallback_python_captured"' in compiled.hlo_text
    outer, call, sine = thunks(compiled)
    assert (outer.kind, call.kind) == ("kCommandBuffer", "kCustomCall")
    assert call.name in compiled.hlo_text
    assert sine.name in compiled.hlo_text
    assert "xla_gpu_graph_min_graph_size: 1" in compiled.config
    assert compiled.device == "NVIDIA H200"


def test_what_may_be_compiled():
    jitted = jax.jit(callback, compiler_options=ONE)
    traced = jitted.trace(X)
    lowered = traced.lower(lowering_platforms=("cuda",))
    for program, args in [(jitted, (X,)), (traced, ()), (lowered, ()), (jitted, (jax.ShapeDtypeStruct.like(X),))]:
        assert kinds(xla.compile_deviceless(program, *args))[0] == "kCommandBuffer"
    assert kinds(xla.compile_deviceless(callback, X)) == ["kCustomCall"]
    again = xla.compile_deviceless(jitted, X, compiler_options={"xla_gpu_graph_min_graph_size": 5})
    assert kinds(again) == ["kCustomCall"]  # later options win


def test_donation():
    copied = xla.compile_deviceless(captured, X, compiler_options=ONE)
    assert kinds(copied) == ["kCommandBuffer", "kCopy", "kCustomCall"]
    in_place = xla.compile_deviceless(captured, X, donate_argnums=0, compiler_options=ONE)
    assert kinds(in_place) == ["kCommandBuffer", "kCustomCall"]
    assert "input_output_alias={ {}: (0, {}" in in_place.hlo_text


def test_several_devices(mesh):
    def step(x):
        return jax.shard_map(callback, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(x)

    compiled = xla.compile_deviceless(step, X, compiler_options=ONE)
    assert kinds(compiled) == ["kCommandBuffer", "kCustomCall"]
    assert "f32[1,8]" in compiled.hlo_text


def test_partitioned_layers(mesh):
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("d")))
    compiled = xla.compile_deviceless(jax.vmap(captured), x, donate_argnums=0, compiler_options=ONE)
    assert kinds(compiled) == ["kCommandBuffer", "kCustomCall"]


def test_errors_of_xla_are_its_own():
    with pytest.raises(JaxRuntimeError, match="No such compile option: 'nonsense'"):
        xla.compile_deviceless(callback, X, compiler_options={"nonsense": 1})
    with pytest.raises(JaxRuntimeError, match="No FFI handler registered for nobody on a platform CUDA"):
        xla.compile_deviceless(lambda x: jax.ffi.ffi_call("nobody", x)(x), X)


def test_why_the_private_compile():
    """JAX's own gives a compile-only client host callbacks, of which it takes none. If this passes, use JAX's."""
    (device,) = _deviceless._devices(1)
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=SingleDeviceSharding(device))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        jax.jit(callback).trace(x).lower().compile()


def test_options_of_a_lowered_program():
    lowered: Any = jax.jit(callback, compiler_options=ONE).trace(X).lower(lowering_platforms=("cuda",))
    assert dict(lowered._lowering._compiler_options_kvs) == ONE


def test_where_nothing_is_installed(monkeypatch):
    monkeypatch.setattr(_deviceless, "_PLUGINS", ("jax_plugins.xla_cuda_none", "no_such_package.xla_cuda"))
    _deviceless.deviceless_unavailable.cache_clear()
    try:
        with pytest.raises(
            xla.DevicelessError, match=r"cannot compile for a GPU that is not there: JAX's CUDA plugin is "
        ):
            xla.compile_deviceless(callback, X)
        assert "pip install --no-deps jax-cuda13-plugin==" in str(xla.deviceless_unavailable())
    finally:
        _deviceless.deviceless_unavailable.cache_clear()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotImplementedError("topology not implemented for cuda"), "JAX_PLATFORMS=cpu must be set before JAX starts"),
        (RuntimeError("unknown field\nmore"), r"does not take the description of a GPU \(unknown field\)$"),
    ],
)
def test_where_the_plugin_does_not_work(monkeypatch, error, text):
    def fail(**_):
        raise error

    monkeypatch.setattr(topologies, "get_topology_desc", fail)
    _deviceless.deviceless_unavailable.cache_clear()
    _deviceless._devices.cache_clear()
    try:
        reason = _deviceless.deviceless_unavailable()
    finally:
        _deviceless.deviceless_unavailable.cache_clear()
        _deviceless._devices.cache_clear()
    with pytest.raises(xla.DevicelessError, match=text):
        raise xla.DevicelessError(reason)


def test_where_a_tool_is_missing(monkeypatch):
    """XLA itself would crash."""
    monkeypatch.setattr(_deviceless, "_toolkit", lambda: None)
    _deviceless.deviceless_unavailable.cache_clear()
    try:
        with pytest.raises(xla.DevicelessError, match="there is no folder with CUDA's ptxas and libdevice, which XLA"):
            xla.compile_deviceless(callback, X)
    finally:
        _deviceless.deviceless_unavailable.cache_clear()


def test_where_the_tools_are(monkeypatch, tmp_path):
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 --xla_gpu_cuda_data_dir={tmp_path} --xla_b=2")
    assert _deviceless._toolkit.__wrapped__() == tmp_path
    (tmp_path / "bin/ptxas").unlink()
    assert _deviceless._toolkit.__wrapped__() != tmp_path


PROGRAM = (
    COUNT_HITS
    + """
from eqxcallback import xla

def lowered():
    jax.clear_caches()
    return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), "float32"))

def hits_of(compile):
    before = len(hits)
    compile()
    return len(hits) - before

new = jax.jit(lambda x: x + 2).lower(jax.ShapeDtypeStruct((3,), "float32"))
assert hits_of(lambda: xla.compile_with_plan(new)) == 0
assert hits_of(lambda: new.compile()) == 0, "it was put there"
assert hits_of(lambda: lowered().compile()) == 0
assert hits_of(lambda: xla.compile_with_plan(lowered())) == 0, "it was taken from there"
assert hits_of(lambda: lowered().compile()) == 1, "the cache is off"
"""
)


def test_a_plan_does_not_come_from_the_persistent_cache(tmp_path):
    """And nothing is put there, nor is it turned off for others."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)], check=True, env=environment)
