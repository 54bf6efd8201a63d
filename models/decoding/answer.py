"""The text of an answer, as its tokens come."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ..tokens.tokenizer import Tokenizer
from .scores import Score
from .stop_strings import StopStrings


Finish = Literal["stop_token", "stop_string", "max_tokens", "context", "time", "interrupted"]


class Answer:
    """One answer.

    **Arguments:**

    - `tokenizer`: of the model.
    - `stop`: texts that end the answer, and are not in it.
    - `continues`: of `Tokenizer.stream`.
    - `echo`: the tokens of the prompt, if its text is to be read together with the answer's: the last character of the prompt
        may become whole with the answer's first tokens, and is the answer's then.

    **Attributes:**

    - `echoed`: the text of `echo`, in whole characters.
    - `text`: the answer so far, in whole characters.
    - `num_tokens`: how many tokens came, the one that ended it included.
    - `finish`: why it ended, or `None`.
    - `stop_string`: the one of `stop` that ended it, or `None`.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, continues: bool = False, echo: Sequence[int] = ()
    ):
        self.text = ""
        self.num_tokens = 0
        self.finish: Finish | None = None
        self._stop_tokens = tokenizer.stop_tokens
        self._stream = tokenizer.stream(continues=continues)
        self.echoed = ""
        self._echo_starts: list[int] = []
        for token in echo:
            self._echo_starts.append(len(self.echoed))
            self.echoed += self._stream.push(token)
        self._stop_strings = StopStrings(stop)
        self._length = len(self.echoed)  # of that and the text, with what is held back
        self._scores: list[tuple[int, Score]] = []

    @property
    def stop_string(self) -> str | None:
        return self._stop_strings.reached

    def record(self) -> dict[str, Any]:
        """Return the fields of the answer for `--json`."""
        return {
            "text": self.text,
            "finish": self.finish,
            "stop_string": self.stop_string,
            "answer_tokens": self.num_tokens,
        }

    def take(
        self,
        tokens: Iterable[int],
        write: Callable[[str], object],
        *,
        max_tokens: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Push tokens until the answer ends, and pass the text on to `write`.

        **Arguments:**

        - `tokens`, `max_tokens`, `stopped`: of `models.decoding.generator.Generator.generate`, and what it was given.
        """
        for token in tokens:
            write(self.push(token))
            if self.finish is not None:
                return
        if self.num_tokens == max_tokens:
            write(self.end("max_tokens"))
        else:
            write(self.end("interrupted" if stopped() else "context"))

    def score_echo(self, scores: Iterable[Score]) -> None:
        """Take the scores of `echo`, before there are any of the answer."""
        self._scores += zip(self._echo_starts, scores, strict=True)

    def push(self, token: int, score: Score | None = None) -> str:
        """The text that `token` adds. It may end the answer.

        **Arguments:**

        - `score`: of the token, for `pop_scores`.
        """
        self.num_tokens += 1
        if score is not None:
            self._scores.append((self._length, score))
        if token in self._stop_tokens:
            return self.end("stop_token")
        text = self._stream.push(token)
        self._length += len(text)
        added = self._stop_strings.push(text)
        if self._stop_strings.reached is not None:
            self.finish = "stop_string"
        self.text += added
        return added

    def end(self, finish: Finish) -> str:
        """The text that was held back, when no more tokens come."""
        added = self._stop_strings.push(self._stream.flush()) + self._stop_strings.flush()
        self.finish = finish if self._stop_strings.reached is None else "stop_string"
        self.text += added
        return added

    def pop_scores(self) -> list[tuple[int, Score]]:
        """Return the scores that came with the text of tokens since the last call, and where each token begins in `echoed`
        and `text`, one after the other.

        The score of a token whose text is held back comes with it. Tokens of the string that ended the answer have none.
        """
        if self.finish is None or self.stop_string is not None:
            length = len(self.echoed) + len(self.text)
            count = sum(start < length for start, _ in self._scores)
        else:
            count = len(self._scores)
        popped, self._scores = self._scores[:count], self._scores[count:]
        return popped
