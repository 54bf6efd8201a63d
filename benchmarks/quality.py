"""Measure what fewer bits cost in quality, and what they bring: SmolLM2-135M-Instruct on texts that scikit-learn ships with.

Weights, activations and the cache in fewer bits change results. Perplexity and logits say how much, tokens per second what for.
"""

import argparse
import dataclasses
import functools
import importlib.resources
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqxcallback import nn
from models import gguf, llama
from models.tokens.tokenizer import Tokenizer

from . import _report
from ._timing import Timing, interleaved


_TEXTS = ("twenty_newsgroups", "lfw", "breast_cancer", "kddcup99")
_LENGTH = 512  # tokens of each
_STEPS = 8
_COUNTED = ("prompt", "decode")


class Variant(NamedTuple):
    """`change` is made to every layer over quantized weights, or to those of blocks: the embedding is the output too."""

    weights: str
    activations: str
    change: Callable[[nn.QuantizedLinear], nn.QuantizedLinear] = lambda layer: layer
    dtype: Any = jnp.float32
    only_blocks: bool = False
    cache_dtype: Any = None


def _rounding(layer: nn.QuantizedLinear) -> nn.QuantizedLinear:
    return nn.QuantizedLinear(layer.blocks, layer.encoding, layer.scale, layer.bias, activations="int8")


def _as_int8(layer: nn.QuantizedLinear) -> nn.QuantizedLinear:
    """Encode a layer as int8, with a scale for each output feature."""
    linear = eqx.filter_eval_shape(
        eqx.nn.Linear, layer.in_features, layer.out_features, use_bias=False, key=jax.random.key(0)
    )
    linear = eqx.tree_at(lambda x: x.weight, linear, layer.rows(jnp.arange(layer.out_features)))
    return nn.QuantizedLinear.from_linear(linear, encoding="int8")


# The first is what the others are compared with.
VARIANTS = (
    Variant("Q4_1 and Q8_0, the file's", "f32"),
    Variant("Q4_1 and Q8_0, the file's", "int8 in products", _rounding),
    Variant("Q4_1 and Q8_0, the file's", "int8 in products of blocks", _rounding, only_blocks=True),
    Variant("Q4_1 and Q8_0, the file's", "bf16, cache too", dtype=jnp.bfloat16),
    Variant("Q4_1 and Q8_0, the file's", "f32, cache in f16", cache_dtype=jnp.float16),
    Variant("Q4_1 and Q8_0, the file's", "f32, cache in int8", cache_dtype=jnp.int8),
    Variant("int8 of the file's", "f32", _as_int8),
    Variant("int8 of the file's", "int8 in products", lambda layer: _rounding(_as_int8(layer))),
)


def variant_of(model: llama.Llama, variant: Variant) -> llama.Llama:
    is_layer = lambda x: isinstance(x, nn.QuantizedLinear)
    changed = jax.tree.map(lambda x: variant.change(x) if is_layer(x) else x, model, is_leaf=is_layer)
    changed = dataclasses.replace(model, blocks=changed.blocks) if variant.only_blocks else changed
    return dataclasses.replace(changed, dtype=jnp.dtype(variant.dtype), cache_dtype=variant.cache_dtype)


def texts(tokenizer: Tokenizer, length: int) -> list[np.ndarray]:
    """The first tokens of each."""
    folder = importlib.resources.files("sklearn.datasets.descr")
    encoded = [tokenizer.encode((folder / f"{name}.rst").read_text(encoding="utf-8")) for name in _TEXTS]
    return [np.asarray(tokens[:length], np.int32) for tokens in encoded]


class Quality(NamedTuple):
    """**Attributes:**

    - `perplexity`: of all texts: the exponential of the mean loss of a token.
    - `error`: of the logits, the root of the mean square, over the standard deviation of those that are compared with.
    - `agreement`: how often the most likely token is the same.
    """

    perplexity: float
    error: float
    agreement: float


def quality_of(logits: Sequence[np.ndarray], exact: Sequence[np.ndarray], given: Sequence[np.ndarray]) -> Quality:
    losses, squares, agreed = [], [], []
    for got, want, tokens in zip(logits, exact, given, strict=True):
        shifted = got[:-1] - got[:-1].max(-1, keepdims=True)
        picked = np.take_along_axis(shifted, tokens[1:, None].astype(np.int64), -1)[:, 0]
        losses.append(np.log(np.exp(shifted).sum(-1)) - picked)
        squares.append([np.mean((got - want) ** 2), np.var(want, axis=-1).mean()])
        agreed.append(got.argmax(-1) == want.argmax(-1))
    error, size = np.mean(squares, axis=0)
    mean = float(np.mean(np.concatenate(losses)))
    return Quality(math.exp(mean), math.sqrt(error / size), float(np.mean(np.concatenate(agreed))))


