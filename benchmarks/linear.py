"""Linear layers over weights of 32, 16, 8 and 4 bits: one token through all those of GPT-2, which is bound by reading the
weights; and many tokens through one layer."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import ops

from . import _onnx_linear, shapes
from ._contestants import normal, to_torch, torch
from ._probes import BYTES, FMA, PAIRS, READ, multiply_operations, multiply_runner, read_bytes, read_runner
from ._rows import BEST, OURS, Goal, Row, Setting
from ._timing import Runner, waited_for


Apply = Callable[[Any, Any], Any]
_BITS = {"int8": 8, "Q4_1": 5, "Q8_0": 8.5}


def weights(sizes: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Random ones, which keep the size of what they are multiplied with."""
    return [normal(i, *size) * np.float32(size[1] ** -0.5) for i, size in enumerate(sizes)]


_quantize_int8 = jax.jit(ops.quantize_int8)
_quantize = jax.jit(ops.quantize, static_argnames="encoding")
_dequantize = jax.jit(ops.dequantize, static_argnames="encoding")


def quantized(encoding: Any, weight: jax.Array) -> tuple[Any, jax.Array]:
    """Return a weight's parts as an op takes them, and what they stand for in f32: all contestants compute the same."""
    if encoding == "int8":
        parts = _quantize_int8(weight)
        return parts, parts[0].astype(jnp.float32) * parts[1][:, None]
    blocks = _quantize(weight, encoding=encoding)
    if encoding == "Q4_1":
        blocks = jnp.asarray(_onnx_linear.with_integer_zeros(blocks))
    return blocks, _dequantize(blocks, encoding=encoding)


def ours(encoding: Any, activations: ops.Activations = "exact") -> Apply:
    if encoding == "int8":
        return lambda x, parts: ops.int8_linear(x, *parts, activations=activations)
    return lambda x, blocks: ops.quantized_linear(x, blocks, encoding=encoding, activations=activations)


def f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight)


def expanded(encoding: Any) -> Apply:
    """XLA, from the small weights."""
    if encoding == "int8":
        return lambda x, parts: f32(x, parts[0].astype(x.dtype)) * parts[1].astype(x.dtype)
    return lambda x, blocks: f32(x, ops.dequantize(blocks, encoding=encoding).astype(x.dtype))


def through(apply: Apply) -> Callable[..., Any]:
    """All layers, one after the other. Every row of every matrix counts: what is too long for the next one is folded."""

    def program(x: Any, layers: Sequence[Any], sizes: Sequence[tuple[int, int]]) -> Any:
        for layer, (_, features) in zip(layers, sizes, strict=True):
            x = apply(_fold(x, features), layer)
        return x

    return program


def _fold(x: Any, features: int) -> Any:
    parts = [x[..., i : i + features] for i in range(0, x.shape[-1], features)]
    whole = [part for part in parts if part.shape[-1] == features]
    total = functools.reduce(lambda a, b: a + b, whole)
    rest = parts[-1]
    if rest.shape[-1] < features:
        length = rest.shape[-1]
        total = total + (
            jnp.pad(rest, [(0, 0)] * (rest.ndim - 1) + [(0, features - length)])
            if isinstance(rest, jax.Array)
            else torch().nn.functional.pad(rest, (0, features - length))
        )
    return total * len(parts) ** -0.5


def _torch_int8(parts: Any) -> tuple[Apply, Any]:
    weight, scale = (to_torch(x) for x in parts)
    return lambda x, layer: torch()._weight_int8pack_mm(x, *layer), (weight, scale)


