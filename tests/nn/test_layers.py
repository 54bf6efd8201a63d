"""The layers, against Equinox's, and against attention over all tokens."""

import functools
import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import nn, ops


def normal(seed, *shape, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


quickly_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def randomized(layer, seed=0):
    leaves, tree = jax.tree.flatten(layer)
    return jax.tree.unflatten(
        tree, [jnp.asarray(normal(seed + i, *x.shape, dtype=x.dtype)) for i, x in enumerate(leaves)]
    )


# RMSNorm: what `equinox.nn.RMSNorm` is.

OPTIONS = [
    {},
    {"use_bias": False},
    {"use_weight": False},
    {"use_weight": False, "use_bias": False},
    {"eps": 0.5},
    {"dtype": jnp.bfloat16},
    {"dtype": jnp.float16},
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("shape", "options"),
    [*(((3, 4), options) for options in OPTIONS), (5, {}), (64, {}), ((7,), {}), ([2, 3], {})],
    ids=str,
)
def test_rms_norm_is_equinox(shape, options, dtype):
    with jax.numpy_dtype_promotion("standard"):  # Equinox adds a bias of one dtype to an x of another
        ours, theirs = (randomized(make(shape, **options)) for make in (nn.RMSNorm, eqx.nn.RMSNorm))
        x = normal(9, 4, *ours.shape, dtype=dtype)
        want = quickly_compiled(jax.vmap(theirs))(x)
    # Ours rounds twice if there is a bias.
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2.0**-6, jnp.float16: 2.0**-9}[dtype]
    for got in (quickly_compiled(jax.vmap(ours))(x), np.stack([ours(row) for row in x])):
        assert got.dtype == want.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rms_norm_has_equinox_fields(options):
    ours, theirs = nn.RMSNorm((2, 3), **options), eqx.nn.RMSNorm((2, 3), **options)
    assert [field.name for field in ours.__dataclass_fields__.values()] == list(theirs.__dataclass_fields__)
    for name in theirs.__dataclass_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if isinstance(other, jax.Array):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)
        else:
            assert mine == other


def test_rms_norm_in_f64(x64):
    ours, theirs = (randomized(make(5)) for make in (nn.RMSNorm, eqx.nn.RMSNorm))
    x = normal(9, 5, dtype=jnp.float64)
    assert ours(x).dtype == jnp.float64
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-14)


def test_rms_norm_with_state():
    x, state = jnp.ones(3), object()
    ours = nn.RMSNorm(3)
    out, same = ours(x, state, key=jax.random.key(0))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert same is state
    np.testing.assert_array_equal(out, ours(x, key=None))
    sequential = eqx.nn.Sequential([eqx.nn.Linear(3, 3, key=jax.random.key(0)), ours])
    np.testing.assert_allclose(jnp.mean(sequential(x) ** 2), 1, rtol=1e-3)


def test_rms_norm_refuses_another_shape():
    for shape in ((2, 3), (4,), ()):
        with pytest.raises(
            ValueError, match=r"RMSNorm: expected x of the layer's shape, \(3,\); got .*`jax.vmap\(rms_norm\)"
        ):
            nn.RMSNorm(3)(jnp.ones(shape))


def test_rms_norm_is_serialised_as_equinox_does():
    first, second = nn.RMSNorm(5), eqx.nn.RMSNorm(5)
    for source, target in ((randomized(first), second), (randomized(second), first)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, source)
        file.seek(0)
        read = eqx.tree_deserialise_leaves(file, target)
        assert type(read) is type(target)
        np.testing.assert_array_equal(read.weight, source.weight)
        np.testing.assert_array_equal(read.bias, source.bias)


def test_rms_norm_learns():
    ours, theirs = (randomized(make(5)) for make in (nn.RMSNorm, eqx.nn.RMSNorm))
    x = normal(9, 4, 5)
    grad = eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(jax.vmap(layer)(x)))))
    gradients = grad(ours), grad(theirs)
    for got, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_vmap_is_one_call():
    text = jax.jit(jax.vmap(randomized(nn.RMSNorm(5)))).lower(jnp.ones((7, 5))).as_text()
    assert text.count("custom_call @eqxcallback_rms_norm(") == 1
    assert "tensor<7x5xf32>, tensor<5xf32>" in text
    assert "while" not in text


