"""Log-probabilities of tokens in OpenAI's form."""

from collections.abc import Callable, Sequence
from typing import Any

from ..decoding.scores import Score
from ..tokens.tokenizer import Tokenizer


# Scores, each with the place of its token in the answer's text.
Scores = Sequence[tuple[int, Score]]
Form = Callable[[Scores], dict[str, Any]]

# OpenAI's number for a token that is very unlikely. JSON has none for an infinity.
_LEAST = -9999.0


def form_of(tokenizer: Tokenizer, *, is_chat: bool) -> Form:
    """Return what makes the field `logprobs` of scores."""
    form = _of_chat if is_chat else _of_completion
    return lambda scores: form(tokenizer, [(start, _in_json(score)) for start, score in scores])


def _in_json(score: Score) -> Score:
    def number(logprob: float) -> float:
        return logprob if logprob > _LEAST else _LEAST  # a NaN too

    logprob = None if score.logprob is None else number(score.logprob)
    return Score(score.token, logprob, [(token, number(of_token)) for token, of_token in score.top])


def _of_chat(tokenizer: Tokenizer, scores: Scores) -> dict[str, Any]:
    def rated(token: int, logprob: float | None) -> dict[str, Any]:
        name = tokenizer.control_text(token)
        if name is not None:
            return {"token": name, "bytes": None, "logprob": logprob}
        piece = tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}

    content = [
        {**rated(score.token, score.logprob), "top_logprobs": [rated(*pair) for pair in score.top]}
        for _, score in scores
        if score.token not in tokenizer.stop_tokens  # the end of the answer
    ]
    return {"content": content, "refusal": None}


def _of_completion(tokenizer: Tokenizer, scores: Scores) -> dict[str, Any]:
    def name(token: int) -> str:
        control, piece = tokenizer.control_text(token), tokenizer.piece(token)
        if control is not None:
            return control
        try:
            return piece.decode()
        except UnicodeDecodeError:  # a part of a character: as a key it has to differ from other parts
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def alternatives(score: Score) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        by_name: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            by_name.setdefault(name(token), logprob)  # of two tokens with one text the likelier
        return by_name

    return {
        "tokens": [name(score.token) for _, score in scores],
        "token_logprobs": [score.logprob for _, score in scores],
        "top_logprobs": [alternatives(score) for _, score in scores],
        "text_offset": [start for start, _ in scores],
    }
