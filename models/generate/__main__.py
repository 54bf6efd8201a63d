"""A language model on a CPU, through eqxcallback's layers: `python -m models.generate "What is the capital of France?"`.

The model is SmolLM2-135M-Instruct, or any Llama, Qwen2 or Qwen3 in a GGUF file or in a folder with safetensors files. The answer
goes to stdout as it is made; progress, and the speed at the end, to stderr.
"""

import argparse
import collections
import io
import json
import sys
from functools import partial
from typing import Any

import jax

from .. import adapter_files, llama, lora
from .._errors import ModelFileError
from .._program import UsageError, progress, report, rounding_of, run, write
from ..compilation_cache import keep_programs
from ..decoding.answer import Answer
from ..decoding.batch import Batch, Request
from ..decoding.chooser import Choice
from ..decoding.generator import Generator, Speed
from ..decoding.lookup import InexactRows
from ..decoding.reader import Model
from ..model_files import open_files
from ..parallel import processes, tensor_parallel
from ..parallel.sequence_parallel import SequenceLlama
from .chat import Chat, converse
from .options import parse, sampling_of
from .profile import profile, table
from .prompts import read_prompt, read_prompts


class _Program:
    """The program that was asked for. It loads the model as late as possible: mistakes are reported before."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.file, self.tokenizer = open_files(options.weights)
        if options.adapter is not None:
            adapter_files.check(options.adapter)
        self.adapters: lora.Adapters | None = None
        self.mesh: jax.sharding.Mesh | None = None

    def run(self) -> None:
        """Answer what there is to answer, on several devices if that was asked for."""
        options = self.options
        if options.devices * options.processes == 1:
            self._answer_all()
            return
        if options.split != "sequence":
            tensor_parallel.check_divides(self.file, options.devices * options.processes)
        devices = processes.joined(options.devices, options.coordinator, options.processes, options.process)
        with devices as self.mesh:
            self._answer_all()

    def _answer_all(self) -> None:
        if self.options.adapter is not None:  # not before: loading starts JAX, with the devices that it has then
            self.adapters = adapter_files.load(self.options.adapter, self.file.config)
        if self.options.prompts is not None:
            self.answer_file()
        elif self.options.chat:
            self.chat()
        else:
            self.answer()

    def model(self) -> llama.Llama:
        """Load the whole model."""
        model = llama.load(self.file, packed=True, **self._loading())
        return model if self.adapters is None else lora.attach(model, self.adapters)

    def placed_model(self) -> Model:
        """Load the model, onto all devices of the mesh if there is one."""
        if self.mesh is None:
            return self.model()
        if self.options.split == "sequence":
            return SequenceLlama(self.model(), self.mesh)
        return tensor_parallel.load(self.file, self.mesh, adapters=self.adapters, **self._loading())

    def _loading(self) -> dict[str, Any]:
        return {**rounding_of(self.options), "progress": partial(progress, desc="loading", unit="block")}

    def generator(self, model: Model, room: int) -> Generator:
        options = self.options
        try:
            return Generator(model, room=room, sampling=sampling_of(options), seed=options.seed, lookup=options.lookup)
        except InexactRows as error:
            raise UsageError(f"--lookup: {error}") from None

    def write(self, text: str) -> None:
        """Pass a piece of an answer on. Of several processes the first one does."""
        if self.options.process == 0 and not self.options.json:
            write([text])

    def answered(self, answer: Answer, speed: Speed) -> None:
        """End an answer."""
        if self.options.process != 0:
            return
        if self.options.json:
            write([f"{json.dumps(answer.record() | speed.record())}\n"])
            return
        write(["\n"])
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
            raise UsageError(
                f"expected a prompt of less than {context} tokens, the model's context; got {len(tokens)}. Shorten it."
            )
        return tokens

    def answer(self) -> None:
        """Answer one prompt."""
        options = self.options
        prompt = options.prompt if options.prompt_file is None else read_prompt(options.prompt_file)
        tokens = self.encode(prompt, options.system)
        model = self.placed_model()
        generator = self.generator(model, len(tokens) + options.max_tokens)
        answer = Answer(self.tokenizer, options.stop)
        generated = generator.generate(
            tokens, max_tokens=options.max_tokens, progress=partial(progress, desc="reading", unit="chunk")
        )
        answer.take(generated, self.write, max_tokens=options.max_tokens)
        self.answered(answer, generator.speed)
        if options.profile:
            timed = profile(model, len(generator.reader.tokens), partial(progress, desc="profiling", unit="kind"))
            report(table(*timed))

    def answer_file(self) -> None:
        """Answer the prompts of a file, in their order."""
        options, records, tokens = self.options, read_prompts(self.options.prompts), []
        for place, record in records:
            try:
                tokens.append(self.encode(record["prompt"], record.get("system", options.system)))
            except (UsageError, ModelFileError) as error:
                raise UsageError(f"{place}: {error}") from None
        batch = Batch(
            self.placed_model(),
            widths=[min(options.rows, len(tokens))],
            room=max(map(len, tokens)) + options.max_tokens,
        )
        waiting = collections.deque()
        for (_, record), prompt in zip(records, tokens, strict=True):
            answer, choice = Answer(self.tokenizer, options.stop), Choice(sampling_of(options), options.seed)
            batch.add(Request(prompt, answer, options.max_tokens, choice))
            waiting.append((record, answer))
        for _ in progress(batch.run(), desc="answering", unit="prompt", total=len(tokens)):
            while waiting and waiting[0][1].finish is not None:
                record, answer = waiting.popleft()
                as_text = f"> {record['prompt']}\n{answer.text}\n"
                if options.process == 0:
                    write([f"{json.dumps(record | answer.record()) if options.json else as_text}\n"])
        if options.process == 0:
            report(str(batch.speed))

    def chat(self) -> None:
        """Answer one line after the other."""
        options = self.options
        # A model that cannot chat, or takes no system message, says so here.
        begun = len(self.encode("", options.system))
        if begun >= options.context:
            raise UsageError(
                f"expected --context above {begun} tokens, with which a conversation begins; got {options.context}. "
                "Shorten --system, or give a larger --context."
            )
        generator = self.generator(self.placed_model(), options.context)
        conversation = Chat(
            generator, self.tokenizer, system=options.system, max_tokens=options.max_tokens, stop=options.stop
        )
        converse(conversation, self.write, lambda answer: self.answered(answer, generator.speed))


def _generate(arguments: list[str] | None) -> None:
    options = parse(arguments)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    _Program(options).run()


def main(arguments: list[str] | None = None) -> int:
    return run("generate", _generate, arguments, remedy="Lower --max-tokens, --context or --rows.")


if __name__ == "__main__":
    keep_programs()
    code = main()
    processes.leave(code)
    sys.exit(code)