# QuantizedLinear.


def quantized(encoding, out_features, in_features):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (out_features, in_features // 32, ops.ENCODINGS[encoding]), np.uint8)
    blocks[..., 1] = 0x2C  # scales near 1 / 16
    if encoding == "Q4_1":
        blocks[..., 3] = 0xB4  # minimums near -1 / 4
    return nn.QuantizedLinear(jnp.asarray(blocks.reshape(out_features, -1)), encoding)


@pytest.mark.parametrize("encoding", ops.ENCODINGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantized_linear(encoding, dtype):
    layer = quantized(encoding, 12, 96)
    assert (layer.in_features, layer.out_features) == (96, 12)
    weights = ops.dequantize(layer.blocks, encoding=encoding)
    x = normal(1, 5, 96, dtype=dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    tolerance = {"rtol": 2.0**-8 if dtype == jnp.bfloat16 else 0, "atol": 1e-5 * np.abs(want).max()}
    for got in (jax.jit(jax.vmap(layer))(x), np.stack([layer(row, key=None) for row in np.asarray(x)])):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(jnp.float32), want, **tolerance)
    np.testing.assert_array_equal(layer.rows(jnp.array([[3, 0], [11, 3]])), weights[np.array([[3, 0], [11, 3]])])
    gradient = jax.jit(jax.grad(lambda x: layer(x).astype(jnp.float32).sum()))(x[0])
    np.testing.assert_allclose(gradient.astype(jnp.float32), weights.sum(0), rtol=2.0**-7, atol=1e-4)


def test_quantized_linear_refuses():
    blocks = jnp.zeros((3, 34), jnp.uint8)
    with pytest.raises(ValueError, match=r"QuantizedLinear: expected encoding to be one of Q4_1, Q8_0; got 'Q2_K'"):
        nn.QuantizedLinear(blocks, "Q2_K")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"quantized_linear: expected blocks of shape .* 32 features; got x: float32\[33\]"
    ):
        nn.QuantizedLinear(blocks, "Q8_0")(jnp.zeros(33))


# KVCache.

LENGTH, HEADS, KV_HEADS, SIZE = 9, 4, 2, 8


def tokens(dtype: Any = jnp.float32, count=LENGTH) -> list[Any]:
    shapes = ((count, HEADS, SIZE), (count, KV_HEADS, SIZE), (count, KV_HEADS, SIZE))
    return [normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def step(cache, token):
    q, k, v = token
    cache = cache.append(k[None], v[None])
    return cache, cache.attend(q)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["eager", "jit", "scan"])
def test_token_by_token_is_causal_attention(dtype, form):
    q, k, v = tokens(dtype)
    cache = nn.KVCache(16, KV_HEADS, SIZE, dtype)
    assert cache.k.dtype == dtype
    if form == "scan":
        cache, got = jax.lax.scan(step, cache, (q, k, v))
    else:
        each, f = [], jax.jit(step) if form == "jit" else step
        for token in zip(q, k, v, strict=True):
            cache, out = f(cache, token)
            each.append(out)
        got = np.stack(each)
    want = ops.attention(q, k, v, causal=True)
    tolerance = 2.0**-7 if dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=tolerance, atol=2e-6)
    assert cache.length == LENGTH
    np.testing.assert_array_equal(cache.k[:LENGTH], k)
    np.testing.assert_array_equal(cache.v[:LENGTH], v)
    assert not np.any(np.asarray(cache.k[LENGTH:], np.float32))


def test_attend_with_a_scale():
    q, k, v = tokens()
    cache = nn.KVCache(16, KV_HEADS, SIZE).append(k, v)
    want = ops.attention(q[-1:], k, v, scale=0.7)[0]
    np.testing.assert_allclose(cache.attend(q[-1], scale=0.7), want, rtol=1e-5, atol=2e-6)


def test_an_empty_cache_gives_zeros():
    np.testing.assert_array_equal(nn.KVCache(4, 1, 3).attend(jnp.ones((2, 3))), np.zeros((2, 3)))


