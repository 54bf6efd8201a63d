"""Texts that end an answer, however they are cut into pieces."""

import pytest
from hypothesis import given, settings, strategies as st

from models.decoding.stop_strings import StopStrings


def passed(pieces, strings):
    stop = StopStrings(strings)
    pushed = [stop.push(piece) for piece in pieces]
    return pushed, stop.flush(), stop.reached


def defined(text, strings):
    """The text before the string that is complete first, and that string."""
    for end in range(len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_a_string_in_one_piece():
    assert passed(["one two three"], ["two"]) == (["one "], "", "two")


def test_a_string_over_three_pieces_is_never_passed_on():
    assert passed(["one t", "w", "o three", " four"], ["two"]) == (["one ", "", "", ""], "", "two")


def test_what_turns_out_to_be_something_else():
    assert passed(["one t", "w", "elve"], ["two"]) == (["one ", "", "twelve"], "", None)


def test_the_end_of_the_text_is_not_lost():
    assert passed(["one tw"], ["two"]) == (["one "], "tw", None)


def test_the_string_that_is_complete_first():
    assert passed(["abcd"], ["abcd", "bc"]) == (["a"], "", "bc")
    assert passed(["xabc"], ["bc", "abc"]) == (["x"], "", "abc")


def test_no_strings():
    assert passed(["one", " two"], []) == (["one", " two"], "", None)


def test_an_empty_string():
    with pytest.raises(ValueError, match="expected strings of at least one character; got an empty one"):
        StopStrings(["a", ""])


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=8),
    strings=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_the_definition(pieces, strings):
    pushed, flushed, reached = passed(pieces, strings)
    assert ("".join(pushed) + flushed, reached) == defined("".join(pieces), strings)
    # Nothing waits that can be passed on: what is held back begins a string.
    stop = StopStrings(strings)
    for i, piece in enumerate(pieces):
        stop.push(piece)
        held = "".join(pieces[: i + 1])[sum(map(len, pushed[: i + 1])) :]
        assert stop.reached is not None or held == "" or any(string.startswith(held) for string in strings)
