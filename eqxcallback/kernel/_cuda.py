"""A kernel in CUDA C++."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ._checks import check_arch, hash_of
from ._contract import Aliases, KernelContract, Scalars
from ._launch import Launch
from ._launched import freeze_launched, identifiers
from ._sources import freeze_source


# What CUDA C++ calls the types of arrays.
_CTYPES = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "float2",
    "complex128": "double2",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}


@dataclasses.dataclass(frozen=True)
class CudaKernel(KernelContract):
    """A kernel in CUDA C++, compiled when a program that calls it is lowered, and launched without Python.

    The kernel is a `__global__` function whose parameters are pointers to the flat operands of the op, then to its flat
    results, then to its workspaces, and then its scalars; or those that `parameters` says. Where a result overwrites an operand,
    both pointers are passed. An absent operand, an argument that is `None`, is a null pointer. A backward kernel has pointers to
    the operands, the results, the cotangents, and the gradient of each operand: a null pointer where it is not needed, or has no
    floating type.

    !!! example

        ```python
        source = '''
        extern "C" __global__ void saxpy(const float* x, const float* y, float* out, int n, float a) {
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) out[i] = a * x[i] + y[i];
        }
        '''
        kernel = eqxcallback.CudaKernel(
            source,
            entry="saxpy",
            launch=eqxcallback.Launch(grid=lambda x, y, *, a: -(-x.size // 256), block=256),
            scalars={"n": ("int32", lambda x, y, *, a: x.size), "a": "float32"},
        )
        op = eqxcallback.Op("saxpy", kernels={"cuda": kernel}, reference=lambda x, y, *, a: a * x + y)
        ```

    **Arguments:**

    - `source`: the text, or the path of a file. `#include "..."` is looked for beside the file. It is compiled by NVRTC, CuPy's
        or the wheel's, and cached on disk by its content.
    - `entry`: the name of the function, with its template arguments: `"scale<float>"`. Or a function, as most of what is below
        may be: it is called with the op's arguments, as types that have the shapes that the kernel sees, and with its options.
        In a layer, the first argument is the layer; in a backward kernel they are `grads, args, out, cotangents`, as a
        `PythonKernel` has them. Where a pointer is null, there is `None`.
    - `launch`: the geometry; or several, which run one after the other with the same parameters.
    - `out_type`: a function of the op's arguments and options that returns a PyTree of `jax.ShapeDtypeStruct`s. By
        default, what the op's `reference` returns.
    - `scalars`: `{name: dtype}`, in the order of the parameters: options of the op, or in a layer static arguments or fields.
        Or `{name: (dtype, function)}`, for what a function says, such as a size. A structure by value has a structured dtype,
        made with `align=True`, or `"V24"` for 24 bytes, and its value is a tuple or `bytes`; in a tuple the name of an array, as
        `parameters` has it, is its address. Or a [`eqxcallback.TensorMap`][].
    - `workspaces`: memory for the time of the call: `jax.ShapeDtypeStruct`s, or a function that returns them. XLA has it:
        a kernel that is captured must not allocate.
    - `aliases`: `{input: output}`: results that overwrite an operand, by parameter and result names or flat indices.
    - `options`: of the compiler, such as `"--use_fast_math"`.
    - `arch`: the architecture to compile for, such as `"sm_90"`, or `"compute_80"` for PTX. By default the device's; without
        a device, what the environment variable `EQXCALLBACK_CUDA_ARCH` says, or `"compute_80"`.
    - `command_buffer_compatible`: whether XLA may record the launch in a command buffer, a CUDA graph. A kernel that is
        only launches may always be.
    - `asks_resident_blocks`: whether the functions of this kernel, but for `supports` and `out_type`, have one more option,
        `resident_blocks`: how many blocks of the first launch a multiprocessor runs at a time, by the registers and the shared
        memory of what was compiled. It is 2 where that is not known: of PTX, and of an emulated kernel. `entry`, `block` and
        `shared_bytes` must not depend on it.
    - `parameters`: of the kernel, where they are not the operands, results, workspaces and scalars in this order. Each is a text
        as `"const float* x"` or `"int x.shape[-1]"`: see [`eqxcallback.CKernel`][]. Types are those of C and CUDA, and may be
        left out. `scalars` has what is neither an array, a size, an option nor a number.
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].

    **Raises:** `TypeError` or `ValueError` for a wrong declaration. When a program is lowered, `ValueError` for source that does
    not compile, and if the parameters of the compiled kernel are not those that it is called with.
    """

    backend: ClassVar[str] = "cuda"

    source: str | os.PathLike[str]
    entry: str | Callable[..., str]
    launch: Launch | Sequence[Launch]
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    scalars: Scalars = dataclasses.field(default_factory=dict)
    workspaces: Sequence[jax.ShapeDtypeStruct] | Callable[..., Sequence[jax.ShapeDtypeStruct]] = ()
    aliases: Aliases = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()
    arch: str | None = None
    command_buffer_compatible: bool = True
    asks_resident_blocks: bool = False
    parameters: Sequence[str] | None = None

    def __post_init__(self) -> None:
        who = freeze_launched(self, "CudaKernel")
        freeze_source(self, "CUDA C++", who)
        check_arch(self.arch, who)
        for option in self.options:
            if option.partition("=")[0].lstrip("-") in ("arch", "gpu-architecture"):
                raise ValueError(f"{who}: expected the architecture in arch, as 'sm_90'; got {option!r} among options.")

    @property
    def name(self) -> str:
        return self.entry if isinstance(self.entry, str) else "CudaKernel"

    @property
    def names(self) -> tuple[str, ...]:
        """The identifiers among what `parameters` pass: arrays, or numbers."""
        return identifiers(self.parameters)

    def __hash__(self) -> int:
        return hash_of(self)

    @staticmethod
    def ctype(dtype: DTypeLike) -> str:
        """Return the name of a dtype in CUDA C++, for templates: for `jnp.bfloat16` `"__nv_bfloat16"`, from `<cuda_bf16.h>`."""
        name = np.dtype(dtype).name
        if name not in _CTYPES:
            raise ValueError(
                f"CudaKernel: there is no type of CUDA C++ for {name}; there is one for {', '.join(_CTYPES)}."
            )
        return _CTYPES[name]
