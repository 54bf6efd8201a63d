"""The findings of one row so far: the largest error, the faults, and what was left out."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from ..core import AnyNumber, DType, KernelError, Value, raising, type_text


_MOST_FAULTS = 8
# Below it, values are taken for rounding errors of zero.
_SMALLEST_SCALE = 1e-2


class NotApplicable(Exception):
    """The row says nothing about this subject. The text says why."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """`|got - want| <= atol + rtol * |want|`. By default `rtol` is some roundings of the dtype, and `atol` is that times the
    largest value of the array: sums may be in any order, and their terms may cancel.
    """

    rtol: AnyNumber | None = None
    atol: AnyNumber | None = None

    def relative(self, dtype: DType) -> float:
        if self.rtol is not None:
            return float(self.rtol)
        eps = float(jnp.finfo(dtype).eps)
        # Kernels and references in 16 bits round after each operation, of which there are a few; in 32 they sum many.
        return (8 if eps > 1e-4 else 256) * eps


@dataclasses.dataclass
class Findings:
    tolerance: Tolerance
    worst: float | None = None
    faults: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def case(self, where: str) -> Iterator[None]:
        """One of several cases in a row: one that raises does not keep the others from running."""
        try:
            with raising():
                yield
        except NotApplicable:
            raise
        except Exception as error:
            self.fault(f"{where}: {error_text(error)}")

    def fault(self, text: str) -> None:
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(text)

    def close(
        self, got: Sequence[Value], want: Sequence[Value], where: str, *, factor: AnyNumber = 1.0, slack: Any = None
    ) -> None:
        """Compare flat results. `factor` widens the tolerance; `slack` has an absolute one for each result, or nothing."""
        if len(got) != len(want):
            return self.fault(f"{where}: got {len(got)} arrays, expected {len(want)}")
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            which = f"{where}, array {i}" if len(want) > 1 else where
            if a.dtype != b.dtype or a.shape != b.shape:
                self.fault(f"{which}: got {type_text(a.dtype, a.shape)}, expected {type_text(b.dtype, b.shape)}")
                continue
            self._compare(host(a), host(b), which, factor, 0.0 if slack is None else slack[i])

    def within(self, got: Any, want: Any, allowed: Any, where: str) -> None:
        """Compare numbers that have a tolerance of their own."""
        got, want = np.asarray(got), np.asarray(want)
        allowed = np.broadcast_to(allowed, want.shape)
        # What may differ by anything is not the largest error either.
        self._judge(got, want, np.where(np.isfinite(allowed), _difference(got, want), 0.0), allowed, where)

    def same_bits(self, got: Sequence[Value], want: Sequence[Value], where: str) -> None:
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            a, b = host(a), host(b)
            if a.tobytes() != b.tobytes():
                which = f"{where}, result {i}" if len(want) > 1 else where
                before = len(self.faults)
                self._compare(a, b, which, 0.0, 0.0)
                if len(self.faults) == before:
                    self.fault(f"{which}: the bits differ, as of -0.0 and 0.0, or of NaNs")
        if self.worst is None:
            self.worst = 0.0

    def _compare(self, got: np.ndarray, want: np.ndarray, where: str, factor: AnyNumber, slack: Any) -> None:
        if not jnp.issubdtype(want.dtype, jnp.inexact):
            different = np.asarray(got != want)
            error = np.where(different, 1.0, 0.0)
            return self._judge(got, want, error, np.zeros(want.shape), where)
        relative = self.tolerance.relative(want.dtype)
        a, b = _wide(got), _wide(want)
        size = np.abs(b)
        scale = scale_of(b)
        absolute = relative * scale if self.tolerance.atol is None else self.tolerance.atol
        allowed = factor * (absolute + relative * np.where(np.isfinite(size), size, 0)) + slack
        return self._judge(a, b, _difference(a, b), allowed, where)

    def _judge(self, got: np.ndarray, want: np.ndarray, error: np.ndarray, allowed: Any, where: str) -> None:
        if error.size == 0:
            self.worst = self.worst or 0.0
            return
        self.worst = max(self.worst or 0.0, float(error.max()) / scale_of(want))
        wrong = error > allowed
        if wrong.any():
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(wrong, error, -1))), error.shape))
            place = f" at {at}" if at else ""
            self.fault(
                f"{where}: {int(wrong.sum())} of {wrong.size} elements differ, most{place}: got {got[at]}, expected {want[at]}"
            )


def host(array: Any) -> np.ndarray:
    """A copy in NumPy: of a typed key, its words."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.array(array, order="C")


def scale_of(array: np.ndarray | np.generic) -> float:
    if not np.issubdtype(array.dtype, np.inexact):
        return 1.0
    size = np.abs(array)
    return max(_SMALLEST_SCALE, float(np.max(size, initial=0.0, where=np.isfinite(size))))


def _wide(array: np.ndarray | np.generic) -> np.ndarray:
    return np.asarray(array, np.complex128 if array.dtype.kind == "c" else np.float64)


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Infinite where one is a NaN or an infinity that the other is not."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.asarray(np.abs(a - b))
    return np.where(same, 0.0, np.where(np.isfinite(error), error, np.inf))


def error_text(error: BaseException) -> str:
    """Write an error in a few lines at most. For a kernel's failure, what the kernel raised."""
    if isinstance(error, KernelError):
        error = error.original
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, JaxRuntimeError) and len(lines) > 3:  # its text holds a traceback
        lines = [lines[0], "...", lines[-1]]
    text = f"{type(error).__name__}: {' '.join(lines[:3])}"
    return text if len(text) <= 600 else text[:600] + "..."


@contextlib.contextmanager
def unwritten_aside() -> Iterator[None]:
    """Within this context a kernel that leaves elements unwritten has no fault: `outputs written` is the row that says it."""
    try:
        yield
    except Exception as error:
        if "were never written" not in str(error):
            raise
