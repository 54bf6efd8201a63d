"""A language model on a CPU, through eqxcallback's layers: `python -m models.generate "What is the capital of France?"`.

The model is SmolLM2-135M-Instruct, or any Llama-family model in a GGUF file with F32, F16, Q8_0 or Q4_1 weights. The answer
goes to stdout as it is made; progress, and the speed at the end, to stderr.
"""

import argparse
import io
import json
import os
import sys
from typing import Any

import jax.numpy as jnp

from . import gguf, llama
from ._terminal import fail, progress, report
from .answer import Answer
from .chat import Chat, converse
from .compilation_cache import keep_programs
from .generator import Generator, Speed
from .options import DTYPES, parse, sampling_of
from .tokenizer import Tokenizer


class _Program:
    """What was asked for, with the model loaded as late as possible: what is wrong is said before."""

    def __init__(self, options: argparse.Namespace):
        path = gguf.default_path() if options.weights is None else options.weights
        self.options = options
        self.file = gguf.open_model(path)
        self.tokenizer = Tokenizer(self.file.metadata)

    def generator(self, room: int) -> Generator:
        dtype = jnp.dtype(DTYPES[self.options.dtype])
        model = llama.load(self.file, dtype=dtype, progress=progress("loading", "block"))
        return Generator(model, room=room, sampling=sampling_of(self.options), seed=self.options.seed)

    def write(self, text: str) -> None:
        """Pass a piece of an answer on."""
        if not self.options.json:
            print(text, end="", flush=True)

    def answered(self, answer: Answer, speed: Speed) -> None:
        """End an answer."""
        if self.options.json:
            print(json.dumps(_record(answer, speed)), flush=True)
            return
        print(flush=True)
        if answer.finish == "context":
            report("the answer ends here, as there is no room for more")
        report(str(speed))

    def answer(self) -> int:
        """Answer one prompt."""
        options, context = self.options, self.file.config.context_length
        messages = [{"role": "user", "content": options.prompt}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        tokens = self.tokenizer.encode_chat(messages)
        if len(tokens) >= context:
            return fail(
                f"expected a prompt of less than {context} tokens, the model's context; got {len(tokens)}. Shorten it."
            )
        generator = self.generator(len(tokens) + options.max_tokens)
        answer = Answer(self.tokenizer, options.stop)
        generated = generator.generate(tokens, max_tokens=options.max_tokens, progress=progress("reading", "chunk"))
        answer.take(generated, self.write, max_tokens=options.max_tokens)
        self.answered(answer, generator.speed)
        return 0

    def chat(self) -> int:
        """Answer one line after the other."""
        options = self.options
        self.tokenizer.encode_chat([{"role": "user", "content": ""}])  # a model that cannot chat says so here
        generator = self.generator(options.context)
        conversation = Chat(
            generator, self.tokenizer, system=options.system, max_tokens=options.max_tokens, stop=options.stop
        )
        converse(conversation, self.write, lambda answer: self.answered(answer, generator.speed))
        return 0


def _record(answer: Answer, speed: Speed) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "text": answer.text,
        "finish": answer.finish,
        "stop_string": answer.stop_string,
        "answer_tokens": answer.num_tokens,
        "kept_tokens": speed.kept_tokens,
        "read_tokens": speed.prompt_tokens,
        "read_tokens_per_second": round(speed.prompt_rate, 1),
        "decoded_tokens": speed.decoded_tokens,
        "decoded_tokens_per_second": round(speed.decode_rate, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack characters that the model writes
    try:
        program = _Program(options)
        return program.chat() if options.chat else program.answer()
    except gguf.ModelFileError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Nobody reads any more, or there is no room for more. What Python still holds back would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if isinstance(error, BrokenPipeError) else fail(f"the answer cannot be written: {error}")


if __name__ == "__main__":
    keep_programs()
    sys.exit(main())
