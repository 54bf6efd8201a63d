"""NVRTC's place, taken by g++: images are shared libraries, which the fake driver runs."""

from collections.abc import Sequence

from eqxcallback.backends._nvrtc import CompileError
from eqxcallback.emulation import build


class SoftwareCompiler:
    version: tuple[int, ...] = (0, 0)
    archs: tuple[int, ...] = (80, 90, 100)

    def compile(
        self, source: str, name: str, options: Sequence[str], entries: Sequence[str], is_cubin: bool
    ) -> tuple[bytes, list[str], str]:
        del name, is_cubin
        flags = [option for option in options if option.startswith("-D")]
        try:
            image = bytearray(build(source, entries, flags=flags).read_bytes())
        except RuntimeError as error:
            raise CompileError(str(error)) from None
        # The driver is not told how large an image is: it stands in bytes of the ELF header that are zero.
        image[8:16] = len(image).to_bytes(8, "little")
        return bytes(image), [f"soft_launch_{i}" for i in range(len(entries))], ""
