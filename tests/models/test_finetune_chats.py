"""Conversations to fine-tune on, by chat templates of several kinds: tiny models in folders."""

import io
import json
import re
import sys

import pytest
from safetensors.numpy import load_file, save_file

from models._program import UsageError
from models.finetune import __main__ as finetune, merge
from models.finetune.examples import read_examples
from models.generate import __main__ as generate
from models.model_files import open_files

from .test_examples import counted
from .test_huggingface import TEMPLATE, write as write_folder


# As Qwen3's: the thoughts of an answer are left out once a user speaks again, and the last answer has some, if only empty ones.
QWEN3 = r"""
{%- set last = namespace(query=-1) %}
{%- for m in messages if m.role == 'user' %}{% set last.query = messages.index(m) %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.query and loop.last %}
        {{- '<think>\n' + ('' if '</think>' in m.content else '\n</think>\n\n') + m.content.split('<think>\n')[-1] }}
    {%- else %}
        {{- m.content.split('</think>\n\n')[-1] }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# As TRL's for training, with the answers marked.
MARKED = r"""
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}
        {% generation %}
        {%- set inside = m.content + '<|im_end|>' %}
        {{- inside }}
        {%- endgeneration %}
        {{- '\n' + (inside | default('')) }}
    {%- else %}
        {{- m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system\nmessages') }}{% endif %}"
    "{% if messages[-1].content == 'secret' %}{{ raise_exception('No secrets') }}{% endif %}"
) + TEMPLATE


def model_with(folder, template):
    write_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    return folder


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def write_lines(path, *records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def examples_of(folder, *messages, max_tokens=256):
    _, tokenizer = open_files(folder)
    path = write_lines(folder / "lines.jsonl", *({"messages": messages} for messages in messages))
    lines, cut = read_examples(path, tokenizer, max_tokens=max_tokens)
    return tokenizer, lines, cut


def test_answers_that_the_template_changes_later_are_examples_of_their_own(tmp_path):
    """Each with the conversation before it as the model sees it then, and each counted once."""
    messages = turns("one?", "<think>\nhm\n</think>\n\none", "two?", "two", "three?", "three")
    tokenizer, (examples, single), cut = examples_of(model_with(tmp_path, QWEN3), messages, messages[:2])
    answers = ["<think>\nhm\n</think>\n\none", "<think>\n\n</think>\n\ntwo", "<think>\n\n</think>\n\nthree"]
    assert [counted(tokenizer, example) for example in examples] == [[answer] for answer in answers]
    for i, example in enumerate(examples):
        before = tokenizer.encode_chat(messages[: 2 * i + 1])
        whole = [*example.tokens, example.targets[-1]]
        assert whole[: len(before)] == before
        assert whole == tokenizer.encode_chat(messages[: 2 * i + 2], add_generation_prompt=False)[:-1]
        assert example.targets == [-1] * (len(before) - 1) + whole[len(before) :]
    assert (single, cut) == (examples[:1], 0)


def test_a_template_that_only_adds_makes_one_example(tmp_path):
    tokenizer, ((example,),), _ = examples_of(model_with(tmp_path, TEMPLATE), turns("one?", "one", "two?", "two"))
    assert counted(tokenizer, example) == ["one", "two"]


def test_marks_of_answers_are_taken(tmp_path):
    """They change no text, and what is set inside is not set behind them, as with transformers."""
    messages = turns("one?", "one", "two?", "two")
    tokenizer, ((example,),), _ = examples_of(model_with(tmp_path / "a", MARKED), messages)
    assert counted(tokenizer, example) == ["one", "two"]
    _, plain = open_files(model_with(tmp_path / "b", TEMPLATE))
    assert tokenizer.chat(messages) == plain.chat(messages)


def test_examples_that_begin_behind_the_limit_are_left_out(tmp_path):
    messages = turns("one?", "one", "two?", "two")
    folder = model_with(tmp_path, QWEN3)
    _, ((first, second),), _ = examples_of(folder, messages)
    length = len(first.tokens) + 1
    assert length < second.targets.count(-1)
    assert examples_of(folder, messages, max_tokens=length)[1:] == ([[first]], 1)
    with pytest.raises(
        UsageError, match=r"lines.jsonl:1: expected an answer, .* that begins within 9 tokens; got none"
    ):
        examples_of(folder, messages, max_tokens=9)


@pytest.mark.parametrize(
    ("template", "record", "message"),
    [
        (
            NO_SYSTEM,
            {"prompt": "a", "response": "b", "system": "c"},
            "expected messages that the model's chat template takes; it says: No system messages",
        ),
        (
            TEMPLATE.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<|im_end|>"),
            {"prompt": "a", "response": "b"},
            'expected a chat template that continues with an answer as the model does; .* Write the line as a "text"',
        ),
        ("", {"prompt": "a", "response": "b"}, "expected the model to have a chat template; got none"),
    ],
)
def test_refusals_name_the_line(template, record, message, tmp_path, capsys):
    path = write_lines(tmp_path / "lines.jsonl", {"text": "one"}, record)
    weights = model_with(tmp_path / "model", template)
    options = ["--output", str(tmp_path / "out"), "--weights", str(weights), "--max-tokens", "64"]
    assert finetune.main([str(path), *options]) == 2
    assert re.fullmatch(rf"finetune: error: .*lines\.jsonl:2: {message}.*\n", capsys.readouterr().err)


def test_refusals_of_prompts(tmp_path, capsys, monkeypatch):
    """In a file they name the line, and a conversation says so before the model is loaded, or goes on."""
    weights = ["--weights", str(model_with(tmp_path / "model", NO_SYSTEM))]
    says = "expected messages that the model's chat template takes; it says: No s"
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b", "system": "c"})
    assert generate.main(["--prompts", str(path), *weights]) == 2
    assert re.fullmatch(rf"generate: error: .*prompts\.jsonl:2: {says}ystem messages\n", capsys.readouterr().err)
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret\nhello\n"))
    assert generate.main(["--chat", "--json", "--max-tokens", "3", *weights]) == 0
    written = capsys.readouterr()
    assert f"\n{says}ecrets\n" in written.err
    assert json.loads(written.out)["answer_tokens"] > 0
    monkeypatch.setattr("models.llama.load", lambda *_, **__: pytest.fail("the model was loaded"))
    for prompt in ("--chat", "hello"):
        assert generate.main([prompt, "--system", "b", *weights]) == 2
        assert capsys.readouterr().err == f"generate: error: {says}ystem messages\n"


def tune(folder, weights, *records):
    """Take one step on lines of which one is held out, and return what the program printed."""
    path, written = write_lines(folder / "lines.jsonl", *records), []
    options = ["--epochs", "1", "--batch", "8", "--rank", "1", "--max-tokens", "128", "--weights", str(weights)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models._program.write", written.extend)
        assert finetune.main([str(path), "--output", str(folder / "adapter"), *options]) == 0
    return "".join(written)


def no_constant(name):
    pytest.fail(f"JSON has no {name}")


def test_lines_are_held_out_and_what_is_printed_is_json(tmp_path):
    """All examples of a line are, and a perplexity beyond all numbers is null."""
    weights = model_with(tmp_path / "model", QWEN3)
    tensors = load_file(weights / "model.safetensors")
    tensors["model.norm.weight"] *= 1e4
    save_file(tensors, weights / "model.safetensors")
    lines = [{"messages": turns("a?", "a", f"{i}?", f"{i}")} for i in range(3)]
    printed = tune(tmp_path, weights, *lines)
    record = json.loads(printed, parse_constant=no_constant)
    assert (record["lines"], record["held_out_lines"], record["steps"]) == (2, 1, 1)
    assert record["losses"][0] > 700
    assert (record["perplexity_before"], record["perplexity_after"]) == (None, None)


def test_where_a_merged_model_goes_is_tried_first(tmp_path, capsys, monkeypatch):
    weights = model_with(tmp_path / "model", TEMPLATE)
    tune(tmp_path, weights, *({"text": text} for text in ("one", "two")))
    capsys.readouterr()
    monkeypatch.setattr("models.llama.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert merge.main([str(tmp_path / "adapter"), "--output", "/proc/model", "--weights", str(weights)]) == 2
    expected = (
        r"finetune\.merge: error: expected --output in a folder that can be written; got /proc/model: .*No such.*\n"
    )
    assert re.fullmatch(expected, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--top-p", "0.9"], "--top-p"),
        (["--top-k", "0", "--min-p", "0.1", "--seed", "3"], "--top-k and --min-p and --seed"),
    ],
)
def test_options_of_draws_without_a_temperature(options, given, capsys):
    """Nothing would be drawn. With a temperature of 0 that is what was asked for."""
    assert generate.main(["hello", *options]) == 2
    expected = f"generate: error: expected --temperature with {given}, as nothing is drawn without; got none\n"
    assert capsys.readouterr().err == expected
    assert generate.main(["hello", "--temperature", "0", "--max-tokens", "0", *options]) == 2
    assert capsys.readouterr().err == "generate: error: expected --max-tokens of 1 or more; got 0\n"
