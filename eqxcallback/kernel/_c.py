"""A plain C function."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ._checks import check_function, freeze_workspaces, frozen_mapping, hash_of
from ._contract import Aliases, KernelContract
from ._launched import identifiers, texts
from ._sources import freeze_library, freeze_source


@dataclasses.dataclass(frozen=True)
class CKernel(KernelContract):
    """A function with the C ABI in a shared library, or at an address: of C, Fortran, Rust, Zig, of BLAS or FFTW. It needs no
    header of XLA's or JAX's, and is called without Python and without the GIL, on a CPU.

    !!! example

        ```c
        void saxpy(int64_t n, float a, const float* x, float* out) {
          for (int64_t i = 0; i < n; ++i) out[i] += a * x[i];
        }
        ```

        ```python
        kernel = eqxcallback.CKernel(
            "saxpy",
            "libsaxpy.so",
            parameters=("int64_t x.size", "float a", "const float* x", "float* out"),
            aliases={"y": 0},
        )
        op = eqxcallback.Op("saxpy", kernels={"cpu": kernel}, reference=lambda x, y, *, a: a * x + y)
        ```

    Arrays are dense, in row-major order. Several threads may call the function at a time, for different arrays.

    **Arguments:**

    - `symbol`: the name of the function.
    - `library`: the path of the shared library that has it. It is loaded when a program that calls it is first lowered.
    - `parameters`: of the function, in its order, each a text: a C type, which may be left out, and what is passed.

        - `"const float* x"`: a pointer to the operand or result `x`, under the name it has as a parameter of the reference;
            results are `out`, or `out[0]`, `out[1]`, .... The type is compared with the dtype of the array: where C has none of
            that name, such as for bf16, an integer of that size. `void*` is any. For an argument that is `None` it is null.
            In a backward kernel, `dout` is the cotangent of `out`, and `dx` the gradient of `x`: null where it is not needed.
        - `"workspace[0]"`: a pointer to a workspace.
        - `"int x.size"`, `"x.ndim"`, `"x.shape[0]"`, `"x.strides[-1]"`: of the array, in elements; without a type `int64_t`.
        - `"float a"`: an option of the op, a static argument or field of a layer, or one of `scalars`. Without a type a `bool`
            is `bool`, an `int` is `int64_t`, a `float` is `double`.
        - `"int 1"`, `"double 0.5"`: a number.
    - `address`: of a function that is in memory already, in place of `library`: of `ctypes`, `cffi` or `llvmlite`. What owns
        the code has to stay alive. Programs that call it are of this process alone.
    - `scalars`: `{name: function}`, for numbers that a function says. It is called with the op's arguments, as types, and with
        its options.
    - `source`: of the function, in place of `library`: a text, or the path of a file, in C, or in C++ where it says
        `extern "C"` and is not a `.c` file. It is compiled when a program that calls it is first lowered, by the machine's own
        compiler, or the one that the environment variables `CC` and `CXX` name, and kept on disk by its content.
    - `options`: of the compiler, such as `"-O3"` or `"-lm"`.
    - `status`: whether the function returns an `int` that is not zero where it fails, which is an error of the call then. Or a
        mapping of these numbers to texts for it.
    - `rows`: arrays that the function works on row by row, along their first axis. They are divided among XLA's own threads,
        and it is called for a part of the rows on each: pointers begin there, and `x.size` and `x.shape[0]` are of the part.
        `"parallel"` is all arrays; else the names of those that are divided. The others are whole in each call.
    - `out_type`, `workspaces`, `aliases`: as in [`eqxcallback.CudaKernel`][].
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].

    **Raises:** `TypeError` or `ValueError` for a wrong declaration. When a program is lowered, `ValueError` for a library or a
    symbol that is not there, and for parameters that do not fit the arrays of the call.
    """

    backend: ClassVar[str] = "c"
    command_buffer_compatible: ClassVar[bool] = False

    symbol: str
    library: str | os.PathLike[str] | None = None
    parameters: Sequence[str] = ()
    _: dataclasses.KW_ONLY
    address: int | None = None
    source: str | os.PathLike[str] | None = None
    options: Sequence[str] = ()
    scalars: Mapping[str, Callable[..., object]] = dataclasses.field(default_factory=dict)
    status: bool | Mapping[int, str] = False
    rows: str | Sequence[str] | None = None
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    workspaces: Sequence[jax.ShapeDtypeStruct] | Callable[..., Sequence[jax.ShapeDtypeStruct]] = ()
    aliases: Aliases = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.symbol, str) or not self.symbol.isidentifier():
            raise ValueError(f"CKernel: expected symbol to be the name of a C function; got {self.symbol!r}.")
        who = f"CKernel({self.symbol})"
        given = [name for name in ("library", "source", "address") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{who}: expected a library, a source or an address; got {' and '.join(given) or 'none of them'}."
            )
        freeze_library(self, who)
        freeze_source(self, "C", who)
        if self.address is not None and not (isinstance(self.address, int) and self.address > 0):
            raise TypeError(f"{who}: expected address to be that of a function, an integer; got {self.address!r}.")
        object.__setattr__(self, "parameters", texts(self.parameters, "parameters", who))
        if not isinstance(self.scalars, Mapping) or not all(map(callable, self.scalars.values())):
            raise TypeError(f"{who}: expected scalars to be {{name: function}}; got {self.scalars!r}.")
        if not isinstance(self.status, bool) and not (
            isinstance(self.status, Mapping)
            and all(isinstance(key, int) and isinstance(text, str) for key, text in self.status.items())
        ):
            raise TypeError(f"{who}: expected status to be a bool, or {{number: text}}; got {self.status!r}.")
        if self.rows is not None and self.rows != "parallel":
            object.__setattr__(self, "rows", texts(self.rows, "rows", who))
        for field in ("scalars", "status", "aliases"):
            frozen_mapping(self, field)
        freeze_workspaces(self, who)
        check_function(self.supports, "supports", who)
        check_function(self.out_type, "out_type", who)

    @property
    def name(self) -> str:
        return self.symbol

    @property
    def names(self) -> tuple[str, ...]:
        """The identifiers among what is passed: arrays, or numbers."""
        return identifiers(self.parameters)

    def __hash__(self) -> int:
        return hash_of(self)
