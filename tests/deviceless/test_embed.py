"""Vectors of sentences: the embedding, a block, and the mean are one command buffer each."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxcallback import xla
from models import bert, embedder

from .programs import thunks


# All-MiniLM-L6-v2, of one block: all blocks are one program.
CONFIG = bert.Config(
    num_layers=1,
    embedding_size=384,
    hidden_size=1536,
    num_heads=12,
    vocab_size=30_522,
    num_positions=512,
    num_kinds=2,
    layer_norm_eps=1e-12,
)
ROWS, LENGTH = 16, 64


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    whole = eqx.filter_eval_shape(bert.Bert, CONFIG, jnp.float32, key=jax.random.key(0))
    return jax.eval_shape(lambda model: bert.with_one_projection(bert.with_products_of(model, request.param)), whole)


@pytest.mark.parametrize(("name", "calls"), [("embed", 1), ("apply", 3), ("pool", 0)])
def test_each_program_is_one_command_buffer(model, name, calls):
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, CONFIG.embedding_size), jnp.float32)
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((ROWS, LENGTH), (ROWS,)))
    first, block = eqx.tree_at(lambda model: model.blocks, model, []), model.blocks[0]
    leaves = jax.tree.leaves
    operands = {"embed": (leaves(first), tokens), "apply": (leaves(block), x, lengths), "pool": (x, lengths)}[name]
    program = getattr(embedder._programs(jax.tree.structure(first), jax.tree.structure(block)), name)
    compiled = xla.compile_deviceless(program.trace(*operands).lower(lowering_platforms=("cuda",)))
    every = thunks(compiled)
    assert [thunk.kind for thunk in every].count("kCommandBuffer") == 1
    assert [thunk.kind for thunk in every if thunk.buffer is None and thunk.kind != "kCommandBuffer"] == []
    ours = [thunk for thunk in every if thunk.kind == "kCustomCall"]
    assert len(ours) == calls
