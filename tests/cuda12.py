"""NVRTC of CUDA 12 and its headers, in the place of the environment's own."""

import pathlib
import sys

from eqxcallback.backends import _nvrtc


FOLDER = pathlib.Path(sys.prefix) / "cuda12"  # where `make twin` installs them
IS_TWIN = FOLDER.is_dir()
# What tests of the compiler are run with.
COMPILERS = ("nvrtc", "nvrtc 12") if IS_TWIN else ("nvrtc",)


def use(compiler, monkeypatch):
    """One of `COMPILERS`, until `monkeypatch` ends."""
    if compiler == "nvrtc":
        return
    monkeypatch.setattr(_nvrtc, "_roots", lambda: [FOLDER / "nvidia"])
    _nvrtc._load_builtins()
    library = _nvrtc._Library()
    assert library.version[0] == 12
    monkeypatch.setattr(_nvrtc, "find", lambda: library)
