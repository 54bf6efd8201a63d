"""A kernel with all that one call of it says."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from .. import xla
from ..core import Aval, callable_name
from ..kernel import Kernel, PythonKernel


@dataclasses.dataclass(frozen=True, eq=False)
class BoundKernel:
    """**Attributes:**

    - `kernel`: what it is.
    - `key`: tells it from the other kernels of an op.
    - `call`: what the call declares.
    - `options`: for a native kernel, its attributes; for one that our launcher launches, what its scalars may be.
    - `body`: for a Python kernel, its body as a function `(ctx, outputs, inputs)` of tuples of buffers.
    - `function`: for a JAX function, itself as one `(operands, result_avals) -> results` of flat arrays.
    - `arguments`: for one that our launcher launches, what its functions are called with, `(args, options)`, of the types of
        flat operands and results.
    - `operands`, `results`: for the latter, its pointers: the name of each, and which flat operand or result it is; `None` for a
        null pointer.
    - `ranks`: for the latter, those of the op's operands, as one example has them.
    """

    kernel: Kernel
    key: Hashable
    call: xla.CallOptions = dataclasses.field(default_factory=xla.CallOptions)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    body: Callable[..., None] | None = None
    function: Callable[[Sequence[Aval], Sequence[Aval]], Sequence[Any]] | None = None
    arguments: Callable[[Sequence[Aval], Sequence[Aval]], tuple[tuple[Any, ...], Mapping[str, Any]]] | None = None
    operands: tuple[tuple[str, int | None], ...] = ()
    results: tuple[tuple[str, int | None], ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return callable_name(self.kernel.body) if isinstance(self.kernel, PythonKernel) else self.kernel.name
