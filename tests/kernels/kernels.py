"""Every CUDA kernel: its instances, and calls of it with the geometry that its source asks for."""

import ctypes
import dataclasses
import functools
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

import eqxcallback

from ..software_gpu.build import build
from .running import Call, Launch, run


FOLDER = pathlib.Path(eqxcallback.__file__).parent / "kernels" / "cuda"
F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
CTYPES = {F32: "float", F16: "__half", BF16: "__nv_bfloat16"}
DTYPES = list(CTYPES)
MULTIPROCESSORS = 132

# For each file, its kernels with `{T}` for the element type.
_NORMS = ["rms_norm", "rms_norm_plain", "layer_norm", "layer_norm_weight", "layer_norm_bias", "layer_norm_plain"]
_TEMPLATES = {
    "norm.cu": [
        *(f"{name}{part}<{{T}}>" for name in _NORMS for part in ("", "_backward")),
        *(f"{name}_backward_sum<{{T}}>" for name in _NORMS if "plain" not in name),
    ],
    "rotary.cu": ["rotary_embedding<{T}>", "rotary_embedding<{T}, true>", "rotary_embedding_backward<{T}>"],
    "swiglu.cu": [f"swiglu{packed}{part}<{{T}}>" for packed in ("", "_packed") for part in ("", "_backward")],
    "cross_entropy.cu": ["cross_entropy<{T}>", "cross_entropy_backward<{T}>"],
    "cache.cu": ["cache_append"],
    "decode_attention.cu": [
        *(f"decode_attention<{{T}}, {heads}, 16, true>" for heads in (1, 2, 4)),
        "decode_attention<{T}, 4, 16, false>",
        *(f"decode_attention<{{T}}, 2, 32, {packed}>" for packed in ("true", "false")),
        "decode_attention_join<{T}>",
    ],
    "quantized.cu": [
        *(f"quantized_linear<{{T}}, eqxcallback::{e}, {rows}>" for e in ("Q4_1", "Q8_0") for rows in (1, 2, 4, 8)),
        *(f"quantized_linear_tiled<{{T}}, eqxcallback::{e}>" for e in ("Q4_1", "Q8_0")),
    ],
}


def entries(file: str, dtypes: Any = DTYPES) -> list[str]:
    """Without the namespace."""
    every = [template.format(T=CTYPES[dtype]) for template in _TEMPLATES[file] for dtype in dtypes]
    return list(dict.fromkeys(every))


def library(file: str, names: list[str], **options: Any) -> pathlib.Path:
    return build(FOLDER / file, [f"eqxcallback::{name}" for name in names], **options)


@functools.cache
def _loaded(file: str) -> tuple[ctypes.CDLL, dict[str, int]]:
    names = entries(file)
    return ctypes.CDLL(str(library(file, names))), {name: i for i, name in enumerate(names)}


def results(call: Call, seed: int = 1, **options: Any) -> list[Any]:
    return run(*_loaded(call.file), call, seed, **options)


