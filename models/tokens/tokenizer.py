"""Text to the tokens of a model and back, with the tokenizer and the chat template that are in the model's own files."""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._errors import ModelFileError
from .._text import without_surrogates
from .vocabulary import Vocabulary, gguf_vocabulary


# Normalisers make one byte of up to 3.5: of U+1FBE and two accents, which have 7 bytes, NFC makes a character of 2.
_SHORTENED = 4


class TextTooLong(Exception):
    """Raised for a text of more bytes than may be. The message is what was got."""


class Tokenizer:
    """The tokens of a model, and the chat template that the model was trained on.

    **Arguments:**

    - `source`: a `Vocabulary`, or the metadata of a `models.gguf.ModelFile`.

    **Raises:**

    - `ModelFileError` if the file has another kind of tokenizer, or a broken one.
    """

    vocab_size: int
    stop_tokens: frozenset[int]
    """The tokens that end an answer."""

    def __init__(self, source: Vocabulary | Mapping[str, Any]):
        vocabulary = source if isinstance(source, Vocabulary) else gguf_vocabulary(source)
        self.vocab_size, self.stop_tokens = vocabulary.size, vocabulary.stop_tokens
        self._vocabulary = vocabulary
        self._control_tokens = {token: text for text, token in vocabulary.control.items()}
        control = "|".join(map(re.escape, sorted(vocabulary.control, key=len, reverse=True))) or "(?!)"
        self._split = re.compile(f"({control})").split
        self._first_character = re.compile(f"(?={control}).", re.DOTALL)
        firsts = sorted({text[0] for text in vocabulary.control})
        self._hide = {first: chr(0xD800 + i) for i, first in enumerate(firsts)}
        self._show = str.maketrans({hidden: first for first, hidden in self._hide.items()})

    @property
    def longest(self) -> int:
        """The most bytes of a text that become one token. Bytes that the vocabulary lacks become none, and do not count."""
        texts = map(str.encode, self._vocabulary.control)
        longest = max(map(len, (*texts, *map(self.piece, range(self.vocab_size)))), default=0)
        return longest * _SHORTENED if self._vocabulary.shortens else longest

    def encode(self, text: str, *, max_bytes: int | None = None) -> list[int]:
        """The tokens of a text, which may name control tokens, such as `<|im_end|>`.

        Bytes that the vocabulary lacks are dropped: of SmolLM2, those of six control characters, and of
        characters from U+40000 to U+BFFFF.

        **Arguments:**

        - `max_bytes`: refuse a longer text, which may take seconds to encode. Of one token there are at most `longest`.

        **Raises:**

        - `ModelFileError` if the text has a token that the tokenizer knows, and the model does not.
        - `TextTooLong`.
        """
        return self._encode(without_surrogates(text), max_bytes)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without control tokens. Bytes that are no UTF-8 become replacement characters."""
        stream = self.stream()
        return "".join([*map(stream.push, tokens), stream.flush()])

    def piece(self, token: int) -> bytes:
        """The bytes of one token: often a word, sometimes a part of a character, and nothing for a control token."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"Tokenizer: expected a token from 0 to {self.vocab_size - 1}; got {token}.")
        return b"" if token in self._control_tokens else self._vocabulary.piece(token)

    def control_text(self, token: int) -> str | None:
        """The text that stands for a control token, such as `<|im_end|>`; `None` for another token."""
        return self._control_tokens.get(token)

    def stream(self, *, continues: bool = False) -> "Stream":
        """A decoder for tokens that come one after the other.

        **Arguments:**

        - `continues`: whether a text is before them, so that a space that they begin with is part of it.
        """
        return Stream(self.piece, drops_space=self._vocabulary.drops_space and not continues)

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model was trained on, up to where it answers. To read, not to encode.

        **Arguments:**

        - `messages`: each with a `role` (`"system"`, `"user"` or `"assistant"`) and a `content`.
        - `add_generation_prompt`: whether an answer begins at the end.

        **Returns:**

        The text, by the template in the model's files.

        **Raises:**

        - `ModelFileError` if there is no template, or it refuses the messages.
        """
        return self._vocabulary.template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        max_bytes: int | None = None,
    ) -> list[int]:
        """The tokens of a conversation, up to where the model answers.

        Like `encode(chat(messages))`, except that control tokens come from the template alone: a message that contains the
        text `<|im_end|>` is that text, and does not end its turn.

        **Arguments:**

        - `messages`, `add_generation_prompt`: as for `chat`.
        - `max_bytes`: as for `encode`.

        **Returns:**

        The tokens.

        **Raises:**

        - `ModelFileError`, as `chat` does, and `TextTooLong`.
        """
        # Not piece by piece: a template may trim a message, and BPE merges across its edges.
        hidden = [{key: self._hidden(value) for key, value in message.items()} for message in messages]
        return self._encode(self.chat(hidden, add_generation_prompt=add_generation_prompt), max_bytes)

    def _hidden(self, text: str) -> str:
        """A surrogate, which no text has, for the first character of each control token."""
        return self._first_character.sub(lambda match: self._hide[match[0]], without_surrogates(text))

    def _encode(self, text: str, max_bytes: int | None) -> list[int]:
        size = len(text.encode("utf-8", "ignore"))  # without what is hidden
        if max_bytes is not None and size > max_bytes:
            raise TextTooLong(f"{size} bytes, which are more")
        vocabulary, tokens = self._vocabulary, list[int]()
        for i, part in enumerate(self._split(text)):
            if part in vocabulary.control:
                tokens.append(vocabulary.control[part])
            elif part:
                tokens += vocabulary.encode(part.translate(self._show), i == 0)
        if vocabulary.first is not None and tokens[:1] != [vocabulary.first]:  # which a template may have written
            tokens.insert(0, vocabulary.first)
        last = max(tokens, default=0)
        if last >= vocabulary.size:  # a token that was added to the tokenizer, and not to the model
            text = vocabulary.piece(last).decode("utf-8", "replace")
            raise ModelFileError(
                f"expected tokens below {vocabulary.size}, all that the model has; got {text!r}, which is token {last}. "
                "Leave it out, or use a model with that token."
            )
        return tokens


class Stream:
    """Decodes tokens that come one after the other, to whole characters: a token may end in the middle of one.

    All that `push` and `flush` return, joined, is what `Tokenizer.decode` returns.
    """

    def __init__(self, piece: Callable[[int], bytes], *, drops_space: bool):
        self._piece = piece
        self._drops_space = drops_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        piece = self._piece(token)
        if self._drops_space and piece:
            piece, self._drops_space = piece.removeprefix(b" "), False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """The end of the text: a replacement character, if the last character has not become whole."""
        return self._decoder.decode(b"", final=True)
