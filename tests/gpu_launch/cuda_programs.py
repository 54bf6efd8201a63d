"""Kernels in CUDA C++, lowered for a GPU that need not be there, and what is in the programs."""

import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc


SAXPY = """
extern "C" __global__ void saxpy(const float* x, const float* y, float* out, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}
"""


F32 = jax.ShapeDtypeStruct((1000,), jnp.float32)


def saxpy(**changed):
    fields = {
        "source": SAXPY,
        "entry": "saxpy",
        "launch": eqxc.Launch(grid=lambda x, y, *, a: -(-x.size // 256), block=256),
        "scalars": {"n": ("int32", lambda x, y, *, a: x.size), "a": "float32"},
        "out_type": lambda x, y, *, a: x,
    }
    return eqxc.CudaKernel(**{**fields, **changed})


def simple(source, **changed):
    """`entry` of as many operands as it has, and one result."""
    fields = {"entry": "entry", "launch": eqxc.Launch(grid=1, block=32), "out_type": lambda *args, **_: F32}
    return eqxc.CudaKernel(source, **{**fields, **changed})


def lowered(kernel, *args, vmap=False, **options):
    op = eqxc.Op("op", kernels={"cuda": kernel}, vmap_method="fold")

    def f(*args):
        return op(*args, **options)

    return jax.jit(jax.vmap(f) if vmap else f).trace(*args).lower(lowering_platforms=("cuda",))


def attributes(program):
    """Return the attributes of the program's one call."""
    (of_call,) = all_attributes(program)
    return of_call


def all_attributes(program):
    """Return the attributes of each call of the launcher."""
    calls = [op for op in _operations(program.compiler_ir()) if op.name == "stablehlo.custom_call"]
    return [_attributes(call) for call in calls if "eqxcallback_launch" in str(call.attributes["call_target_name"])]


def _attributes(call):
    values = {item.name: item.attr for item in call.attributes["mhlo.backend_config"]}
    names = ("geometry", "scalars", "images", "sizes", "attributes", "scratch", "starts", "maps")
    arrays = {name: np.array(values[name]) for name in names if name in values}
    return {**{name: values[name].value for name in ("who", "entries")}, **arrays}


def _operations(module):
    for op in module.body.operations:
        for block in op.regions[0]:
            yield from (inner.operation for inner in block)


def image_of(program):
    return attributes(program)["images"].tobytes()
