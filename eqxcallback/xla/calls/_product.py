"""The primitive of a product of two arrays that are rounded before it, as are tangents and cotangents: JAX's derivatives of a
product round neither, and so they multiply numbers of 32 bits by numbers of 16, without tensor cores.
"""

import dataclasses
import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from ... import _ext
from ...core import Aval, DType, Value
from ..types import Factors, no_mesh, on_current_mesh, result_aval, split_alike, vary_alike
from . import _matrix_product
from ._partition import requires_devices


_config: Any = jax.config  # its options are made at run time: no type checker knows them


@dataclasses.dataclass(frozen=True)
class _Product:
    """**Attributes:**

    - `of_a`, `of_b`, `of_result`: the axes, a letter each.
    - `dtype`: what the operands are rounded to.
    - `result`: what the sums are rounded to, which are of f32, or of f64 where the operands are.
    - `precision`: that of `jax.default_matmul_precision` where the product was written.
    """

    of_a: str
    of_b: str
    of_result: str
    dtype: DType
    result: DType
    precision: str | None

    @property
    def factors(self) -> Factors:
        return Factors((tuple(self.of_a), tuple(self.of_b)), (tuple(self.of_result),))

    def __call__(self, a: Value, b: Value) -> Any:
        a, b = split_alike(vary_alike((a, b)), self.factors)
        return product_p.bind(a, b, product=self)

    def compute(self, a: Value, b: Value, rounded: Callable[[Value, DType], Value]) -> Value:
        subscripts = f"{self.of_a},{self.of_b}->{self.of_result}"
        a, b = rounded(a, self.dtype), rounded(b, self.dtype)
        sums = jnp.einsum(subscripts, a, b, precision=self.precision, preferred_element_type=_of_sums(self.dtype))
        return sums.astype(self.result)

    def of_cotangent(self, of_operand: str, of_other: str, result: DType) -> "_Product":
        """The product of the cotangent and the other operand that is the cotangent of an operand."""
        return dataclasses.replace(self, of_a=self.of_result, of_b=of_other, of_result=of_operand, result=result)


product_p = Primitive("product")


def _of_sums(dtype: DTypeLike) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def product(subscripts: str, dtype: DTypeLike, a: Value, b: Value, result: DTypeLike | None = None) -> Any:
    """`jnp.einsum` of two arrays, summed in f32, or in f64 if that is `dtype`, and rounded to `result`, by default not at all.
    They are rounded to `dtype` before, as are their tangents and cotangents, in derivatives of any order and in both modes. No
    subscript may be summed over that one array alone has. Products of f32 are as precise as `jax.default_matmul_precision` says.
    """
    inputs, of_result = subscripts.split("->")
    of_a, of_b = inputs.split(",")
    num_more = max((x.ndim - len(of) + 3 for of, x in ((of_a, a), (of_b, b)) if "..." in of), default=0)
    more = string.ascii_uppercase[:num_more]
    of_a, of_b, of_result = (of.replace("...", more) for of in (of_a, of_b, of_result))
    precision = _config.jax_default_matmul_precision
    result = _of_sums(dtype) if result is None else np.dtype(result)
    return _Product(of_a, of_b, of_result, np.dtype(dtype), result, precision)(a, b)


@product_p.def_impl
@functools.partial(jax.jit, static_argnames="product")
def _impl(a: Value, b: Value, *, product: _Product) -> Value:
    return product_p.bind(a, b, product=product)


@product_p.def_abstract_eval
def _abstract_eval(a: Aval, b: Aval, *, product: _Product) -> Aval:
    sizes = product.factors.sizes([a.shape, b.shape])
    aval = result_aval([sizes[axis] for axis in product.of_result], product.result)
    return on_current_mesh([aval], [a, b], product)[0]


def _of_a(cotangent: Value, a: Any, b: Value, *, product: _Product) -> Value:
    return product.of_cotangent(product.of_a, product.of_b, a.aval.dtype)(cotangent, b)


def _of_b(cotangent: Value, a: Value, b: Any, *, product: _Product) -> Value:
    return product.of_cotangent(product.of_b, product.of_a, b.aval.dtype)(cotangent, a)


ad.defbilinear(product_p, _of_a, _of_b)


def _batch(args: Sequence[Value], dims: Sequence[int | None], *, product: _Product) -> tuple[Value, int]:
    used = product.of_a + product.of_b + product.of_result
    axis = next(letter for letter in string.ascii_uppercase if letter not in used)
    (a, of_a), (b, of_b) = (
        (x, of) if dim is None else (jnp.moveaxis(x, dim, 0), axis + of)
        for x, dim, of in zip(args, dims, (product.of_a, product.of_b), strict=True)
    )
    return dataclasses.replace(product, of_a=of_a, of_b=of_b, of_result=axis + product.of_result)(a, b), 0


batching.primitive_batchers[product_p] = _batch


def _narrow(x: Value, dtype: DType) -> Value:
    return x.astype(dtype)


def _bf16_in_f32(x: Value, dtype: DType) -> Value:
    """Not converted to bf16 and back, for XLA may leave out both."""
    bf16 = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), bf16.nexp, bf16.nmant)


def _best_on_cpu(dtype: DType) -> Callable[[Value, DType], Value]:
    """XLA takes the processor's instructions for bf16 wherever there are some, also where this machine has measured that f32 is
    faster.
    """
    is_slow = dtype == jnp.bfloat16 and _matrix_product.fastest_isa() != _ext.isa()
    return _bf16_in_f32 if is_slow else _narrow


def _lower(ctx: mlir.LoweringRuleContext, *operands: Value, product: _Product, platform: str | None) -> Sequence[Value]:
    avals: list[Any] = list(ctx.avals_in)
    sizes = product.factors.sizes([aval.shape for aval in avals])
    matrices = None
    if platform == "cpu":
        of = (product.of_a, product.of_b, product.of_result)
        matrices = _matrix_product.Matrices.of(*of, product.dtype, product.result, sizes)

    def compute(a: Value, b: Value) -> Value:
        if matrices is None or not _matrix_product.is_whole(ctx):
            return product.compute(a, b, _best_on_cpu(product.dtype) if platform == "cpu" else _narrow)
        shape = [sizes[axis] for axis in product.of_result]
        return matrices(a.astype(product.dtype), b.astype(product.dtype), shape)

    plain = ctx.replace(avals_in=[result_aval(aval.shape, aval.dtype) for aval in avals])
    with no_mesh():
        return mlir.lower_fun(compute, multiple_results=False)(plain, *operands)


def register() -> None:
    mlir.register_lowering(product_p, functools.partial(_lower, platform=None))
    mlir.register_lowering(product_p, functools.partial(_lower, platform="cpu"), platform="cpu")
    requires_devices(product_p)
