"""A product of two arrays of bf16 or f32 as products of matrices by this package's own kernel, on a CPU where it beats XLA's."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from ... import _ext
from ...core import DType, Size, Value
from ..handles import CPU_OPS, is_exported
from ._partition import devices_of, is_manual


_TILES = "avx512_amx"
# Of results, for factors of each dtype.
_RESULTS = {
    np.dtype(jnp.bfloat16): (jnp.float32, jnp.bfloat16, jnp.float16),
    np.dtype(jnp.float32): (jnp.float32,),
}
# A product of fewer numbers takes XLA less time than a call.
_SMALLEST = 1 << 15
# Fewer rows or columns take XLA less time than it takes to pack the other factor: of f32 by tiles, and by vectors.
_FEWEST_BY_TILES = 128
_FEWEST_BY_VECTORS = {np.dtype(jnp.bfloat16): 16, np.dtype(jnp.float32): 128}
# By vectors, XLA is as fast where it reads the left factor along its rows: at products of f32 with smaller results, on processors
# of a vendor, and at those of bf16 with more numbers and fewer columns.
_LARGE_RESULT = {"AuthenticAMD": 1 << 22, "GenuineIntel": 1 << 20}
_SMALL_PRODUCT, _FEWEST_COLUMNS = 1 << 21, 96


def fastest_isa() -> str:
    """Return the instruction set that multiplies many rows of bf16 fastest on this machine."""
    return _ext.isas_of_bf16().get("linear_rows", _ext.isa())


def has_tiles() -> bool:
    """Return true if this machine multiplies many rows of bf16 fastest by tiles."""
    return fastest_isa() == _TILES


def fewest_lines(dtype: DType) -> int | None:
    """Return how many rows and columns a product of this dtype needs to be faster by this package's kernel than by XLA, if it is
    with any.

    By vectors it has been measured on processors with AVX-512 of Intel and AMD, and bf16 on those of AMD that multiply it.
    """
    if dtype not in _RESULTS:
        return None
    if has_tiles():
        return 1 if dtype == jnp.bfloat16 else _FEWEST_BY_TILES
    if not _ext.isa().startswith("avx512") or _ext.vendor() not in _LARGE_RESULT:
        return None
    is_widened = dtype == jnp.bfloat16 and fastest_isa() != "avx512_bf16"
    return None if is_widened and _ext.vendor() == "AuthenticAMD" else _FEWEST_BY_VECTORS[dtype]


def multiplies_faster(dtype: DType, rows: Size, columns: Size, size: Size, a_has_columns: bool = False) -> bool:
    """Return true if this package's kernel multiplies matrices of such sizes faster than XLA."""
    fewest = fewest_lines(dtype)
    if fewest is None or min(rows, columns) < fewest or rows * columns * size < _SMALLEST:
        return False
    if a_has_columns or has_tiles():
        return True
    if dtype == jnp.float32:
        return rows * columns >= _LARGE_RESULT[_ext.vendor()]
    return columns >= _FEWEST_COLUMNS or rows * columns * size <= _SMALL_PRODUCT


def is_whole(ctx: mlir.LoweringRuleContext) -> bool:
    """Return true if a program may call the kernel: it has its arrays whole, as XLA splits products between devices, and no
    calls; and it is not exported, to where another version of this package may lack the kernel."""
    if is_exported(ctx):
        return False
    if is_manual(ctx):
        axis_context: Any = ctx.module_context.axis_context
        return set(axis_context.manual_axes) == set(axis_context.mesh.axis_names)
    devices = devices_of(ctx)
    return devices is not None and len(devices) == 1


@dataclasses.dataclass(frozen=True)
class Matrices:
    """A product `of_a,of_b->of_result` as one of matrices, for each of several examples.

    **Attributes:**

    - `sizes`: of examples, rows, columns, and what is summed over.
    - `a_has_columns`, `b_has_columns`: whether that is the first axis of a factor, and not the last.
    - `is_swapped`: whether the rows are those of `b`.
    - `dtype`, `result`: of the factors, and of the result.
    """

    sizes: tuple[int, int, int, int]
    a_has_columns: bool
    b_has_columns: bool
    is_swapped: bool
    dtype: DType
    result: DType

    @classmethod
    def of(
        cls, of_a: str, of_b: str, of_result: str, dtype: DType, result: DType, sizes: dict[str, Any]
    ) -> "Matrices | None":
        """Return `None` if axes are in another order, if there are too few numbers, or what a size is is not known yet."""
        if result not in _RESULTS.get(dtype, ()) or any(map(jax.export.is_symbolic_dim, sizes.values())):
            return None
        examples = "".join(axis for axis in of_result if axis in of_a and axis in of_b)
        rows = "".join(axis for axis in of_result if axis not in of_b)
        columns = "".join(axis for axis in of_result if axis not in of_a)
        summed = "".join(axis for axis in of_a if axis not in of_result)
        is_swapped = of_result == examples + columns + rows and bool(rows) and bool(columns)
        if not is_swapped and of_result != examples + rows + columns:
            return None
        if is_swapped:
            of_a, of_b, rows, columns = of_b, of_a, columns, rows
        has_columns = []
        for of, lines in ((of_a, rows), (of_b, columns)):
            if of not in (examples + lines + summed, examples + summed + lines):
                return None
            has_columns.append(of != examples + lines + summed)
        count, m, n, k = (math.prod(sizes[axis] for axis in axes) for axes in (examples, rows, columns, summed))
        if not multiplies_faster(dtype, m, n, k, has_columns[0]):
            return None
        return cls((count, m, n, k), has_columns[0], has_columns[1], is_swapped, dtype, result)

    def __call__(self, a: Value, b: Value, shape: Sequence[int]) -> Value:
        examples, rows, columns, size = self.sizes
        if self.is_swapped:
            a, b = b, a
        has_columns = (self.a_has_columns, self.b_has_columns)
        a, b = (
            x.reshape((examples, size, lines) if first else (examples, lines, size))
            for x, lines, first in zip((a, b), (rows, columns), has_columns, strict=True)
        )
        packed = _ext.matrix_product_bytes(self.dtype == jnp.float32, rows, columns, size, *has_columns)
        results = (
            jax.ShapeDtypeStruct((examples, rows, columns), self.result),
            jax.ShapeDtypeStruct((packed,), jnp.uint8),
        )
        attributes = dict(zip(("a_has_columns", "b_has_columns"), map(np.int64, has_columns), strict=True))
        out, _ = jax.ffi.ffi_call(CPU_OPS["matrix_product"], results)(a, b, present=np.int64(3), **attributes)
        return out.reshape(shape)
