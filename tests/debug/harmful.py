"""The kernels of harmful.cc, and ops of them."""

import functools
import pathlib
import tempfile

import eqxcallback as eqxc

from ..transform.library import build


SOURCE = pathlib.Path(__file__).with_name("harmful.cc")
_built = tempfile.TemporaryDirectory()


@functools.cache
def library():
    return build(pathlib.Path(_built.name) / "libharmful.so", SOURCE, "-fopenmp", "-Wno-write-strings")


def op(symbol, reference=lambda x: 2 * x, **options):
    kernel = eqxc.NativeKernel(symbol, library(), **options)
    return eqxc.Op("mine", {"cpu": kernel}, reference, vmap_method={"x": "broadcast_all"})


def harm(what, distance=0):
    """A function that doubles `x` and does one thing wrong."""
    of_options = op("Harm", lambda x, *, what, distance: 2 * x)
    return lambda x: of_options(x, what=what, distance=distance)
