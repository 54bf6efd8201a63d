"""Answers in OpenAI's form: objects, and the chunks of a stream."""

import base64
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..decoding.answer import Answer, Finish
from .logprobs import Form, Scores


# OpenAI knows two reasons: the model was done, or a limit was reached.
_REASONS: dict[Finish, str] = {
    "stop_token": "stop",
    "stop_string": "stop",
    "max_tokens": "length",
    "context": "length",
    "time": "length",
}

DONE = "data: [DONE]\n\n"


class Reply:
    """The form of the answers to one request, each of which is a choice.

    **Arguments:**

    - `model`: its name.
    - `num_prompt_tokens`: of all prompts, for the counts.
    - `is_chat`: whether a chat is completed, or a text.
    - `include_usage`: whether a stream ends with the counts.
    - `logprobs`: makes the field of that name, or `None` for answers without it.
    """

    def __init__(
        self,
        model: str,
        num_prompt_tokens: int,
        *,
        is_chat: bool,
        include_usage: bool = False,
        logprobs: Form | None = None,
    ):
        self._prompt_tokens = num_prompt_tokens
        self._is_chat = is_chat
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._fields: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answers: Sequence[Answer], scores: Sequence[Scores]) -> dict[str, Any]:
        """The answers, which have ended, and the scores of each."""
        choices: list[dict[str, Any]] = []
        for i, (answer, of_tokens) in enumerate(zip(answers, scores, strict=True)):
            if self._is_chat:
                content: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            else:
                content = {"text": answer.echoed + answer.text}
            choices.append(self._choice(i, content, answer.finish, of_tokens))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._fields, "object": kind, "choices": choices, "usage": self._usage(answers)}

    def first(self, i: int, answer: Answer) -> str:
        """Return what the stream of a choice begins with, before there is text of its own."""
        if self._is_chat:
            return self._chunk(i, {"delta": {"role": "assistant", "content": ""}})
        return self._chunk(i, {"text": answer.echoed}) if answer.echoed else ""

    def piece(self, i: int, text: str, scores: Scores) -> str:
        """A chunk with more of a choice."""
        return self._chunk(i, {"delta": {"content": text}} if self._is_chat else {"text": text}, scores=scores)

    def end(self, i: int, finish: Finish) -> str:
        """The end of a choice, after all of its text."""
        return self._chunk(i, {"delta": {}} if self._is_chat else {"text": ""}, finish)

    def last(self, answers: Sequence[Answer]) -> str:
        """The end of a stream, after the ends of all choices."""
        usage = self._event({"choices": [], "usage": self._usage(answers)}) if self._include_usage else ""
        return usage + DONE

    def _chunk(
        self, i: int, content: dict[str, Any], finish: Finish | None = None, scores: Scores | None = None
    ) -> str:
        usage = {"usage": None} if self._include_usage else {}
        return self._event({"choices": [self._choice(i, content, finish, scores)], **usage})

    def _choice(self, i: int, content: dict[str, Any], finish: Finish | None, scores: Scores | None) -> dict[str, Any]:
        reason = None if finish is None else _REASONS[finish]
        logprobs = None if self._logprobs is None or scores is None else self._logprobs(scores)
        return {"index": i, **content, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, content: dict[str, Any]) -> str:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return event({**self._fields, "object": kind, **content})

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        num_tokens = sum(answer.num_tokens for answer in answers)
        return _usage(self._prompt_tokens) | {
            "completion_tokens": num_tokens,
            "total_tokens": self._prompt_tokens + num_tokens,
        }


def event(content: Any) -> str:
    """An event of a stream."""
    return f"data: {json.dumps(content)}\n\n"


def embeddings(model: str, vectors: np.ndarray, num_tokens: int, *, in_base64: bool) -> dict[str, Any]:
    def encoded(vector: np.ndarray) -> Any:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()

    data = [{"object": "embedding", "index": i, "embedding": encoded(vector)} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model, "usage": _usage(num_tokens)}


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "local"}


def _usage(num_prompt_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens}
