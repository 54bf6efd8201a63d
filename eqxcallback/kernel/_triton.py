"""A kernel in Triton."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
from jaxtyping import PyTree

from ._checks import (
    Strict,
    check_arch,
    check_function,
    freeze_workspaces,
    frozen_mapping,
    hash_of,
    no_structures,
    scalars,
)
from ._contract import Aliases, KernelContract, Scalars
from ._launch import Dims, dims


# A `triton.JITFunction`: Triton need not be installed.
JitFunction: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class TritonKernel(KernelContract):
    """A `triton.jit` or `gluon.jit` function, compiled when a program that calls it is lowered, and launched without Python.

    Its parameters are pointers to the flat operands of the op, then to its flat results, then to its workspaces, then its
    scalars, and anywhere its `tl.constexpr`s. Where [`eqxcallback.CudaKernel`][] has a null pointer, the parameter is the
    constant `None`. Nothing is tuned when it runs: [`eqxcallback.tune`][] does that before.

    !!! example

        ```python
        @triton.jit
        def saxpy(x, y, out, n, a, BLOCK: tl.constexpr):
            i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + i, a * tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

        kernel = eqxcallback.TritonKernel(
            saxpy,
            grid=lambda x, y, *, a, BLOCK: triton.cdiv(x.size, BLOCK),
            scalars={"n": ("int32", lambda x, y, *, a: x.size), "a": "float32"},
            constexprs={"BLOCK": 1024},
        )
        ```

    **Arguments:**

    - `fn`: the function, or where to import it from when it is needed: `"package.module:name"`.
    - `grid`: the number of programs: an integer, up to three, or a function of the op's arguments, as types that have the
        shapes that the kernel sees, its options, and the constexprs.
    - `out_type`, `scalars`, `workspaces`, `aliases`, `command_buffer_compatible`: as in [`eqxcallback.CudaKernel`][].
    - `constexprs`: `{name: value}`, or `{name: function}` of the op's arguments and options.
    - `num_warps`, `num_stages`, `num_ctas`, `launch_pdl`, `launch_cooperative_grid`: as Triton has them. `num_ctas` is the number
        of blocks of a program, a cluster. With `launch_pdl` the kernel may begin before the one ahead of it on the stream has
        ended, and has to wait for it, by `triton.language.extra.cuda.gdc_wait()`, before it reads or writes global memory.
    - `choose`: a function `(arch, *args, **options)` of the architecture, such as 90, that returns constexprs, and perhaps
        `num_warps` and the others, in place of those above.
    - `then`: kernels that are launched after this one with the same parameters. What they have of their own is `fn`, `grid`,
        `constexprs`, `choose`, and what `choose` may say.
    - `arch`: as in [`eqxcallback.CudaKernel`][].
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].
    """

    backend: ClassVar[str] = "triton"

    fn: JitFunction
    grid: Dims | Callable[..., Dims]
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    scalars: Scalars = dataclasses.field(default_factory=dict)
    workspaces: Sequence[jax.ShapeDtypeStruct] | Callable[..., Sequence[jax.ShapeDtypeStruct]] = ()
    aliases: Aliases = dataclasses.field(default_factory=dict)
    constexprs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    choose: Callable[..., Mapping[str, object]] | None = None
    then: Sequence["TritonKernel"] = ()
    arch: str | None = None
    command_buffer_compatible: bool = True
    num_ctas: int = 1
    launch_pdl: bool = False
    launch_cooperative_grid: bool = False

    def __post_init__(self) -> None:
        who = f"TritonKernel({self.name})"
        text_of_place = isinstance(self.fn, str) and self.fn.count(":") == 1
        if not text_of_place and not hasattr(self.fn, "arg_names"):
            raise TypeError(
                f"TritonKernel: expected fn to be a triton.jit or gluon.jit function, or 'package.module:name'; got {self.fn!r}. "
                "Decorate it with @triton.jit."
            )
        if not text_of_place:
            check_readable(self.fn, who)
        if not callable(self.grid):
            dims(self.grid, f"{who}: expected grid")
        declared = scalars(self.scalars, who)
        no_structures(declared, who)
        object.__setattr__(self, "scalars", declared)
        frozen_mapping(self, "aliases")
        object.__setattr__(self, "constexprs", Strict(self.constexprs, f"{who}.constexprs"))
        freeze_workspaces(self, who)
        object.__setattr__(self, "then", tuple(self.then))
        for other in self.then:
            if not isinstance(other, TritonKernel):
                raise TypeError(f"{who}: expected then to be TritonKernels; got {other!r}.")
            if other.then or other.scalars or other.workspaces or other.aliases or other.out_type:
                raise ValueError(
                    f"{who}: expected a kernel in then to have no parameters of its own; got {other.name} with some. Give "
                    "out_type, scalars, workspaces and aliases to the first."
                )
        check_arch(self.arch, who)
        check_function(self.supports, "supports", who)
        check_function(self.out_type, "out_type", who)
        check_function(self.choose, "choose", who)

    @property
    def name(self) -> str:
        return self.fn.partition(":")[2] if isinstance(self.fn, str) else getattr(self.fn, "__name__", repr(self.fn))

    def __hash__(self) -> int:
        return hash_of(self)


def check_readable(fn: object, who: str) -> None:
    """Triton reads the text of a function, and of those that it calls, when it computes its hash."""
    try:
        hash(fn)
    except Exception as error:
        raise ValueError(
            f"{who}: expected fn to be a function that Triton can read; got {fn!r}, of which it says: {error} Write it in the "
            "part of Python that Triton has."
        ) from error
