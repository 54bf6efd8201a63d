"""The GPU architecture that kernels are compiled for."""

import os

from .. import xla


# PTX for the oldest GPUs that JAX supports: the driver makes of it what the device is.
_WITHOUT_DEVICE = "compute_80"
OLDEST_OF_TRITON = 80


def architecture(asked: str | None) -> str:
    """Return what a kernel asks for, else what `EQXCALLBACK_CUDA_ARCH` says, else the device's architecture, else PTX."""
    if asked or (asked := os.environ.get("EQXCALLBACK_CUDA_ARCH")):
        return asked
    capabilities = xla.compute_capabilities()
    # One program runs on all devices: what the oldest can run, the others can, from PTX.
    if len(set(capabilities)) > 1:
        return f"compute_{min(capabilities)}"
    return f"sm_{capabilities[0]}" if capabilities else _WITHOUT_DEVICE


def version_of(arch: str) -> int:
    """90 of `sm_90a`."""
    return int(arch.partition("_")[2].rstrip("af"))
