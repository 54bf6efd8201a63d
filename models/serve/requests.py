"""OpenAI's requests in our terms."""

import dataclasses
import re
import secrets
from collections.abc import Sequence
from typing import Any

from ..decoding.chooser import Bias, Choice
from ..decoding.sampling import PENALTIES, TEMPERATURES, Sampling
from ..decoding.scores import MOST_ALTERNATIVES
from .errors import ApiError
from .fields import Fields, shown, text


_MAX_STOPS, _MAX_STOP_LENGTH = 4, 1000
_MAX_INPUTS = 2048
_MAX_CHOICES = 128
_MAX_COMPLETION_LOGPROBS = 5
_MAX_BIAS = 100
_TOKEN = re.compile("[0-9]{1,9}")  # a key of JSON, which is a text
_MOST = 2**31 - 1  # of integers without a limit of their own
# A completion has so many tokens if it does not say, as OpenAI's; a chat goes on to its end.
_COMPLETION_TOKENS = 16
# Fields for OpenAI's own servers, or for what is kept there. They change no answer.
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclasses.dataclass(frozen=True)
class AnswerRequest:
    """A request for a chat completion or a completion.

    **Attributes:**

    - `prompts`: messages as chat templates take them; or texts, and lists of tokens.
    - `max_tokens`: or `None`: as many as there is room for.
    - `choices`: the ways in which the tokens of each answer are chosen, as many for each prompt, those of the first one first.
    - `top_logprobs`: how many alternatives each token comes with, those of an echo too, or `None` for answers without
        log-probabilities.
    - `echo`: whether the prompt is a part of the answer.
    - `include_usage`: whether a stream ends with the counts of tokens.
    """

    model: str
    prompts: list[Any]
    max_tokens: int | None
    stop: list[str]
    choices: list[Choice]
    top_logprobs: int | None
    stream: bool
    include_usage: bool
    echo: bool


@dataclasses.dataclass(frozen=True)
class EmbeddingRequest:
    """**Attributes:**

    - `inputs`: the texts.
    - `dimensions`: which the vectors should have, or `None`.
    - `in_base64`: whether vectors are in base64, and not lists.
    """

    model: str
    inputs: list[str]
    dimensions: int | None
    in_base64: bool


def parse_chat(body: bytes) -> AnswerRequest:
    """**Raises:** `ApiError`, as all functions of this module do."""
    fields = Fields(body)
    model = text("model", fields.required("model"))
    messages = _messages(fields.required("messages"))
    newer = fields.integer("max_completion_tokens", None, 1, _MOST)
    max_tokens = fields.integer("max_tokens", newer, 1, _MOST)
    if newer is not None and newer != max_tokens:
        raise ApiError("max_tokens: expected it without max_completion_tokens; got both.", param="max_tokens")
    with_logprobs = fields.flag("logprobs")
    top_logprobs = fields.integer("top_logprobs", 0, 0, MOST_ALTERNATIVES)
    num_choices = _num_choices(fields)
    if top_logprobs and not with_logprobs:
        raise ApiError("top_logprobs: expected it with logprobs of true; got it without.", param="top_logprobs")
    fields.only("tools", [])
    fields.only("tool_choice", "none", "auto")
    fields.only("response_format", {"type": "text"})
    fields.only("modalities", ["text"])
    top_logprobs = top_logprobs if with_logprobs else None
    return _answer_request(fields, model, [messages], max_tokens, num_choices, top_logprobs)


def parse_completion(body: bytes) -> AnswerRequest:
    fields = Fields(body)
    model = text("model", fields.required("model"))
    prompts = _prompts(fields.required("prompt"))
    max_tokens = fields.integer("max_tokens", _COMPLETION_TOKENS, 0, _MOST)
    echo = fields.flag("echo")
    top_logprobs = fields.integer("logprobs", None, 0, _MAX_COMPLETION_LOGPROBS)
    num_choices = _num_choices(fields)
    fields.only("best_of", num_choices)
    fields.only("suffix", "")
    return _answer_request(fields, model, prompts, max_tokens, num_choices, top_logprobs, echo)


def parse_embeddings(body: bytes) -> EmbeddingRequest:
    fields = Fields(body)
    model = text("model", fields.required("model"))
    inputs = fields.required("input")
    inputs = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(inputs, list) or not all(isinstance(item, str) for item in inputs):
        raise ApiError(
            f"input: expected a string, or a list of strings; got {shown(inputs)}. Tokens are not supported.",
            param="input",
        )
    if not 1 <= len(inputs) <= _MAX_INPUTS:
        raise ApiError(f"input: expected 1 to {_MAX_INPUTS} strings; got {len(inputs)}.", param="input")
    dimensions = fields.integer("dimensions", None, 1, _MOST)
    encoding = fields.text("encoding_format", "float")
    if encoding not in ("float", "base64"):
        message = f'encoding_format: expected "float" or "base64"; got {shown(encoding)}.'
        raise ApiError(message, param="encoding_format")
    fields.ignore(_IGNORED)
    fields.end()
    return EmbeddingRequest(model, inputs, dimensions, encoding == "base64")


