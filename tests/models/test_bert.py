"""all-MiniLM-L6-v2 through our layers, against BERT written in NumPy, in float64 and without padding."""

import json
import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from scipy.special import erf

from models import bert
from models._errors import ModelFileError
from models.embedder import Embedder, default_folder, make_batches


DOCS = pathlib.Path(__file__).parents[2] / "docs"
SETTINGS = json.loads((default_folder() / "config.json").read_text())


@pytest.fixture(scope="module")
def embedder():
    return Embedder(default_folder())


@pytest.fixture(scope="module")
def weights():
    with safe_open(default_folder() / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118 it is not iterable


def plain_bert(weights, sentences):
    """BERT as the paper and the published code have it. The tokens of all sentences follow each other, and nothing is padded."""

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + SETTINGS["layer_norm_eps"])
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attend(*qkv):
        q, k, v = (x.reshape(len(x), SETTINGS["num_attention_heads"], -1).swapaxes(0, 1) for x in qkv)
        logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        seen = np.exp(logits - logits.max(-1, keepdims=True))
        return (seen / seen.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(qkv[0].shape)

    ends = np.cumsum([len(tokens) for tokens in sentences])[:-1]
    x = weights["embeddings.word_embeddings.weight"][np.concatenate(sentences)]
    x = x + weights["embeddings.position_embeddings.weight"][np.concatenate([np.arange(len(t)) for t in sentences])]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(SETTINGS["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        qkv = (np.split(linear(x, f"{layer}.attention.self.{part}"), ends) for part in ("query", "key", "value"))
        attended = np.concatenate([attend(*heads) for heads in zip(*qkv, strict=True)])
        x = norm(linear(attended, f"{layer}.attention.output.dense") + x, f"{layer}.attention.output.LayerNorm")
        hidden = linear(x, f"{layer}.intermediate.dense")
        hidden = hidden * (1 + erf(hidden / np.sqrt(2))) / 2
        x = norm(linear(hidden, f"{layer}.output.dense") + x, f"{layer}.output.LayerNorm")
    means = np.stack([part.mean(0) for part in np.split(x, ends)])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def sentences():
    """Sentences of our own pages, and odd ones."""
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))[:12])
    parts = [part.strip() for part in re.split(r"(?<=[.:])\s", text) if 20 < len(part) < 110]
    odd = [
        "",
        " ",
        "a",
        "漢字とかな",
        "naïve CAFÉ ÆØÅ",
        "😀 emoji 👩‍👩‍👧",
        "\u0000\u200b",
        "x" * 300,
        "[CLS] and [SEP] [MASK]",
    ]
    return [*parts[: 198 - len(odd)], *odd, " ".join(parts[:9]), " ".join(parts[20:80])]


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1 - 1e-10), ("bfloat16", 0.9999)])
def test_two_hundred_sentences(dtype, least, embedder, weights):
    texts = sentences()
    ours = embedder if dtype == "float32" else Embedder(default_folder(), dtype=dtype)
    tokens = ours.tokenize(texts)
    lengths = [len(sentence) for sentence in tokens.sentences]
    assert (min(lengths), max(lengths)) == (2, 256)
    assert len(set(lengths)) > 6
    assert tokens.cut
    vectors = ours.embed(tokens.sentences)
    assert (vectors.shape, vectors.dtype) == ((len(texts), 384), np.float32)
    theirs = plain_bert(weights, tokens.sentences)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    cosine = (vectors * theirs).sum(1) / np.linalg.norm(vectors.astype(np.float64), axis=1)
    assert cosine.min() >= least
    # They could be alike if all vectors were: sentences differ by far more.
    others = theirs @ theirs.T - np.eye(len(texts))
    assert np.median(others) < 0.5


def test_order_and_batches_do_not_matter(embedder):
    texts = sentences()[::6]
    together = embedder.encode(texts)
    backwards = embedder.encode(texts[::-1])[::-1]
    np.testing.assert_allclose(together, backwards, atol=2e-6)
    np.testing.assert_allclose(together[3], embedder.encode([texts[3]])[0], atol=2e-6)
    assert embedder.encode([]).shape == (0, 384)


def test_a_long_sentence_is_cut_behind_the_last_token_that_fits(embedder):
    """256 with those that begin and end it, as the model's own settings say."""
    words = ["river", "stone", "cloud", "paper"] * 100
    tokens = embedder.tokenize([" ".join(words), " ".join(words[:254]), " ".join(words[:253])])
    assert [len(sentence) for sentence in tokens.sentences] == [256, 256, 255]
    assert tokens.cut == 1
    np.testing.assert_array_equal(tokens.sentences[0], tokens.sentences[1])
    assert (tokens.sentences[0][0], tokens.sentences[0][-1]) == (101, 102)


def test_batches_are_few_and_full():
    lengths = np.random.default_rng(0).integers(2, 257, 500)
    tokens = [np.full(length, i + 1, np.int32) for i, length in enumerate(lengths)]
    batches = list(make_batches(tokens, 256))
    seen = np.concatenate([batch.which for batch in batches])
    assert sorted(seen) == list(range(500))
    for batch in batches:
        assert [*batch.lengths[: len(batch.which)]] == [*lengths[batch.which]]
        assert not batch.lengths[len(batch.which) :].any()
        for row, which in enumerate(batch.which):
            np.testing.assert_array_equal(batch.tokens[row, : lengths[which]], tokens[which])
            assert not batch.tokens[row, lengths[which] :].any()
    shapes = {batch.tokens.shape for batch in batches}
    assert len(shapes) <= 20
    assert sum(batch.tokens.size for batch in batches) < 1.1 * lengths.sum()
    (alone,) = make_batches([np.ones(300, np.int32)], 300)  # a model's own length, which is not a step
    assert alone.tokens.shape == (1, 300)


def test_padding_is_not_read():
    """Here it is NaN."""
    config = bert.config_of(
        SETTINGS | {"num_hidden_layers": 1, "vocab_size": 9, "hidden_size": 24, "intermediate_size": 8}
    )
    model = bert.Bert(config, key=jax.random.key(0))
    model = eqx.tree_at(lambda model: model.tokens.weight, model, replace_fn=lambda weight: weight.at[8].set(jnp.nan))
    tokens = jnp.array([1, 2, 3, 8, 8], jnp.int32)
    whole = model(tokens[:3], jnp.int32(3))
    np.testing.assert_allclose(model(tokens, jnp.int32(3)), whole, atol=1e-6)
    assert not model(tokens, jnp.int32(0)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "expected model_type to be 'bert'; got 'roberta', which is not supported"),
        ({"hidden_act": "gelu_new"}, "expected hidden_act to be 'gelu'; got 'gelu_new'"),
        ({"position_embedding_type": "relative_key"}, "expected position_embedding_type to be 'absolute'"),
        ({"is_decoder": True}, "expected is_decoder to be False; got True, which is not supported"),
        ({"hidden_size": None}, "expected hidden_size to be a positive integer; got None"),
        ({"vocab_size": True}, "expected vocab_size to be a positive integer; got True"),
        ({"num_attention_heads": 7}, "expected heads that divide hidden_size, 384; got 7"),
        ({"layer_norm_eps": "tiny"}, "expected layer_norm_eps to be 0 or more; got 'tiny'"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(ModelFileError, match=message):
        bert.config_of(SETTINGS | change)
