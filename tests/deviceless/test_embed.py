"""Vectors of sentences: the whole model is one command buffer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqxcallback import xla
from models import bert, embedder

from .programs import thunks


# All-MiniLM-L6-v2, with two of its blocks.
CONFIG = bert.Config(
    num_layers=2,
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


def test_the_program_is_one_command_buffer(model):
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((ROWS, LENGTH), (ROWS,)))
    leaves, structure = jax.tree.flatten(model)
    program = embedder._program(structure)
    operands = leaves, tokens, lengths
    compiled = xla.compile_deviceless(program.trace(*operands).lower(lowering_platforms=("cuda",)))
    every = thunks(compiled)
    assert [thunk.kind for thunk in every].count("kCommandBuffer") == 1
    assert [thunk.kind for thunk in every if thunk.buffer is None and thunk.kind != "kCommandBuffer"] == []
    ours = [thunk for thunk in every if thunk.kind == "kCustomCall"]
    assert len(ours) == 1 + 3 * CONFIG.num_layers
