"""Requests as clients of OpenAI's write them: histories that they send back, names, and fields that change nothing."""

import json

import pytest
from openai.types.chat import ChatCompletionMessage

from models.serve.app import make_app
from models.serve.errors import ApiError
from models.serve.language import Language
from models.serve.requests import parse_chat, parse_completion
from models.tokens.tokenizer import Tokenizer

from .test_sentencepiece import METADATA, Told
from .test_serve import client, serving


USER = {"role": "user", "content": "a"}
TEMPLATE = "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}: {{ m.content }}]{% endfor %}"


def parsed(*messages, **fields):
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode()).prompts[0]


def refused(match, *messages, **fields):
    with pytest.raises(ApiError, match=match) as caught:
        parsed(*messages, **fields)
    return caught.value.body["error"]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": "b"}, "b"),
        ({"content": None}, ""),  # of an answer without tokens
        ({}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]}, "bc"),
    ],
)
@pytest.mark.parametrize("empty", [None, []])
def test_an_answer_is_sent_back_as_the_client_has_it(fields, content, empty):
    """Whatever its fields are, if they say nothing."""
    answer = {"role": "assistant", **fields}
    fillers = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning"), empty)
    if empty == []:
        del fillers["refusal"]
    assert parsed(USER, {**fillers, **answer}, USER) == [USER, {"role": "assistant", "content": content}, USER]


def test_the_message_of_the_openai_package_is_sent_back():
    message = ChatCompletionMessage(role="assistant", content="b", annotations=[])
    assert message.model_dump().keys() > {"refusal", "annotations", "audio", "function_call", "tool_calls"}
    assert parsed(USER, message.model_dump(), USER)[1] == {"role": "assistant", "content": "b"}
    message = ChatCompletionMessage(role="assistant", content=None, refusal="no")
    assert parsed(USER, message.model_dump(), USER)[1] == {"role": "assistant", "content": "no"}


def test_calls_of_tools_are_refused():
    """Also without a content, with which they come."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    match = r'messages\[1\]: expected role, content, name, refusal alone; got "tool_calls", which is not supported\.'
    error = refused(match, USER, {"role": "assistant", "content": None, "tool_calls": calls})
    assert error["code"] == "unsupported_parameter"


def test_only_assistants_have_no_content_or_refuse():
    refused(r"messages\[0\]\.content: expected a string, or a list of parts; got null", {**USER, "content": None})
    refused(r'messages\[0\]: expected role, content, name alone; got "refusal"', {**USER, "refusal": "no"})
    part = {"type": "refusal", "refusal": "no"}
    refused(r'messages\[0\]\.content: expected parts of the type "text"; got', {**USER, "content": [part]})
    assert parsed({**USER, "refusal": None}) == [USER]


def test_parts_have_nothing_else_to_say():
    """A field that is not done is refused, as in a message, and one without a value is not one."""
    part = {"type": "text", "text": "a"}
    for key, value in (("cache_control", {"type": "ephemeral"}), ("refusal", "no"), ("image_url", {"url": "x"})):
        match = rf'messages\[0\]\.content: expected type, text alone; got "{key}", which is not supported\.'
        error = refused(match, {**USER, "content": [part, {**part, key: value}]})
        assert error["code"] == "unsupported_parameter"
        assert parsed({**USER, "content": [{**part, key: None}]}) == [USER]


def test_streams_are_not_obfuscated():
    """A client that asks for it would believe that they are."""
    for value in (False, None):
        parsed(USER, stream=True, stream_options={"include_obfuscation": value})
    match = r"stream_options\.include_obfuscation: expected false, all that is supported; got true\. Leave it out\."
    error = refused(match, USER, stream=True, stream_options={"include_obfuscation": True})
    assert error["code"] == "unsupported_parameter"


@pytest.fixture(scope="module")
def opened():
    tokenizer = Tokenizer(METADATA | {"tokenizer.chat_template": TEMPLATE})
    language = Language("small", Told(), tokenizer, timeout=60)  # pyright: ignore[reportArgumentType]
    with serving(make_app(language)) as address, client(address) as opened:
        yield opened, tokenizer


def test_names_are_given_to_the_chat_template(opened):
    openai_client, tokenizer = opened
    messages = [{**USER, "name": "Ada"}, {"role": "assistant", "content": None, "name": "Bob"}, {**USER, "name": None}]
    response = openai_client.chat.completions.create(model="small", messages=messages)
    expected = tokenizer.encode("[user Ada: a][assistant Bob: ][user: a]")
    assert response.usage.prompt_tokens == len(expected)
    refused(r"messages\[0\]\.name: expected a string; got 3", {**USER, "name": 3})


def test_what_came_from_the_server_is_sent_again(opened):
    """An object of the package, which has all fields that a message may have."""
    openai_client, tokenizer = opened
    answer = openai_client.chat.completions.create(model="small", messages=[USER]).choices[0].message
    response = openai_client.chat.completions.create(model="small", messages=[USER, answer, USER])
    assert response.usage.prompt_tokens == len(tokenizer.encode("[user: a][assistant: b][user: a]"))


def test_log_probabilities_are_of_those_who_ask():
    """OpenAI's 0 asks for those of the tokens themselves."""
    for number in (0, 1, None):
        body = json.dumps({"model": "m", "prompt": "a", "logprobs": number})
        assert parse_completion(body.encode()).top_logprobs == number
    for fields, expected in (
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ):
        body = json.dumps({"model": "m", "messages": [USER], **fields})
        assert parse_chat(body.encode()).top_logprobs == expected


def test_fields_of_the_cache_of_prompts_change_nothing():
    fields = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}}
    assert parsed(USER, **fields) == parsed(USER)
