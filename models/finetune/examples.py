"""Examples to fine-tune a language model on: conversations in a file as tokens, and batches of them."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._errors import ModelFileError
from .._program import UsageError
from .._text import parse_json, read_lines
from ..tokens.tokenizer import Tokenizer


_ANSWERS = ("response", "completion")  # the names that an answer to a "prompt" may have
_SHAPE = (
    'an object with "prompt", "response" or "completion", and, if need be, "system"; with "messages", each of them a "role" and '
    'a "content", and one of the role "assistant"; or with a "text"; and with one of these alone'
)


class Example(NamedTuple):
    """Tokens, and for each of them the token that follows, or -1 where the loss does not count."""

    tokens: list[int]
    targets: list[int]


class Batch(NamedTuple):
    """Examples of about one length. Padding has targets of -1."""

    tokens: np.ndarray
    targets: np.ndarray


def read_examples(path: pathlib.Path, tokenizer: Tokenizer, *, max_tokens: int) -> tuple[list[list[Example]], int]:
    """The examples of each line of a file, which has JSON objects in its lines.

    Of a conversation the answers count, with the tokens that end them. It is one example if the model's chat template only adds
    to it. Else an answer that is followed by others is not as it was given, as with Qwen3, and is an example of its own.
    Of a text all tokens count.

    **Arguments:**

    - `path`: the file. Empty lines are left out.
    - `tokenizer`: of the model.
    - `max_tokens`: of an example, which loses its end if it has more.

    **Returns:** the examples of each line, and how many lines were cut.

    **Raises:** `UsageError`, which says what was expected, and in which line.
    """
    lines, cut = [], 0
    for place, line in read_lines(path):
        try:
            parts = list(_parts(_parsed(place, line), tokenizer))
        except ModelFileError as error:  # of the chat template, which takes not all conversations
            raise UsageError(f"{place}: {error}") from None
        cut += any(len(tokens) > max_tokens for tokens, _ in parts)
        examples = [_example(tokens[:max_tokens], counts) for tokens, counts in parts]
        examples = [example for example in examples if max(example.targets, default=-1) >= 0]
        if max(len(tokens) for tokens, _ in parts) < 2:
            raise UsageError(
                f"{place}: expected a text of 2 tokens or more, as each is learnt from those before it; got {len(parts[0][0])}. "
                "Leave the line out."
            )
        if not examples:
            raise UsageError(
                f"{place}: expected an answer, or a text, that begins within {max_tokens} tokens; got none. "
                "Leave the line out, or raise --max-tokens."
            )
        lines.append(examples)
    if not lines:
        raise UsageError(f"{path}: expected at least one example; got empty lines alone")
    return lines, cut


def batches(examples: Sequence[Example], rows: int, rng: np.random.Generator | None = None) -> list[Batch]:
    """All examples, in batches of so many rows, of which the last may be filled up with empty ones.

    A batch has examples of about one length, and there are few lengths, as a program is compiled for each.

    **Arguments:**

    - `rng`: shuffles which examples of a length are together, and the batches.
    """
    order = range(len(examples)) if rng is None else rng.permutation(len(examples)).tolist()
    order = sorted(order, key=lambda index: -_padded(len(examples[index].tokens)))
    parts = [order[first : first + rows] for first in range(0, len(order), rows)]
    if rng is not None:
        rng.shuffle(parts)
    return [_batch([examples[index] for index in part], rows) for part in parts]


def _batch(examples: Sequence[Example], rows: int) -> Batch:
    length = _padded(max(len(example.tokens) for example in examples))
    batch = Batch(np.zeros((rows, length), np.int32), np.full((rows, length), -1, np.int32))
    for row, example in enumerate(examples):
        batch.tokens[row, : len(example.tokens)] = example.tokens
        batch.targets[row, : len(example.targets)] = example.targets
    return batch


def _padded(length: int) -> int:
    """The next one of 32, 48, 64, 96, 128 and so on."""
    size = 32
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def _parsed(place: str, line: str) -> Mapping[str, Any]:
    record = parse_json(place, line)
    if not isinstance(record, dict) or not _fits(record):
        raise UsageError(f"{place}: expected {_SHAPE}; got {line.strip():.80}")
    return record


def _fits(record: Mapping[str, Any]) -> bool:
    def texts(record: Any, *names: str) -> bool:
        return isinstance(record, dict) and all(isinstance(record.get(name), str) for name in names)

    shapes = [name for name in ("messages", "text") if name in record]
    shapes += [name for name in _ANSWERS if name in record and "prompt" in record]
    if len(shapes) != 1 or ("system" in record and shapes[0] not in _ANSWERS):  # which would not be seen
        return False
    if shapes == ["messages"]:
        messages = record["messages"]
        return (
            isinstance(messages, list)
            and all(texts(message, "role", "content") and len(message) == 2 for message in messages)
            and any(message["role"] == "assistant" for message in messages)
        )
    if shapes == ["text"]:
        return texts(record, "text")
    return texts(record, "prompt", *shapes) and isinstance(record.get("system", ""), str)


def _messages(record: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    if "messages" in record:
        return record["messages"]
    roles = {"system": "system", "prompt": "user"} | dict.fromkeys(_ANSWERS, "assistant")
    return [{"role": role, "content": record[name]} for name, role in roles.items() if name in record]


def _example(tokens: list[int], counts: list[bool]) -> Example:
    targets = [token if is_target else -1 for token, is_target in zip(tokens, counts, strict=False)][1:]
    return Example(tokens[: len(targets)], targets)


def _parts(record: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[bool]]]:
    """The tokens of each example of a line, and which of them count."""
    if "text" in record:
        tokens = tokenizer.encode(record["text"])
        yield tokens, [True] * len(tokens)
        return
    tokens: list[int] = []
    counts: list[bool] = []
    for before, whole in _turns(_messages(record), tokenizer):
        if whole[: len(before)] != before:
            raise ModelFileError(
                "expected a chat template that continues with an answer as the model does; it changes what the model saw "
                'before. Write the line as a "text".'
            )
        if before[: len(tokens)] != tokens:
            # The model no longer sees its last answers as it gave them: they count as they were, and from here on they do not.
            yield tokens, counts
            tokens, counts = [], []
        end = next((i + 1 for i in range(len(before), len(whole)) if whole[i] in tokenizer.stop_tokens), len(whole))
        counts += [False] * (len(before) - len(tokens)) + [True] * (end - len(before))
        tokens = whole[:end]
    yield tokens, counts


def _turns(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """For each answer, the tokens up to where it begins, and those up to where its turn ends."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            yield (
                tokenizer.encode_chat(messages[:index]),
                tokenizer.encode_chat(messages[: index + 1], add_generation_prompt=False),
            )
