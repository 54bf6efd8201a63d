"""A Python function that Numba compiles."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ._checks import check_function, frozen_mapping, hash_of
from ._contract import Aliases, KernelContract
from ._launched import texts


@dataclasses.dataclass(frozen=True)
class NumbaKernel(KernelContract):
    """A function of NumPy arrays, `function(out, *args, **options)`, that Numba compiles when a program that calls it is lowered,
    for the dtypes and ranks of the call. It is called without Python and without the GIL, on a CPU.

    !!! example

        ```python
        def saxpy(out, x, y, a):
            for i in range(out.size):
                out[i] = a * x[i] + y[i]

        op = eqxcallback.Op("saxpy", kernels={"cpu": eqxcallback.NumbaKernel(saxpy)}, reference=lambda x, y, *, a: a * x + y)
        ```

    **Arguments:**

    - `function`: takes the flat results, which it writes, then the flat operands, which it may not write, and options by name.
        Arrays are dense and in row-major order; an absent argument is `None`. As the `backward` of an op it takes the gradients,
        `None` where one is not needed, then operands, results and cotangents. What `numba.njit` has made keeps its options.
    - `options`: those of `numba.njit`, such as `{"fastmath": True}`.
    - `rows`: arrays that the function works on row by row, along their first axis, `"parallel"` or their names, as in
        [`eqxcallback.CKernel`][]: it is called for a part of the rows on each of XLA's threads.
    - `out_type`, `aliases`: as in [`eqxcallback.CudaKernel`][].
    - `supports`, `only_if_chosen`: see [`eqxcallback.Op`][].

    **Raises:** `TypeError` for a wrong declaration. When a program is lowered, `ValueError` for a function that Numba does not
    compile, with what it says. An exception of the function is an error of the call; Numba does not pass on its text.
    """

    backend: ClassVar[str] = "numba"
    command_buffer_compatible: ClassVar[bool] = False

    function: Callable[..., None]
    _: dataclasses.KW_ONLY
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    rows: str | Sequence[str] | None = None
    out_type: Callable[..., PyTree[jax.ShapeDtypeStruct]] | None = None
    aliases: Aliases = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"NumbaKernel: expected a function; got {self.function!r}.")
        who = f"NumbaKernel({self.name})"
        try:
            _ = self.names
        except ValueError:
            raise TypeError(
                f"{who}: expected a function in Python, whose parameters are known; got a builtin."
            ) from None
        if not isinstance(self.options, Mapping):
            raise TypeError(f"{who}: expected options to be those of numba.njit; got {self.options!r}.")
        asked = {**getattr(self.function, "targetoptions", {}), **self.options}
        if asked.get("parallel"):
            # Its own pool of threads ends the process when two threads of XLA enter it.
            raise ValueError(
                f"{who}: expected no parallel=True: XLA calls kernels from several threads, which Numba's own cannot share. Pass "
                "rows='parallel', or the names of the arrays whose rows are independent."
            )
        # Kernels are compared and hashed. `fastmath` may be a set.
        options = {name: frozenset(value) if isinstance(value, set) else value for name, value in self.options.items()}
        for name, value in options.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{who}: expected options that are hashable; got {name}={value!r}. Pass what numba.njit has made with it."
                ) from None
        object.__setattr__(self, "options", options)
        for field in ("options", "aliases"):
            frozen_mapping(self, field)
        if self.rows is not None and self.rows != "parallel":
            object.__setattr__(self, "rows", texts(self.rows, "rows", who))
        check_function(self.supports, "supports", who)
        check_function(self.out_type, "out_type", who)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the function's parameters: arrays, and then options."""
        return tuple(inspect.signature(getattr(self.function, "py_func", self.function)).parameters)

    def __hash__(self) -> int:
        return hash_of(self)
