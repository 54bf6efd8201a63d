"""One token of SmolLM2 is one command buffer."""

import collections
import functools
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import xla
from models import gguf, llama
from models.decoding.chooser import Choice, operands_of
from models.decoding.reader import Reader
from models.decoding.rows import Rows
from models.decoding.sampling import Sampling

from ..models.tiny import write_tiny
from .programs import thunks


BLOCKS = 30
# Two norms, four linear layers, one of them with the gate, the rotation with the cache, and attention.
CALLS_OF_BLOCK = 8
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


def plan(f, model, init_cache=None):
    cache = jax.eval_shape(init_cache or (lambda: model.init_cache(512)))
    return plan_of(f, model, jax.ShapeDtypeStruct((), jnp.int32), cache, donate_argnums=2)


def plan_of(f, *args, donate_argnums):
    lowered = jax.jit(f, donate_argnums=donate_argnums).trace(*args).lower(lowering_platforms=("cuda",))
    compiled = xla.compile_deviceless(lowered, compiler_options=eqxc.jit_captured(f).compiler_options)
    return thunks(compiled), compiled


def kinds_outside(every):
    """The steps that no command buffer has."""
    return [thunk.kind for thunk in every if thunk.buffer is None and thunk.kind != "kCommandBuffer"]


@pytest.mark.parametrize("blocks", ["one function", "written out"])
def test_calls_share_their_images(blocks, model, monkeypatch):
    if blocks == "written out":
        monkeypatch.setattr(llama, "_run_block", lambda block, *arguments: block(*arguments))
    args = (model, jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: model.init_cache(512)))
    exported = eqxc.export(step, platforms=["cuda"])(*args)
    text = exported.mlir_module()
    images = [bytes.fromhex(digits) for digits in re.findall(r'images = dense<"0x([0-9A-F]*)"', text)]
    assert len(images) == CALLS_OF_BLOCK + 1  # both norms of a block are the same call
    assert len(text.encode()) < 2 * sum(map(len, images)) + 1_000_000
    assert len(exported.serialize()) < sum(map(len, set(images))) + 300_000
    assert text.count("call @native_call") == (1 if blocks == "one function" else BLOCKS) * CALLS_OF_BLOCK + 2


def test_a_step_is_one_command_buffer(model):
    every, compiled = plan(step, model)
    kinds = collections.Counter(thunk.kind for thunk in every)
    assert kinds["kCommandBuffer"] == 1
    assert kinds["kCustomCall"] == BLOCKS * CALLS_OF_BLOCK + 2
    assert kinds.total() <= BLOCKS * CALLS_OF_BLOCK + OTHERS
    assert kinds_outside(every) == []
    assert copied(compiled) <= {"s32[]"}  # the cache is written where it lies; lengths are copied


def test_each_step_of_a_loop_is_one_command_buffer(model):
    every, compiled = plan(several, model)
    calls = [thunk for thunk in every if thunk.kind == "kCustomCall"]
    assert len(calls) == BLOCKS * CALLS_OF_BLOCK + 2
    assert len({id(thunk.buffer) for thunk in calls}) == 1
    assert calls[0].buffer is not None
    assert copied(compiled) <= {"s32[]", "s32[1]"}


def test_a_step_over_ring_buffers_is_one_command_buffer(model):
    def init_cache():
        config, cache = model.config, model.init_cache(1)
        ring = eqxc.nn.KVCache(512, config.num_kv_heads, config.head_size, model.dtype, window=128)
        blocks = [
            eqx.tree_at(lambda ring: ring.length, ring, None, is_leaf=lambda leaf: leaf is None) for _ in cache.blocks
        ]
        return llama.Cache(blocks, cache.length)

    every, compiled = plan(step, model, init_cache)
    assert [thunk.kind for thunk in every].count("kCommandBuffer") == 1
    assert kinds_outside(every) == []
    assert copied(compiled) <= {"s32[]"}


def test_a_chunk_of_a_prompt_is_one_command_buffer(model):
    reader = Reader(model, 256)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((32,), (), ())]
    weights = jax.tree.leaves(model)
    every, compiled = plan_of(reader._run, weights, *shapes, reader.shapes, donate_argnums=4)
    assert [thunk.kind for thunk in every].count("kCommandBuffer") == 1
    assert kinds_outside(every) == []
    assert copied(compiled) <= {"s32[]"}