@pytest.mark.parametrize("valid", [0, 2, jnp.int32(2), 5])
def test_valid(valid):
    """The padding of a prompt is overwritten by what comes next, and attended by nobody."""
    q, k, v = tokens()
    cache = nn.KVCache(16, KV_HEADS, SIZE).append(k[:5], v[:5], valid=valid)
    n = int(valid)
    assert cache.length == n
    assert cache.length.dtype == jnp.int32
    cache = cache.append(k[5:6], v[5:6])
    keys, values = (jnp.concatenate([x[:n], x[5:6]]) for x in (k, v))
    np.testing.assert_array_equal(cache.k[: n + 1], keys)
    np.testing.assert_allclose(cache.attend(q[0]), ops.attention(q[:1], keys, values)[0], rtol=1e-5, atol=2e-6)


def test_too_many_entries_overwrite_the_last_ones():
    cache = nn.KVCache(3, 1, 1)
    for i in range(5):
        cache = cache.append(jnp.full((1, 1, 1), float(i)), jnp.full((1, 1, 1), float(i)))
    np.testing.assert_array_equal(cache.k.ravel(), [0, 1, 4])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_donated_cache_is_written_in_place(dtype):
    """The compiled program has no copy of it, and it stays where it is."""
    shape = (512, KV_HEADS, SIZE)
    cache = nn.KVCache(*shape, dtype=dtype)
    token = [x[0] for x in tokens(dtype)]
    program = jax.jit(step, donate_argnums=0).lower(cache, token).compile()
    name = {jnp.float32: "f32", jnp.bfloat16: "bf16"}[dtype]
    array = f"{name}[{','.join(map(str, shape))}]"
    lines = [line for line in str(program.as_text()).splitlines() if f"= {array}" in line]
    assert any("custom-call" in line for line in lines)
    assert not any(" copy(" in line for line in lines)
    pointers = cache.k.unsafe_buffer_pointer(), cache.v.unsafe_buffer_pointer()
    for _ in range(3):
        cache, _ = program(cache, token)
        assert (cache.k.unsafe_buffer_pointer(), cache.v.unsafe_buffer_pointer()) == pointers
    assert cache.length == 3


def test_a_cache_in_a_loop_is_written_in_place():
    shape = (512, KV_HEADS, SIZE)
    cache = nn.KVCache(*shape)
    program = jax.jit(lambda c, t: jax.lax.scan(step, c, t), donate_argnums=0).lower(cache, tokens()).compile()
    array = f"f32[{','.join(map(str, shape))}]"
    assert not [line for line in str(program.as_text()).splitlines() if f"= {array}" in line and " copy(" in line]
    pointer = cache.k.unsafe_buffer_pointer()
    cache, _ = program(cache, tokens())
    assert cache.k.unsafe_buffer_pointer() == pointer


def test_a_cache_that_is_kept_survives():
    cache = nn.KVCache(4, KV_HEADS, SIZE)
    _, k, v = tokens()
    jax.jit(step)(cache, [x[0] for x in tokens()])
    cache.append(k[:2], v[:2])
    assert not np.any(cache.k)
    assert cache.length == 0


def test_caches_of_a_batch():
    """Sequences of different lengths: one call of each kernel for all of them."""
    q, k, v = (jnp.stack([x, x[::-1]]) for x in tokens())
    caches = jax.vmap(lambda _: nn.KVCache(16, KV_HEADS, SIZE))(jnp.arange(2))
    caches = jax.vmap(lambda cache, k, v, n: cache.append(k, v, valid=n))(caches, k, v, jnp.array([3, 7]))
    f = jax.vmap(lambda cache, q: cache.attend(q))
    got = f(caches, q[:, 0])
    for i, n in enumerate([3, 7]):
        np.testing.assert_allclose(got[i], ops.attention(q[i, :1], k[i, :n], v[i, :n])[0], rtol=1e-5, atol=2e-6)
    text = jax.jit(f).lower(caches, q[:, 0]).as_text()
    assert text.count("custom_call @eqxcallback_decode_attention(") == 1
    assert "while" not in text


def test_dtypes_of_what_is_appended():
    cache = nn.KVCache(4, 1, 2, jnp.bfloat16).append(jnp.full((1, 1, 2), 1 + 2.0**-9), jnp.ones((1, 1, 2)))
    assert cache.k.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.k[0].astype(jnp.float32), np.ones((1, 2)))
    with pytest.raises(
        ValueError, match=r"decode_attention: expected q, k, v of one floating dtype; got q: float32\[1,2\]"
    ):
        cache.attend(jnp.ones((1, 2)))
