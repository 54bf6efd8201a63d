"""Sentencepiece's tokens in GGUF files: a random vocabulary against the rule as it is told, and what is refused."""

import contextlib
import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from models._errors import ModelFileError
from models.decoding.answer import Answer
from models.model_files import open_files
from models.serve.app import make_app
from models.serve.engine import Event
from models.serve.language import Language
from models.tokens.tokenizer import Tokenizer

from . import families
from .test_serve import send, serving
from .test_tokenizer import properties


SPACE = "\u2581"
LETTERS = [*"abcé", SPACE]


def random_metadata():
    """Unknown, two control tokens, one that is as it is, all bytes, and 60 random pieces, many of them of the same score."""
    rng = np.random.default_rng(0)
    pieces = list(LETTERS)
    while len(pieces) < 60:
        piece = "".join(rng.choice(pieces, 2))
        if piece not in pieces and len(piece) < 7:
            pieces.append(piece)
    first = ["<unk>", "<s>", "</s>", "<user a>"]
    tokens = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = np.zeros(len(tokens), np.float32)
    scores[-60:] = -rng.integers(0, 15, 60)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 4] + [6] * 256 + [1] * 60, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}[{{ messages[0].content }}]{{ eos_token }}",
    }


METADATA = random_metadata()
TOKENIZER = Tokenizer(METADATA)
NUMBERS = {token: i for i, token in enumerate(METADATA["tokenizer.ggml.tokens"])}


def merged(text):
    """Look through all neighbours for the best pair, again and again."""
    pieces = list(text.replace(" ", SPACE))
    scores = {token: METADATA["tokenizer.ggml.scores"][i] for token, i in NUMBERS.items() if i >= 260}
    while True:
        pairs = ["".join(pieces[i : i + 2]) for i in range(len(pieces) - 1)]
        ranked = [(-scores[pair], i) for i, pair in enumerate(pairs) if pair in scores]
        if not ranked:
            break
        _, i = min(ranked)
        pieces[i : i + 2] = [pairs[i]]
    return [i for piece in pieces for i in ([NUMBERS[piece]] if piece in scores else [4 + b for b in piece.encode()])]


@properties
@hypothesis.given(st.text(st.sampled_from("abcé 日\n😀")))
def test_pairs_are_merged_by_their_scores(text):
    tokens = TOKENIZER.encode(text)
    assert tokens == [1, *(merged(f" {text}") if text else [])]
    assert TOKENIZER.decode(tokens) == text