@pytest.mark.parametrize("size", [1, llama.FEW_TOKENS])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7)], ids=["greedy", "drawn"])
def test_a_step_with_the_choice_of_tokens_is_one_command_buffer(model, size, sampling):
    reader, choice = Reader(model, 256), Choice(sampling)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size,), ())]
    operands = jax.tree.leaves(model), *shapes, reader.shapes, *choice.operands(model.config.vocab_size)
    every, compiled = plan_of(functools.partial(reader._run_step, choice.steps), *operands, donate_argnums=3)
    assert [thunk.kind for thunk in every].count("kCommandBuffer") == 1
    assert [thunk.kind for thunk in every].count("kCustomCall") == BLOCKS * CALLS_OF_BLOCK + 2
    assert kinds_outside(every) == []
    assert copied(compiled) <= {"s32[]"}


def test_a_step_of_a_batch_with_the_choice_of_tokens_is_one_command_buffer(model):
    """One program for all options: what is not needed is left out where it runs, in the same command buffer."""
    one = Reader(model, 256).shapes
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), one)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 1), (4,))]
    choices = operands_of([None] * 4, np.zeros((4, model.config.vocab_size), bool))
    operands = jax.tree.leaves(model), *shapes, cache, *choices
    every, compiled = plan_of(Rows(model, one)._step, *operands, donate_argnums=3)
    kinds = [thunk.kind for thunk in every]
    assert kinds.count("kCommandBuffer") == 1
    assert kinds.count("kCustomCall") == BLOCKS * CALLS_OF_BLOCK + 2
    assert "kConditional" in kinds
    assert kinds_outside(every) == []
    assert not [kind for kind in copied(compiled) if kind.startswith("bf16")]  # no cache


def elements(types):
    """Count those of each type, as `f32[3,64]`."""
    return [math.prod(map(int, re.findall(r"\d+", kind.split("[")[1]))) for kind in types]


# Weights, activations, cache, how inputs of layers are rounded, and how many rows one program has.
@pytest.mark.parametrize(
    ("weights", "dtype", "cache_dtype", "activations", "rows"),
    [
        ("F32", "float32", None, "exact", 1),
        ("F32", "float32", "int8", "exact", 3),
        ("F16", "float32", "float16", "exact", 1),
        ("F16", "bfloat16", "int8", "exact", 3),
        ("Q4_K", "bfloat16", None, "exact", 1),
        ("Q4_K", "float32", "int8", "int8", 3),
        ("Q8_0", "float32", "float16", "int8", 3),
        ("Q8_0", "bfloat16", "int8", "exact", 1),
        ("Q4_1", "bfloat16", None, "int8", 3),
        ("Q4_1", "float32", None, "exact", 3),
    ],
)
def test_a_step_of_each_kind_is_one_command_buffer(weights, dtype, cache_dtype, activations, rows, tmp_path):
    """On a small model, of tokens that are drawn with a penalty."""
    write_tiny(tmp_path / "tiny.gguf", other=weights, width=256, hidden=512, context=300)
    file = gguf.open_model(tmp_path / "tiny.gguf")
    model = llama.load(file, dtype=dtype, cache_dtype=cache_dtype, activations=activations)
    reader, choice = Reader(model, 256), Choice(Sampling(temperature=0.7, repetition_penalty=1.2))
    one, leaves, vocab_size = reader.shapes, jax.tree.leaves(model), model.config.vocab_size
    if rows == 1:
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), ())]
        f, operands = functools.partial(reader._run_step, choice.steps), choice.operands(vocab_size)
        cache = one
    else:
        shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 1), (rows,))]
        f, operands = Rows(model, one)._step, operands_of([choice] * rows, np.zeros((rows, vocab_size), bool))
        cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), one)
    every, compiled = plan_of(f, leaves, *shapes, cache, *operands, donate_argnums=3)
    kinds = [thunk.kind for thunk in every]
    assert kinds.count("kCommandBuffer") == 1
    assert kinds.count("kCustomCall") > 10
    assert kinds_outside(every) == []
    assert max(elements(copied(compiled)), default=0) < min(x.size for x in jax.tree.leaves(cache))  # no cache
