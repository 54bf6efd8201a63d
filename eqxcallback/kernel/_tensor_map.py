"""The description of an array for the tensor memory accelerator of a GPU."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


SWIZZLES = "none", "32", "64", "128"
"""In the order of the driver's numbers."""
PROMOTIONS = "none", "64", "128", "256"

_Sizes = int | Sequence[int]


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A parameter of a [`eqxcallback.CudaKernel`][], `const __grid_constant__ CUtensorMap`, that describes an array of the call.

    It stands in `scalars`, and is encoded when the kernel is launched, for the array's address. Devices from 9.0 on have an
    accelerator for it: one thread copies a box of the array to shared memory or back. Sizes are in the order of NumPy, rows
    before columns, and may be functions of the op's arguments and options, as `out_type` is.

    !!! example

        ```python
        scalars={"map_of_x": eqxcallback.TensorMap("x", box=(64, 64), swizzle="128")}
        ```

    **Arguments:**

    - `of`: the name of the operand, of the result, or of a workspace, as `parameters` has it: `"x"`, `"out"`, `"workspace[0]"`;
        or its position among all operands, results and workspaces. The map of an absent operand, or of an empty one, is zeros.
    - `box`: the number of elements that are copied at once in each dimension, up to 256. A row of the box has a multiple of 16
        bytes.
    - `shape`: of the array, by default what the kernel sees. Up to 5 dimensions.
    - `strides`: the distance in elements from one row, plane, and so on, to the next: one number less than `shape` has, each a
        multiple of 16 bytes. By default those of a dense array.
    - `element_strides`: `2` takes every second element of a dimension.
    - `swizzle`: `"32"`, `"64"` or `"128"` spreads rows of the box, of at most so many bytes, over the banks of shared memory.
    - `l2_promotion`: how many bytes the cache fetches at once, such as `"128"`.
    - `nan_outside`: whether what lies outside of the array is NaN, and not 0.
    - `tf32`: whether an array of `float32` is rounded to TF32 on the way.
    """

    of: str | int
    box: _Sizes | Callable[..., _Sizes]
    shape: _Sizes | Callable[..., _Sizes] | None = None
    strides: _Sizes | Callable[..., _Sizes] | None = None
    element_strides: _Sizes | Callable[..., _Sizes] | None = None
    swizzle: str = "none"
    l2_promotion: str = "none"
    nan_outside: bool = False
    tf32: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.of, str | int) or isinstance(self.of, bool):
            raise TypeError(f"TensorMap: expected of to be the name of an array, or its position; got {self.of!r}.")
        for name, known in (("swizzle", SWIZZLES), ("l2_promotion", PROMOTIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"TensorMap: expected {name} to be one of {', '.join(known)}; got {getattr(self, name)!r}."
                )
        for name in ("nan_outside", "tf32"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"TensorMap: expected {name} to be True or False; got {getattr(self, name)!r}.")
        for name in ("box", "shape", "strides", "element_strides"):
            value: Any = getattr(self, name)
            if isinstance(value, list):  # must be hashable
                object.__setattr__(self, name, tuple(value))