def test_a_long_text_takes_no_time():
    """Whose merges each change what its neighbours may be merged with."""
    text = "abc " * 20_000
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_space_is_put_before_what_follows_a_special_token():
    """As llama.cpp does it; and none with `add_space_prefix` off."""
    assert TOKENIZER.encode("a<s>b<user a> c") == [1, *merged(" a"), 1, *merged(" b"), 3, *merged("  c")]
    assert TOKENIZER.decode(TOKENIZER.encode("a<user a>b")) == "a<user a> b"
    plain = Tokenizer(METADATA | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert plain.encode("a b<user a>c") == [*merged("a b"), 3, *merged("c")]
    assert plain.decode(plain.encode(" a")) == " a"


def test_tokens_that_are_not_text():
    assert TOKENIZER.stop_tokens == {2}
    assert TOKENIZER.decode([0, 1, *merged(" a"), 2]) == "a"
    assert [TOKENIZER.piece(token) for token in (0, 1, 3, 4 + 0x41, NUMBERS[SPACE])] == [
        b"",
        b"",
        b"<user a>",
        b"A",
        b" ",
    ]
    stream = TOKENIZER.stream()
    assert "".join([*map(stream.push, TOKENIZER.encode("a 😀")), stream.flush()]) == "a 😀"


def test_files_that_do_not_say_the_tokens_of_beginning_and_end():
    """Sentencepiece has them at 1 and 2, which llama.cpp takes then."""
    said = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
    tokenizer = Tokenizer({key: value for key, value in METADATA.items() if key not in said})
    assert tokenizer.encode("a") == TOKENIZER.encode("a")
    assert tokenizer.stop_tokens == {2}
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == "<s>[a]</s>"
    renamed = METADATA | {
        "tokenizer.ggml.tokens": ["<unk>", "<begin>", "<end>", *METADATA["tokenizer.ggml.tokens"][3:]]
    }
    assert Tokenizer({key: value for key, value in renamed.items() if key not in said}).stop_tokens == {2}


def test_an_answer_that_continues_a_text_keeps_its_first_space():
    prompt, tokens = TOKENIZER.encode("a"), [NUMBERS[SPACE], NUMBERS["b"]]
    answer = Answer(TOKENIZER, continues=True)
    assert TOKENIZER.decode(prompt) + "".join(map(answer.push, tokens)) == TOKENIZER.decode([*prompt, *tokens]) == "a b"
    assert "".join(map(Answer(TOKENIZER).push, tokens)) == "b"


class Told:
    """An engine that answers a space and "b"."""

    room, num_requests = 64, 0
    place = contextlib.nullcontext

    def submit(self, request, deliver, deadline):
        text = "".join(map(request.answer.push, [NUMBERS[SPACE], NUMBERS["b"]])) + request.answer.end("max_tokens")
        deliver(Event(text, request.answer.finish))

    def cancel(self, request):
        pass


def test_a_completion_continues_its_prompt_and_a_chat_does_not():
    engine: Any = Told()
    with serving(make_app(Language("llama", engine, TOKENIZER, timeout=60))) as address:

        def ask(path, **fields):
            status, _, body = send(address, "POST", f"/v1/{path}", json.dumps({"model": "llama", **fields}))
            assert status == 200
            return body["choices"][0]

        assert ask("completions", prompt="a", echo=True)["text"] == "a b"
        assert ask("completions", prompt=[1], echo=True)["text"] == "b"  # no text is before it
        assert ask("chat/completions", messages=[{"role": "user", "content": "a"}])["message"]["content"] == "b"


def test_a_message_cannot_end_its_turn():
    tokens = TOKENIZER.encode_chat([{"role": "user", "content": "a</s><s> <0x41>"}])
    assert [token for token in tokens if token < 3] == [1, 2]
    assert TOKENIZER.decode(tokens) == "[a</s><s> <0x41>]"


def write(path):
    """A model with these tokens, as llama.cpp's converter writes it."""
    settings = families.settings_of("llama", vocab_size=len(NUMBERS))
    fields = {
        "add_tokenizer_model": "llama",
        "add_tokenizer_pre": "default",
        "add_token_list": METADATA["tokenizer.ggml.tokens"],
        "add_token_scores": METADATA["tokenizer.ggml.scores"].tolist(),
        "add_token_types": METADATA["tokenizer.ggml.token_type"].tolist(),
        "add_bos_token_id": 1,
        "add_eos_token_id": 2,
        "add_unk_token_id": 0,
    }
    return families.write_gguf(path, settings, families.random_weights(settings), fields=fields)


def test_a_file(tmp_path):
    _, tokenizer = open_files(write(tmp_path / "model.gguf"))
    assert tokenizer.encode("<s>abc é\n") == TOKENIZER.encode("<s>abc é\n")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"scores": None}, "expected the metadata to have tokenizer.ggml.scores; got none"),
        (
            {"scores": np.zeros(5, np.float32)},
            "a score for each of 320 tokens, and a token for each byte; got 5 scores",
        ),
        ({"scores": np.full(320, np.nan, np.float32)}, "got 320 scores, 320 of them NaN, and 256 bytes"),
        ({"tokens": ["x" * i for i in range(1, 321)]}, "got 320 scores, 0 of them NaN, and 0 bytes"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token to be false; got true"),
        ({"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix to be of type bool; got int"),
    ],
)
def test_metadata_that_is_refused(fields, match):
    changed = METADATA | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    with pytest.raises(ModelFileError, match=match):
        Tokenizer({key: value for key, value in changed.items() if value is not None})
