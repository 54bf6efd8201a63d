"""Text that programs read: one way for all of them."""

import io
import sys

import pytest

from models import _text
from models._program import UsageError
from models.finetune.examples import read_examples
from models.generate.prompts import read_prompt, read_prompts
from models.train import text_data


BOM = b"\xef\xbb\xbf"


def test_a_byte_order_mark_is_no_text(tokenizer, tmp_path, monkeypatch):
    lines, objects, examples = (tmp_path / name for name in ("a.txt", "a.jsonl", "b.jsonl"))
    lines.write_bytes(BOM + b"Say hello.\r\n\r\nSay goodbye.\r\n")
    objects.write_bytes(BOM + b'{"prompt": "Say hello."}\r\n')
    examples.write_bytes(BOM + b'{"text": "Hello."}\r\n')
    text = "Say hello.\n\nSay goodbye.\n"
    assert _text.read_text(lines) == text_data.read_text(lines) == text
    assert read_prompts(lines) == [(f"{lines}:1", {"prompt": "Say hello."}), (f"{lines}:3", {"prompt": "Say goodbye."})]
    assert read_prompt(lines) == text.strip()
    assert read_prompts(objects) == [(f"{objects}:1", {"prompt": "Say hello."})]
    (((example,),), _) = read_examples(examples, tokenizer, max_tokens=9)
    assert [example.tokens[0], *example.targets] == tokenizer.encode("Hello.")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.read_bytes())))
    assert _text.read_stdin() == text


def test_what_is_not_text(tmp_path, monkeypatch):
    path = tmp_path / "latin.txt"
    path.write_bytes(BOM + "Käse".encode("latin-1"))
    with pytest.raises(UsageError, match=r"^expected .*latin.txt to be UTF-8; got byte 0xe4 at 4$"):
        _text.read_text(path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UsageError, match=r"^expected stdin to be UTF-8; got byte 0xff at 0$"):
        _text.read_stdin()
    with pytest.raises(UsageError, match=r"^expected .* to be a file that can be read; got .*null byte$"):
        _text.read_text(tmp_path / "a\0b")


@pytest.mark.parametrize("line", ["{", "[" * 100_000, '{"a":' * 100_000])
def test_what_is_not_json(line):
    with pytest.raises(UsageError, match=r"^a.jsonl:7: expected a JSON object; got "):
        _text.parse_json("a.jsonl:7", line)
