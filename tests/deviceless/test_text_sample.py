"""A token of `models.train sample`: the model and the choice are one command buffer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc
from eqxcallback import xla
from models.decoding.chooser import Choice
from models.decoding.sampling import Sampling
from models.train.text_sample import make_step
from models.transformer import GPT, Config

from .programs import thunks


def test_a_token_is_one_command_buffer():
    config = Config(num_layers=2, embedding_size=128, hidden_size=512, num_heads=2, length=64)
    model = eqxc.fuse(GPT(config, 300, key=jax.random.key(0))).model
    weights, static = eqx.partition(model, eqx.is_array)
    choice = Choice(Sampling(temperature=0.8))
    tokens, place = jax.ShapeDtypeStruct((64,), jnp.int32), np.int32(0)
    program = make_step(static, 280, choice.steps).trace(weights, tokens, place, place, *choice.operands(280))
    every = thunks(xla.compile_deviceless(program.lower(lowering_platforms=("cuda",))))
    assert [thunk.kind for thunk in every].count("kCommandBuffer") == 1
    assert [thunk.kind for thunk in every if thunk.buffer is None and thunk.kind != "kCommandBuffer"] == []
