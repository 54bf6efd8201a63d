"""Guesses of the next tokens of a text, from where its last few tokens stood before: prompt lookup."""

from collections.abc import Sequence


# Measured on 52 answers of SmolLM2: after two tokens guesses are wrong more often, after four there are fewer.
_NGRAM = 3
_DECAY = 0.9  # of what earlier guesses count
_FIRST_WRONG = 2.0  # so many wrong guesses are supposed to have been before the first one
_FIRST_COST = 1.5  # of a step with guesses, in steps without, before it is measured


class InexactRows(ValueError):
    """Raised where guesses might change a text, by what a model rounds."""

    def __init__(self) -> None:
        super().__init__(
            "expected a model that gives several tokens the very logits that each gets alone; got one that rounds them "
            "otherwise, as weights in f32 do. Use bf16 or quantised weights, or guess nothing."
        )


class Lookup:
    """Guesses what comes next: what came where the last three tokens of the text stood before.

    Each guess is compared with the tokens that come, whether or not a program has read it. Guesses are given out while earlier
    ones saved, or would have saved, more steps than it takes to read them: a text that never repeats itself costs nothing.

    **Arguments:**

    - `count`: how many tokens are guessed at a time.
    """

    def __init__(self, count: int):
        self._count = count
        self._seconds: float | None = None  # of a step without guesses
        self._cost = _FIRST_COST
        self.start([])

    def start(self, tokens: Sequence[int]) -> None:
        """Begin a text, of which these tokens are known."""
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of the last place of some tokens that others followed
        self._open: list[tuple[list[int], int]] = []  # guesses that are right so far, and where they begin
        self._guesses, self._right = _FIRST_WRONG, 0.0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take the next token of the text."""
        tokens = self._tokens
        if len(tokens) >= _NGRAM:
            self._ends[tuple(tokens[-_NGRAM:])] = len(tokens)
        still_open: list[tuple[list[int], int]] = []
        for guesses, start in self._open:
            right = len(tokens) - start
            is_right = guesses[right] == token
            if is_right and right + 1 < self._count:
                still_open.append((guesses, start))
            else:
                self._right = self._right * _DECAY + right + is_right
                self._guesses = self._guesses * _DECAY + 1
        self._open = still_open
        tokens.append(token)

    def guess(self) -> list[int]:
        """Return guesses of the next tokens, or none where they are not expected to pay."""
        tokens = self._tokens
        end = self._ends.get(tuple(tokens[-_NGRAM:]))
        if end is None:
            return []
        period = len(tokens) - end
        guesses = [tokens[end + i % period] for i in range(self._count)]
        self._open.append((guesses, len(tokens)))
        return guesses if 1 + self._right / self._guesses > self._cost else []

    def took(self, seconds: float, *, guessed: bool) -> None:
        """Take the time of a step, with guesses or without."""
        if not guessed:
            self._seconds = seconds if self._seconds is None else self._seconds + 0.1 * (seconds - self._seconds)
            self._cost += 0.01 * (_FIRST_COST - self._cost)  # what was slow once is tried again
        elif self._seconds is not None:
            cost = min(max(1.0, seconds / self._seconds), self._count + 1)
            self._cost += 0.2 * (cost - self._cost)
