"""SmolLM2-135M: one token after the other, as XLA launches it, as it records it by default, and as `jit_captured` has it."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqxcallback as eqxc
from models import gguf, llama
from models._errors import ModelFileError

from .. import shapes
from .._contestants import random_blocks
from .._rows import Goal, Row, Setting
from .._timing import Runner
from .launches import NOT_CAPTURED


STEPS = 64
CAPTURED, PLAIN = "jit_captured", "not captured"


def model(tiny: bool) -> tuple[llama.Llama, str]:
    """The published weights if they are installed, else random ones of the same sizes; and which."""
    if not tiny:
        try:
            return llama.load(gguf.open_model(gguf.default_path()), dtype=jnp.bfloat16), "SmolLM2-135M"
        except ModelFileError:
            pass
    sizes = shapes.TINY if tiny else shapes.SMOLLM2
    config = gguf.Config(
        num_layers=sizes.layers,
        context_length=sizes.length,
        embedding_size=sizes.embedding,
        hidden_size=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        vocab_size=sizes.vocabulary,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
    )
    return _random(config), f"random weights of {sizes.name}'s sizes"


def _random(config: gguf.Config) -> llama.Llama:
    rng = np.random.default_rng(0)

    def blocks(out_features: int, in_features: int, encoding: Any) -> eqxc.nn.QuantizedLinear:
        data = random_blocks(rng, encoding, out_features, in_features // 32)
        return eqxc.nn.QuantizedLinear(jnp.asarray(data), encoding)

    def add_norm() -> eqxc.nn.FusedAddRMSNorm:
        return eqxc.nn.FusedAddRMSNorm(config.embedding_size, config.rms_norm_eps, dtype=jnp.float32)

    def projection(out_features: int, in_features: int) -> llama.Projection:
        return llama.Projection([blocks(out_features, in_features, "Q4_1")])

    queries, keys = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
    size, hidden = config.embedding_size, config.hidden_size
    layers = [
        llama.Block(
            attention_norm=add_norm(),
            qkv=projection(queries + 2 * keys, size),
            attention_out=projection(size, queries),
            feed_forward_norm=add_norm(),
            gate_up=projection(2 * hidden, size),
            down=projection(size, hidden),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
        )
        for _ in range(config.num_layers)
    ]
    embedding = llama.Embedding(blocks(config.vocab_size, size, "Q8_0"))
    norm = eqxc.nn.RMSNorm(size, eps=config.rms_norm_eps, use_bias=False, dtype=jnp.float32)
    return llama.Llama(embedding, layers, norm, None, config, jnp.dtype(jnp.bfloat16))


def step(weights: Any, tree: Any, token: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
    model = jax.tree.unflatten(tree, weights)
    x, cache = model(token[None], cache)
    return jnp.argmax(model.logits(x)[-1]).astype(jnp.int32), cache


def scanned(weights: Any, tree: Any, token: jax.Array, cache: Any, steps: int) -> tuple[jax.Array, Any]:
    """Many tokens in one program."""

    def next_token(carry: Any, _: Any) -> tuple[Any, None]:
        return step(weights, tree, *carry), None

    return jax.lax.scan(next_token, (token, cache), length=steps)[0]


def options() -> dict[str, dict[str, Any]]:
    """Return the compiler's options for each way to run a program."""
    return {
        CAPTURED: dict(eqxc.jit_captured(lambda: None).compiler_options),
        "XLA's default": {},
        PLAIN: dict(NOT_CAPTURED),
    }


def measure(setting: Setting) -> Iterator[Row]:
    llm, which = model(setting.tiny)
    filled, steps = (8, 4) if setting.tiny else (512, STEPS)
    weights, tree = jax.tree.flatten(llm)

    @eqx.filter_jit
    def prompt(weights: Any, tokens: jax.Array, cache: Any) -> Any:
        return jax.tree.unflatten(tree, weights)(tokens, cache)

    tokens = jnp.arange(filled, dtype=jnp.int32) * 7 % llm.config.vocab_size
    _, cache = prompt(weights, tokens, llm.init_cache(2 * filled + steps))

    def decode(jit_options: dict[str, Any], in_one: bool, reads: bool) -> Runner:
        def function(weights: Any, token: jax.Array, cache: Any) -> Any:
            return scanned(weights, tree, token, cache, steps) if in_one else step(weights, tree, token, cache)

        # The token too: what lies elsewhere in the next call is written into the graph, which is then sent to the GPU again.
        program: Callable[..., Any] = jax.jit(function, donate_argnums=(1, 2), compiler_options=jit_options)

        def generate() -> jax.Array:
            token, filled = jnp.int32(1), jax.tree.map(jnp.copy, cache)
            for _ in range(1 if in_one else steps):
                token, filled = program(weights, token, filled)
                if reads:
                    int(token)
            return token

        # The time of a user: the host's, the copy of the prompt's cache in it, which is little.
        def run(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                jax.block_until_ready(generate())
            return time.perf_counter() - start

        return Runner(run, generate)

    kinds = {
        "one program a token": (False, False),
        "one program a token, each token read": (False, True),
        f"a scan of {steps}": (True, False),
    }
    for kind, (in_one, reads) in kinds.items():
        if not setting.has_time():
            return
        runners = {
            name: functools.partial(decode, jit_options, in_one, reads) for name, jit_options in options().items()
        }
        goal = Goal(PLAIN, 3.0, of=CAPTURED)
        yield Row(f"{which}, {filled} tokens before, {kind}", "tokens/s", steps, setting.race(runners), (goal,))
