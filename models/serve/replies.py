"""Answers in OpenAI's form: objects, and the chunks of a stream."""

import base64
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..decoding.answer import Answer, Finish


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
    """The form of one answer.

    **Arguments:**

    - `model`: its name.
    - `num_prompt_tokens`: for the counts.
    - `is_chat`: whether a chat is completed, or a text.
    - `echoed`: what comes before the answer.
    - `include_usage`: whether a stream ends with the counts.
    """

    def __init__(
        self, model: str, num_prompt_tokens: int, *, is_chat: bool, echoed: str = "", include_usage: bool = False
    ):
        self._prompt_tokens = num_prompt_tokens
        self._is_chat = is_chat
        self._echoed = echoed
        self._include_usage = include_usage
        self._fields: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """An answer that has ended."""
        if self._is_chat:
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        else:
            choice = {"text": self._echoed + answer.text}
        choices = [self._choice(choice, answer.finish)]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._fields, "object": kind, "choices": choices, "usage": self._usage(answer)}

    @property
    def first(self) -> str:
        """Return what a stream begins with, before there is text."""
        if self._is_chat:
            return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)
        return self._chunk({"text": self._echoed}, None) if self._echoed else ""

    def piece(self, text: str) -> str:
        """A chunk with more of the text."""
        return self._chunk({"delta": {"content": text}} if self._is_chat else {"text": text}, None)

    def last(self, answer: Answer) -> str:
        """The end of a stream, after all text."""
        end = self._chunk({"delta": {}} if self._is_chat else {"text": ""}, answer.finish)
        if self._include_usage:
            end += self._event({"choices": [], "usage": self._usage(answer)})
        return end + DONE

    def _chunk(self, choice: dict[str, Any], finish: Finish | None) -> str:
        usage = {"usage": None} if self._include_usage else {}
        return self._event({"choices": [self._choice(choice, finish)], **usage})

    def _choice(self, choice: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        reason = None if finish is None else _REASONS[finish]
        return {"index": 0, **choice, "logprobs": None, "finish_reason": reason}

    def _event(self, content: dict[str, Any]) -> str:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return event({**self._fields, "object": kind, **content})

    def _usage(self, answer: Answer) -> dict[str, int]:
        return _usage(self._prompt_tokens) | {
            "completion_tokens": answer.num_tokens,
            "total_tokens": self._prompt_tokens + answer.num_tokens,
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
