"""The GPU architecture that kernels are compiled for."""

import os

from .. import xla


def architecture(asked: str | None) -> str | None:
    """What a kernel asks for, else what `EQXCALLBACK_CUDA_ARCH` says, else the device's; `None` where nobody says."""
    if asked or (asked := os.environ.get("EQXCALLBACK_CUDA_ARCH")):
        return asked
    found = xla.compute_capabilities()
    # One program runs on all devices: what the oldest can run, the others can, from PTX.
    if len(set(found)) > 1:
        return f"compute_{min(found)}"
    return f"sm_{found[0]}" if found else None