def _answer_request(
    fields: Fields,
    model: str,
    prompts: list[Any],
    max_tokens: int | None,
    num_choices: int,
    top_logprobs: int | None,
    echo: bool = False,
) -> AnswerRequest:
    stop = _stop(fields.any("stop"))
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, *TEMPERATURES),
        top_k=fields.integer("top_k", 0, 0, _MOST) or 0,
        top_p=fields.number("top_p", 1.0, 0, 1),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, *PENALTIES),
    )
    bias = Bias(
        frequency=fields.number("frequency_penalty", 0.0, -2, 2),
        presence=fields.number("presence_penalty", 0.0, -2, 2),
        of_tokens=_logit_bias(fields.any("logit_bias")),
    )
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    stream = fields.flag("stream")
    include_usage = _include_usage(fields.any("stream_options"), stream)
    fields.ignore(_IGNORED)
    fields.end()
    seed = secrets.randbits(32) if seed is None else seed
    choices = [Choice(sampling, (seed + i) % 2**32, bias) for _ in prompts for i in range(num_choices)]
    return AnswerRequest(model, prompts, max_tokens, stop, choices, top_logprobs, stream, include_usage, echo)


def _num_choices(fields: Fields) -> int:
    return fields.integer("n", 1, 1, _MAX_CHOICES) or 1


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ApiError(f"messages: expected a list of at least one message; got {shown(messages)}.", param="messages")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(name: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(f"{name}: expected an object; got {shown(message)}.", param=name)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(
            f"{name}.role: expected {', '.join(map(shown, _ROLES))}; got {shown(role)}.", param=f"{name}.role"
        )
    answers = role == "assistant"
    fields = ("role", "content", "name", "refusal") if answers else ("role", "content", "name")
    _check_alone(name, message, fields)
    given = {key: value for key, value in message.items() if value is not None}
    if answers:  # it may have refused, in place of a content
        content = _content(f"{name}.content", given.get("content", ""), "text", "refusal")
        content += text(f"{name}.refusal", given.get("refusal", ""))
    else:
        content = _content(f"{name}.content", given.get("content"), "text")
    taken = {"role": _ROLES[role], "content": content}
    if "name" in given:  # for the chat template, which may write it
        taken["name"] = text(f"{name}.name", given["name"])
    return taken


def _content(name: str, content: Any, *kinds: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{name}: expected a string, or a list of parts; got {shown(content)}.", param=name)
    words = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get(kind), str):
            message = f"{name}: expected parts of the type {' or '.join(map(shown, kinds))}; got {shown(part)}."
            raise ApiError(message, param=name)
        _check_alone(name, part, ("type", kind))
        words.append(part[kind])
    return "".join(words)


def _check_alone(name: str, value: dict[str, Any], fields: Sequence[str]) -> None:
    """Refuse other fields, but for those that say nothing: clients send back what they got."""
    for key, field in value.items():
        if key not in fields and field not in (None, [], {}, ""):
            message = f"{name}: expected {', '.join(fields)} alone; got {shown(key)}, which is not supported."
            raise ApiError(message, param=name, code="unsupported_parameter")


def _prompts(prompt: Any) -> list[str | list[int]]:
    # A list of numbers is one prompt, and a list of anything else has several.
    is_many = isinstance(prompt, list) and prompt and not all(type(item) is int for item in prompt)
    prompts = prompt if is_many else [prompt]
    for item in prompts:
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            message = f"prompt: expected a string, a list of tokens, or a list of these; got {shown(prompt)}."
            raise ApiError(message, param="prompt")
    return prompts


def _stop(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    fits = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not fits or not all(isinstance(item, str) and 1 <= len(item) <= _MAX_STOP_LENGTH for item in stops):
        expected = f"up to {_MAX_STOPS} strings, of 1 to {_MAX_STOP_LENGTH} characters"
        raise ApiError(f"stop: expected {expected}; got {shown(stop)}.", param="stop")
    return stops


def _logit_bias(bias: Any) -> dict[int, float]:
    bias = {} if bias is None else bias
    if not isinstance(bias, dict) or not all(map(_is_bias, bias.keys(), bias.values())):
        expected = f"an object with numbers from -{_MAX_BIAS} to {_MAX_BIAS} by tokens"
        raise ApiError(f"logit_bias: expected {expected}; got {shown(bias)}.", param="logit_bias")
    return {int(token): float(value) for token, value in bias.items()}


def _is_bias(token: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return _TOKEN.fullmatch(token) is not None and is_number and -_MAX_BIAS <= value <= _MAX_BIAS


def _include_usage(options: Any, stream: bool) -> bool:
    name = "stream_options"
    if options is None:
        return False
    if not stream:
        raise ApiError(f"{name}: expected it with stream; got it without.", param=name)
    known = isinstance(options, dict) and options.keys() <= {"include_usage", "include_obfuscation"}
    if not known or not all(value is None or isinstance(value, bool) for value in options.values()):
        raise ApiError(f"{name}: expected an object with include_usage; got {shown(options)}.", param=name)
    if options.get("include_obfuscation"):
        message = f"{name}.include_obfuscation: expected false, all that is supported; got true. Leave it out."
        raise ApiError(message, param=f"{name}.include_obfuscation", code="unsupported_parameter")
    return options.get("include_usage") is True
