"""`python -m eqxcallback doctor`: what is installed, which kernels can run, and whether they do."""

import os
import platform
import traceback
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np

from .. import _ext, ops
from ..backends import available_backends, missing
from ..layer import Layer


_PACKAGES = ("jax", "jaxlib", "equinox", "numpy", "triton", "cupy-cuda12x", "cupy-cuda13x")


class _Scale(Layer):
    weight: jax.Array
    vmap_method = "fold"

    def kernel(self, ctx, out, x):
        np.multiply(np.asarray(x), np.asarray(self.weight), out=np.asarray(out))

    def reference(self, x):
        return x * self.weight


def _python() -> None:
    weight = jnp.arange(3, dtype=jnp.float32)
    layer, x = _Scale(weight), jnp.ones((4, 3))
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(jax.jit(jax.vmap(layer))(x), x * weight)
        np.testing.assert_array_equal(jax.grad(lambda x: jax.vmap(layer)(x).sum())(x), jnp.tile(weight, (4, 1)))


def _ops() -> None:
    """Compare an op and its gradient with their reference, on the default device, whatever it is."""
    x = jnp.sin(jnp.arange(4 * 96, dtype=jnp.float32)).reshape(4, 1, 3, 32)

    def results(implementation):
        def attend(x):
            return ops.attention(x, x, x, causal=True, implementation=implementation)

        return jax.jit(lambda x: (attend(x), jax.grad(lambda x: (attend(x) ** 2).sum())(x)))(x)

    for got, want in zip(results("auto"), results("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


CHECKS = {"a layer with a kernel in Python": _python, "attention and its gradient": _ops}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _instruction_sets() -> bool:
    """Prints those of the kernels for CPUs. False if EQXCALLBACK_ISA is wrong."""
    try:
        isa = _ext.isa()
    except ValueError as error:
        print(f"kernels for CPUs: none run. {error}")
        return False
    print(f"kernels for CPUs: {isa}, of {', '.join(_ext.available_isas())} (EQXCALLBACK_ISA chooses)")
    if faster := _ext.isas_of_bf16():
        print("  products of bf16, as measured:", ", ".join(f"{family} on {isa}" for family, isa in faster.items()))
        if os.path.exists(file := _ext.file_of_bf16()):
            print(f"  remembered in {file}; without it they are measured again")
        else:
            print("  measured in each process, as the file that would remember them cannot be written")
    return True


def doctor() -> bool:
    """Prints what it finds. False if a check fails."""
    print(f"eqxcallback {_version('eqxcallback')}, Python {platform.python_version()}, {platform.platform()}")
    for package in _PACKAGES:
        print(f"  {package:<14}{_version(package)}")
    print("devices:", ", ".join(f"{device} ({device.device_kind})" for device in jax.devices()))
    well = _instruction_sets()
    print("backends:")
    for name, state in available_backends().items():
        print(f"  {name:<14}{'yes' if state is True else f'no: {state}'}")
        if missing(name) is not None:
            print(f'  {"":<14}implementation="auto" runs other kernels, or references, in place of those in {name}')
    print("checks:")
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:  # whatever it is, the other checks are of interest too
            well = False
            print(f"  {name}: FAILED\n{traceback.format_exc()}")
        else:
            print(f"  {name}: passed")
    return well