def _torch_int4(blocks: jax.Array) -> tuple[Apply, Any]:
    """Pack Q4_1 for Torch: a scale and a minimum for each 32 weights. Torch's weights are from -8 to 7."""
    raw = np.asarray(blocks).reshape(blocks.shape[0], -1, 20)
    scale, least = raw[..., :4].copy().view(np.float16).astype(np.float32).transpose(2, 1, 0)
    codes = np.concatenate([raw[..., 4:] & 15, raw[..., 4:] >> 4], -1).reshape(blocks.shape[0], -1)
    packed = torch()._convert_weight_to_int4pack_for_cpu(torch().from_numpy(codes.astype(np.int32)), 1)
    pairs = torch().from_numpy(np.ascontiguousarray(np.stack([scale, least + 8 * scale], -1)))
    return lambda x, layer: torch()._weight_int4pack_mm_for_cpu(x, layer[0], 32, layer[1]), (packed, pairs)


_TORCH = {"int8": ("int8 weights", _torch_int8), "Q4_1": ("int4 weights", _torch_int4)}


def contestants(
    setting: Setting,
    encoding: str,
    sizes: Sequence[tuple[int, int]],
    rows: int,
    activations: ops.Activations = "exact",
) -> dict[str, Callable[[], Runner]]:
    made = [quantized(encoding, weight) for weight in weights(sizes)]
    small, wide = [parts for parts, _ in made], [weight for _, weight in made]
    x = normal(99, rows, sizes[0][1])

    def on_jax(apply: Apply, layers: Sequence[Any]) -> Runner:
        return setting.clock.runner(functools.partial(through(apply), sizes=sizes), x, layers)

    def of_torch(pack: Callable[[Any], tuple[Apply, Any]], layers: Sequence[Any]) -> Runner:
        packed = [pack(layer) for layer in layers]
        program, given = through(packed[0][0]), to_torch(x)
        torch_layers = [layer for _, layer in packed]

        def call() -> Any:
            with torch().no_grad():
                return program(given, torch_layers, sizes)

        return waited_for(call)

    def of_onnx() -> Runner:
        run, given = _onnx_linear.program(encoding, small, sizes, activations, setting.threads), np.asarray(x)
        return waited_for(lambda: run(given))

    runners: dict[str, Callable[[], Runner]] = _ours(on_jax, encoding, activations, small) | {
        "XLA: f32 weights": functools.partial(on_jax, f32, wide),
        "XLA: f32 weights, transposed": lambda: on_jax(jnp.matmul, [jnp.array(weight.T) for weight in wide]),
        "XLA: expanded in the program": functools.partial(on_jax, expanded(encoding), small),
    }
    if setting.torch:
        wide_pack = lambda weight: (lambda x, layer: torch().nn.functional.linear(x, layer), to_torch(weight))
        runners["torch: f32 weights"] = functools.partial(of_torch, wide_pack, wide)
        if encoding in _TORCH:
            name, pack = _TORCH[encoding]
            runners[f"torch: {name}"] = functools.partial(of_torch, pack, small)
    if _onnx_linear.has_operator(encoding):
        runners["onnxruntime"] = of_onnx
    return runners


def _ours(
    on_jax: Callable[[Apply, Sequence[Any]], Runner], encoding: Any, activations: ops.Activations, layers: Sequence[Any]
) -> dict[str, Callable[[], Runner]]:
    """The weights as a file has them, and as `QuantizedLinear.packed` puts them, where it does."""
    if encoding not in ops.INTERLEAVED or any(blocks.shape[0] % ops.INTERLEAVED_ROWS for blocks in layers):
        return {OURS: functools.partial(on_jax, ours(encoding, activations), layers)}

    def packed() -> Runner:
        side_by_side = [ops.interleave_rows(blocks, encoding=encoding) for blocks in layers]
        return on_jax(ours(ops.INTERLEAVED[encoding], activations), side_by_side)

    return {f"{OURS}: rows": functools.partial(on_jax, ours(encoding, activations), layers), f"{OURS}: packed": packed}


