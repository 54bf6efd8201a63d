"""Every op with a kernel in CUDA C++ on a real GPU, against its definition: edge sizes, sizes of real models, derivatives.

Attention is in test_attention.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops

from ..ops import cases, test_transformations as transformations
from .conftest import require_gpu
from .values import DTYPES, F16, F32, kernels_in, on_device, tolerate, wide


pytestmark = pytest.mark.gpu

require_gpu()


CUDA = [make for make in cases.SHAPES if make is not cases.attention]


def takes(make, dtype):
    return dtype != F16 or make is not cases.quantized_linear


def identified(made):
    return f"{made[0]}-{cases.name(*made[1:])}"


EDGES = [
    (dtype, make, *arguments)
    for dtype in DTYPES
    for make in CUDA
    if takes(make, dtype)
    for arguments in cases.SHAPES[make][:: 3 if dtype == F16 else 1]
]
# Of language models: the rows of a batch of prompts or of a token, vocabularies, heads.
REAL = [
    (cases.rms_norm, (4096, 4096)),
    (cases.rms_norm, (1, 576)),
    (cases.rms_norm, (33, 50_257), False),
    (cases.layer_norm, (4096, 1024)),
    (cases.layer_norm, (33, 50_257), True, False),
    (cases.softmax_cross_entropy, (1024, 32_000)),
    (cases.softmax_cross_entropy, (7, 151_936)),
    (cases.rotary_embedding, (2, 1024, 32, 128)),
    (cases.rotary_embedding, (2, 1024, 9, 64), True),
    (cases.swiglu, (1024, 11_008)),
    (cases.swiglu, (1001, 3072), True),
    (cases.swiglu, (333, 1001)),
    (cases.decode_attention, (8,), 4096, 32, 8, 128),
    (cases.decode_attention, (1,), 32_768, 32, 8, 128, (32_000,)),
    (cases.decode_attention, (3,), 1001, 9, 3, 64, (1001, 0, 500)),
    (cases.decode_attention, (2,), 257, 4, 4, 256),
    (cases.cache_append, (8,), 4096, 1, (8, 128)),
    (cases.cache_append, (2,), 1000, 37, (3, 64)),
    *[(cases.quantized_linear, encoding, (rows,), 2048, 5632) for encoding in ops.ENCODINGS for rows in (1, 8, 9, 200)],
    *[(cases.quantized_linear, encoding, (1,), 576, 49_152) for encoding in ops.ENCODINGS],
]
LARGE = [(dtype, *made) for dtype in DTYPES for made in REAL if takes(made[0], dtype)]


def check(case, want):
    if all(x.size for x in case.args):
        assert kernels_in(case.op, *case.args) == 1
    got = np.asarray(jax.jit(case.op)(*case.args))
    assert got.dtype == (case.args[0].dtype if case.dtype is None else case.dtype)
    tolerate(got, want, case.terms)


@pytest.mark.parametrize("made", EDGES, ids=identified)
def test_edge_sizes(made):
    case = made[1](made[0], *made[2:])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # which compiles in a tenth of the time
        want = np.asarray(cases.quickly_compiled(case.definition)(*map(wide, case.args)))
    check(case, want)


@pytest.mark.parametrize("made", LARGE, ids=identified)
def test_sizes_of_models(made):
    case = made[1](made[0], *made[2:])
    check(case, on_device(case.definition, *map(wide, case.args)))


HAVE_BACKWARD = (cases.rms_norm, cases.layer_norm, cases.softmax_cross_entropy, cases.rotary_embedding, cases.swiglu)


@pytest.mark.parametrize("made", [made for made in LARGE if made[1] in HAVE_BACKWARD], ids=identified)
def test_gradients(made):
    """By the backward kernels, in the dtype of the operands, against f32."""
    case = made[1](made[0], *made[2:])
    floats = tuple(i for i, x in enumerate(case.args) if x.dtype != np.int32)
    result = jax.eval_shape(case.op, *case.args)
    cotangent = cases.normal(9, result.shape, result.dtype)

    def gradients(f):
        def of(cotangent, *args):
            def of_floats(*values):
                given = iter(values)
                return f(*(next(given) if i in floats else x for i, x in enumerate(args)))

            return jax.vjp(of_floats, *(args[i] for i in floats))[1](cotangent)

        return of

    ours = gradients(case.op)
    assert kernels_in(ours, cotangent, *case.args) == 2
    got = jax.jit(ours)(cotangent, *case.args)
    want = on_device(gradients(case.definition), wide(cotangent), *map(wide, case.args))
    rows = int(np.prod(result.shape[:-1]))
    for g, w, i in zip(got, want, floats, strict=True):
        assert g.dtype == case.args[i].dtype
        summed = rows if np.ndim(w) < np.ndim(case.args[0]) else 1
        tolerate(g, w, case.terms * summed)


CASES = {name: case for name, case in transformations.CASES.items() if not name.startswith("attention")}
by_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@pytest.fixture
def device_tolerance(monkeypatch):
    """The tests of the CPU's kernels, as close as a GPU comes, and with its compiler's usual options."""
    monkeypatch.setattr(cases, "tolerate", tolerate)
    monkeypatch.setattr(cases, "quickly_compiled", jax.jit)


@pytest.mark.usefixtures("device_tolerance")
@by_case
def test_vmap_of_each_operand(case):
    transformations.test_vmap_of_each_operand(case)


@pytest.mark.usefixtures("device_tolerance")
@by_case
def test_nested_vmap(case):
    transformations.test_nested_vmap(case)


@pytest.mark.usefixtures("device_tolerance")
@by_case
def test_derivatives(case):
    transformations.test_derivatives(case)


@pytest.mark.parametrize("index", range(len(cases.one_of_each(F32))))
def test_operands_are_left_as_they_are(index):
    case = cases.one_of_each(F32)[index]
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
