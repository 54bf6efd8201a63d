"""A kernel for a GPU that is compiled already."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ._checks import hash_of
from ._contract import Aliases, KernelContract, Scalars
from ._launch import Launch
from ._launched import freeze_launched, identifiers
from ._sources import freeze_image


@dataclasses.dataclass(frozen=True)
class ImageKernel(KernelContract):
    """A kernel in PTX, a cubin or a fatbin, of `nvcc`, Numba, Warp, cuTile or Triton. It is launched without Python, as a
    [`eqxcallback.CudaKernel`][] is.

    !!! example

        ```python
        kernel = eqxcallback.ImageKernel(
            pathlib.Path("saxpy.cubin"),
            entry="saxpy",
            launch=eqxcallback.Launch(grid=lambda x, y, *, a: -(-x.size // 256), block=256),
            parameters=("int x.size", "float a", "const float* x", "const float* y", "float* out"),
        )
        op = eqxcallback.Op("saxpy", kernels={"cuda": kernel}, reference=lambda x, y, *, a: a * x + y)
        ```

    **Arguments:**

    - `image`: the bytes of a cubin or a fatbin, or PTX as bytes or a text; or the path of a file, which is read when a program
        that calls it is lowered. The content travels in the program.
    - `entry`: the name of the kernel in the image; or that in the source, if the image has one kernel of that name, without
        namespaces and template arguments. Or a function, as in [`eqxcallback.CudaKernel`][].
    - `launch`: the geometry; or several, which run one after the other with the same parameters.
    - `parameters`: of the kernel, in its order, each a text as `"const float* x"`, or `"void* 0"` for a null pointer: see
        [`eqxcallback.CKernel`][]. Types are those of C and CUDA, and may be left out of pointers. By default pointers to the
        operands, the results and the workspaces, and then the scalars.
    - `scalars`: what `parameters` may name beside arrays and options: what a function says, structures by value, and
        [`eqxcallback.TensorMap`][]s, as in [`eqxcallback.CudaKernel`][].
    - `out_type`, `workspaces`, `aliases`, `command_buffer_compatible`: as in [`eqxcallback.CudaKernel`][].
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].

    **Raises:** `TypeError` or `ValueError` for a wrong declaration. When a program is lowered, `ValueError` for bytes that are
    not an image, for an image that has no such kernel, whose kernel has parameters of other sizes, or that does not run on the
    devices.
    """

    backend: ClassVar[str] = "image"

    image: bytes | str | os.PathLike[str]
    entry: str | Callable[..., str]
    launch: Launch | Sequence[Launch]
    parameters: Sequence[str] | None = None
    scalars: Scalars = dataclasses.field(default_factory=dict)
    workspaces: Sequence[jax.ShapeDtypeStruct] | Callable[..., Sequence[jax.ShapeDtypeStruct]] = ()
    aliases: Aliases = dataclasses.field(default_factory=dict)
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    command_buffer_compatible: bool = True

    def __post_init__(self) -> None:
        who = freeze_launched(self, "ImageKernel")
        freeze_image(self, who)

    @property
    def name(self) -> str:
        return self.entry if isinstance(self.entry, str) else "ImageKernel"

    @property
    def names(self) -> tuple[str, ...]:
        """The identifiers among what `parameters` pass: arrays, or numbers."""
        return identifiers(self.parameters)

    def __hash__(self) -> int:
        return hash_of(self)
