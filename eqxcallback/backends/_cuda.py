"""CUDA C++: compiled by NVRTC when a program is lowered, and kept on disk."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ..kernel import CudaKernel, Launch
from . import _cache, _nvrtc
from ._architecture import architecture, version_of
from ._device_call import DeviceCall
from ._image import kernels_of
from ._signature import checks, mismatch
from ._source import read_source
from ._step import Program, Step


def compiled(kernel: CudaKernel, call: DeviceCall) -> Program:
    entries, geometry = launches(kernel, call)
    text, file = read_source(kernel.source, call.who)
    arch = architecture(kernel.arch)
    image, names = compiled_source(text, file, arch, tuple(kernel.options), entries, *parameters(call), call.who)
    steps = [
        Step.checked(0, names[entry], f"{call.who}: {entry}", **asked)
        for entry, asked in zip(entries, geometry, strict=True)
    ]
    _check_architecture(arch, bool(call.maps) or any(step.needs_hopper for step in steps), call.who)
    return Program((image,), tuple(steps))


def _check_architecture(arch: str, needs_hopper: bool, who: str) -> None:
    if needs_hopper and arch.startswith("sm_") and version_of(arch) < 90:
        raise ValueError(
            f"{who}: expected arch to be sm_90 or newer, for clusters, tensor maps or programmatic launches; got {arch}."
        )


def launches(kernel: CudaKernel, call: DeviceCall) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """For each launch its entry, and what else a step is made of."""
    assert isinstance(kernel.launch, tuple)
    entries = tuple(_entry(call.value(launch.entry or kernel.entry, "entry"), call) for launch in kernel.launch)
    return entries, [{name: call.value(getattr(launch, name), name) for name in _ASKED} for launch in kernel.launch]


_ASKED = tuple(field.name for field in dataclasses.fields(Launch) if field.name != "entry")


def parameters(call: DeviceCall) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]:
    """The names and dtypes of the pointers, and of the scalars."""
    pointers = tuple((name, None if aval is None else aval.dtype) for name, aval in call.pointers)
    return pointers, tuple((name, dtype) for name, dtype, _ in call.scalars)


def wrong_parameters(who: str, entry: str, expected: str, got: str) -> str:
    return (
        f"{who}: expected {entry} to have {expected}; got {got}. The order is operands, results, workspaces, scalars."
    )


def _entry(entry: Any, call: DeviceCall) -> str:
    if not isinstance(entry, str):
        raise TypeError(f"{call.who}: expected entry to be the name of a function; got {entry!r}.")
    return entry


# Before 13.2, NVRTC takes a generic lambda for a function of the host, and refuses it, unless told so.
FLAGS = ("--std=c++17", "--device-as-default-execution-space")


@functools.lru_cache(maxsize=512)
def compiled_source(
    text: str,
    file: str,
    arch: str,
    options: tuple[str, ...],
    entries: tuple[str, ...],
    pointers: tuple[tuple[str, Any], ...],
    scalars: tuple[tuple[str, Any], ...],
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
    whole = text + checks(entries, pointers, scalars)
    key = _cache.key_of(("cuda", whole, file, flags, entries, nvrtc.version))
    if (known := _cache.load(key)) is not None:
        about, image = known
        return image, about["names"]
    flags = (*flags, *_nvrtc.include_options(nvrtc.version[0]))
    try:
        image, lowered, _ = nvrtc.compile(whole, file, flags, entries, _makes_cubin(flags))
    except _nvrtc.CompileError as error:
        raise ValueError(_explained(str(error), text, file, flags, entries, nvrtc, who)) from None
    names = dict(zip(entries, lowered, strict=True))
    _check_sizes(image, names, len(pointers), scalars, who)
    _cache.store(key, {"names": names}, image)
    return image, names


def _makes_cubin(flags: Sequence[str]) -> bool:
    return "=sm_" in flags[0]


def _supported(arch: str, known: Sequence[int]) -> str:
    """`arch`, or PTX for the newest one that the compiler knows, if the device is newer."""
    return arch if version_of(arch) <= max(known) else f"compute_{max(known)}"


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


def _check_sizes(
    image: bytes, names: Mapping[str, str], num_pointers: int, scalars: Sequence[tuple[str, Any]], who: str
) -> None:
    """What the driver will read of each parameter is what the launcher passes."""
    kernels = kernels_of(image)
    if kernels is None:  # PTX: the compiler's assertions have to do
        return
    expected = (*(8,) * num_pointers, *(dtype.itemsize for _, dtype in scalars))
    for entry, name in names.items():
        if kernels[name].parameters != expected:
            raise ValueError(
                f"{who}: expected {entry} to have parameters of {expected} bytes; got {kernels[name].parameters}. The parameter "
                "is larger, or smaller, than what is passed."
            )
