"""The launches of a kernel that says its own geometry, and what a compiled one has to be for them."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..kernel import CudaKernel, ImageKernel, Launch
from ._architecture import version_of
from ._device_call import DeviceCall, Parameter
from ._image import Declared, readable
from ._step import Step


_ASKED = tuple(field.name for field in dataclasses.fields(Launch) if field.name != "entry")


def launches(kernel: CudaKernel | ImageKernel, call: DeviceCall) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """Return for each launch its entry, and what else a step is made of."""
    assert isinstance(kernel.launch, tuple)
    entries = tuple(_entry(call.value(launch.entry or kernel.entry, "entry"), call) for launch in kernel.launch)
    return entries, [{name: call.value(getattr(launch, name), name) for name in _ASKED} for launch in kernel.launch]


def _entry(entry: Any, call: DeviceCall) -> str:
    if not isinstance(entry, str):
        raise TypeError(f"{call.who}: expected entry to be the name of a function; got {entry!r}.")
    return entry


def steps_of(
    entries: Sequence[str], geometry: Sequence[Mapping[str, object]], names: Mapping[str, str], who: str
) -> Iterator[Step]:
    """**Arguments:** `names`: what entries are called in the image."""
    for entry, asked in zip(entries, geometry, strict=True):
        yield Step.checked(0, names[entry], f"{who}: {entry}", **asked)


def check_architecture(arch: str, steps: Sequence[Step], call: DeviceCall) -> None:
    needs_hopper = bool(call.maps) or any(step.needs_hopper for step in steps)
    if needs_hopper and arch.startswith("sm_") and version_of(arch) < 90:
        raise ValueError(
            f"{call.who}: expected arch to be sm_90 or newer, for clusters, tensor maps or programmatic launches; got {arch}."
        )


def check_blocks(kernels: Mapping[str, Declared], steps: Sequence[Step], who: str) -> None:
    """Blocks are what their kernels are compiled for: the driver would refuse others when the program runs."""
    for step in steps:
        kernel, entry = kernels[step.entry], readable(step.entry)
        if kernel.block not in (None, step.block):
            raise ValueError(
                f"{who}: expected block to be {kernel.block}, which {entry} requires (`.reqntid`); got {step.block}."
            )
        if math.prod(step.block) > kernel.most_threads:
            raise ValueError(
                f"{who}: expected block to have at most the {kernel.most_threads} threads that {entry} is compiled for "
                f"(`__launch_bounds__`, `.maxntid`); got {step.block}."
            )


def check_sizes(entry: str, sizes: Sequence[int], parameters: Sequence[Parameter], who: str) -> None:
    """Check that the launcher passes parameters of the sizes that the driver reads: `sizes`, from the compiled kernel."""
    if tuple(sizes) == tuple(parameter.size for parameter in parameters):
        return
    expected = ", ".join(f"{parameter.name} of {parameter.size} bytes" for parameter in parameters)
    raise ValueError(
        f"{who}: expected {entry} to have the parameters ({expected}), which it is called with; got parameters of "
        f"({', '.join(map(str, sizes))}) bytes. Say in `parameters` or `scalars` what it has."
    )
