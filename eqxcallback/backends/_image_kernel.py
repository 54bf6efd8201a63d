"""Kernels that are compiled already: an image is read and checked when a program is lowered."""

import dataclasses
import functools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence

from .. import xla
from ..core import warn
from ..kernel import ImageKernel
from . import _fatbin, _image, _ptx
from ._architecture import version_of
from ._device_call import DeviceCall
from ._image import Declared
from ._launches import check_architecture, check_blocks, check_sizes, launches, steps_of
from ._source import read_image
from ._step import Program


def compiled(kernel: ImageKernel, call: DeviceCall) -> Program:
    image = read_image(kernel.image, call.who)
    codes = _codes(image, call.who)
    _check_devices(codes, call.who)
    entries, geometry = launches(kernel, call)
    names = {entry: _checked_entry(entry, codes, call) for entry in entries}
    steps = tuple(steps_of(entries, geometry, names, call.who))
    for code in codes:
        if code.kernels is not None:
            check_blocks(code.kernels, steps, call.who)
    if len(codes) == 1 and not codes[0].is_ptx:
        check_architecture(codes[0].target, steps, call)
    return Program((image,), steps)


@dataclasses.dataclass(frozen=True)
class _Code:
    """Code for one architecture.

    **Attributes:**

    - `target`: such as `"sm_90a"`.
    - `kernels`: by name; `None` where the code is compressed.
    """

    is_ptx: bool
    target: str
    kernels: Mapping[str, Declared] | None

    def __str__(self) -> str:
        return f"{'PTX' if self.is_ptx else 'a cubin'} for {self.target}"

    def runs_on(self, device: int) -> bool:
        """True if the driver runs it: PTX is compiled for newer devices, a cubin is for the later ones of one generation."""
        version = version_of(self.target)
        if self.target.endswith("a"):
            return version == device
        if self.is_ptx and not self.target.endswith("f"):
            return version <= device
        return version // 10 == device // 10 and version <= device


@functools.lru_cache(maxsize=512)
def _codes(image: bytes, who: str) -> tuple[_Code, ...]:
    try:
        codes = tuple(_read(image))
    except (struct.error, ValueError, IndexError) as error:
        raise ValueError(
            f"{who}: expected a whole image; got {len(image)} bytes that cannot be read ({error})."
        ) from None
    if not codes:
        raise ValueError(
            f"{who}: expected image to be PTX, a cubin or a fatbin; got {len(image)} bytes that begin with {image[:12]!r}. "
            "Make one with nvcc -ptx, -cubin or -fatbin."
        )
    if all(code.kernels is None for code in codes):
        warn(
            f"{who}: the fatbin is compressed, so that neither its kernels nor their parameters are checked. Compile it with "
            "--compress-mode=none."
        )
    return codes


def _read(image: bytes) -> Iterator[_Code]:
    if _fatbin.is_fatbin(image):
        for entry in _fatbin.entries(image):
            if entry.image is None:
                yield _Code(entry.is_ptx, entry.target, None)
            elif _fatbin.is_fatbin(entry.image):
                raise ValueError("a fatbin in a fatbin")
            else:
                yield from (dataclasses.replace(code, target=entry.target) for code in _read(entry.image))
    elif _ptx.is_ptx(image):
        yield _Code(True, *_ptx.read_ptx(image))
    elif (kernels := _image.kernels_of(image)) is not None:
        yield _Code(False, f"sm_{_image.version_of_cubin(image)}", kernels)


def _check_devices(codes: Sequence[_Code], who: str) -> None:
    for device in _devices():
        if not any(code.runs_on(device) for code in codes):
            raise ValueError(
                f"{who}: expected an image that runs on sm_{device}; got {' and '.join(map(str, codes))}. Compile it for "
                f"sm_{device}, to PTX for an older architecture, or for several to a fatbin."
            )


def _devices() -> Sequence[int]:
    """The architectures that the program is for, as far as one knows."""
    asked = os.environ.get("EQXCALLBACK_CUDA_ARCH", "")
    if asked:
        return [version_of(asked)] if asked.startswith("sm_") else []
    return sorted(set(xla.compute_capabilities()))


def _checked_entry(entry: str, codes: Sequence[_Code], call: DeviceCall) -> str:
    """Return the entry's name in the image: as it is written, or the only name that a compiler has made of it."""
    name = entry
    for code in codes:
        if code.kernels is None:
            continue
        alike = [name for name in code.kernels if entry in (name, _image.readable(name))]
        if entry not in code.kernels and len(alike) != 1:
            there = "one kernel" if alike else "a kernel"
            raise ValueError(
                f"{call.who}: expected {there} {entry} in the image, {code}; there are {', '.join(code.kernels) or 'none'}."
            )
        name = entry if entry in code.kernels else alike[0]
        check_sizes(entry, code.kernels[name].parameters, call.parameters, call.who)
    return name
