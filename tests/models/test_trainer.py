"""The step of a training, and the batches that it gets."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxcallback as eqxc
from eqxcallback import ops
from models._errors import ModelFileError
from models.train import text_data
from models.train.digits_data import Digits
from models.train.text_data import Text
from models.train.trainer import Trainer, make_optimizer
from models.transformer import GPT, Config, gpt_loss


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        yield


def test_masters_keep_what_bf16_rounds_away():
    """Steps of 2e-5 from 1 on, where neighbours in bf16 are 4e-3 apart."""
    model = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda model: model.weight, model, jnp.ones((8, 8)))
    batch = np.ones(8, np.float32)
    loss = lambda model, x: jnp.sum(model(x.astype(model.weight.dtype)), dtype=jnp.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        trainer = Trainer(model, loss, optax.sgd(2e-5), dtype=jnp.dtype(dtype))
        memory = trainer.compile(batch)
        assert memory is None or memory.total >= memory.temporary + 256
        state = trainer.begin(model)
        assert trainer.model(state).weight.dtype == dtype
        for _ in range(150):
            state, _ = trainer.step(state, batch)
        np.testing.assert_allclose(state.weights.weight, 1 - 150 * 2e-5, rtol=1e-5)
    assert np.all(np.asarray(trainer.model(state).weight, np.float32) == 1 - 2**-8)
    assert np.all(np.asarray(model.weight) == 1)  # the model's own arrays are not used up


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_model_outlives_the_steps_after_it(dtype):
    """Also without `compile`, which the first step calls then."""
    model = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
    loss = lambda model, x: jnp.sum(model(x.astype(model.weight.dtype)), dtype=jnp.float32)
    trainer = Trainer(model, loss, optax.sgd(0.1), dtype=jnp.dtype(dtype))
    state = trainer.begin(model)
    kept = trainer.model(state)
    state, _ = trainer.step(state, np.ones(8, np.float32))
    np.testing.assert_array_equal(kept.weight, model.weight.astype(dtype))
    assert np.all(np.asarray(trainer.model(state).weight) < np.asarray(kept.weight))


def test_gradients_that_are_not_finite_are_told():
    """The loss before the step is."""
    model = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
    loss = lambda model, x: jnp.sqrt(jnp.sum(model(x)) * 0)
    trainer = Trainer(model, loss, make_optimizer(rate=1e-2, steps=20), dtype=jnp.dtype("float32"))
    assert loss(model, jnp.ones(8)) == 0
    assert np.isnan(trainer.step(trainer.begin(model), np.ones(8, np.float32))[1])


@pytest.mark.parametrize("change", [lambda model: model, lambda model: eqxc.fuse(model).model])
def test_a_gpt_refuses_more_tokens_than_its_length(change):
    model = change(GPT(Config(1, 32, 128, 2, 16), 64, key=jax.random.key(0)))
    assert model(jnp.zeros(16, jnp.int32)).shape == (16, 32)
    with pytest.raises(ValueError, match=r"^GPT: expected at most 16 tokens, its length; got 20\. Pass the last ones"):
        model(jnp.zeros(20, jnp.int32))


def test_the_rate_rises_and_falls_and_matrices_decay():
    model = {"matrix": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    optimizer = make_optimizer(rate=1e-2, steps=40)
    state, sizes = optimizer.init(model), []
    updates: Any
    for _ in range(41):
        gradients = {"matrix": jnp.zeros((2, 2)), "bias": jnp.full(2, 1e6)}
        updates, state = optimizer.update(gradients, state, model)
        sizes.append(-float(updates["bias"][0]))
        np.testing.assert_allclose(updates["matrix"], -0.1 * sizes[-1], rtol=1e-3, atol=1e-9)
    assert np.argmax(sizes) == 4
    np.testing.assert_allclose([sizes[0], sizes[4], sizes[40]], [0, 1e-2, 1e-3], rtol=1e-3)


def test_fused_and_plain_are_the_same_in_bf16():
    model = eqx.nn.MLP(16, 4, 32, depth=1, key=jax.random.key(0))
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)
    curves = []
    for which in (model, eqxc.fuse(model).model):
        trainer = Trainer(which, loss, make_optimizer(rate=1e-2, steps=30), dtype=jnp.dtype("bfloat16"))
        trainer.compile(x)
        state, curve = trainer.begin(which), []
        for _ in range(30):
            state, value = trainer.step(state, x)
            curve.append(value)
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] / 4
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.02)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_parts_of_a_batch_are_the_batch_and_take_less_memory(dtype, bound):
    model = eqxc.fuse(GPT(Config(1, 32, 128, 2, 64), 64, key=jax.random.key(0))).model
    loss = functools.partial(gpt_loss, functools.partial(ops.linear_cross_entropy, reduction="mean"))
    tokens = np.random.default_rng(0).integers(0, 64, (16, 65)).astype(np.int32)
    curves, memory = [], []
    for rows, parts in ((16, 1), (16, 8), (2, 1)):
        options: Any = {"dtype": jnp.dtype(dtype), "accumulate": parts}
        trainer = Trainer(model, loss, make_optimizer(rate=1e-2, steps=20), **options)
        memory.append(trainer.compile(tokens[:rows]))
        state, curve = trainer.begin(model), []
        for _ in range(20 if rows == 16 else 0):
            state, value = trainer.step(state, tokens)
            curve.append(value)
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] * 0.9
    np.testing.assert_allclose(curves[1], curves[0], rtol=bound)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    whole, split, small = (plan.temporary for plan in memory)
    assert split < small + 3 * weights < whole  # the sums are in f32, beside the gradients of a part


@pytest.mark.parametrize("parts", [0, 3])
def test_parts_that_do_not_divide_a_batch_are_told(parts):
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    loss = lambda model, batch: (jax.vmap(model)(batch) ** 2).mean()
    optimizer = make_optimizer(rate=1e-2, steps=2)
    trainer = Trainer(model, loss, optimizer, dtype=jnp.dtype("float32"), accumulate=parts)
    message = f"^Trainer: expected accumulate to divide the 4 rows of a batch; got {parts}. Pass another accumulate, or"
    with pytest.raises(ValueError, match=message):
        trainer.step(trainer.begin(model), np.ones((4, 2), np.float32))


@pytest.fixture
def words(tmp_path):
    """Ten thousand numbers, each one its own place: with a vocabulary of 256, tokens are bytes."""
    text_data.prepare(
        "".join(f"{i:05}\n" for i in range(10_000)), tmp_path, vocab_size=256, progress=lambda items, **_: items
    )
    return tmp_path


def test_tokens_are_the_text(words):
    tokens = np.load(words / "tokens.npy")
    text = text_data.open_tokenizer(words).decode(tokens.tolist())
    assert text == "".join(f"{i:05}\n" for i in range(10_000))


def test_a_batch_depends_on_the_step_alone(words):
    data = Text(words, length=50, batch=7, seed=3)
    again = Text(words, length=50, batch=7, seed=3)
    batches = [data.batch(step) for step in range(5)]
    for step in reversed(range(5)):
        np.testing.assert_array_equal(again.batch(step), batches[step])
    assert batches[0].shape == (7, 51)
    assert len({batch.tobytes() for batch in batches}) == 5
    assert Text(words, length=50, batch=7, seed=4).batch(0).tobytes() != batches[0].tobytes()


def test_no_step_sees_what_is_held_out(words):
    data, tokenizer = Text(words, length=50, batch=7, seed=3), text_data.open_tokenizer(words)

    def numbers(batches):
        windows = [tokenizer.decode(row.tolist()) for batch in batches for row in batch]
        return [int(line) for window in windows for line in window.split("\n")[1:-1]]

    held_out = numbers(data.held_out())
    assert min(held_out) >= 9000
    assert max(held_out) > 9800  # from all of the tenth
    assert len(set(held_out)) == len(held_out) > 300
    assert max(numbers(data.batch(step) for step in range(200))) < 9000


@pytest.mark.parametrize(("length", "batches"), [(24_998, [(1, 24_999)]), (2000, [(2, 2001)]), (1100, [(5, 1101)])])
def test_few_windows_are_one_small_batch(words, length, batches):
    data = Text(words, length=length, batch=7, seed=0)
    assert [batch.shape for batch in data.held_out()] == batches


def test_too_long_a_window_and_no_tokens(words, tmp_path):
    with pytest.raises(ModelFileError, match="expected a text of 60002 tokens or more, twice --length; got 60000"):
        Text(words, length=30_000, batch=1, seed=0)
    (words / "tokens.npy").write_bytes(b"")
    with pytest.raises(ModelFileError, match=r"expected tokens in .*tokens.npy; got "):
        Text(words, length=3, batch=1, seed=0)
    (words / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"expected a tokenizer in .*tokenizer.json; got "):
        text_data.open_tokenizer(words)


def test_digits_are_cut_into_patches():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    data = Digits(batch=16, seed=0)
    ((held_out, held_out_labels),) = data.held_out()
    assert held_out.shape == (360, 16, 4)
    whole = {image.tobytes(): label for image, label in zip(images.astype(np.float32), labels, strict=True)}
    patches, batch_labels = data.batch(3)
    assert patches.shape == (16, 16, 4)
    for rows, label in [*zip(held_out, held_out_labels, strict=True), *zip(patches, batch_labels, strict=True)]:
        image = np.block([[rows[4 * i + j].reshape(2, 2) for j in range(4)] for i in range(4)])
        assert whole[((image + 1) * 8).ravel().tobytes()] == label
    trained = {row.tobytes() for step in range(300) for row in data.batch(step)[0]}
    assert not trained & {row.tobytes() for row in held_out}
    np.testing.assert_array_equal(Digits(batch=16, seed=0).batch(3)[0], patches)
