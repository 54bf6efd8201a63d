"""A kernel in C++ that XLA calls without Python."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ._checks import check_function, frozen_mapping, hash_of
from ._contract import Aliases, KernelContract
from ._sources import freeze_library, freeze_source


@dataclasses.dataclass(frozen=True)
class NativeKernel(KernelContract):
    """An XLA FFI handler, compiled: there is no Python and no GIL between the program and the kernel.

    The handler is called with the flat operands that there are, then the flat results, and the op's options as attributes: a
    `bool` is `bool` there, an `int` is `int64_t`, a `float` is `double`, a `str` is `std::string_view`, a tuple of
    integers is `ffi::Span<const int64_t>` and one of floats `ffi::Span<const double>`, and a mapping is `ffi::Dictionary`.

    **Arguments:**

    - `symbol`: the name of the handler, as in `XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, ...)`.
    - `library`: the path of a shared library that exports it; without one, a handler of this package. It is loaded when a
        program that calls it is first lowered. Build it with the headers in `jax.ffi.include_dir()`, of the oldest JAX
        that it should run on.
    - `out_type`: a function of the op's arguments and options that returns a PyTree of `jax.ShapeDtypeStruct`s. By
        default, what the op's `reference` returns.
    - `aliases`: `{input: output}`: results that overwrite an operand, by parameter and result names or flat indices, as in
        [`eqxcallback.buffer_callback`][].
    - `attributes`: the names of the options that the handler takes. By default all of the op's. In a layer they are static
        arguments of the call, or static fields of the layer, and by default none. Two more may be named, both `int64_t` with a
        bit for each flat operand, the lowest first, where an absent argument, `None`, counts as one operand:

        - `present`: the operands that are there. The handler is called with these.
        - `needs_grad`, of a backward kernel: the operands whose gradients are needed. The results of the handler are these
            gradients, in order. A backward kernel that does not name it has as results the gradients of all operands of
            floating type.
    - `source`: C++ that defines the handler, a text or the path of a file, in place of `library`. It is compiled when a program
        that calls it is first lowered, by the machine's own compiler, against the headers of JAX, and kept on disk by its
        content. Of a plain function, without a handler, make a [`eqxcallback.CKernel`][].
    - `options`: of the compiler, such as `"-O3"`.
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].
    """

    backend: ClassVar[str] = "native"

    symbol: str
    library: str | os.PathLike[str] | None = None
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    aliases: Aliases = dataclasses.field(default_factory=dict)
    attributes: tuple[str, ...] | None = None
    source: str | os.PathLike[str] | None = None
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.symbol, str) or not self.symbol.isidentifier():
            raise ValueError(f"NativeKernel: expected symbol to be the name of a C function; got {self.symbol!r}.")
        who = f"NativeKernel({self.symbol})"
        if self.library is not None and self.source is not None:
            raise ValueError(f"{who}: expected a library or a source; got both.")
        freeze_library(self, who)
        freeze_source(self, "C++", who)
        frozen_mapping(self, "aliases")
        check_function(self.supports, "supports", who)
        check_function(self.out_type, "out_type", who)

    @property
    def name(self) -> str:
        return self.symbol

    def __hash__(self) -> int:
        return hash_of(self)
