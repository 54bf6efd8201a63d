"""Models of sentences in folders: what their files say, and folders that are refused."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from models.embed import main
from models.embedder import Embedder, default_folder

from .test_embed import refused


def copy_of_model(folder):
    names = ("modules.json", "config.json", "tokenizer.json", "sentence_bert_config.json", "1_Pooling/config.json")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(default_folder() / name, folder / name)
    return folder


def changed_model(folder, **texts):
    """The model with the texts of these files, or JSON of the values; `__` stands for a slash."""
    copy_of_model(folder)
    (folder / "model.safetensors").symlink_to(default_folder() / "model.safetensors")
    for name, value in texts.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def modules(*kinds):
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [
        {"idx": i, "name": str(i), "path": paths.get(kind.split(".")[-1], f"{i}"), "type": kind}
        for i, kind in enumerate(kinds)
    ]


OLD = ("sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling")
NEW = (
    "sentence_transformers.base.modules.transformer.Transformer",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
)
NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"


def hidden(embedder, tokens):
    """The vectors of all tokens of one sentence."""
    x = embedder.model.embed(jnp.asarray(tokens))
    for block in embedder.model.blocks:
        x = block(x, jnp.int32(len(tokens)))
    return np.asarray(x)


@pytest.mark.parametrize(
    ("pooling", "row"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, 0),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, -1),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}, None),
        ({"pooling_mode_mean_tokens": False}, None),
        ({"embedding_dimension": 384, "pooling_mode": "cls", "include_prompt": True}, 0),
        ({"pooling_mode": ["lasttoken"]}, -1),
        ({"pooling_mode": "mean", "pooling_mode_cls_token": True}, None),
    ],
)
def test_vectors_are_pooled_as_the_files_say(pooling, row, tmp_path):
    """In the words of old and of new versions of sentence-transformers, and divided by the norm where a module does that."""
    texts = ["A short one.", "", "This one is longer than the other, so that there is padding."]
    plain, normalizing = (
        Embedder(changed_model(tmp_path / str(len(kinds)), modules=modules(*kinds), **{"1_Pooling__config": pooling}))
        for kinds in (NEW, (*OLD, NORMALIZE))
    )
    rows = [hidden(plain, tokens) for tokens in plain.tokenize(texts).sentences]
    expected = np.stack([x.mean(0) if row is None else x[row] for x in rows])
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    assert norms.min() > 2
    np.testing.assert_allclose(plain.encode(texts), expected, atol=3e-5)
    np.testing.assert_allclose(normalizing.encode(texts), expected / norms, atol=2e-6)


def test_an_encoder_alone(tmp_path):
    """Without the files of sentence-transformers: the mean, of the length 1, as the program's own model has it."""
    folder = changed_model(tmp_path / "model")
    (folder / "modules.json").unlink()
    shutil.rmtree(folder / "1_Pooling")
    np.testing.assert_array_equal(
        Embedder(folder).encode(["A short one."]), Embedder(default_folder()).encode(["A short one."])
    )


def test_a_search_is_by_cosine_also_without_norms(tmp_path, capsys):
    folder = changed_model(tmp_path / "model", modules=modules(*OLD))
    scores = []
    for options in ([], ["--weights", str(folder)]):
        assert main(["The cat sleeps.", "Stock markets fell.", "--search", "a kitten is asleep", *options]) == 0
        scores.append([float(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines()])
    assert 0.4 < max(scores[0]) < 1
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4)


PROMPTS = {"query": "Find: ", "passage": "Text: ", "other": "Sort: "}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("", "", "")),
        ({"prompts": {"query": "", "document": None}, "default_prompt_name": None}, ("", "", "")),
        ({"prompts": PROMPTS}, ("", "Find: ", "Text: ")),
        ({"prompts": PROMPTS | {"document": "Found: "}}, ("", "Find: ", "Found: ")),
        ({"prompts": PROMPTS, "default_prompt_name": "other"}, ("Sort: ", "Find: ", "Text: ")),
        ({"prompts": {"other": "Sort: "}, "default_prompt_name": "other"}, ("Sort: ", "Sort: ", "Sort: ")),
        ({"default_prompt_name": "query"}, ("", "", "")),
    ],
)
def test_prompts_are_before_the_texts(settings, expected, tmp_path):
    embedder = Embedder(changed_model(tmp_path, config_sentence_transformers=settings))
    plain = Embedder(default_folder())
    for task, prompt in zip((None, "query", "document"), expected, strict=True):
        (tokens,) = embedder.tokenize(["cats"], task=task).sentences
        assert tokens.tolist() == plain.tokenize([f"{prompt}cats"]).sentences[0].tolist()


def test_a_search_is_a_query_over_documents(tmp_path, capsys):
    """Vectors that are not searched have the default prompt, here none."""
    folder = changed_model(tmp_path / "model", config_sentence_transformers={"prompts": PROMPTS})
    options = ["cats", "--weights", str(folder), "--output", str(tmp_path / "out.npy")]
    plain = Embedder(default_folder())
    for search, line in (([], "cats"), (["--search", "dogs"], "Text: cats")):
        assert main([*options, *search]) == 0
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), plain.encode([line]), atol=2e-6)
    query, document = plain.encode(["Find: dogs", "Text: cats"])
    assert float(capsys.readouterr().out.split("\t")[0]) == pytest.approx(query @ document, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "of_the_tokenizer", "expected"),
    [
        ({"max_seq_length": 128}, {"model_max_length": 64}, 128),
        ({"max_seq_length": None}, {"model_max_length": 64}, 64),
        ({}, {"model_max_length": 10**30}, 512),
        ({}, {"model_max_length": 1e30}, 512),
        ({}, {"model_max_length": None}, 512),
        ({}, {}, 512),
    ],
)
def test_the_longest_sentence(settings, of_the_tokenizer, expected, tmp_path):
    """By the model's own limit, or else the tokenizer's, or else the positions."""
    folder = changed_model(tmp_path, sentence_bert_config=settings, tokenizer_config=of_the_tokenizer)
    embedder = Embedder(folder)
    assert embedder.max_tokens == expected
    tokens = embedder.tokenize(["word " * 600])
    assert (len(tokens.sentences[0]), tokens.cut) == (expected, 1)


