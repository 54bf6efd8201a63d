"""The fused loss and its gradients in XLA's plan for a GPU, at real sizes: docs/design/gpu.md says why they have no kernel."""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from benchmarks.programs import struct
from eqxcallback import ops, xla
from eqxcallback.inspection import _hlo


class Sizes(NamedTuple):
    """**Attributes:**

    - `chunk`: rows and classes of the logits that are in memory at a time, of the loss.
    - `backward`: the same of its gradients.
    """

    rows: int
    features: int
    classes: int
    chunk: tuple[int, int]
    backward: tuple[int, int]

    def args(self, dtype):
        return (
            struct(self.rows, self.features, dtype=dtype),
            struct(self.classes, self.features, dtype=dtype),
            struct(self.rows, dtype=jnp.int32),
        )


GPT = Sizes(1024, 768, 32_000, (1024, 32_000), (1024, 32_000))
LLAMA = Sizes(8192, 4096, 128_256, (2048, 128_256), (8192, 32_064))
CASES = {"GPT-2": (GPT, jnp.bfloat16), "GPT-2 in f32": (GPT, jnp.float32), "Llama 3": (LLAMA, jnp.bfloat16)}
by_sizes = pytest.mark.parametrize(("sizes", "dtype"), CASES.values(), ids=list(CASES))


class Steps:
    """The instructions of a program that are launched, and what they read and are made of."""

    def __init__(self, function, *args):
        self.module = _hlo.Module(xla.compile_deviceless(function, *args).hlo_text)
        loops = [instruction for instruction in self.module if instruction.opcode == "while"]
        names = [self.module.entry, *(loop.body for loop in loops)]
        free = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "async-done", "fusion-done"}
        self.launched = [
            instruction
            for name in names
            for instruction in self.module.computations[name].values()
            if instruction.opcode not in free
        ]

    def inside(self, step):
        """The instruction itself, and what it is made of."""
        yield step
        for name in step.called():
            for instruction in self.module.computations.get(name, {}).values():
                yield from self.inside(instruction)

    def has(self, step, opcode):
        return any(instruction.opcode == opcode for instruction in self.inside(step))

    def is_product(self, step):
        return self.has(step, "dot") or any("cublas" in instruction.rest for instruction in self.inside(step))

    def reads(self, step):
        """The types of the operands, without layouts."""
        inside = self.module.computations[step.computation]
        return [inside[name].shape.partition("{")[0] for name in step.operands]

    def products(self):
        return [step for step in self.launched if self.is_product(step)]

    def passes(self, sizes):
        """Steps other than products that read so many logits, or write as many numbers. A gather of some is not among them."""
        dims = ",".join(map(str, sizes))
        beside = [step for step in self.launched if not self.is_product(step)]
        return [
            step
            for step in beside
            if f"[{dims}]" in step.shape or (f"f32[{dims}]" in self.reads(step) and self.has(step, "reduce"))
        ]


def arrays(*types):
    """The sizes of all arrays of these types."""
    return [tuple(map(int, dims.split(","))) for text in types for dims in re.findall(r"\[([\d,]+)\]", text)]


def loss_and_gradients(x, weight, labels, reduction: Any = "none"):
    def loss(x, weight):
        return ops.linear_cross_entropy(x, weight, labels, reduction=reduction).mean()

    return jax.value_and_grad(loss, (0, 1))(x, weight)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "soft_cap": 30.0, "ignore_index": -100}], ids=str)
@by_sizes
def test_logits_are_read_once(sizes, dtype, options):
    """One product for a chunk and one reduction. Nothing copies the weight."""
    steps = Steps(lambda *args: ops.linear_cross_entropy(*args, **options), *sizes.args(dtype))
    (product,) = steps.products()
    assert arrays(product.shape)[0] == sizes.chunk
    (reduction,) = steps.passes(sizes.chunk)
    assert all(math.prod(array) < math.prod(sizes.chunk) / 100 for array in arrays(reduction.shape))
    for step in steps.launched:
        for array in arrays(step.shape, *steps.reads(step)):
            is_of_x = math.prod(array) <= sizes.rows * sizes.features  # of which a loop has slices
            assert step is product or array[-1] != sizes.features or is_of_x


@by_sizes
def test_gradients_take_one_pass_more(sizes, dtype):
    """It makes the gradient of the logits, in the dtype of the next products: of another, and of one for `x` and the weight."""
    steps = Steps(loss_and_gradients, *sizes.args(dtype))
    # The logits of one chunk are still there.
    again = sizes.backward != sizes.chunk
    assert len(steps.products()) == 3 + again
    (reduction,) = (step for step in steps.passes(sizes.chunk) if steps.has(step, "reduce"))
    (gradient,) = (step for step in steps.passes(sizes.backward) if step is not reduction)
    name = "bf16" if dtype == jnp.bfloat16 else "f32"
    assert gradient.shape.startswith(f"{name}[{sizes.backward[0]},{sizes.backward[1]}]")
    (last,) = (step for step in steps.products() if f"[{sizes.backward[1]},{sizes.features}]" in step.shape)
    assert last.shape.strip("(").startswith(name), "the gradient of the weight is rounded by its product"
    assert all(step.shape.strip("(").startswith("f32") for step in steps.products() if step is not last)
    assert not [step for step in steps.launched if step.opcode == "copy" and arrays(step.shape)]


@by_sizes
def test_a_mean_has_its_gradients_from_the_same_logits(sizes, dtype):
    """The logits of a chunk of rows are read once for the loss, and once for their gradient."""
    steps = Steps(functools.partial(loss_and_gradients, reduction="mean"), *sizes.args(dtype))
    products, passes = steps.products(), steps.passes(sizes.chunk)
    assert len(products) == 3
    assert arrays(products[0].shape)[0] == sizes.chunk
    assert [steps.has(step, "reduce") for step in passes] == [True, False]
    name = "bf16" if dtype == jnp.bfloat16 else "f32"
    assert passes[1].shape.startswith(f"{name}[{sizes.chunk[0]},{sizes.chunk[1]}]")
    (last,) = (step for step in products if f"[{sizes.classes},{sizes.features}]" in step.shape)
    assert last.shape.strip("(").startswith(name), "the gradient of the weight is rounded by its product"
