"""The attention of one token by tensor cores, on a CPU."""

import collections
import dataclasses
import functools
import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxcallback import ops
from eqxcallback.kernel import emulated
from eqxcallback.ops.attention import _reference as reference

from ..ops.attention.cases import decode_attention as case_of
from ..ops.table import normal
from . import kernels
from .checking import SEEDS, want
from .compiling import ptx, unavailable
from .kernels import BF16, F16, decode_mma_cuda, results
from .test_cuda_decode_attention import OPTIONS, example, example_with


FILE = "attention/decode_mma.cu"
call = functools.partial(kernels.decode_attention, kernel=decode_mma_cuda.DECODE_ATTENTION_MMA)


def calls(dtype):
    for shape in ((2, 70, 3, 1, 48), (1, 130, 20, 1, 80), (1, 9, 6, 2, 256)):
        for lengths in ([0], [2**31 - 1]):
            q, k, v, every, scale = example(shape, dtype, lengths=lengths)
            yield call(q, k, v, every[:1], scale)
    for size in (16, 48):
        args, options = example_with(OPTIONS["all"], (2, 130, 6, 1, size), BF16)
        yield call(*args, **options)


def check(got, args, **options):
    """A weight is rounded to the type once, and so is the result; all else is of f32."""
    q, k, v, lengths, scale = args
    options = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    definition = functools.partial(reference.decode_attention, scale=scale, **options)
    wanted, of_weights = (want(definition, q, k, values, lengths) for values in (v, np.abs(v)))
    rounded = {F16: 2.0**-11, BF16: 2.0**-8}[got.dtype]
    error = rounded * (of_weights + np.abs(wanted)) + 2.0**-18 * np.max(of_weights, initial=0)
    assert (np.abs(got.astype(np.float32) - wanted) <= error).all()


