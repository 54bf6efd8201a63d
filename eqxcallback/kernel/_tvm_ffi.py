"""A function of the TVM-FFI ABI."""

import ast
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
from jaxtyping import PyTree

from ._checks import check_function, freeze_workspaces, frozen_mapping, hash_of
from ._contract import Aliases, KernelContract
from ._sources import absolute


# A path, a `tvm_ffi.Module` or `tvm_ffi.Function`, or `None`: TVM-FFI need not be installed.
TvmFfiModule: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class TvmFfiKernel(KernelContract):
    """A function of the [TVM-FFI](https://tvm.apache.org/ffi/) ABI, which FlashInfer, TileLang and CuTe DSL emit. It is called
    without Python and without the GIL, on a CPU or a GPU, with tensors over XLA's own memory.

    !!! example

        ```python
        library = tvm_ffi.cpp.build_inline("scale", cpp_sources=source, functions="scale")
        kernel = eqxcallback.TvmFfiKernel(library, "scale", ("x", "out", "factor"))
        op = eqxcallback.Op("scale", kernels={"cpu": kernel}, reference=lambda x, *, factor: factor * x)
        ```

    Tensors are dense, in row-major order, and have not been written to where they are results. Several threads may call the
    function at a time, for different arrays.

    **Arguments:**

    - `module`: the path of a shared library that exports the function, as `tvm_ffi.cpp.build_inline` or
        `Module.export_library` makes it; it is loaded when a program that calls it is first lowered. Or what is in memory
        already: a `tvm_ffi.Module`, a `tvm_ffi.Function`, or `None` for a function that is registered globally. Programs that
        call these are of this process alone.
    - `name`: of the function in the library or module, or globally.
    - `arg_spec`: the arguments of the function, in its order.

        - `"args"`, `"rets"`, `"workspaces"`: all operands, results or workspaces, each a tensor; `"args[0]"`, `"rets[0]"`,
            `"workspace[0]"` one of them.
        - `"x"`: the operand or result `x`, under the names that [`eqxcallback.CKernel`][] has for them: a parameter of the
            reference, `out`, `out[0]`, ..., and in a backward kernel `dout` and `dx`. What is absent, or a gradient that is
            not needed, is `None`.
        - `"attrs.k"`, or `"k"` alone: an option of the op, a static argument or field of a layer, or one of `scalars`: a
            `bool`, an `int`, a `float`, a `str` or `None`.
        - `"ctx.stream"`: XLA's stream as a pointer, null on a CPU. The stream of the environment, which most functions ask
            for, is XLA's in any case.
        - `2`, `0.5`, `True`, `None`, or `"'text'"`: itself.
    - `scalars`: `{name: function}`, for values that a function says. It is called with the op's arguments, as types, and with
        its options.
    - `command_buffer_compatible`: whether XLA may record the function on a GPU into a command buffer. It may then do no more
        than enqueue work on its stream, the same each time.
    - `out_type`, `workspaces`, `aliases`: as in [`eqxcallback.CudaKernel`][].
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].

    **Raises:** `TypeError` or `ValueError` for a wrong declaration. When a program is lowered, `ValueError` for a library or a
    function that is not there, for a word of `arg_spec` that means nothing in the call, and for arrays of elements that are
    less than a byte. An error that the function raises is a `KernelError`, with its kind and text.
    """

    backend: ClassVar[str] = "tvm_ffi"

    module: TvmFfiModule
    name: str
    arg_spec: Sequence[str | int | float | None] = ("args", "rets")
    _: dataclasses.KW_ONLY
    scalars: Mapping[str, Callable[..., object]] = dataclasses.field(default_factory=dict)
    command_buffer_compatible: bool = False
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    workspaces: Sequence[jax.ShapeDtypeStruct] | Callable[..., Sequence[jax.ShapeDtypeStruct]] = ()
    aliases: Aliases = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"TvmFfiKernel: expected name to be that of a function; got {self.name!r}.")
        who = f"TvmFfiKernel({self.name})"
        if isinstance(self.module, str | os.PathLike):
            object.__setattr__(self, "module", absolute(self.module, "module to be a path", who))
        elif self.module is not None and not hasattr(self.module, "__chandle__"):
            raise TypeError(
                f"{who}: expected module to be the path of a library, a tvm_ffi.Module, a tvm_ffi.Function or None; got "
                f"{self.module!r}."
            )
        if isinstance(self.arg_spec, str) or not isinstance(self.arg_spec, Sequence):
            raise TypeError(f"{who}: expected arg_spec to be a tuple of words and numbers; got {self.arg_spec!r}.")
        # Texts alone: 1, 1.0 and True are equal to Python, and not to a function.
        object.__setattr__(self, "arg_spec", tuple(_text(word, who) for word in self.arg_spec))
        if not isinstance(self.scalars, Mapping) or not all(map(callable, self.scalars.values())):
            raise TypeError(f"{who}: expected scalars to be {{name: function}}; got {self.scalars!r}.")
        for field in ("scalars", "aliases"):
            frozen_mapping(self, field)
        freeze_workspaces(self, who)
        check_function(self.supports, "supports", who)
        check_function(self.out_type, "out_type", who)

    @property
    def is_in_memory(self) -> bool:
        return not isinstance(self.module, str)

    @property
    def names(self) -> tuple[str, ...]:
        """The identifiers among the arguments: arrays, or values."""
        words = (str(word).removeprefix("attrs.") for word in self.arg_spec)
        return tuple(word for word in words if word.isidentifier())

    def __hash__(self) -> int:
        return hash_of(self)


def _text(word: object, who: str) -> str:
    if isinstance(word, str):
        return word.strip()
    if word is None or type(word) in (bool, int, float):
        return repr(word)
    raise TypeError(f"{who}: expected the words of arg_spec to be texts, numbers, bools or None; got {word!r}.")


def literal(text: str) -> tuple[Any] | None:
    """The value that a word of `arg_spec` is, if it is one."""
    if text in ("inf", "-inf", "nan"):  # as Python writes these
        return (float(text),)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return (value,)
