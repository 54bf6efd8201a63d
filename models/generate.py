"""A language model on a CPU, through eqxcallback's layers: `python -m models.generate "What is the capital of France?"`.

The model is SmolLM2-135M-Instruct, or any Llama-family model in a GGUF file with F32, F16, Q8_0 or Q4_1 weights. The answer
goes to stdout as it is made; progress, and the speed at the end, to stderr.
"""

import argparse
import io
import math
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import NoReturn

import jax.numpy as jnp
from tqdm import tqdm

from . import gguf, llama
from .generator import Generator
from .tokenizer import Tokenizer


_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # without the usage: one line
        raise SystemExit(_fail(message))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m models.generate", description="Answer a prompt with a language model on the CPU.")
    parser.add_argument("prompt", help="what the user says")
    parser.add_argument("--max-tokens", type=int, default=256, help="of the answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="draw from the most likely tokens of this much probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--system", help="the system message (default: the model's own)")
    parser.add_argument(
        "--weights", type=pathlib.Path, metavar="PATH", help="a GGUF file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", choices=list(_DTYPES), default="f32", help="of activations and cache (default: f32)")
    options = parser.parse_args(arguments)
    if options.max_tokens < 1:
        parser.error(f"expected --max-tokens of 1 or more; got {options.max_tokens}")
    if not (options.temperature >= 0 and math.isfinite(options.temperature)):
        parser.error(f"expected --temperature of 0 or more; got {options.temperature}")
    if not 0 < options.top_p <= 1:
        parser.error(f"expected --top-p above 0 and up to 1; got {options.top_p}")
    if not 0 <= options.seed < 2**32:
        parser.error(f"expected --seed from 0 to 2**32 - 1; got {options.seed}")
    return options


def _fail(message: str) -> int:
    _report(f"generate: error: {message}")
    return 2


def _report(text: str) -> None:
    if sys.stderr is not None:  # else it is closed, and `print` would take stdout
        print(text, file=sys.stderr)


def _progress(items: Iterable[int]) -> Iterable[int]:
    if sys.stderr is None:
        return items
    return tqdm(items, desc="loading", unit="block", leave=False, file=sys.stderr)


def _answer(options: argparse.Namespace) -> int:
    path = gguf.default_path() if options.weights is None else options.weights
    file = gguf.open_model(path)
    tokenizer = Tokenizer(file.metadata)
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    tokens = tokenizer.encode_chat(messages)
    if len(tokens) >= file.config.context_length:
        return _fail(
            f"expected a prompt of less than {file.config.context_length} tokens, the model's context; got {len(tokens)}. "
            "Shorten it."
        )
    generator = Generator(
        llama.load(file, dtype=_DTYPES[options.dtype], progress=_progress),
        tokens,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    )
    stream = tokenizer.stream()
    for token in generator:
        if token in tokenizer.stop_tokens:
            break
        print(stream.push(token), end="", flush=True)
    print(stream.flush(), flush=True)
    _report(str(generator.speed))
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters that the model writes
    try:
        return _answer(options)
    except gguf.ModelFileError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Nobody reads any more, or there is no room for more. What Python still holds back would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if isinstance(error, BrokenPipeError) else _fail(f"the answer cannot be written: {error}")


if __name__ == "__main__":
    sys.exit(main())
