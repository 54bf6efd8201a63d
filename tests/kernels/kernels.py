"""Every CUDA kernel: calls of it, launched as programs launch it."""

import ctypes
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import pytest

import eqxcallback
from eqxcallback import CudaKernel
from eqxcallback.backends._source import read_source
from eqxcallback.emulation import build
from eqxcallback.kernel import dims
from eqxcallback.ops.attention import _cuda as attention_cuda, _cuda_decode_mma as decode_mma_cuda
from eqxcallback.ops.cache import _cuda as cache_cuda
from eqxcallback.ops.glu import _cuda as glu_cuda
from eqxcallback.ops.linear import _cuda as linear_cuda
from eqxcallback.ops.loss import _cuda as loss_cuda
from eqxcallback.ops.norm import _cuda as norm_cuda, _cuda_group_norm as group_norm_cuda
from eqxcallback.ops.recurrent import _cuda as recurrent_cuda
from eqxcallback.ops.rotary import _cuda as rotary_cuda
from eqxcallback.ops.softmax import _cuda as softmax_cuda

from ..ops.table import DTYPES
from .running import Call, Launch, run
from .templates import TEMPLATES


FOLDER = pathlib.Path(eqxcallback.__file__).parent / "ops"
F32, BF16, F16 = DTYPES
CTYPES = {F32: "float", BF16: "__nv_bfloat16", F16: "__half"}
# The indices of all operands of any kernel.
ALL = range(12)

# Where not all of them have kernels.
_DTYPES = {"linear/quantized_mma.cu": (BF16, F16), "attention/decode_mma.cu": (BF16, F16)}


FILES = list(TEMPLATES)


def entries(file: str, dtypes: Any = DTYPES) -> list[str]:
    """Without the namespace."""
    taken = [dtype for dtype in dtypes if dtype in _DTYPES.get(file, DTYPES)]
    every = [template.format(T=CTYPES[dtype]) for template in TEMPLATES[file] for dtype in taken]
    return list(dict.fromkeys(every))


def library(file: str, names: list[str], **options: Any) -> pathlib.Path:
    source, _ = read_source(FOLDER / file, file)
    return build(source, [f"eqxcallback::{name}" for name in names], **options)


@functools.cache
def _loaded(file: str) -> tuple[ctypes.CDLL, dict[str, int]]:
    names = entries(file)
    return ctypes.CDLL(str(library(file, names))), {name: i for i, name in enumerate(names)}


def results(call: Call, seed: int = 1, **options: Any) -> list[Any]:
    return run(*_loaded(call.file), call, seed, **options)


def gradients_of(operands: Any, needed: Any = ALL) -> list[Any]:
    """Shapes and dtypes: of the operands that there are, have a floating dtype and whose index is in `needed`."""
    return [
        (x.shape, x.dtype) if x is not None and i in needed and x.dtype in DTYPES else None
        for i, x in enumerate(operands)
    ]


def types_of(results: Any) -> tuple[Any, ...]:
    return tuple(None if result is None else jax.ShapeDtypeStruct(*result) for result in results)


def with_one_block(call: Call) -> Call:
    """Return the call with one block. For kernels that are right with any grid."""
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
    file = pathlib.Path(kernel.source).relative_to(FOLDER).as_posix()
    # What is empty is not launched.
    return Call(
        file, [step for step in steps if 0 not in step.grid], operands, results, scalars, workspaces, aliases or {}
    )


def norm(x: Any, weight: Any, bias: Any, *, center: bool, eps: float = 1e-5) -> Call:
    args = x, weight, bias
    return of(norm_cuda.NORM, args, [(x.shape, x.dtype)], args, eps=eps, center=center)


def norm_backward(
    x: Any, weight: Any, bias: Any, out: Any, dout: Any, *, center: bool, needed: Any = ALL, eps: float = 1e-5
) -> Call:
    args = x, weight, bias
    grads = gradients_of(args, needed)
    return of(
        norm_cuda.NORM_BACKWARD, [*args, out, dout], grads, (types_of(grads), args, out, dout), eps=eps, center=center
    )


def add_norm(x: Any, residual: Any, weight: Any, *, eps: float = 1e-5) -> Call:
    args = x, residual, weight
    return of(norm_cuda.ADD_NORM, args, [(x.shape, x.dtype)] * 2, args, eps=eps)


