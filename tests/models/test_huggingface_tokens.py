"""Folders whose files do not agree: on the token that texts begin with, and on how many tokens there are."""

import json

import pytest
from tokenizers import processors

from models import llama
from models._errors import ModelFileError
from models.decoding.generator import Generator
from models.decoding.sampling import Sampling
from models.generate.__main__ import main
from models.model_files import open_files
from models.serve.app import make_app
from models.serve.language import Language
from models.tokens.huggingface_tokenizer import read_vocabulary
from models.tokens.tokenizer import Tokenizer

from .test_huggingface import SIZE, byte_level, sentencepiece, write
from .test_sentencepiece import Told
from .test_serve import send, serving


def adds_bos(folder, **config):
    """True if a text begins with the token `<s>`, by these settings beside the folder's tokenizer."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    tokens = Tokenizer(read_vocabulary(folder, SIZE)).encode("a")
    assert tokens in ([0, 261], [261])
    return tokens == [0, 261]


@pytest.mark.parametrize("processor_adds_bos", [True, False])
def test_the_settings_of_the_token_that_texts_begin_with(processor_adds_bos, tmp_path):
    """Only of classes that take them; and what follows a text is left to the model."""
    tokenizer = sentencepiece("first")
    if processor_adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "$A $B", [("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in ("LlamaTokenizerFast", "LlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizer"):
        for setting in (True, False):
            assert adds_bos(tmp_path, tokenizer_class=name, add_bos_token=setting, add_eos_token=True) == setting
        assert adds_bos(tmp_path, tokenizer_class=name) == processor_adds_bos
        assert adds_bos(tmp_path, tokenizer_class=name, add_bos_token=True, bos_token=None) == processor_adds_bos
    for name in ("PreTrainedTokenizerFast", "Qwen2Tokenizer", None):
        for setting in (True, False):
            assert adds_bos(tmp_path, tokenizer_class=name, add_bos_token=setting) == processor_adds_bos


@pytest.fixture
def folder(tmp_path):
    """A model whose tokenizer has tokens that the model lacks: 20 of its own, one of which is a control token."""
    tokenizer = byte_level()
    tokenizer.add_tokens([f"<new{i}>" for i in range(19)])
    tokenizer.add_special_tokens(["<pad>"])
    assert [tokenizer.token_to_id(text) for text in ("<new9>", "<new10>", "<pad>")] == [SIZE - 1, SIZE, 281]
    write(tmp_path, tokenizer=tokenizer)
    return tmp_path


def test_a_tokenizer_with_more_tokens_than_the_model(folder, capsys):
    file, tokenizer = open_files(folder)
    assert tokenizer.vocab_size == file.config.vocab_size == SIZE
    assert tokenizer.decode(tokenizer.encode("a<new9>")) == "a<new9>"
    for text, token in (("<new10>", 272), ("<pad>", 281)):
        with pytest.raises(
            ModelFileError, match=rf"expected tokens below 272, .*; got '{text}', which is token {token}\."
        ):
            tokenizer.encode(f"a{text}")
    harmless = [{"role": "user", "content": "<pad>"}]  # as text
    assert tokenizer.decode(tokenizer.encode_chat(harmless)) == "user\n<pad>\nassistant\n"
    assert main(["a <new10>", "--weights", str(folder)]) == 2
    assert "generate: error: expected tokens below 272" in capsys.readouterr().err


def test_tokens_that_the_model_lacks_are_never_drawn(folder):
    file, tokenizer = open_files(folder)
    sampling = Sampling(temperature=2.0, repetition_penalty=0.01)
    generator = Generator(llama.load(file), room=128, sampling=sampling)
    drawn = list(generator.generate(tokenizer.encode("the"), max_tokens=100))
    assert len(drawn) == 100
    assert max(drawn) < SIZE


def test_the_server_refuses_tokens_that_the_model_lacks(folder):
    _, tokenizer = open_files(folder)
    with serving(make_app(Language("small", Told(), tokenizer, timeout=60))) as address:  # pyright: ignore[reportArgumentType]
        body = json.dumps({"model": "small", "prompt": "a<pad>"})
        status, _, answer = send(address, "POST", "/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert answer["error"]["message"].startswith(
        "prompt: expected tokens below 272, all that the model has; got '<pad>'"
    )
