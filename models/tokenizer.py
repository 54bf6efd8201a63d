"""Text to the tokens of a model and back, with the tokenizer and the chat template that are in the model's own file."""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers

from .gguf import ModelFileError, field


_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
_UNSUPPORTED = "which is not supported. Use another model."
_CORRUPT = "The file is corrupt: get it again."

# GPT-2 writes bytes as characters: printable ones as themselves, the others as those from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)).difference(_PRINTABLE))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


class Tokenizer:
    """A byte-level BPE, as of GPT-2, and the chat template that the model was trained on.

    **Arguments:**

    - `metadata`: of a `models.gguf.ModelFile`.

    **Raises:**

    - `ModelFileError` if the file has another kind of tokenizer, or a broken one.
    """

    vocab_size: int
    stop_tokens: frozenset[int]
    """The tokens that end an answer."""

    def __init__(self, metadata: Mapping[str, Any]):
        _check_kind(metadata)
        tokens = field(metadata, "tokenizer.ggml.tokens", list)
        kinds = field(metadata, "tokenizer.ggml.token_type", np.ndarray)
        if len(set(tokens) - {""}) != len(tokens) or len(kinds) != len(tokens):
            raise ModelFileError(
                f"expected {len(tokens)} tokens, each with a text of its own and a type; got {len(set(tokens))} different texts "
                f"and {len(kinds)} types. {_CORRUPT}"
            )

        def special(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            if key not in metadata:
                return None
            token = field(metadata, key, int)
            if not 0 <= token < len(tokens):
                raise ModelFileError(f"expected {key} to be one of {len(tokens)} tokens; got {token}. {_CORRUPT}")
            return token

        bos, eos, end_of_turn = special("bos"), special("eos"), special("eot")
        self._tokens: list[str] = tokens
        self._kinds: list[int] = kinds.tolist()
        self._control = {tokens[i]: i for i, kind in enumerate(self._kinds) if kind == _CONTROL}
        self.vocab_size = len(tokens)
        stops = (eos, end_of_turn, self._control.get("<|im_end|>"), self._control.get("<|endoftext|>"))
        self.stop_tokens = frozenset(token for token in stops if token is not None)
        self._bpe = _byte_level_bpe(metadata, tokens, self._kinds)
        self._template = _compile(field(metadata, "tokenizer.chat_template", str, ""))
        self._template_names = {
            f"{name}_token": "" if token is None else tokens[token] for name, token in (("bos", bos), ("eos", eos))
        }

        control = "|".join(map(re.escape, sorted(self._control, key=len, reverse=True))) or "(?!)"
        self._split = re.compile(f"({control})").split
        self._first_character = re.compile(f"(?={control}).", re.DOTALL)
        self._hide = {first: chr(0xD800 + i) for i, first in enumerate(sorted({text[0] for text in self._control}))}
        self._show = str.maketrans({hidden: first for first, hidden in self._hide.items()})

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, which may name control tokens, such as `<|im_end|>`.

        Bytes that the vocabulary lacks are dropped: of SmolLM2, those of six control characters, and of
        characters from U+40000 to U+BFFFF.
        """
        return self._encode(_without_surrogates(text))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without control tokens. Bytes that are no UTF-8 become replacement characters."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one token: often a word, sometimes a part of a character, and nothing for a control token."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"Tokenizer: expected a token from 0 to {self.vocab_size - 1}; got {token}.")
        text, kind = self._tokens[token], self._kinds[token]
        if kind == _CONTROL:
            return b""
        if kind == _USER_DEFINED or not _BYTE_OF.keys() >= set(text):
            return text.encode()
        return bytes(map(_BYTE_OF.__getitem__, text))

    def stream(self) -> "Stream":
        """A decoder for tokens that come one after the other."""
        return Stream(self)

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as the text that the model was trained on, up to where it answers. To read, not to encode.

        **Arguments:**

        - `messages`: each with a `role` (`"system"`, `"user"` or `"assistant"`) and a `content`.
        - `add_generation_prompt`: whether an answer begins at the end.

        **Returns:**

        The text, by the template in the model's file.

        **Raises:**

        - `ModelFileError` if the file has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise ModelFileError("expected the file to have tokenizer.chat_template; got none. Use an instruct model.")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._template_names
            )
        except ModelFileError:
            raise
        except Exception as error:  # a template is a program, and may fail like any
            raise ModelFileError(f"expected messages that the file's chat template takes; it failed: {error}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """The tokens of a conversation, up to where the model answers.

        Like `encode(chat(messages))`, except that control tokens come from the template alone: a message that contains the
        text `<|im_end|>` is that text, and does not end its turn.

        **Arguments:**

        - `messages`, `add_generation_prompt`: as for `chat`.

        **Returns:**

        The tokens.

        **Raises:**

        - `ModelFileError`, as `chat` does.
        """
        # Not piece by piece: a template may trim a message, and BPE merges across its edges.
        hidden = [{key: self._hidden(value) for key, value in message.items()} for message in messages]
        return self._encode(self.chat(hidden, add_generation_prompt=add_generation_prompt))

    def _hidden(self, text: str) -> str:
        """A surrogate, which no text has, for the first character of each control token."""
        return self._first_character.sub(lambda match: self._hide[match[0]], _without_surrogates(text))

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in self._split(text):
            if piece in self._control:
                tokens.append(self._control[piece])
            else:
                tokens += self._bpe.encode(piece.translate(self._show)).ids
        return tokens


class Stream:
    """Decodes tokens that come one after the other, to whole characters: a token may end in the middle of one.

    All that `push` and `flush` return, joined, is what `Tokenizer.decode` returns.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._piece = tokenizer.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, which may be empty."""
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        """The end of the text: a replacement character, if the last character has not become whole."""
        return self._decoder.decode(b"", final=True)


def _check_kind(metadata: Mapping[str, Any]) -> None:
    for key, supported in (("model", ("gpt2",)), ("pre", ("smollm", "gpt-2"))):
        value = field(metadata, f"tokenizer.ggml.{key}", str)
        if value not in supported:
            raise ModelFileError(
                f"expected tokenizer.ggml.{key} to be {' or '.join(map(repr, supported))}; got {value!r}, {_UNSUPPORTED}"
            )
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if field(metadata, f"tokenizer.ggml.{key}", bool, False):
            raise ModelFileError(f"expected tokenizer.ggml.{key} to be false; got true, {_UNSUPPORTED}")


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    """Make the tokenizer without the control tokens: to it their texts are texts."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in field(metadata, "tokenizer.ggml.merges", list)]
    try:
        # Merges of another length than two are refused when they are taken.
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))  # pyright: ignore[reportArgumentType]
    except Exception as error:  # of no class of its own
        raise ModelFileError(f"expected pairs of tokens in tokenizer.ggml.merges; got {error}. {_CORRUPT}") from None
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if metadata["tokenizer.ggml.pre"] == "smollm":
        digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    else:
        bpe.pre_tokenizer = byte_level
    bpe.add_tokens(
        [
            tokenizers.AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _USER_DEFINED
        ]
    )
    return bpe


def _compile(template: str) -> jinja2.Template | None:
    """Compile a template as Hugging Face's transformers does, for which such templates are written."""
    if not template:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelFileError(f"expected tokenizer.chat_template to be a template; got {error}. {_CORRUPT}") from None


def _refuse(message: str) -> NoReturn:
    raise ModelFileError(f"expected messages that the file's chat template takes; it says: {message}")


def _without_surrogates(text: str) -> str:
    """Python has halves of characters, in arguments of a program, say; UTF-8 has not."""
    return text.encode("utf-8", "replace").decode()