def add_norm_backward(args: Any, results: Any, cotangents: Any, *, needed: Any = ALL, eps: float = 1e-5) -> Call:
    """`args`: x, residual, weight. `results` and `cotangents` have two arrays each."""
    grads = gradients_of(args, needed)
    more = types_of(grads), args, results, cotangents
    return of(norm_cuda.ADD_NORM_BACKWARD, [*args, *results, *cotangents], grads, more, eps=eps)


def group_norm(
    x: Any, weight: Any, bias: Any, *, groups: int, eps: float = 1e-5, kernel: CudaKernel = group_norm_cuda.GROUP_NORM
) -> Call:
    args = x, weight, bias
    return of(kernel, args, [(x.shape, x.dtype)], args, groups=groups, eps=eps)


def group_norm_backward(
    args: Any,
    out: Any,
    dout: Any,
    *,
    groups: int,
    needed: Any = ALL,
    eps: float = 1e-5,
    kernel: CudaKernel = group_norm_cuda.GROUP_NORM_BACKWARD,
) -> Call:
    """`args`: x, weight, bias."""
    grads = gradients_of(args, needed)
    more = types_of(grads), args, out, dout
    return of(kernel, [*args, out, dout], grads, more, groups=groups, eps=eps)


def rotary(x: Any, cos: Any, sin: Any) -> Call:
    return of(rotary_cuda.ROTARY_EMBEDDING, [x, cos, sin], [(x.shape, x.dtype)], (x, (cos, sin)))


def rotary_backward(x: Any, cos: Any, sin: Any, out: Any, dout: Any, *, needed: Any = ALL) -> Call:
    grads = gradients_of([x, cos, sin], needed)
    of_x, *of_table = types_of(grads)
    args = (of_x, tuple(of_table)), (x, (cos, sin)), out, dout
    return of(rotary_cuda.ROTARY_EMBEDDING_BACKWARD, [x, cos, sin, out, dout], grads, args)


def rotary_append(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, position: Any) -> Call:
    heads = qkv.shape[-2] - 2 * k_cache.shape[-2]
    operands = qkv, cos, sin, k_cache, v_cache, position
    results = [((*qkv.shape[:-2], heads, qkv.shape[-1]), qkv.dtype), *((x.shape, x.dtype) for x in (k_cache, v_cache))]
    args = qkv, (cos, sin), k_cache, v_cache, position
    return of(rotary_cuda.ROTARY_APPEND, operands, results, args, aliases={1: 3, 2: 4})


def glu(gate: Any, up: Any = None, *, activation: str) -> Call:
    """Without `up`, `gate` holds both halves."""
    return of(glu_cuda.GLU, [gate, up], [_half(gate, up)], (gate, up), activation=activation)


def glu_backward(gate: Any, up: Any, out: Any, dout: Any, *, activation: str, needed: Any = ALL) -> Call:
    grads = gradients_of([gate, up], needed)
    args = types_of(grads), (gate, up), out, dout
    return of(glu_cuda.GLU_BACKWARD, [gate, up, out, dout], grads, args, activation=activation)


def _half(gate: Any, up: Any) -> Any:
    return (gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)), gate.dtype


def cross_entropy(logits: Any, labels: Any, **options: Any) -> Call:
    """`labels` are integers, or targets."""
    kernel = loss_cuda.OF_TARGETS if labels.dtype == F32 else loss_cuda.CROSS_ENTROPY
    return of(kernel, [logits, labels], [(logits.shape[:-1], F32)], (logits, labels), **options)


def cross_entropy_backward(
    logits: Any, labels: Any, loss: Any, dloss: Any, *, needed: Any = ALL, **options: Any
) -> Call:
    kernel = loss_cuda.OF_TARGETS_BACKWARD if labels.dtype == F32 else loss_cuda.CROSS_ENTROPY_BACKWARD
    grads = gradients_of([logits, labels], needed)
    args = types_of(grads), (logits, labels), loss, dloss
    return of(kernel, [logits, labels, loss, dloss], grads, args, **options)


def softmax(x: Any, mask: Any, *, scale: float) -> Call:
    return of(softmax_cuda.SOFTMAX, [x, mask], [(x.shape, x.dtype)], (x, mask), scale=scale)


