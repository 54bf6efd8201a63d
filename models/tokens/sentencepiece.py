"""The tokens of sentencepiece's BPE, as Llama 2 and TinyLlama have them: pairs are merged by the scores of what they make."""

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence


SPACE = "\u2581"
"""The character that tokens have for a space."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Sentencepiece:
    """Texts to tokens, as llama.cpp does it: of all neighbours that are a token together, the two with the highest score are
    merged first, and of several with the same score those on the left.

    **Arguments:**

    - `tokens`: the tokens that texts are merged to, and their numbers.
    - `scores`: of all tokens, by number.
    - `bytes_`: the 256 tokens for the bytes of characters that `tokens` lacks.
    - `as_they_are`: tokens that are looked for before anything is merged, and their numbers.
    - `adds_space`: whether a space is put before each text, and after each token of `as_they_are`.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        scores: Sequence[float],
        bytes_: Sequence[int],
        as_they_are: Mapping[str, int],
        *,
        adds_space: bool,
    ):
        self._tokens, self._bytes, self._as_they_are = tokens, bytes_, as_they_are
        self._order = {text: -scores[token] for text, token in tokens.items()}  # the lowest is merged first
        self._prefix = SPACE if adds_space else ""
        names = "|".join(map(re.escape, sorted(as_they_are, key=len, reverse=True))) or "(?!)"
        self._split = re.compile(f"({names})").split

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        numbers: list[int] = []
        for part in self._split(text):
            if part in self._as_they_are:
                numbers.append(self._as_they_are[part])
            elif part:
                for piece in self._pieces(self._prefix + part.replace(" ", SPACE)):
                    token = self._tokens.get(piece)
                    numbers += [token] if token is not None else [self._bytes[byte] for byte in piece.encode()]
        return numbers

    def _pieces(self, text: str) -> Iterator[str]:
        """The parts of a text between which nothing can be merged."""
        pieces, count = list(text), len(text)  # a piece that was merged into the one before it is empty
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < count:
                both = pieces[left] + pieces[right]
                if both in self._order:
                    heapq.heappush(queue, (self._order[both], left, right, len(both)))

        for right in range(1, count):
            offer(right - 1, right)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != length:
                continue  # one of them has been merged with another
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] < count:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return filter(None, pieces)


def bytes_of_piece(token: str) -> bytes:
    """The bytes of a token: those of its text, or the one that a token such as `<0x0A>` names."""
    if match := _BYTE.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE, " ").encode()
