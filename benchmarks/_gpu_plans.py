"""XLA's plans for our programs: on the GPU that is there, and on the described one that the tests without a GPU compile for.

`python -m benchmarks._gpu_plans --to FILE`, where `JAX_PLATFORMS=cpu` asks for the described one.
"""

import argparse
import collections
import itertools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import eqxcallback as eqxc
from eqxcallback import ops, xla
from eqxcallback.inspection import _thunks

from . import _gpu_decode


BF16 = jnp.bfloat16


def struct(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    """A function, its operands, and which of them are donated: each op, and gradients."""
    f32, int32 = jnp.float32, jnp.int32
    cache, scalar = struct(2, 256, 2, 64), struct(dtype=int32)
    weight, table = struct(576, dtype=f32), struct(5, 32, dtype=f32)
    q4, q8 = struct(576, 360, dtype=jnp.uint8), struct(576, 612, dtype=jnp.uint8)

    def attention(q: Any, k: Any, v: Any) -> jax.Array:
        return ops.attention(q, k, v, causal=True)

    def summed(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda *args: (f(*args).astype(f32) ** 2).sum()

    return {
        "rms_norm": (lambda x, w: ops.rms_norm(x, w), (struct(8, 576), weight), ()),
        "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b), (struct(8, 576), weight, weight), ()),
        "rotary_embedding": (ops.rotary_embedding, (struct(2, 5, 8, 64), table, table), ()),
        "swiglu": (ops.swiglu, (struct(8, 1536), struct(8, 1536)), ()),
        "softmax_cross_entropy": (ops.softmax_cross_entropy, (struct(8, 1000), struct(8, dtype=int32)), ()),
        "attention": (attention, (struct(2, 256, 6, 64), cache, cache), ()),
        "decode_attention": (ops.decode_attention, (struct(2, 6, 64), cache, cache, struct(2, dtype=int32)), ()),
        "cache_append": (lambda c, rows, p: ops.cache_append(c, rows, p), (cache, struct(1, 256, 2, 64), scalar), (0,)),
        "cache_append, not donated": (
            lambda c, rows, p: ops.cache_append(c, rows, p),
            (cache, struct(1, 256, 2, 64), scalar),
            (),
        ),
        "quantized_linear Q4_1": (lambda x, w: ops.quantized_linear(x, w, encoding="Q4_1"), (struct(1, 576), q4), ()),
        "quantized_linear Q8_0": (lambda x, w: ops.quantized_linear(x, w, encoding="Q8_0"), (struct(64, 576), q8), ()),
        "rms_norm, gradients": (jax.grad(summed(ops.rms_norm), (0, 1)), (struct(8, 576), weight), ()),
        "attention, gradients": (
            jax.grad(summed(attention), (0, 1, 2)),
            (struct(2, 256, 6, 64), cache, cache),
            (),
        ),
    }


def decode_programs(tiny: bool) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]]:
    llm, which = _gpu_decode.model(tiny)
    weights, tree = jax.tree.flatten(llm)
    cache = jax.eval_shape(lambda: llm.init_cache(512))
    args = (weights, struct(dtype=jnp.int32), cache)

    def step(weights: Any, token: Any, cache: Any) -> Any:
        return _gpu_decode.step(weights, tree, token, cache)

    def several(weights: Any, token: Any, cache: Any) -> Any:
        return _gpu_decode.scanned(weights, tree, token, cache, 8)

    return {f"a decode step, {which}": (step, args, (2,)), f"a scan of 8, {which}": (several, args, (2,))}


def summary(compiled: xla.Compiled) -> dict[str, Any]:
    """What two plans have to agree on, and beside it what each is made of."""
    every = [thunk for outer in _thunks.parse(compiled.thunks, compiled.thunk_names) for thunk in outer]
    calls = [thunk for thunk in every if thunk.kind == "kCustomCall"]
    return {
        "captured": ", ".join(
            f"{len(list(run))} {'yes' if inside else 'no'}"
            for inside, run in itertools.groupby(calls, lambda thunk: thunk.buffer is not None)
        ),
        "copies": sum("Copy" in thunk.kind or "Memcpy" in thunk.kind for thunk in every),
        "command_buffers": sum(thunk.kind == "kCommandBuffer" for thunk in every),
        "kinds": dict(collections.Counter(thunk.kind for thunk in every)),
    }


def plans(tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    on_gpu = jax.default_backend() == "gpu"
    captured = dict(eqxc.jit_captured(lambda: None).compiler_options)
    ways: Mapping[str, dict[str, Any]] = {"default": {}, "captured": captured}
    every = {**programs(), **decode_programs(tiny)}
    for name, (f, args, donated) in every.items():
        for way, options in ways.items():
            start = time.monotonic()
            try:
                traced = jax.jit(f, donate_argnums=donated).trace(*args)
                if on_gpu:
                    compiled = xla.compile_with_plan(traced.lower(), options)
                else:
                    compiled = xla.compile_deviceless(traced, compiler_options=options)
                found: dict[str, Any] = {**summary(compiled), "thunks": compiled.thunks}
            except Exception as error:  # one program must not cost the others
                found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            yield f"{name}; {way}", {**found, "seconds": round(time.monotonic() - start, 1)}


def target_config() -> str:
    """What XLA knows of the GPU that it compiles for, as it writes it: eqxcallback/xla/h200.txtpb describes one."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile(compiler_options=options)
        found = sorted(pathlib.Path(folder).glob("*target_config*"))
        return found[0].read_text() if found else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=pathlib.Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    data: dict[str, Any] = {"plans": {}, "target_config": target_config() if on_gpu else ""}
    reason = None if on_gpu else xla.deviceless_unavailable()
    if reason is not None:
        data["unavailable"] = reason
    else:
        for name, found in plans(options.tiny):
            data["plans"][name] = found
            options.to.write_text(json.dumps(data))
            text = found.get("error") or {key: found[key] for key in ("captured", "copies", "command_buffers")}
            print(f"{name}: {text} ({found['seconds']} s)", flush=True)
    options.to.write_text(json.dumps(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
