"""XLA's plans for our programs: on the GPU that is there, and on the described one that the tests without a GPU compile for.

`python -m benchmarks.gpu.plans --to FILE`, where `JAX_PLATFORMS=cpu` asks for the described one.
"""

import argparse
import collections
import itertools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import eqxcallback as eqxc
from eqxcallback import xla
from eqxcallback.inspection import _thunks

from ..programs import PROGRAMS, Program, struct
from . import decode


def programs() -> dict[str, Program]:
    """Each op, and what differs where memory is not donated, or with gradients."""
    return {
        **PROGRAMS,
        "cache_append, not donated": PROGRAMS["cache_append"]._replace(donated=()),
        **{f"{name}, gradients": PROGRAMS[name].gradients for name in ("rms_norm", "attention")},
    }


def decode_programs(tiny: bool) -> dict[str, Program]:
    llm, which = decode.model(tiny)
    weights, tree = jax.tree.flatten(llm)
    cache = jax.eval_shape(lambda: llm.init_cache(512))
    args = (weights, struct(dtype=jnp.int32), cache)

    def step(weights: Any, token: Any, cache: Any) -> Any:
        return decode.step(weights, tree, token, cache)

    def several(weights: Any, token: Any, cache: Any) -> Any:
        return decode.scanned(weights, tree, token, cache, 8)

    return {f"a decode step, {which}": Program(step, args, (2,)), f"a scan of 8, {which}": Program(several, args, (2,))}


def summary(compiled: xla.Compiled) -> dict[str, Any]:
    """Summarise a plan: what two plans have to agree on, and beside it what each is made of."""
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
    for name, program in every.items():
        for way, options in ways.items():
            start = time.monotonic()
            try:
                traced = jax.jit(program.function, donate_argnums=program.donated).trace(*program.args)
                if on_gpu:
                    compiled = xla.compile_with_plan(traced.lower(), options)
                else:
                    compiled = xla.compile_deviceless(traced, compiler_options=options)
                plan: dict[str, Any] = {**summary(compiled), "thunks": compiled.thunks}
            except Exception as error:  # one program must not cost the others
                plan = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            yield f"{name}; {way}", {**plan, "seconds": round(time.monotonic() - start, 1)}


def target_config() -> str:
    """Return XLA's own description of the GPU that it compiles for: eqxcallback/xla/programs/h200.txtpb describes one."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile(compiler_options=options)
        files = sorted(pathlib.Path(folder).glob("*target_config*"))
        return files[0].read_text() if files else ""


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
        for name, plan in plans(options.tiny):
            data["plans"][name] = plan
            options.to.write_text(json.dumps(data))
            text = plan.get("error") or {key: plan[key] for key in ("captured", "copies", "command_buffers")}
            print(f"{name}: {text} ({plan['seconds']} s)", flush=True)
    options.to.write_text(json.dumps(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