class Contestant:
    """A model, and what it does with a text."""

    def __init__(self, model: llama.Llama, given: Sequence[np.ndarray]):
        weights, tree = jax.tree.flatten(model)
        length = max(map(len, given))

        def step(weights: Any, tokens: Any, cache: Any) -> Any:
            model = jax.tree.unflatten(tree, weights)
            x, cache = model(tokens, cache)
            return model.logits(x), cache

        jitted = jax.jit(step, donate_argnums=2)
        self._step = functools.partial(jitted, weights)
        self._new_cache = lambda: model.init_cache(length + 256)
        self._text = given[0]
        self._cache = self._new_cache()

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(self._step(tokens, self._new_cache())[0])

    def prompt(self) -> None:
        """Run a prompt, with the logits of all tokens."""
        jax.block_until_ready(self._step(self._text, self._new_cache()))

    def decode(self) -> None:
        """The first tokens again, always after as many as the text has."""
        length = jnp.int32(len(self._text))
        for i in range(_STEPS):
            here = eqx.tree_at(lambda cache: cache.length, self._cache, length + i)
            logits, self._cache = self._step(self._text[i : i + 1], here)
            logits.block_until_ready()


def measure(mode: str) -> dict[str, Any]:
    file = gguf.open_model(gguf.default_path())
    model, given = llama.load(file), texts(Tokenizer(file.metadata), 24 if mode == "tiny" else _LENGTH)
    if mode == "tiny":
        config = dataclasses.replace(model.config, num_layers=2)
        model = dataclasses.replace(model, blocks=model.blocks[:2], config=config)
    made = {variant: Contestant(variant_of(model, variant), given) for variant in VARIANTS}
    exact: list[np.ndarray] = []
    results: dict[Variant, Quality] = {}
    for variant, contestant in made.items():
        logits = [contestant.logits(tokens) for tokens in given]
        exact = exact or logits
        results[variant] = quality_of(logits, exact, given)
    rounds = {"full": 9, "quick": 3, "tiny": 2}[mode]
    calls = {f"{i}, {what}": getattr(made[variant], what) for i, variant in enumerate(made) for what in _COUNTED}
    seconds = interleaved(calls, rounds=rounds, round_seconds=0.0)
    timings = {(variant, what): seconds[f"{i}, {what}"] for i, variant in enumerate(made) for what in _COUNTED}
    counts = {"prompt": len(given[0]), "decode": _STEPS}
    rows = [
        {
            "weights": variant.weights,
            "activations": variant.activations,
            **quality._asdict(),
            **{what: _speed(timings[variant, what], count) for what, count in counts.items()},
        }
        for variant, quality in results.items()
    ]
    tokens = sum(map(len, given))
    return {"machine": _report.machine(), "mode": mode, "texts": _TEXTS, "tokens": tokens, "variants": rows}


def _speed(timing: Timing, count: int) -> dict[str, float]:
    """Tokens per second."""
    return {"median": count / timing.median, "low": count / timing.high, "high": count / timing.low}


def markdown(data: Mapping[str, Any]) -> str:
    header = [
        "weights",
        "activations",
        "perplexity",
        "error of logits",
        "same token",
        "prompt, tokens/s",
        "decode, tokens/s",
    ]
    first, lines = data["variants"][0], []
    for row in data["variants"]:
        speeds = [f"{row[what]['median']:.0f} ({row[what]['median'] / first[what]['median']:.2f})" for what in _COUNTED]
        quality = [f"{row['perplexity']:.3f}", f"{row['error']:.2%}", f"{row['agreement']:.1%}"]
        lines.append([row["weights"], row["activations"], *quality, *speeds])
    about = (
        f"SmolLM2-135M-Instruct over {data['tokens']} tokens of {len(data['texts'])} texts of scikit-learn. Errors are root mean "
        "squares over the standard deviation of the logits of the first row, and ratios are to its speeds; *same token* is how "
        "often the most likely one is that of the first row."
    )
    return "\n\n".join([_report.table(header, lines), about, _report.measured_on(data["machine"])])


def in_own_process(mode: str, results: pathlib.Path) -> None:
    command = [sys.executable, "-m", "benchmarks.quality", "--mode", mode, "--out", str(results)]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--mode", choices=["full", "quick", "tiny"], default="full", help="how many rounds and tokens")
    parser.add_argument("--out", type=pathlib.Path, default=_report.RESULTS, help="a folder for the results")
    options = parser.parse_args()
    data = measure(options.mode)
    print(markdown(data))
    _report.write("quality", markdown(data), data, folder=options.out)


if __name__ == "__main__":
    main()