def test_capitals(tmp_path):
    """`do_lower_case` is of sentence-transformers: it holds whether or not the tokenizer keeps capitals."""
    settings = json.loads((default_folder() / "tokenizer.json").read_text())
    settings["normalizer"] |= {"lowercase": False, "strip_accents": True}
    tokens = []
    for lowers in (False, True):
        folder = changed_model(
            tmp_path / str(lowers),
            tokenizer=settings,
            sentence_bert_config={"do_lower_case": lowers, "max_seq_length": None},
        )
        tokens.append(Embedder(folder).tokenize(["CAFÉ"]).sentences[0].tolist())
    assert tokens[1] == Embedder(default_folder()).tokenize(["café"]).sentences[0].tolist() != tokens[0]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{", "config.json: expected a file of JSON; got"),
        ("config.json", "[]", "config.json: expected an object of JSON; got list"),
        ("config.json", '{"model_type": "gpt2"}', "config.json: expected model_type to be 'bert'; got 'gpt2'"),
        ("tokenizer.json", "{}", "tokenizer.json: expected a tokenizer; got"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            "expected pooling_mode to be 'mean' or 'cls' or 'lasttoken'; got .*max_tokens.*, which is not supported",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": "max"}', "expected pooling_mode to be .*; got 'max', which is not"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode": ["cls", "mean"]}',
            r"got \['cls', 'mean'\], which is not supported",
        ),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}',
            r"got \['cls', 'mean'\], which is not supported",
        ),
        ("1_Pooling/config.json", '{"include_prompt": false}', "expected include_prompt to be true; got false, which"),
        ("modules.json", "{", "modules.json: expected a file of JSON; got"),
        ("modules.json", "[{}]", "modules.json: expected a list of modules, each with a path and a type; got others"),
        (
            "modules.json",
            json.dumps(
                [{"path": "", "type": kind} for kind in (*OLD, "sentence_transformers.models.Dense", NORMALIZE)]
            ),
            "expected modules Transformer, Pooling and, .*; got Transformer, Pooling, Dense, Normalize, which is not supp",
        ),
        (
            "modules.json",
            json.dumps([{"path": "", "type": kind} for kind in ("custom_st.Transformer", OLD[1])]),
            r"got custom_st\.Transformer, Pooling, which is not supported",
        ),
        (
            "config_sentence_transformers.json",
            '{"prompts": {"a": 1}}',
            "config_sentence_transformers.json: expected prompts, each a text with a name; got {'a': 1}",
        ),
        (
            "config_sentence_transformers.json",
            '{"prompts": {"a": "b"}, "default_prompt_name": "c"}',
            "expected default_prompt_name to be one of query, document, a; got 'c'",
        ),
        ("sentence_bert_config.json", '{"query_length": 32}', "expected query_length to be off; got 32, which is not"),
        ("sentence_bert_config.json", '{"max_seq_length": 600}', "expected max_seq_length from 3 to 512.*; got 600"),
        ("model.safetensors", "hello", "model.safetensors: expected a safetensors file that is whole"),
    ],
)
def test_broken_models_are_told(file, text, message, tmp_path, capsys):
    copy_of_model(tmp_path)
    if file != "model.safetensors":
        (tmp_path / "model.safetensors").symlink_to(default_folder() / "model.safetensors")
    (tmp_path / file).write_text(text)
    refused(["a", "--weights", tmp_path], message, capsys)


def test_a_tokenizer_that_panics(tmp_path, capsys):
    """In Rust, which is not an `Exception`: when it is opened, and not before it meets a word."""
    settings = json.loads((default_folder() / "tokenizer.json").read_text())
    vocab = settings["model"]["vocab"]
    broken = settings | {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "xab": 2},
            "merges": [["a", "b"]],
            "continuing_subword_prefix": "x" * 9,
        }
    }
    folder = changed_model(tmp_path / "a", tokenizer=broken)
    refused(
        ["a", "--weights", folder], "tokenizer.json: expected a tokenizer; got range end index .*Get it again", capsys
    )
    settings["model"]["vocab"] = {word: i for word, i in vocab.items() if word != "[UNK]"}
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] != "[UNK]"]
    folder = changed_model(tmp_path / "b", tokenizer=settings)
    refused(
        ["\U00020000", "--weights", folder], "tokenizer.json: expected a tokenizer; got .*UNK.*Get it again", capsys
    )


def test_weights_of_another_size_are_told(tmp_path, capsys):
    folder = copy_of_model(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 5}))
    refused(["a", "--weights", folder], "expected a folder with safetensors files; got none in it", capsys)
    (folder / "model.safetensors").symlink_to(default_folder() / "model.safetensors")
    refused(["a", "--weights", folder], r"got 16 unexpected: encoder\.layer\.5\.", capsys)
