"""Kernels for GPUs that are checked on a CPU, by emulation."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax

from .. import debug, xla
from ..core import PyTree, raising
from ..emulation import NotEmulated
from ..kernel import Emulated, ImageKernel, SourceKernel, as_tuple, emulated as for_cpu
from ..layer import Layer
from ..transform import Op
from ._findings import NotApplicable
from ._subject import Subject, kernels_of


LayerOrOp = TypeVar("LayerOrOp", bound=Layer | Op)

MODES = ("auto", "never")

_PLATFORM = "cuda"
_NO_SOURCE = "An ImageKernel has no source to emulate: check it on a GPU"
# The rows that tell most, for kernels that are checked beside those for this platform: emulation is slow.
_ROWS = (
    *("inputs untouched", "outputs written", "determinism", "reference", "vmap", "grad"),
    *("vmap of grad", "grad of vmap", "odd shapes"),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One subject of a check.

    **Attributes:**

    - `names`: of its rows.
    - `prefix`: of these names in the table.
    - `note`: of the title.
    - `reason`: why none of them runs.
    """

    target: Any
    names: Sequence[str]
    prefix: str = ""
    note: str = ""
    reason: str | None = None


def parts(target: Any, mode: str, names: Sequence[str], are_chosen: bool) -> list[Part]:
    """Return the parts of a check: kernels for this platform, kernels for GPUs by emulation, or both."""
    if mode not in MODES:
        raise ValueError(f"testing.check: expected emulate to be one of {MODES}; got {mode!r}.")
    platform, kernels = xla.platform_in_use(()), kernels_of(target)
    has_own = not kernels or platform in kernels
    if platform == "cpu" and mode == "auto" and _device_kernels(target, kernels):
        but = " but for the gradients' image" if _has_image_backward(target) else ""
        note = f", its kernels for {_PLATFORM} emulated{but}"
        if not has_own:
            return [Part(emulated(target), names, note=note)]
        rows = names if are_chosen else [name for name in names if name in _ROWS]
        note = f", and its kernels for {_PLATFORM} emulated{but}"
        return [Part(target, names), Part(emulated(target), rows, f"{_PLATFORM}: ", note)]
    if has_own:
        return [Part(target, names)]
    reason = f"there is no kernel for {platform}, only for {', '.join(kernels)}"
    if isinstance(kernels.get(_PLATFORM), ImageKernel):
        reason += f". {_NO_SOURCE}"
    return [Part(target, names, reason=reason)]


def refusal(it: Subject) -> str | None:
    """Why its kernels cannot be emulated, if that is so. All else that is wrong is for the rows to say."""
    try:
        with raising(), debug.checked():
            it.call(*it.arrays())
            it.need_reverse()
            it.pullback(it.arrays(), it.cotangents())
    except NotApplicable:
        pass
    except Exception as error:
        original = getattr(error, "original", error)
        if isinstance(original, NotEmulated):
            return str(original)
    return None


def emulated(layer_or_op: LayerOrOp) -> LayerOrOp:
    """The same layer or op, with its kernels for GPUs in place of those for CPUs: CUDA C++ is built by g++, and Triton is run by
    its interpreter. It works under every transformation, in a process without a GPU.

    !!! example

        ```python
        y = jax.vmap(eqxcallback.testing.emulated(layer))(x)
        ```

    **Arguments:**

    - `layer_or_op`: an [`eqxcallback.Layer`][] or an [`eqxcallback.Op`][] with a [`eqxcallback.CudaKernel`][] or a
        [`eqxcallback.TritonKernel`][] for `"cuda"`.

    **Returns:** a layer with the same arrays and fields, or an op.

    **Raises:** `ValueError` if it has no such kernel. Where a kernel is wrong, or cannot be emulated, a call outside of `jit`
    raises [`eqxcallback.KernelError`][], which says why.
    """
    kernels = kernels_of(layer_or_op)
    device_kernels = _device_kernels(layer_or_op, kernels)
    if not device_kernels:
        hint = f" {_NO_SOURCE}." if isinstance(kernels.get(_PLATFORM), ImageKernel) else ""
        raise ValueError(
            f"testing.emulated: expected a layer or an op with a CudaKernel or a TritonKernel for {_PLATFORM}; got "
            f"{layer_or_op!r} of type {type(layer_or_op).__name__}.{hint}"
        )
    if isinstance(layer_or_op, Op):
        backward: Any = layer_or_op.backward or {}
        gradients = _for_cpu(backward.get(_PLATFORM, ()))
        fields = {field.name: getattr(layer_or_op, field.name) for field in dataclasses.fields(Op) if field.init}
        fields |= {"kernels": {"cpu": _for_cpu(device_kernels)}, "backward": {"cpu": gradients} if gradients else None}
        made: Any = _EmulatedOp(**fields)
        return made
    # As Equinox makes a Module from leaves: without `__init__`.
    made = object.__new__(_emulated_class(type(layer_or_op)))
    for name, value in vars(layer_or_op).items():
        object.__setattr__(made, name, value)
    return made


class _Raising:
    """Calls that raise what an emulated kernel raises, as those of kernels in Python do: XLA's error has its text alone."""

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        with raising():
            # Tracers, which `jit` and other transformations have here, are ready.
            return jax.block_until_ready(super().__call__(*args, **kwargs))  # type: ignore[misc]


class _EmulatedOp(_Raising, Op):
    pass


@functools.lru_cache(maxsize=256)
def _emulated_class(cls: Any) -> Any:
    """One class for all instances: they share programs."""
    backward = _for_cpu(cls.backward_kernels.get(_PLATFORM, ()))
    return type(cls)(
        cls.__name__,
        (_Raising, cls),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "kernels": {"cpu": _for_cpu(cls.kernels[_PLATFORM])},
            "backward_kernels": {"cpu": backward} if backward else {},
        },
    )


def _device_kernels(target: Any, kernels: Mapping[str, object]) -> tuple[Any, ...]:
    """Return the kernels that may run on a GPU and are neither in Python nor of a library."""
    if _PLATFORM not in kernels or not isinstance(kernels[_PLATFORM], SourceKernel):
        return ()
    return tuple(kernel for kernel in as_tuple(target.kernels[_PLATFORM]) if isinstance(kernel, SourceKernel))


def _for_cpu(kernels: Any) -> tuple[Emulated, ...]:
    return tuple(for_cpu(kernel) for kernel in as_tuple(kernels) if isinstance(kernel, SourceKernel))


def _has_image_backward(target: Any) -> bool:
    """True if gradients are an image's, which is not emulated: the reference's gradients are checked in its place."""
    declared: Any = target.backward if isinstance(target, Op) else target.backward_kernels
    kernels = declared.get(_PLATFORM, ()) if isinstance(declared, Mapping) else ()
    return any(isinstance(kernel, ImageKernel) for kernel in as_tuple(kernels))
