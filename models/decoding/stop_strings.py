"""Texts that end an answer."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on as it comes, up to where the first of some strings is complete.

    What may become such a string is held back, so that no part of it is passed on, however the text is cut into pieces. If two
    are complete at the same character, the longer one is taken.

    **Arguments:**

    - `strings`: none of them empty.

    **Attributes:**

    - `reached`: the string that ended the text, or `None`. Nothing is passed on after it.
    """

    def __init__(self, strings: Sequence[str]):
        if "" in strings:
            raise ValueError("StopStrings: expected strings of at least one character; got an empty one.")
        self.reached: str | None = None
        self._strings = sorted(set(strings), key=len, reverse=True)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be passed on after `text` has come."""
        if self.reached is not None:
            return ""
        text = self._held + text
        ends = [(text.find(string) + len(string), string) for string in self._strings if string in text]
        if ends:
            end, self.reached = min(ends, key=lambda pair: pair[0])  # of equals the first, which is the longest
            self._held = ""
            return text[: end - len(self.reached)]
        self._held = text[len(text) - self._unfinished(text) :]
        return text[: len(text) - len(self._held)]

    def flush(self) -> str:
        """Return the text that is held back, when nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _unfinished(self, text: str) -> int:
        """The number of characters at the end that begin one of the strings."""
        longest = max(map(len, self._strings), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-count:]) for string in self._strings):
                return count
        return 0
