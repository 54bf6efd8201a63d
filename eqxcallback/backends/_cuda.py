"""CUDA C++: compiled by NVRTC when a program is lowered, and kept on disk."""

import functools
from collections.abc import Mapping, Sequence

from ..kernel import CudaKernel
from . import _cache, _nvrtc
from ._architecture import architecture, version_of
from ._device_call import DeviceCall, Parameter
from ._image import Declared, kernels_of
from ._launches import check_architecture, check_blocks, check_sizes, launches, steps_of
from ._ptx import is_ptx, read_ptx
from ._signature import checks, mismatch
from ._source import read_source
from ._step import Program


def compiled(kernel: CudaKernel, call: DeviceCall) -> Program:
    entries, geometry = launches(kernel, call)
    text, file = read_source(kernel.source, call.who, kernel.options)
    arch = architecture(kernel.arch)
    image, names = compiled_source(text, file, arch, tuple(kernel.options), entries, call.parameters, call.who)
    steps = tuple(steps_of(entries, geometry, names, call.who))
    if (kernels := _kernels(image)) is not None:
        check_blocks(kernels, steps, call.who)
    check_architecture(arch, steps, call)
    return Program((image,), steps)


@functools.lru_cache(maxsize=512)  # a program has the same image in many calls
def _kernels(image: bytes) -> Mapping[str, Declared] | None:
    """Return the kernels of an image by name; `None` for an image for a CPU, as emulation has it."""
    return read_ptx(image)[1] if is_ptx(image) else kernels_of(image)


def wrong_parameters(who: str, entry: str, expected: str, got: str) -> str:
    return (
        f"{who}: expected {entry} to have {expected}; got {got}. The order is operands, results, workspaces, scalars, or that of "
        "`parameters`."
    )


# Before 13.2, NVRTC takes a generic lambda for a function of the host, and refuses it, unless told so.
FLAGS = ("--std=c++17", "--device-as-default-execution-space")


@functools.lru_cache(maxsize=512)
def compiled_source(
    text: str,
    file: str,
    arch: str,
    options: tuple[str, ...],
    entries: tuple[str, ...],
    parameters: tuple[Parameter, ...],
    who: str,
) -> tuple[bytes, Mapping[str, str]]:
    """The image, and for each of `entries` its name in it."""
    try:
        nvrtc = _nvrtc.find()
    except ImportError as error:
        raise ValueError(f"{who}: the kernel cannot be compiled: {error}") from None
    arch = _supported(arch, nvrtc.archs)
    flags = (f"--gpu-architecture={arch}", *FLAGS, *options)
    entries = tuple(dict.fromkeys(entries))
    whole = text + checks(entries, parameters)
    key = _cache.key_of(("cuda", whole, file, flags, entries, nvrtc.version))
    if (known := _cache.load(key)) is not None:
        about, image = known
        return image, about["names"]
    flags = (*flags, *_nvrtc.include_options(nvrtc.version[0]))
    try:
        image, lowered, _ = nvrtc.compile(whole, file, flags, entries, _makes_cubin(flags))
        if not image.strip(b"\0"):
            raise RuntimeError("it is empty")
    except _nvrtc.CompileError as error:
        raise ValueError(_explained(str(error), text, file, flags, entries, nvrtc, who)) from None
    except RuntimeError as error:  # of a source that compiles
        raise ValueError(
            f"{who}: the compiler makes no image ({error}). Leave out options that ask for another output."
        ) from None
    names = dict(zip(entries, lowered, strict=True))
    _check_sizes(image, names, parameters, who)
    _cache.store(key, {"names": names}, image)
    return image, names


def _makes_cubin(flags: Sequence[str]) -> bool:
    return "=sm_" in flags[0]


def _supported(arch: str, known: Sequence[int]) -> str:
    """`arch`, or if the compiler does not know it, PTX for the newest older one, of which the driver makes what the device runs.
    A compiler may know newer devices and not this one: NVRTC 12.8 knows `sm_120`, but not `sm_103`.
    """
    version = version_of(arch)
    older = [other for other in known if other <= version]
    return arch if version in known or not older else f"compute_{max(older)}"


def _explained(
    log: str, text: str, file: str, flags: Sequence[str], entries: Sequence[str], nvrtc: _nvrtc.Nvrtc, who: str
) -> str:
    expected = mismatch(log)
    if expected is None and "parameters(" in log:  # our own text does not compile: perhaps only that
        try:
            nvrtc.compile(text, file, flags, (), _makes_cubin(flags))
        except _nvrtc.CompileError as error:
            log = str(error)
        else:
            return (
                f"{who}: the source has no kernel that can be called {' or '.join(entries)}. Name a `__global__` function that "
                "returns void, with its namespace, and a template with its arguments: 'mine::scale<float>'."
            )
    if expected is None:
        log = log.strip()
        if "cannot open source file" in log:
            log += "\nCUDA's own headers are in the wheels nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl."
        return f"{who}: the source does not compile for {flags[0].partition('=')[2]}:\n{log}"
    got = "another"
    try:  # without the assertions, to say what it has
        image, lowered, _ = nvrtc.compile(text, file, ["--gpu-architecture=sm_90", *flags[1:]], entries, True)
        sizes = (kernels_of(image) or {})[lowered[0]].parameters
        got = f"{len(sizes)} parameters of {', '.join(map(str, sizes))} bytes"
    except (_nvrtc.CompileError, KeyError):
        pass
    return wrong_parameters(who, entries[0], expected, got)


def _check_sizes(image: bytes, names: Mapping[str, str], parameters: Sequence[Parameter], who: str) -> None:
    kernels = kernels_of(image)
    if kernels is None:  # PTX: the compiler's assertions have to do
        return
    for entry, name in names.items():
        check_sizes(entry, kernels[name].parameters, parameters, who)