# What is done to weights, and to activations: where there is one row, and many.
_OF_ONE: tuple[tuple[str, ops.Activations], ...] = (
    ("int8", "exact"),
    ("Q4_1", "exact"),
    ("Q4_1", "int8"),
    ("Q8_0", "exact"),
)
_OF_MANY: tuple[tuple[str, ops.Activations], ...] = (
    ("int8", "exact"),
    ("int8", "int8"),
    ("Q4_1", "exact"),
    ("Q8_0", "exact"),
)
# One gaussian layer after the other: what rounding errs by adds up.
_TOLERANCES: dict[ops.Activations, float] = {"exact": 1e-3, "int8": 0.1}


def _name(encoding: str, activations: ops.Activations) -> str:
    return encoding if activations == "exact" else f"{encoding} times int8 activations"


def measure(setting: Setting) -> Iterator[Row]:
    model = shapes.TINY if setting.tiny else shapes.GPT2
    layers = 1 if setting.tiny else 4 if setting.quick else model.layers
    of_layer = list(model.matrices.values())
    for encoding, activations in _OF_ONE:
        sizes = of_layer * layers
        count = sum(out * features for out, features in sizes)
        made = contestants(setting, encoding, sizes, 1, activations)
        made[READ] = functools.partial(read_runner, setting)
        yield Row(
            f"one token, {_name(encoding, activations)}, {layers} layers of {model.name}, {count / 1e6:.0f} M weights",
            "GB/s",
            count * _BITS[encoding] / 8,
            setting.race(made),
            (Goal(BEST), Goal("probe", 0.8)),
            more_work={READ: read_bytes(setting)},
            tolerance=_TOLERANCES[activations],
        )
    yield from _many(setting, of_layer)


def _many(setting: Setting, sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    counts = (6,) if setting.tiny else (512,) if setting.quick else (32, 512)
    work = 2.0 * sum(out * features for out, features in sizes)
    for rows in counts:
        for encoding, activations in _OF_MANY:
            made = contestants(setting, encoding, sizes, rows, activations)
            peak = _add_peak(made, setting, FMA if activations == "exact" else BYTES)
            yield Row(
                f"{rows} tokens, {_name(encoding, activations)}, one layer",
                "GFLOP/s",
                rows * work,
                setting.race(made),
                (Goal(BEST),),
                more_work=peak,
                tolerance=_TOLERANCES[activations],
            )
    yield _bf16(setting, sizes, counts[-1], work)


def _add_peak(made: dict[str, Callable[[], Runner]], setting: Setting, name: str) -> dict[str, float]:
    """Add the probe if this machine has its instructions, and return the operations of one call."""
    operations = multiply_operations(setting, name)
    if operations:
        made[name] = functools.partial(multiply_runner, setting, name)
    return {name: operations} if operations else {}


def _bf16(setting: Setting, sizes: Sequence[tuple[int, int]], rows: int, work: float) -> Row:
    """Products of matrices in bf16."""
    given = [weight.astype(jnp.bfloat16) for weight in weights(sizes)]
    x = normal(99, rows, sizes[0][1], dtype=jnp.bfloat16)

    def on_jax(apply: Apply) -> Runner:
        return setting.clock.runner(functools.partial(through(apply), sizes=sizes), x, given)

    def of_torch() -> Runner:
        tensors, operand = [to_torch(weight) for weight in given], to_torch(x)
        program = through(lambda x, layer: torch().nn.functional.linear(x, layer))

        def call() -> Any:
            with torch().no_grad():
                return program(operand, tensors, sizes)

        return waited_for(call)

    wide = lambda x, weight: f32(x.astype(jnp.float32), weight.astype(jnp.float32)).astype(x.dtype)
    made: dict[str, Callable[[], Runner]] = {
        OURS: functools.partial(on_jax, ops.linear),
        "XLA: bf16": functools.partial(on_jax, f32),
        "XLA: in f32": functools.partial(on_jax, wide),
    }
    made |= {"torch": of_torch} if setting.torch else {}
    peak = _add_peak(made, setting, PAIRS)
    case = f"{rows} tokens, bfloat16, one layer"
    return Row(case, "GFLOP/s", rows * work, setting.race(made), (Goal(BEST),), more_work=peak, tolerance=0.05)
