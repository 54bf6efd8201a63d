"""One token of SmolLM2 is one command buffer."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

import eqxcallback as eqxc
from eqxcallback import xla
from models import gguf, llama

from .programs import thunks


BLOCKS = 30
# Two norms, four linear layers, the rotation with the cache, attention, the gate.
CALLS_OF_BLOCK = 9
# Around them: tables of angles, the embedding, the length, the last norm and the logits.
OTHERS = 12


@pytest.fixture(scope="module")
def model():
    return llama.load(gguf.open_model(gguf.default_path()), dtype=jnp.bfloat16)


def step(model, token, cache):
    x, cache = model(token[None], cache)
    return jnp.argmax(model.logits(x)[-1]).astype(jnp.int32), cache


def several(model, token, cache):
    """Tokens in a loop, as a program that generates has them."""

    def next_token(carry, _):
        token, cache = step(model, *carry)
        return (token, cache), token

    (_, cache), tokens = jax.lax.scan(next_token, (token, cache), length=8)
    return tokens, cache


def copied(compiled):
    """The types that the program copies."""
    return set(re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", compiled.hlo_text))


def plan(f, model):
    args = (model, jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: model.init_cache(512)))
    lowered = jax.jit(f, donate_argnums=2).trace(*args).lower(lowering_platforms=("cuda",))
    compiled = xla.compile_deviceless(lowered, compiler_options=eqxc.jit_captured(f).compiler_options)
    return thunks(compiled), compiled


def test_an_exported_step_has_each_image_once(model, monkeypatch):
    monkeypatch.setattr(llama, "_run_block", lambda block, *arguments: block(*arguments))  # each block is written out
    args = (model, jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: model.init_cache(512)))
    exported = eqxc.export(step, platforms=["cuda"])(*args)
    text = exported.mlir_module()
    images = [bytes.fromhex(found) for found in re.findall(r'images = dense<"0x([0-9A-F]*)"', text)]
    assert len(images) == BLOCKS * CALLS_OF_BLOCK + 2
    assert len(exported.serialize()) < sum(map(len, set(images))) + 300_000 < sum(map(len, images)) / 10


def test_a_step_is_one_command_buffer(model):
    every, compiled = plan(step, model)
    kinds = collections.Counter(thunk.kind for thunk in every)
    assert kinds["kCommandBuffer"] == 1
    assert kinds["kCustomCall"] == BLOCKS * CALLS_OF_BLOCK + 2
    assert kinds.total() <= BLOCKS * CALLS_OF_BLOCK + OTHERS
    outside = [thunk.kind for thunk in every if thunk.buffer is None and thunk.kind != "kCommandBuffer"]
    assert outside == []
    assert copied(compiled) <= {"s32[]"}  # the cache is written where it lies; lengths are copied


def test_each_step_of_a_loop_is_one_command_buffer(model):
    every, compiled = plan(several, model)
    calls = [thunk for thunk in every if thunk.kind == "kCustomCall"]
    assert len(calls) == BLOCKS * CALLS_OF_BLOCK + 2
    assert len({id(thunk.buffer) for thunk in calls}) == 1
    assert calls[0].buffer is not None
    assert copied(compiled) <= {"s32[]", "s32[1]"}
