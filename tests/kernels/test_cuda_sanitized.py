"""Every kernel under AddressSanitizer: no access beyond an array, or beyond shared memory."""

import dataclasses
import importlib
import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ..ops.table import normal
from . import kernels, test_cuda_decode_attention, test_cuda_quantized, test_cuda_quantized_swiglu
from .kernels import BF16, F32


def sanitized(library: pathlib.Path, index_of: Any, calls: Any, folder: pathlib.Path) -> tuple[int, str]:
    """The exit status of a process that runs the calls, and what it says."""
    name = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not pathlib.Path(name).is_absolute():
        pytest.skip("this g++ has no libasan.so")
    described = []
    for call in calls:  # by plain values: there these modules have other names
        fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        launches = [dataclasses.astuple(launch) for launch in fields.pop("launches")]
        described.append((launches, fields))
    (folder / "calls").write_bytes(pickle.dumps((index_of, described)))
    script = str(pathlib.Path(__file__).with_name("run_sanitized.py"))
    result = subprocess.run(
        [sys.executable, script, str(library), str(folder / "calls")],
        env={**os.environ, "LD_PRELOAD": name, "ASAN_OPTIONS": "detect_leaks=0"},  # CPython itself leaks at exit
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


def _norm_calls(dtype):
    for shape in ((3, 7), (5, 264), (2, 1001)):
        x, w, b = normal(1, shape, dtype), normal(2, shape[1:]), normal(3, shape[1:])
        for center, bias in ((False, None), (True, b)):
            yield kernels.norm(x, w, bias, center=center)
            yield kernels.norm_backward(x, w, bias, x, x, center=center)
        yield kernels.norm_backward(x, w, b, x, x, center=True, needed=[0])
        yield kernels.norm_backward(x, w, b, x, x, center=True, needed=[2])
        for weight in (None, w):
            yield kernels.add_norm(x, x, weight)
            for needed in ([0], [1], kernels.ALL):
                yield kernels.add_norm_backward((x, x, weight), (x, x), (x, x), needed=needed)


def _rotary_calls(dtype):
    for heads, size in ((5, 32), (2, 18)):
        x, angles = normal(1, (6, heads, size), dtype), normal(2, (3, size // 2))
        yield kernels.rotary(x, angles, angles)
        yield kernels.rotary_backward(x, angles, angles, x, x)
        yield kernels.rotary_backward(x, angles, angles, x, x, needed=[0])
        k_cache, v_cache = (normal(seed, (2, 4, 2, size), dtype) for seed in (3, 4))
        for position in (-3, 2**31 - 1):
            qkv, start = normal(5, (2, 3, heads + 4, size), dtype), np.full(2, position, np.int32)
            yield kernels.rotary_append(qkv, angles, angles, k_cache, v_cache, start)


def _glu_calls(dtype):
    for shape, activation in (((3, 7), "silu"), ((5, 64), "silu"), ((3, 7), "gelu"), ((5, 64), "gelu_tanh")):
        x, both = normal(1, shape, dtype), normal(1, (shape[0], 2 * shape[1]), dtype)
        yield kernels.glu(x, x, activation=activation)
        yield kernels.glu(both, activation=activation)
        yield kernels.glu_backward(x, x, x, x, activation=activation)
        yield kernels.glu_backward(x, x, x, x, activation=activation, needed=[1])
        yield kernels.glu_backward(both, None, x, x, activation=activation)


def _cross_entropy_calls(dtype):
    for shape in ((5, 7), (3, 1001)):
        x, loss = normal(1, shape, dtype), np.full(shape[0], 3, np.float32)
        for labels in ([0], [-1], [shape[1] - 1], [shape[1]], [-shape[1] - 1]):
            of_rows = np.array(labels * shape[0], np.int32)
            yield kernels.cross_entropy(x, of_rows)
            yield kernels.cross_entropy_backward(x, of_rows, loss, loss)
            for ignored in (labels[0], 1):
                options = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": ignored}
                yield kernels.cross_entropy(x, of_rows, **options)
                yield kernels.cross_entropy_backward(x, of_rows, loss, loss, **options)
        targets = normal(2, shape)
        yield kernels.cross_entropy(x, targets, z_loss=0.01)
        for needed in ([0], [1], kernels.ALL):
            yield kernels.cross_entropy_backward(x, targets, loss, loss, needed=needed)


def _cache_calls(dtype):
    for row in ((8,), (3,)):
        cache, rows = normal(1, (2, 9, *row), dtype), normal(2, (2, 4, *row), dtype)
        for position in (-3, 0, 5, 2**31 - 1):
            yield kernels.cache_append(cache, rows, np.array([position], np.int32))


def _decode_attention_calls(dtype):
    example = test_cuda_decode_attention.example
    for shape in ((2, 70, 3, 1, 17), (2, 130, 6, 1, 64), (1, 9, 3, 1, 601)):
        for lengths in ([0], [2**31 - 1]):
            q, k, v, every, scale = example(shape, dtype, lengths=lengths)
            yield kernels.decode_attention(q, k, v, every[:1], scale)
    q, k, v, every, scale = example((2, 130, 6, 1, 64), dtype, lengths=[130, 70])
    k, v = (np.asarray(x, np.float32).astype(np.int8) for x in (k, v))
    scales = {name: normal(3, (2, 130, 1)) for name in ("k_scale", "v_scale")}
    options = {"alibi_slopes": normal(4, (1, 6)), "window": 90, "soft_cap": 2.0}
    yield kernels.decode_attention(q, k, v, every, scale, **options, **scales)


def _quantized_calls(dtype):
    for encoding in ("Q4_1", "Q8_0"):
        for shape in ((1, 96, 5), (3, 64, 7), (9, 32, 3), (65, 64, 70)):
            yield kernels.quantized_linear(*test_cuda_quantized.example(shape, encoding, dtype), encoding=encoding)
        for shape in ((1, 96, 5), (3, 64, 7)):
            x, weights = test_cuda_quantized_swiglu.example(shape, encoding, dtype)
            yield kernels.quantized_linear_swiglu(x, weights, encoding=encoding)


CALLS = {
    "norm/norm.cu": _norm_calls,
    "rotary/rotary.cu": _rotary_calls,
    "glu/glu.cu": _glu_calls,
    "loss/loss.cu": _cross_entropy_calls,
    "cache/cache.cu": _cache_calls,
    "attention/decode.cu": _decode_attention_calls,
    "linear/quantized.cu": _quantized_calls,
}
# Other files have a test of their own, which has calls.
for _file in set(kernels.FILES) - set(CALLS):
    CALLS[_file] = importlib.import_module(f"{__package__}.test_cuda_{pathlib.Path(_file).stem}").calls


@pytest.mark.parametrize("file", kernels.FILES)
def test_addresses(file, tmp_path):
    calls = [*CALLS[file](BF16), *(CALLS[file](F32) if file == "linear/quantized.cu" else [])]
    names = sorted({launch.entry for call in calls for launch in call.launches})
    path = kernels.library(file, names, sanitize="address")
    code, output = sanitized(path, {name: i for i, name in enumerate(names)}, calls, tmp_path)
    assert (code, output) == (0, "clean\n")