SIZES = [16, 48, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(
    ("size", "group"), [*((64, group) for group in (1, 3, 4, 8, 12, 16, 20, 33)), *((size, 20) for size in SIZES)]
)
def test_values(size, group, dtype):
    """Examples of several lengths, in one part and in several; a warp has one tile of keys, several or none."""
    args = example((3, 200, 2 * group, 2, size), dtype, lengths=[200, 7, 130])
    for parts in (1, 3):
        check(results(call(*args, parts=parts))[0], args)


@pytest.mark.parametrize("group", [3, 17])
@pytest.mark.parametrize("size", SIZES)
def test_values_of_int8(size, group):
    """With a size of 16, and of 48 and 80, a row has an odd number of chunks."""
    args, options = example_with(OPTIONS["int8"], (3, 150, 2 * group, 2, size), BF16)
    for parts in (1, 2):
        check(results(call(*args, parts=parts, **options))[0], args, **options)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("length", [-1, 0, 1, 15, 16, 17, 63, 64, 65, 149, 150, 151])
def test_lengths(length, int8):
    """The kernel reads nothing beyond a length: neither keys and values, nor the scales of integers, which have no NaN."""
    (q, k, v, _, scale), options = example_with({"int8": int8}, (1, 150, 3, 1, 64), BF16)
    args = q, k, v, np.array([length], np.int32), scale

    def hidden(x):
        return np.where(np.arange(150).reshape(1, 150, *[1] * (x.ndim - 2)) < length, x, x.dtype.type(np.nan))

    hidden_options: Any = {name: hidden(x) for name, x in options.items()}
    hidden_args = args if int8 else (q, hidden(k), hidden(v), *args[3:])
    for parts in (1, 3):
        (got,) = results(call(*hidden_args, parts=parts, **hidden_options))
        check(got, args, **options)
        assert length > 0 or (got == 0).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("shape", [(3, 200, 6, 1, 48), (2, 90, 34, 2, 80)], ids=str)
def test_options(shape, options):
    for dtype in (BF16,) if options.get("int8") else (BF16, F16):
        args, more = example_with(options, shape, dtype)
        check(results(call(*args, **more))[0], args, **more)


def test_keys_before_a_window_are_not_read():
    q, k, v, lengths, scale = args = example((1, 150, 3, 1, 64), BF16, lengths=[140])
    hidden = k.copy(), v.copy()
    for x in hidden:
        x[:, :120] = np.nan
    (got,) = results(call(q, *hidden, lengths, scale, window=20))
    check(got, args, window=20)


@pytest.mark.parametrize("axes", [(3,), (1, 3), (2, 1, 3), (2, 2, 3)], ids=str)
def test_slopes_of_a_part_of_the_batch(axes):
    q, k, v, lengths = case_of(BF16, (2, 2), 20, 3, 1, 16, lengths=20).args
    slopes: Any = np.abs(normal(7, axes))
    (got,) = results(call(q, k, v, lengths, 0.25, alibi_slopes=slopes))
    every: Any = np.broadcast_to(slopes, (2, 2, 3))
    check(got, (q, k, v, lengths, 0.25), alibi_slopes=every)


def test_cache_and_length_of_a_part_of_the_batch():
    """The other examples share the cache and the length of these."""
    q, k, v, lengths, scale = example((6, 70, 8, 2, 16), BF16, lengths=[70, 3, 40] * 2)
    every_k, every_v = (np.concatenate([x[:2]] * 3) for x in (k, v))
    (got,) = results(call(q, k[:2], v[:2], lengths[:3], scale))
    check(got, (q, every_k, every_v, lengths, scale))


@pytest.mark.parametrize("int8", [False, True])
def test_the_order_of_threads_and_copies_does_not_matter(int8):
    """With other seeds, copies arrive as early as they can, or as late."""
    args, options = example_with({"int8": int8, "slopes": True}, (2, 400, 6, 1, 64), BF16)
    assert {seed % 2 for seed in SEEDS} == {0, 1}
    for parts in (1, 2):
        made = call(*args, parts=parts, **options)
        assert len({results(made, seed)[0].tobytes() for seed in SEEDS}) == 1


@pytest.mark.parametrize("parts", [1, 2, 3, 40])
def test_one_part_is_one_launch(parts):
    args = example((3, 200, 8, 2, 16), BF16, lengths=[200, 0, 65])
    made = call(*args, parts=parts)
    assert len(made.launches) == (1 if parts == 1 else 2)
    check(results(made)[0], args)


@pytest.mark.parametrize("shape", [(0, 5, 6, 2, 16), (1, 0, 6, 2, 16)], ids=str)
def test_nothing_to_attend_to(shape):
    args = example(shape, BF16)
    (got,) = results(call(*args))
    np.testing.assert_array_equal(got.astype(np.float32), np.zeros(got.shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_not_finite(operand, value):
    args = example((2, 37, 6, 2, 16), BF16, lengths=[37, 37])
    args[operand][(1, 0, 0) if operand == 0 else (1, 5, 0, 0)] = value
    (got,) = results(call(*args))
    wanted = want(functools.partial(reference.decode_attention, scale=args[-1]), *args[:-1])
    np.testing.assert_array_equal(np.isfinite(got.astype(np.float32)), np.isfinite(wanted))
    check(got[:1], [x[:1] for x in args[:-1]] + [args[-1]])


def test_the_last_key_is_not_there_twice():
    """A tile is filled up with zeros: with a weight of 0, another infinite value would be NaN."""
    args = example((1, 37, 3, 1, 16), BF16, lengths=[37])
    args[2][0, 36, 0, 3] = np.inf
    (got,) = results(call(*args))
    wanted = want(functools.partial(reference.decode_attention, scale=args[-1]), *args[:-1])
    np.testing.assert_array_equal(np.isinf(got.astype(np.float32)), np.isinf(wanted))


@pytest.mark.parametrize("size", [1e4, -1e4, 1e15])
def test_large_logits_choose(size):
    q, k, v, lengths, scale = example((2, 140, 6, 2, 16), BF16, lengths=[140, 140])
    q[...], k[...] = size, 1
    k[:, 77] = 2 if size > 0 else 0.5
    (got,) = results(call(q, k, v, lengths, scale))
    np.testing.assert_array_equal(got, np.repeat(v[:, 77], 3, axis=1))


def test_all_logits_are_very_low():
    q, k, v, lengths, scale = example((1, 20, 3, 1, 16), BF16, lengths=[20])
    q[...], k[...] = 1e17, -1e17
    (got,) = results(call(q, k, v, lengths, scale))
    mean = np.broadcast_to(np.asarray(v, np.float32).mean(axis=1), got.shape)
    np.testing.assert_allclose(got.astype(np.float32), mean, rtol=2**-8, atol=1e-6)


def test_under_vmap():
    """As programs call it: the examples of a batch are one call."""
    module = importlib.import_module("eqxcallback.ops.attention._decode")
    kernels = {"cpu": emulated(decode_mma_cuda.DECODE_ATTENTION_MMA)}
    op = dataclasses.replace(module._decode_attention, kernels=kernels, backward=None)
    q, k, v, lengths, scale = args = example((4, 50, 6, 2, 48), BF16, lengths=[50, 1, 20, 33])

    def apply(q, k, v, length):
        return op(q, (k, v), length, None, None, None, scale=scale, window=0, soft_cap=0.0)

    got = jax.jit(jax.vmap(apply))(q, k, v, lengths)
    check(np.asarray(got), args)


Types = collections.namedtuple("Types", ["q", "kv", "length", "alibi_slopes", "k_scale", "v_scale"])


def test_what_it_does_not_take():
    def said(heads=6, size=64, dtype=jnp.bfloat16, cache=None, batch=(2,), slopes=None):
        q = jax.ShapeDtypeStruct((*batch, heads, size), dtype)
        kv = jax.ShapeDtypeStruct((*batch, 70, 2, size), cache or dtype)
        scale = jax.ShapeDtypeStruct(kv.shape[:-1], jnp.float32) if cache == jnp.int8 else None
        of_slopes = None if slopes is None else jax.ShapeDtypeStruct(slopes, jnp.float32)
        types = Types(q, (kv, kv), None, of_slopes, scale, scale)
        return decode_mma_cuda.DECODE_ATTENTION_MMA.supports(types, soft_cap=0.0, window=0)

    assert said() is True
    assert said(heads=40, size=256, dtype=jnp.float16) is True
    assert said(cache=jnp.int8, size=16) is True
    assert said(dtype=jnp.float32) == "tensor cores multiply bfloat16 and float16; q is float32"
    assert (
        said(dtype=jnp.float16, cache=jnp.int8)
        == "the cache has to have the dtype of q, or int8 with q in bfloat16; q is float16, and the cache int8"
    )
    for size in (0, 8, 72, 272):
        assert said(size=size) == f"heads have to be a multiple of 16 up to 256 long; they are {size}"
    assert said(heads=4) == "3 heads of q or more have to share those of the cache; 2 do"
    assert str(said(batch=(2, 3, 2), slopes=(2, 1, 2, 6))).startswith(
        "alibi_slopes have a batch axis of 1 between others"
    )


@pytest.mark.compilers
@pytest.mark.parametrize(
    ("arch", "keys", "heads", "is_by_mma"),
    [
        ("sm_90", 65_536, 6, True),
        ("sm_90", 65_535, 6, False),
        ("sm_90", 65_536, 4, False),
        ("sm_80", 65_600, 6, False),  # other numbers of keys: a call of the same types keeps its kernel
        ("compute_90", 65_664, 6, False),
    ],
)
def test_it_runs_where_it_is_the_faster_one(arch, keys, heads, is_by_mma, monkeypatch):
    """A cache of 16 MiB, which three query heads share, and machine code in which the second launch waits for the first."""
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    q, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((heads, 32), (keys, 2, 32)))
    length = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.jit(ops.decode_attention).trace(q, cache, cache, length).lower(lowering_platforms=("cuda",))
    assert ("decode_attention_mma" in program.as_text()) == is_by_mma


@pytest.mark.compilers
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_the_second_launch_waits_before_it_touches_memory():
    """Launched before the first one has ended, where its instructions are for a device that has such launches."""
    join = "eqxcallback::decode_attention_join<__nv_bfloat16, __nv_bfloat16>"
    first = "eqxcallback::decode_attention_mma<__nv_bfloat16, __nv_bfloat16, 128, false>"
    text = ptx(kernels.FOLDER / FILE, join, arch="compute_90")
    assert text.count("griddepcontrol.wait") == 1
    before = text[: text.index("griddepcontrol.wait")]
    assert not re.search(r"\b(ld|st|red|atom|cp)\.(?!param|shared)", before)
    # Nor is the wait left out by a branch.
    assert not re.search(r"\bbra\b|^\$L", before, re.MULTILINE)
    text = ptx(kernels.FOLDER / FILE, first, arch="compute_90")
    assert text.count("griddepcontrol.launch_dependents") == 1
    for entry in (join, first):
        assert "griddepcontrol" not in ptx(kernels.FOLDER / FILE, entry)


@pytest.mark.parametrize(
    ("arch", "taken"),
    [("sm_80", False), ("sm_89", False), ("compute_80", False), ("sm_90", True), ("sm_90a", True), ("sm_100", True)],
)
def test_which_devices_overlap_launches(arch, taken, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", arch)
    cache = jax.ShapeDtypeStruct((2, 70, 2, 64), jnp.bfloat16)
    types = Types(jax.ShapeDtypeStruct((2, 6, 64), jnp.bfloat16), (cache, cache), None, None, None, None)
    said = decode_mma_cuda.DECODE_ATTENTION_MMA_OVERLAPPED.supports(types, soft_cap=0.0, window=0)
    assert said is True if taken else said == f"the architecture has to be sm_90 or newer; it is {arch}"
