"""A language model on a CPU, through eqxcallback's layers: `python -m models.generate "What is the capital of France?"`.

The model is SmolLM2-135M-Instruct, or any Llama-family model in a GGUF file with F32, F16, Q8_0 or Q4_1 weights. The answer
goes to stdout as it is made; progress, and the speed at the end, to stderr.
"""

import argparse
import collections
import io
import json
import os
import sys

import jax.numpy as jnp

from . import gguf, llama
from ._terminal import fail, progress, report, write_line
from .answer import Answer
from .batch import Batch
from .chat import Chat, converse
from .compilation_cache import keep_programs
from .generator import Generator, Speed
from .options import DTYPES, parse, sampling_of
from .profile import profile, read_speed, table
from .prompts import PromptsError, read_prompts
from .tokenizer import Tokenizer


class _Program:
    """The program that was asked for. It loads the model as late as possible: mistakes are reported before."""

    def __init__(self, options: argparse.Namespace):
        path = gguf.default_path() if options.weights is None else options.weights
        self.options = options
        self.file = gguf.open_model(path)
        self.tokenizer = Tokenizer(self.file.metadata)

    def model(self) -> llama.Llama:
        dtype = jnp.dtype(DTYPES[self.options.dtype])
        return llama.load(self.file, dtype=dtype, progress=progress("loading", "block"))

    def generator(self, model: llama.Llama, room: int) -> Generator:
        return Generator(model, room=room, sampling=sampling_of(self.options), seed=self.options.seed)

    def write(self, text: str) -> None:
        """Pass a piece of an answer on."""
        if not self.options.json:
            print(text, end="", flush=True)

    def answered(self, answer: Answer, speed: Speed) -> None:
        """End an answer."""
        if self.options.json:
            print(json.dumps(answer.record() | speed.record()), flush=True)
            return
        print(flush=True)
        if answer.finish == "context":
            report("the answer ends here, as there is no room for more")
        report(str(speed))

    def encode(self, prompt: str, system: str | None) -> list[int]:
        """The tokens of a prompt that the model has room for."""
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        tokens, context = self.tokenizer.encode_chat(messages), self.file.config.context_length
        if len(tokens) >= context:
            raise PromptsError(
                f"expected a prompt of less than {context} tokens, the model's context; got {len(tokens)}. Shorten it."
            )
        return tokens

    def answer(self) -> int:
        """Answer one prompt."""
        options = self.options
        tokens = self.encode(options.prompt, options.system)
        model = self.model()
        generator = self.generator(model, len(tokens) + options.max_tokens)
        answer = Answer(self.tokenizer, options.stop)
        generated = generator.generate(tokens, max_tokens=options.max_tokens, progress=progress("reading", "chunk"))
        answer.take(generated, self.write, max_tokens=options.max_tokens)
        self.answered(answer, generator.speed)
        if options.profile:
            parts = profile(model, len(generator.reader.tokens), progress("profiling", "kind"))
            report(table(parts, read_speed()))
        return 0

    def answer_file(self) -> int:
        """Answer the prompts of a file, in their order."""
        options, records, tokens = self.options, read_prompts(self.options.prompts), []
        for place, record in records:
            try:
                tokens.append(self.encode(record["prompt"], record.get("system", options.system)))
            except PromptsError as error:
                raise PromptsError(f"{place}: {error}") from None
        batch = Batch(
            self.model(),
            rows=min(options.rows, len(tokens)),
            room=max(map(len, tokens)) + options.max_tokens,
            sampling=sampling_of(options),
            seed=options.seed,
        )
        answers = [Answer(self.tokenizer, options.stop) for _ in tokens]
        ended = batch.answer(tokens, answers, max_tokens=options.max_tokens)
        waiting = collections.deque(zip(records, answers, strict=True))
        for _ in progress("answering", "prompt", len(tokens))(ended):
            while waiting and waiting[0][1].finish is not None:
                (_, record), answer = waiting.popleft()
                as_text = f"> {record['prompt']}\n{answer.text}\n"
                write_line(json.dumps(record | answer.record()) if options.json else as_text)
        report(str(batch.speed))
        return 0

    def chat(self) -> int:
        """Answer one line after the other."""
        options = self.options
        self.tokenizer.encode_chat([{"role": "user", "content": ""}])  # a model that cannot chat says so here
        generator = self.generator(self.model(), options.context)
        conversation = Chat(
            generator, self.tokenizer, system=options.system, max_tokens=options.max_tokens, stop=options.stop
        )
        converse(conversation, self.write, lambda answer: self.answered(answer, generator.speed))
        return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack characters that the model writes
    try:
        program = _Program(options)
        if options.prompts is not None:
            return program.answer_file()
        return program.chat() if options.chat else program.answer()
    except (gguf.ModelFileError, PromptsError) as error:
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
