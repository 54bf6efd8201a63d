"""Every CUDA kernel: its instances, and calls of it, launched as programs launch it."""

import ctypes
import dataclasses
import functools
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import eqxcallback
from eqxcallback import CudaKernel, kernels as declared
from eqxcallback.kernel import dims
from eqxcallback.kernels import _decode_attention, _quantized

from ..software_gpu.build import build
from .running import Call, Launch, run


FOLDER = pathlib.Path(eqxcallback.__file__).parent / "kernels" / "cuda"
F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
CTYPES = {F32: "float", F16: "__half", BF16: "__nv_bfloat16"}
DTYPES = list(CTYPES)

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


def of(kernel: CudaKernel, operands: Any, results: Any, args: Any, *, aliases: Any = None, **options: Any) -> Call:
    """A call, with the geometry that the kernel declares. `args` is what its functions are called with."""

    def value(field: Any) -> Any:
        return field(*args, **options) if callable(field) else field

    launches: Any = kernel.launch
    steps = [
        Launch(
            value(launch.entry or kernel.entry).removeprefix("eqxcallback::"),
            dims(value(launch.grid), "grid"),
            dims(value(launch.block), "block"),
            value(launch.shared_bytes),
        )
        for launch in launches
    ]
    scalars = [options[name] if function is None else value(function) for name, (_, function) in kernel.scalars.items()]
    workspaces = [(workspace.shape, workspace.dtype) for workspace in value(kernel.workspaces)]
    file = pathlib.Path(kernel.source).name
    # What is empty is not launched.
    return Call(
        file, [step for step in steps if 0 not in step.grid], operands, results, scalars, workspaces, aliases or {}
    )


def _norm_args(name: str, x: Any, parameters: Any) -> tuple[Any, ...]:
    """With `None` for the bias or weight that a layer norm lacks."""
    return (x, None, *parameters) if name == "layer_norm_bias" else (x, *parameters)


def norm(name: str, x: Any, *parameters: Any, eps: float = 1e-5) -> Call:
    kernel = declared.RMS_NORM if name.startswith("rms") else declared.LAYER_NORM
    return of(kernel, [x, *parameters], [(x.shape, x.dtype)], _norm_args(name, x, parameters), eps=eps)


def norm_backward(name: str, x: Any, *parameters: Any, out: Any, dout: Any, eps: float = 1e-5) -> Call:
    kernel = declared.RMS_NORM_BACKWARD if name.startswith("rms") else declared.LAYER_NORM_BACKWARD
    grads = [(x.shape, x.dtype), *(((x.shape[-1],), F32) for _ in parameters)]
    args = None, _norm_args(name, x, parameters), out, dout
    return of(kernel, [x, *parameters, out, dout], grads, args, eps=eps)


def rotary(x: Any, cos: Any, sin: Any, *, inverse: bool = False) -> Call:
    call = of(declared.ROTARY_EMBEDDING, [x, cos, sin], [(x.shape, x.dtype)], (x, (cos, sin)))
    entry = f"rotary_embedding<{CTYPES[x.dtype]}, true>"
    launches = [dataclasses.replace(launch, entry=entry) if inverse else launch for launch in call.launches]
    return dataclasses.replace(call, launches=launches)


def rotary_backward(x: Any, cos: Any, sin: Any, out: Any, dout: Any) -> Call:
    grads = [(x.shape, x.dtype), (cos.shape, F32), (sin.shape, F32)]
    args = None, (x, (cos, sin)), out, dout
    return of(declared.ROTARY_EMBEDDING_BACKWARD, [x, cos, sin, out, dout], grads, args)


def swiglu(gate: Any, up: Any) -> Call:
    return of(declared.SWIGLU, [gate, up], [(gate.shape, gate.dtype)], (gate, up))


def swiglu_packed(gate: Any) -> Call:
    result = ((gate.shape[0], gate.shape[1] // 2), gate.dtype)
    return of(declared.SWIGLU, [gate], [result], (gate,))


def swiglu_backward(gate: Any, up: Any, out: Any, dout: Any) -> Call:
    grads = [(gate.shape, gate.dtype)] * 2
    return of(declared.SWIGLU_BACKWARD, [gate, up, out, dout], grads, (None, (gate, up), out, dout))


def swiglu_packed_backward(gate: Any, out: Any, dout: Any) -> Call:
    grads = [(gate.shape, gate.dtype)]
    return of(declared.SWIGLU_BACKWARD, [gate, out, dout], grads, (None, (gate,), out, dout))


def cross_entropy(logits: Any, labels: Any) -> Call:
    return of(declared.CROSS_ENTROPY, [logits, labels], [(labels.shape, F32)], (logits, labels))


def cross_entropy_backward(logits: Any, labels: Any, loss: Any, dloss: Any) -> Call:
    grads = [(logits.shape, logits.dtype)]
    args = None, (logits, labels), loss, dloss
    return of(declared.CROSS_ENTROPY_BACKWARD, [logits, labels, loss, dloss], grads, args)


def cache_append(cache: Any, rows: Any, position: Any) -> Call:
    """`cache`: `(batch, length, *row)`."""
    operands, result = (cache, rows, position), (cache.shape, cache.dtype)
    return of(declared.CACHE_APPEND, operands, [result], operands, aliases={0: 0}, row_rank=cache.ndim - 2)


def decode_attention(q: Any, k: Any, v: Any, length: Any, scale: float, parts: int | None = None) -> Call:
    with pytest.MonkeyPatch.context() as patch:
        if parts is not None:
            patch.setattr(_decode_attention, "_parts", lambda q, kv: parts)
        result = (q.shape, q.dtype)
        return of(declared.DECODE_ATTENTION, [q, k, v, length], [result], (q, (k, v), length), scale=float(scale))


def quantized_linear(x: Any, blocks: Any, *, encoding: str, tiled: bool | None = None) -> Call:
    with pytest.MonkeyPatch.context() as patch:
        if tiled is not None:
            patch.setattr(_quantized, "_is_tiled", lambda x: tiled)
        result = ((len(x), len(blocks)), x.dtype)
        return of(declared.QUANTIZED_LINEAR, [x, blocks], [result], (x, blocks), encoding=encoding)
