"""Every op with a kernel in CUDA C++ on a real GPU, against its reference: edge sizes, sizes of real models, derivatives.

Attention, in Triton, is in test_attention.py. Under `vmap` and derivatives both are in test_transformations.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.programs import decode_by_tensor_cores, quantized_linear_by_tensor_cores
from eqxcallback import ops
from eqxcallback.ops.linear import _cuda as linear_cuda

from ..ops.families import by_op, ops_with_backward_kernels, ops_with_kernels, tagged
from ..ops.linear.cases import quantized_linear
from ..ops.table import floating, kernels_of, normal, quickly_compiled, wide
from .conftest import require_gpu
from .values import BF16, DTYPES, F16, F32, kernels_in, on_device, program_text, tolerate, tolerate_products


pytestmark = pytest.mark.gpu

require_gpu()


CUDA = ops_with_kernels("cuda")


def of_cuda(tag):
    return {op: rows for op, rows in by_op(tagged(tag)).items() if op in CUDA}


def identified(made):
    return "-".join(map(str, made)) if isinstance(made, tuple) else str(made)


EDGES = [
    (dtype, row) for dtype in DTYPES for rows in of_cuda("edge").values() for row in rows[:: 3 if dtype == F16 else 1]
]
LARGE = [(dtype, row) for dtype in DTYPES for rows in of_cuda("model").values() for row in rows]
# Their arguments: (batch), keys, heads, kv_heads, size.
GROUPED = [row for row in of_cuda("model")["decode_attention"] if row.arguments[2] > 2 * row.arguments[3]]
BACKWARD = [made for made in LARGE if made[1].make.__name__ in ops_with_backward_kernels("cuda")]


def check(case, want):
    by_xla = kernels_of(case.op, *case.args) == ["jax"]  # what it is better at, such as many rows of weights in blocks
    if all(x.size for x in case.args):
        assert kernels_in(case.op, *case.args) == (not by_xla)
    got = on_device(case.op, *case.args)
    assert got.dtype == (case.args[0].dtype if case.dtype is None else case.dtype)
    # Tensor cores get the weights of attention rounded.
    is_rounded = by_xla or "decode_attention_mma" in program_text(case.op, *case.args)
    (tolerate_products if is_rounded else tolerate)(got, want, case.terms)


@pytest.mark.parametrize("made", EDGES, ids=identified)
def test_edge_sizes(made):
    dtype, row = made
    case = row(dtype)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # which compiles in a tenth of the time
        want = np.asarray(quickly_compiled(case.reference)(*map(wide, case.args)))
    check(case, want)


@pytest.mark.parametrize("made", LARGE, ids=identified)
def test_sizes_of_models(made):
    dtype, row = made
    case = row(dtype)
    check(case, on_device(case.reference, *map(wide, case.args)))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("row", GROUPED, ids=str)
def test_decode_by_tensor_cores(row, dtype):
    """The kernel that runs if a variable of the environment asks for it."""
    case = row(dtype)
    assert kernels_in(decode_by_tensor_cores, *case.args) == 1
    want = on_device(case.reference, *map(wide, case.args))
    tolerate_products(on_device(decode_by_tensor_cores, *case.args), want, case.terms)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("encoding", list(linear_cuda._STRIDE_BY_MMA))
@pytest.mark.parametrize(
    "shape", [((), 256, 17), ((8,), 512, 1001), ((9,), 2048, 5632), ((3, 11), 1536, 40), ((64,), 4096, 4096)], ids=str
)
def test_quantized_linear_by_tensor_cores(shape, encoding, dtype):
    """Likewise, over all its numbers of rows. The last blocks of rows and of features are not full."""
    case, ours = quantized_linear(dtype, encoding, *shape), quantized_linear_by_tensor_cores(encoding)
    assert kernels_in(ours, *case.args) == 1
    want = on_device(case.reference, *map(wide, case.args))
    tolerate(on_device(ours, *case.args), want, case.terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", of_cuda("model")["quantized_linear_swiglu"], ids=str)
def test_a_product_with_a_gate_has_the_bits_of_two_launches(row, dtype):
    case = row(dtype)

    def of_two(x, weights):
        return ops.swiglu(ops.quantized_linear(x, weights, encoding=row.arguments[0]))

    assert (kernels_in(case.op, *case.args), kernels_in(of_two, *case.args)) == (1, 2)
    assert on_device(case.op, *case.args).tobytes() == on_device(of_two, *case.args).tobytes()


@pytest.mark.parametrize("made", BACKWARD, ids=identified)
def test_gradients(made):
    """By the backward kernels, in the dtype of the operands, against f32."""
    dtype, row = made
    case = row(dtype)
    floats = floating(case.args)
    result = jax.eval_shape(case.op, *case.args)
    cotangent = normal(9, result.shape, result.dtype)

    def gradients(f):
        def of(cotangent, *args):
            def of_floats(*values):
                given = iter(values)
                return f(*(next(given) if i in floats else x for i, x in enumerate(args)))

            result, backward = jax.vjp(of_floats, *(args[i] for i in floats))
            return result, backward(cotangent)

        return of

    ours = gradients(case.op)
    assert kernels_in(ours, cotangent, *case.args) == 2
    _, got = jax.jit(ours)(cotangent, *case.args)
    _, want = on_device(gradients(case.reference), wide(cotangent), *map(wide, case.args))
    rows = int(np.prod(result.shape[:-1]))
    for g, w, i in zip(got, want, floats, strict=True):
        assert g.dtype == case.args[i].dtype
        summed = rows if np.ndim(w) < np.ndim(case.args[0]) else 1
        tolerate(g, w, case.terms * summed)


@pytest.mark.parametrize("row", tagged("written"), ids=str)
def test_operands_are_left_as_they_are(row):
    case = row(F32)
    args = [jnp.array(x) for x in case.args]
    jax.block_until_ready(jax.jit(case.op)(*args))
    for arg, before in zip(args, case.args, strict=True):
        assert np.asarray(arg).tobytes() == before.tobytes()


def test_a_cache_is_written_where_it_lies():
    cache, rows = jnp.zeros((2, 100, 8, 128), jnp.bfloat16), jnp.ones((2, 1, 8, 128), jnp.bfloat16)
    address = cache.unsafe_buffer_pointer()
    append = jax.jit(lambda cache, rows, p: ops.cache_append(cache, rows, p, batch_dims=1), donate_argnums=0)
    for position in range(3):
        cache = append(cache, rows, jnp.int32(position))
    assert cache.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(cache, np.float32).sum(1), np.full((2, 8, 128), 3.0))


def test_the_same_call_gives_the_same_bits():
    """Sums are in a fixed order, those of gradients over rows among them."""
    x, weight = jax.random.normal(jax.random.key(0), (4099, 1000)), jnp.ones(1000)
    gradients = jax.jit(jax.grad(lambda x, w: (ops.rms_norm(x, w) ** 2).sum(), (0, 1)))
    first = jax.tree.map(np.asarray, gradients(x, weight))
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, gradients(x, weight)), first)
