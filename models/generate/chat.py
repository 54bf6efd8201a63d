"""A conversation. On a terminal, or over a pipe, a line is a message."""

import contextlib
import functools
import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from .._errors import ModelFileError
from .._program import progress, report
from ..decoding.answer import Answer
from ..decoding.generator import Generator
from ..tokens.tokenizer import Tokenizer


HELP = "/reset forgets the conversation, /quit or the end of the input ends it, Ctrl-C stops an answer."


class Chat:
    """A conversation, of which only what is new is read.

    **Arguments:**

    - `generator`: with room for the conversation.
    - `tokenizer`: of its model.
    - `system`: the system message, or `None` for the model's own.
    - `max_tokens`: of each answer.
    - `stop`: texts that end an answer.

    **Attributes:**

    - `messages`: so far, as chat templates take them.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
    ):
        self._generator = generator
        self._tokenizer = tokenizer
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._max_tokens = max_tokens
        self._stop = stop
        self.messages = list(self._first)

    def reset(self) -> None:
        """Begin anew."""
        self.messages = list(self._first)

    def say(self, text: str, write: Callable[[str], object], stopped: Callable[[], bool] = lambda: False) -> Answer:
        """The answer to a message. Both become part of the conversation, unless the answer was stopped before it had a character.

        **Arguments:**

        - `write`: takes the answer piece by piece.
        - `stopped`: whether to stop it; asked before each token, and each chunk of a prompt.

        **Raises:** `ConversationFull` if there is no room for an answer, and `ModelFileError` if the chat template refuses the
            message. The conversation is as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self._tokenizer.encode_chat(messages)
        if len(tokens) >= self._generator.room:
            remedy = "Shorten the message" if self.messages == self._first else "Say /reset"
            raise ConversationFull(len(tokens), self._generator.room, remedy)
        answer = Answer(self._tokenizer, self._stop)
        answer.take(
            self._generator.generate(
                tokens,
                max_tokens=self._max_tokens,
                stopped=stopped,
                progress=functools.partial(progress, desc="reading", unit="chunk"),
            ),
            write,
            max_tokens=self._max_tokens,
            stopped=stopped,
        )
        if answer.finish != "interrupted" or answer.text:
            self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


class ConversationFull(Exception):
    """Raised by `Chat.say`. The conversation is as it was."""

    def __init__(self, tokens: int, room: int, remedy: str):
        super().__init__(
            f"expected a conversation of less than {room} tokens; got {tokens}. {remedy}, or start with a larger --context."
        )


def converse(chat: Chat, write: Callable[[str], object], answered: Callable[[Answer], object]) -> None:
    """Answer the lines of stdin.

    **Arguments:**

    - `write`: takes an answer piece by piece.
    - `answered`: takes each answer when it has ended.
    """
    if importlib.util.find_spec("readline") is not None:  # not on Windows
        importlib.import_module("readline")  # `input` takes keys to edit a line then
    report(HELP)
    while (line := _read_line()) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            chat.reset()
        elif line.startswith("/"):
            report(f"expected a message, /reset or /quit; got {line.split()[0]}")
        elif line:
            try:
                with _interrupt_stops() as stopped:
                    answer = chat.say(line, write, stopped)
                answered(answer)
            except (ConversationFull, ModelFileError) as error:
                report(str(error))


def _read_line() -> str | None:
    """Read a line, without the spaces around it; `None` at the end of the input."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            print()  # the terminal's own line goes on below
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


@contextlib.contextmanager
def _interrupt_stops() -> Iterator[Callable[[], bool]]:
    """Ctrl-C makes what this yields return true. If that does not help, the second Ctrl-C is what it always is."""
    is_stopped = False
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: is_stopped
    finally:
        signal.signal(signal.SIGINT, before)
