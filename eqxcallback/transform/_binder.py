"""The kernels of an op, or of a layer, with all that one type of arguments says."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import backends, xla
from ..core import Aval
from ..kernel import JaxKernel, Kernel, NativeKernel, PythonKernel, TypedKernel
from ._bound_op import differentiable


Arguments = Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """The flat operands of a call, where each absent argument, a `None`, counts as one.

    **Attributes:**

    - `names`: of each.
    - `indices`: which of the operands that are there it is; `None` where it is absent.
    """

    names: tuple[str, ...]
    indices: tuple[int | None, ...]

    @classmethod
    def of(cls, leaves: Sequence[tuple[str, object]]) -> "Slots":
        """Make slots from paths and leaves, absent ones included."""
        present = iter(range(len(leaves)))
        return cls(tuple(path for path, _ in leaves), tuple(None if x is None else next(present) for _, x in leaves))

    def mask(self, operands: Sequence[int] | None = None) -> int:
        """A bit for each slot, the lowest first: whether it is one of these operands; by default whether it is there."""
        chosen = [i is not None and (operands is None or i in operands) for i in self.indices]
        return sum(is_chosen << bit for bit, is_chosen in enumerate(chosen))


@dataclasses.dataclass(frozen=True, eq=False)
class Binder:
    """**Attributes:**

    - `results`: the names of the flat results, residuals included; `cotangents` those of results that callers see.
    - `static`: what a kernel takes beside buffers, by name. Its second argument has what only we know, for kernels that name it.
    - `arguments`, `backward_arguments`: see `BoundKernel`. The second also takes the operands whose gradients are needed.
    """

    slots: Slots
    results: tuple[str, ...]
    cotangents: tuple[str, ...]
    input_avals: Sequence[Aval]
    static: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    arguments: Arguments
    backward_arguments: Callable[[tuple[int, ...]], Arguments]

    def forward(
        self, kernel: Kernel, key: Any, options: xla.CallOptions, body: Callable[..., Any] | None
    ) -> backends.BoundKernel:
        """**Arguments:** `body` is that of a Python kernel, on flat buffers, or the function of a JAX kernel, of flat arrays."""
        if isinstance(kernel, JaxKernel):
            return backends.BoundKernel(kernel, key, function=body)
        if isinstance(kernel, PythonKernel):
            return backends.BoundKernel(kernel, key, _declared(kernel, options), body=body)
        if isinstance(kernel, NativeKernel):
            return backends.BoundKernel(kernel, key, options, self.static(kernel, {"present": self.slots.mask()}))
        return backends.BoundKernel(
            kernel,
            key,
            _declared(kernel, options),
            self.static(kernel, {}),
            arguments=self.arguments,
            operands=tuple(zip(self.slots.names, self.slots.indices, strict=True)),
            results=_counted(self.results),
            ranks=self._ranks,
        )

    def backward(
        self, kernel: Kernel, key: Any, needs_grad: tuple[int, ...], body: Callable[..., Any] | None
    ) -> backends.BoundKernel:
        """The kernel of the gradients of these operands, and perhaps of others."""
        key, options = (key, needs_grad), xla.CallOptions(gradients=needs_grad)
        if isinstance(kernel, JaxKernel):
            return backends.BoundKernel(kernel, key, options, function=body)
        if isinstance(kernel, PythonKernel):
            return backends.BoundKernel(kernel, key, _declared(kernel, options), body=body)
        if isinstance(kernel, NativeKernel):
            masks = {"present": self.slots.mask(), "needs_grad": self.slots.mask(needs_grad)}
            if "needs_grad" not in (kernel.attributes or ()):
                options = xla.CallOptions(gradients=differentiable(self.input_avals))
            return backends.BoundKernel(kernel, key, options, self.static(kernel, masks))
        after = [*self.results, *(f"the cotangent of {name}" for name in self.cotangents)]
        results = {operand: i for i, operand in enumerate(needs_grad)}
        return backends.BoundKernel(
            kernel,
            key,
            _declared(kernel, options),
            self.static(kernel, {}),
            arguments=self.backward_arguments(needs_grad),
            operands=(
                *zip(self.slots.names, self.slots.indices, strict=True),
                *((name, len(self.input_avals) + i) for i, name in enumerate(after)),
            ),
            results=tuple(
                (f"the gradient of {name}", None if i is None else results.get(i))
                for name, i in zip(self.slots.names, self.slots.indices, strict=True)
            ),
            ranks=self._ranks,
        )

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(len(xla.memory_aval(aval).shape) for aval in self.input_avals)


def _declared(kernel: PythonKernel | TypedKernel, options: xla.CallOptions) -> xla.CallOptions:
    return dataclasses.replace(options, command_buffer_compatible=kernel.command_buffer_compatible)


def _counted(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    return tuple((name, i) for i, name in enumerate(names))
