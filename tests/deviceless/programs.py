"""Layers and callbacks that several tests compile. None of them runs."""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp

import eqxcallback as eqxc
from eqxcallback import xla
from eqxcallback.inspection import _thunks

from ..transform.library import build


X = jnp.ones((4, 8))
ONE = {"xla_gpu_graph_min_graph_size": 1}

_built = tempfile.TemporaryDirectory()


def kernel(ctx, out, x):
    raise AssertionError("a described GPU runs nothing")


class Captured(eqxc.Layer):
    vmap_method = "fold"
    command_buffer_compatible = True
    input_output_aliases = {"x": 0}  # noqa: RUF012

    def kernel(self, ctx, out, x):
        raise AssertionError("a described GPU runs nothing")

    def reference(self, x):
        return x + 1.0


class Plain(Captured):
    command_buffer_compatible = False


captured, plain = Captured(), Plain()


def callback(x, compatible=True, **options):
    return eqxc.buffer_callback(kernel, jax.ShapeDtypeStruct.like(x), command_buffer_compatible=compatible, **options)(
        x
    )


@functools.cache
def library():
    return build(pathlib.Path(_built.name) / "libhandlers.so", str(pathlib.Path(__file__).with_name("handlers.cc")))


def thunks(compiled):
    """All of them, from the outermost inwards."""
    return [thunk for outer in _thunks.parse(compiled.thunks, compiled.thunk_names) for thunk in outer]


def calls_of(fn, *args, donate_argnums=(), **options):
    """Tell for each kernel of a program whether it is in a command buffer."""
    compiled = xla.compile_deviceless(fn, *(args or (X,)), donate_argnums=donate_argnums, compiler_options=options)
    return [thunk.buffer is not None for thunk in thunks(compiled) if thunk.kind == "kCustomCall"]


def reports(fn, *args):
    """`captured` of each call, and why."""
    inspection = eqxc.inspect(fn, *(args or (X,)), platform="cuda")
    assert inspection.stage == "compiled"
    return [(call.captured, call.captured_reason) for call in inspection.calls]
