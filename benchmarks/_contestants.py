"""One computation as every peer runs it: forward, backward, or both."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops


Pass = Literal["forward", "backward", "forward + backward"]


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Return normal numbers of NumPy's, so that nothing is compiled for them."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def random_blocks(rng: np.random.Generator, encoding: ops.Encoding, out_features: int, blocks: int) -> np.ndarray:
    """Quantised weights, with `blocks` blocks in each row: all digits are random, and scales are small."""
    # The numbers of 16 bits, before the digits or after them.
    halves = 2 if encoding in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    first = 208 if encoding == "Q6_K" else 0
    data = rng.integers(0, 256, (out_features, blocks, ops.ENCODINGS[encoding]), np.uint8)
    scales = rng.uniform(-0.01, 0.01, (out_features, blocks, halves)).astype(np.float16)
    data[..., first : first + 2 * halves] = scales.view(np.uint8)
    return data.reshape(out_features, -1)


def of_pass(f: Callable[..., Any], which: Pass, differentiable: Sequence[int]) -> Callable[..., Any]:
    """`f`, or a function of the cotangent of its result and its arguments: the gradients of those that are `differentiable`, and
    the result if that is asked for."""
    if which == "forward":
        return f

    def gradients(cotangent: Any, *args: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            given = iter(floats)
            return f(*(next(given) if i in differentiable else x for i, x in enumerate(args)))

        out, vjp = jax.vjp(of_floats, *(args[i] for i in differentiable))
        return (*vjp(cotangent.astype(out.dtype)), *([out] if which == "forward + backward" else []))

    return gradients


def operands(f: Callable[..., Any], which: Pass, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of `of_pass(f, which, ...)`."""
    if which == "forward":
        return tuple(args)
    like = jax.eval_shape(f, *args)
    return normal(9, *like.shape, dtype=like.dtype), *args


def after_forward(
    f: Callable[..., Any], differentiable: Sequence[int], given: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`of_pass(f, "backward", ...)` and its operands, with what a forward pass has kept in the place of those in `given`."""
    cotangent, *args = given

    @jax.jit
    def forward(*args: Any) -> tuple[Any, Callable[..., Any]]:
        def of_floats(*floats: Any) -> Any:
            return f(*(floats[differentiable.index(i)] if i in differentiable else x for i, x in enumerate(args)))

        return jax.vjp(of_floats, *(args[i] for i in differentiable))

    out, pullback = forward(*args)
    return lambda cotangent, pullback: pullback(cotangent), (cotangent.astype(out.dtype), pullback)


@functools.cache
def torch() -> Any:
    """Raises where it is not installed."""
    return importlib.import_module("torch")


def torch_ways(is_tiny: bool) -> dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Ways in which PyTorch runs a function of tensors, by contestant. Its compiler takes seconds, and up to a minute."""
    return {"torch: eager": lambda f: f} | ({} if is_tiny else {"torch: compiled": _compiled})


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's compiler on a function of tensors. Raises where it cannot take the function as a whole."""
    # A backward pass alone runs many times after one forward pass.
    options: Any = importlib.import_module("torch._functorch.config")
    options.donated_buffer = False
    # Rows share functions, and each has shapes of its own: with the programs of others, rows after the eighth would stay eager.
    return torch().compile(f, fullgraph=True, dynamic=False, isolate_recompiles=True)


def to_torch(x: jax.Array) -> Any:
    return torch().from_dlpack(x)


def torch_call(
    f: Callable[..., Any], which: Pass, differentiable: Sequence[int], args: Sequence[Any]
) -> Callable[[], Any]:
    """The same of a function of tensors. `args` are `operands`. What is measured of a backward pass alone is after a forward one,
    whose intermediate values it finds."""
    if which == "forward":
        tensors = [to_torch(x) for x in args]

        def forward() -> Any:
            with torch().no_grad():
                return f(*tensors)

        return forward
    cotangent, *tensors = (to_torch(x) for x in args)
    for i in differentiable:
        tensors[i] = tensors[i].clone().requires_grad_(True)
    inputs = [tensors[i] for i in differentiable]
    grad = torch().autograd.grad
    if which == "backward":
        out = f(*tensors)
        cotangent = cotangent.to(out.dtype)
        return lambda: grad(out, inputs, cotangent, retain_graph=True)

    def both() -> Any:
        out = f(*tensors)
        return *grad(out, inputs, cotangent.to(out.dtype)), out.detach()

    return both