def with_one_block(call: Call) -> Call:
    """Where any grid is right."""
    return dataclasses.replace(call, launches=[dataclasses.replace(launch, grid=(1,)) for launch in call.launches])


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def rows_geometry(
    rows: int, size: int, dtype: Any, packs_of_thread: int, most: int, least: int
) -> tuple[int, int, int]:
    """Threads of a row, rows of a block, blocks."""
    packs = ceil(size * dtype.itemsize, 16)
    threads = min(max(32 * ceil(packs, 32 * packs_of_thread), 32), most)
    block_rows = max(1, least // threads)
    return threads, block_rows, ceil(rows, block_rows)


def norm(name: str, x: Any, *parameters: Any, eps: float = 1e-5) -> Call:
    rows, size = x.shape
    threads, block_rows, blocks = rows_geometry(rows, size, x.dtype, 4, 512, 128)
    launch = Launch(f"{name}<{CTYPES[x.dtype]}>", (blocks,), (threads, block_rows))
    return Call("norm.cu", [launch], [x, *parameters], [(x.shape, x.dtype)], [rows, size, eps])


def norm_backward(name: str, x: Any, *parameters: Any, out: Any, dout: Any, eps: float = 1e-5) -> Call:
    (rows, size), sums, T = x.shape, len(parameters), CTYPES[x.dtype]  # noqa: N806
    threads, block_rows, blocks = rows_geometry(rows, size, x.dtype, 2, 512, 256)
    parts = max(1, min(blocks, MULTIPROCESSORS * max(1, 768 // (threads * block_rows))))
    shared = block_rows * sums * size * 4
    launches = [Launch(f"{name}_backward<{T}>", (parts,), (threads, block_rows), shared if shared <= 96 << 10 else 0)]
    scalars: list[Any] = [rows, size, eps]
    if sums:
        launches.append(Launch(f"{name}_backward_sum<{T}>", (ceil(size, 32),), (32, 8)))
        scalars.insert(2, parts)
    grads = [(x.shape, x.dtype), *(((size,), F32) for _ in parameters)]
    workspaces = [((parts, sums, size), F32)] if sums else []
    return Call("norm.cu", launches, [x, *parameters, out, dout], grads, scalars, workspaces)


def _columns(half: int, dtype: Any) -> int:
    pack = 16 // dtype.itemsize
    return half // pack if half % pack == 0 else half


def rotary(x: Any, cos: Any, sin: Any, *, inverse: bool = False) -> Call:
    rows, heads, size = x.shape
    blocks = ceil(rows * ceil(heads, 4) * _columns(size // 2, x.dtype), 256)
    entry = f"rotary_embedding<{CTYPES[x.dtype]}{', true' if inverse else ''}>"
    scalars = [rows, cos.shape[0], heads, size]
    return Call("rotary.cu", [Launch(entry, (blocks,), (256,))], [x, cos, sin], [(x.shape, x.dtype)], scalars)


def rotary_backward(x: Any, cos: Any, sin: Any, out: Any, dout: Any) -> Call:
    rows, heads, size = x.shape
    blocks = ceil(cos.shape[0] * _columns(size // 2, x.dtype), 64)
    launch = Launch(f"rotary_embedding_backward<{CTYPES[x.dtype]}>", (blocks,), (64,))
    grads = [(x.shape, x.dtype), (cos.shape, F32), (sin.shape, F32)]
    return Call("rotary.cu", [launch], [x, cos, sin, out, dout], grads, [rows, cos.shape[0], heads, size])


def _swiglu(name: str, operands: Any, grads: Any, rows: int, size: int) -> Call:
    dtype, packed = operands[0].dtype, "packed" in name
    pack = 16 // dtype.itemsize
    threads = rows * size // pack if size % pack == 0 else ceil(rows * size, 1 if packed else pack)
    launch = Launch(f"{name}<{CTYPES[dtype]}>", (ceil(threads, 256),), (256,))
    scalars = [rows, size] if packed else [rows * size]
    return Call("swiglu.cu", [launch], operands, [(shape, dtype) for shape in grads], scalars)


def swiglu(gate: Any, up: Any) -> Call:
    return _swiglu("swiglu", [gate, up], [gate.shape], *gate.shape)


def swiglu_packed(gate: Any) -> Call:
    rows, size = gate.shape[0], gate.shape[1] // 2
    return _swiglu("swiglu_packed", [gate], [(rows, size)], rows, size)


def swiglu_backward(gate: Any, up: Any, out: Any, dout: Any) -> Call:
    return _swiglu("swiglu_backward", [gate, up, out, dout], [gate.shape, up.shape], *gate.shape)


def swiglu_packed_backward(gate: Any, out: Any, dout: Any) -> Call:
    return _swiglu("swiglu_packed_backward", [gate, out, dout], [gate.shape], *out.shape)


def cross_entropy(logits: Any, labels: Any) -> Call:
    rows, size = logits.shape
    threads, block_rows, blocks = rows_geometry(rows, size, logits.dtype, 4, 1024, 128)
    launch = Launch(f"cross_entropy<{CTYPES[logits.dtype]}>", (blocks,), (threads, block_rows))
    return Call("cross_entropy.cu", [launch], [logits, labels], [((rows,), F32)], [rows, size])


def cross_entropy_backward(logits: Any, labels: Any, loss: Any, dloss: Any) -> Call:
    rows, size = logits.shape
    threads, block_rows, blocks = rows_geometry(rows, size, logits.dtype, 4, 1024, 128)
    launch = Launch(f"cross_entropy_backward<{CTYPES[logits.dtype]}>", (blocks,), (threads, block_rows))
    operands = [logits, labels, loss, dloss]
    return Call("cross_entropy.cu", [launch], operands, [(logits.shape, logits.dtype)], [rows, size])


def cache_append(cache: Any, rows: Any, position: Any) -> Call:
    """`cache`: `(batch, length, *row)`."""
    batch, length, count = *cache.shape[:2], rows.shape[1]
    row_bytes = math.prod(cache.shape[2:]) * cache.itemsize
    unit = next(unit for unit in (16, 4, 1) if row_bytes % unit == 0)
    launch = Launch("cache_append", (ceil(batch * count * row_bytes // unit, 256),), (256,))
    scalars = [batch, position.shape[0], length, count, row_bytes]
    operands = [cache, rows, position]
    return Call("cache.cu", [launch], operands, [(cache.shape, cache.dtype)], scalars, aliases={0: 0})


def decode_attention(q: Any, k: Any, v: Any, length: Any, scale: float, parts: int | None = None) -> Call:
    (batch, heads, size), (kv_batch, keys, kv_heads, _), dtype = q.shape, k.shape, q.dtype
    group = heads // kv_heads
    columns = 16 if size <= 512 else 32
    packed = size * dtype.itemsize % 16 == 0
    block_heads = 2 if columns == 32 else 4 if not packed or group > 2 else max(group, 1)  # fewer instances to build
    groups = batch * kv_heads * ceil(group, block_heads)
    if parts is None:
        parts = max(1, min(4 * MULTIPROCESSORS // max(groups, 1), ceil(keys, 64)))
    T = CTYPES[dtype]  # noqa: N806
    entry = f"decode_attention<{T}, {block_heads}, {columns}, {str(packed).lower()}>"
    launches = [
        Launch(entry, (groups * parts,), (128,), (size + 2) * 16),
        Launch(f"decode_attention_join<{T}>", (batch * heads * ceil(size, 32),), (32, 8)),
    ]
    workspaces = [((batch, heads, parts), F32), ((batch, heads, parts), F32), ((batch, heads, parts, size), F32)]
    scalars = [batch, kv_batch, length.shape[0], keys, heads, kv_heads, size, parts, float(scale)]
    operands = [q, k, v, length]
    return Call("decode_attention.cu", launches, operands, [(q.shape, dtype)], scalars, workspaces)


def quantized_linear(x: Any, blocks: Any, *, encoding: str, tiled: bool | None = None) -> Call:
    (rows, in_features), out_features, T = x.shape, blocks.shape[0], CTYPES[x.dtype]  # noqa: N806
    if rows > 8 if tiled is None else tiled:
        entry, block = f"quantized_linear_tiled<{T}, eqxcallback::{encoding}>", 256
        grid = (ceil(out_features, 64), ceil(rows, 64))
    else:
        block_rows = next((count for count in (1, 2, 4) if count >= rows), 8)
        entry, block = f"quantized_linear<{T}, eqxcallback::{encoding}, {block_rows}>", 128
        grid = (ceil(out_features, 4), ceil(rows, block_rows))
    scalars = [rows, in_features, out_features]
    result = ((rows, out_features), x.dtype)
    return Call("quantized.cu", [Launch(entry, grid, (block,))], [x, blocks], [result], scalars)