def softmax_backward(x: Any, mask: Any, out: Any, dout: Any, *, scale: float, needed: Any = ALL) -> Call:
    grads = gradients_of([x, mask], needed)
    args = types_of(grads), (x, mask), out, dout
    return of(softmax_cuda.SOFTMAX_BACKWARD, [x, mask, out, dout], grads, args, scale=scale)


def lstm_gates(gates: Any, cell: Any) -> Call:
    return of(recurrent_cuda.LSTM_GATES, [gates, cell], [(cell.shape, cell.dtype)] * 2, (gates, cell))


def lstm_gates_backward(gates: Any, cell: Any, results: Any, cotangents: Any, *, needed: Any = ALL) -> Call:
    """`results` and `cotangents` have two arrays each."""
    grads = gradients_of([gates, cell], needed)
    args = types_of(grads), (gates, cell), results, cotangents
    return of(recurrent_cuda.LSTM_GATES_BACKWARD, [gates, cell, *results, *cotangents], grads, args)


def gru_gates(input_gates: Any, hidden_gates: Any, hidden: Any, bias: Any) -> Call:
    args = input_gates, hidden_gates, hidden, bias
    return of(recurrent_cuda.GRU_GATES, args, [(hidden.shape, hidden.dtype)], args)


def gru_gates_backward(args: Any, out: Any, dout: Any, *, needed: Any = ALL) -> Call:
    """`args`: as those of `gru_gates`."""
    grads = gradients_of(args, needed)
    return of(recurrent_cuda.GRU_GATES_BACKWARD, [*args, out, dout], grads, (types_of(grads), args, out, dout))


def cache_append(cache: Any, rows: Any, position: Any) -> Call:
    """`cache`: `(batch, length, *row)`."""
    operands, result = (cache, rows, position), (cache.shape, cache.dtype)
    return of(cache_cuda.CACHE_APPEND, operands, [result], operands, aliases={0: 0}, row_rank=cache.ndim - 2)


def decode_attention(
    q: Any,
    k: Any,
    v: Any,
    length: Any,
    scale: float,
    parts: int | None = None,
    *,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    window: int = 0,
    soft_cap: float = 0.0,
    kernel: CudaKernel = attention_cuda.DECODE_ATTENTION,
) -> Call:
    with pytest.MonkeyPatch.context() as patch:
        if parts is not None:
            for module in (attention_cuda, decode_mma_cuda):
                patch.setattr(module, "parts_of", lambda *_: parts)
        result = (q.shape, q.dtype)
        more = (alibi_slopes, k_scale, v_scale)
        operands, args = [q, k, v, length, *more], (q, (k, v), length, *more)
        options = {"scale": float(scale), "window": window, "soft_cap": soft_cap, "resident_blocks": 4}
        return of(kernel, operands, [result], args, **options)


def quantized_linear(x: Any, blocks: Any, *, encoding: str, tiled: bool | None = None) -> Call:
    with pytest.MonkeyPatch.context() as patch:
        if tiled is not None:
            patch.setattr(linear_cuda, "_is_tiled", lambda x: tiled)
        result = ((len(x), len(blocks)), x.dtype)
        options = {"encoding": encoding, "activations": "exact"}
        return of(linear_cuda.QUANTIZED_LINEAR, [x, blocks], [result], (x, blocks), **options)


def quantized_linear_swiglu(x: Any, blocks: Any, *, encoding: str) -> Call:
    result = ((len(x), len(blocks) // 2), x.dtype)
    return of(linear_cuda.QUANTIZED_LINEAR_SWIGLU, [x, blocks], [result], (x, blocks), encoding=encoding)


def quantized_linear_mma(x: Any, blocks: Any, *, encoding: str) -> Call:
    result = ((len(x), len(blocks)), x.dtype)
    return of(linear_cuda.QUANTIZED_LINEAR_MMA, [x, blocks], [result], (x, blocks), encoding=encoding)


def quantized_linear_swiglu_mma(x: Any, blocks: Any, *, encoding: str) -> Call:
    result = ((len(x), len(blocks) // 2), x.dtype)
    return of(linear_cuda.QUANTIZED_LINEAR_SWIGLU_MMA, [x, blocks], [result], (x, blocks), encoding=encoding)
