"""The goals of the benchmarks on each processor whose results the repository has, and what limits those that are missed."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import _report, _transformers, generate, shapes, training
from benchmarks._check import check, misses_of, processors, table_of_misses
from benchmarks._limits import limit_of
from benchmarks._rows import Setting
from benchmarks._timing import WaitingClock


pytestmark = pytest.mark.any_jax_version

PROCESSORS = processors(_report.RESULTS)


def generate_of(folder: pathlib.Path):
    return json.loads((folder / "generate.json").read_text())


@pytest.mark.parametrize("folder", PROCESSORS, ids=lambda folder: folder.name)
def test_what_limits_published_results_is_told(folder):
    misses = misses_of(folder)
    assert misses
    assert [miss for miss in misses if miss.limit == "not known"] == []
    table = table_of_misses(folder).splitlines()[2:]
    assert sum(int(line.split(" | ")[2]) for line in table) == len(misses)


def test_processors_have_limits_of_their_own():
    case = ("training, 1 thread", "ViT-B, 2 layers, 8 images, bfloat16", ">= 1.8 x Equinox")
    assert limit_of("AMD EPYC (family 26, model 2), 2 cores", *case) is None
    assert "no instructions for bf16" in str(
        limit_of("Intel(R) Xeon(R) Processor (family 6, model 207), 2 cores", *case)
    )
    loss = ("cross_entropy, 2 threads", "forward + backward, GPT-2", ">= 0.8 x probe")
    forward = (loss[0], "forward, GPT-2", loss[2])
    assert "gradient" in str(limit_of("another processor", *loss))
    assert limit_of("another processor", *forward) is None
    assert "1.2 ns" in str(limit_of("AMD EPYC (family 26, model 2), 2 cores", *forward))
    assert "2.8 ns" in str(limit_of("AMD EPYC (family 25, model 17), 2 cores", *forward))
    assert limit_of("AMD EPYC (family 26, model 2), 2 cores", "decode", "a case", "a goal") is None


def test_every_processor_is_checked():
    page, every = check(_report.RESULTS), check(_report.RESULTS, every=True)
    for text in (page, every):
        sections = text.split("\n\n")
        assert len(sections) == len(PROCESSORS) > 3
        for folder, section in zip(PROCESSORS, sections, strict=True):
            assert section.splitlines()[0] == f"{generate_of(folder)['machine']['cpu']}:"
            shares = [int(line.split("%")[0]) for line in section.splitlines() if "% missing: " in line]
            assert shares == sorted(shares, reverse=True)
            assert len(shares) == (len(misses_of(folder)) if text == every else 40 // len(PROCESSORS))
    assert len(page.splitlines()) < 80
    assert "of which less is missing" not in every
    only = check(_report.RESULTS, ["embed"], every=True)
    assert {line.split("missing: ")[1].split(",")[0] for line in only.splitlines() if "missing: " in line} == {"embed"}


@pytest.mark.parametrize("folder", PROCESSORS, ids=lambda folder: folder.name)
def test_a_language_model_has_goals(folder):
    """Prompts, and decoding after two lengths, of our slowest contestant on one thread and on two; and a second start."""
    data = generate_of(folder)
    assert data["rows"] == generate.goals(data)
    goals = {row["case"]: goal for row in data["rows"] for goal in row["goals"]}
    assert len(goals) == 3 * 2 + 1
    for count, least in (("1", 1.6), ("2", 1.5)):
        speeds = data["threads"][count]
        for what, wanted in (("prompt of 512", 3), ("decode at 64", least), ("decode at 512", least)):
            ours = ("eqxcallback, f32", "eqxcallback, f32, cache in f16", "eqxcallback, bf16")
            ratio = min(speeds[name][what][1] / speeds["llama.cpp"][what][1] for name in ours)
            goal = goals[f"{what}, {count} thread{'s' * (count != '1')}"]
            assert goal["goal"] == f">= {wanted} x llama.cpp"
            assert (goal["ratio"], goal["met"]) == (pytest.approx(ratio, abs=1e-4), ratio >= wanted)
    beside = data["start"]["first byte"] - data["start"]["JAX"]
    start = goals["a second start beside JAX's import, s"]
    assert (start["goal"], start["met"]) == ("<= 1", beside <= 1)


def test_missed_goals_of_a_language_model_are_told(tmp_path):
    data = generate_of(_report.RESULTS)
    assert "All are met." in generate.markdown(data)
    data["start"]["first byte"] = data["start"]["JAX"] + 2
    text = "a second start beside JAX's import, s: <= 1: no, 2.00"
    assert f"Not met: {text}." in generate.markdown(data)
    (tmp_path / "generate.json").write_text(json.dumps({**data, "rows": generate.goals(data)}))
    assert check(tmp_path).splitlines() == [
        f" 50% missing: generate: {text}; limit: not known",
        "6 of 7 goals met, 1 not, 0 not measured.",
    ]
    shutil.copytree(tmp_path, tmp_path / "another")
    assert check(tmp_path).count("generate: a second start") == 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equinox_with_the_attention_of_jax(dtype, monkeypatch):
    """Each layer calls `jax.nn`, causal in the GPT and not in the ViT. Equinox alone never does."""
    calls, attend = [], jax.nn.dot_product_attention

    def counted(*qkv, is_causal):
        calls.append((is_causal, {x.dtype for x in qkv}))
        return attend(*qkv, is_causal=is_causal)

    monkeypatch.setattr(jax.nn, "dot_product_attention", counted)
    tasks = [task for task, _ in training.tasks(Setting(WaitingClock(), tiny=True))][:2]
    for task, causal in zip(tasks, (True, False), strict=True):
        for contestant, count in (("Equinox", 0), ("Equinox with jax.nn", task.model.layers)):
            step, arguments = training.program(task, dtype, contestant)
            with jax.numpy_dtype_promotion("standard"):  # which optax needs
                jax.eval_shape(step, *arguments)
            assert calls == [(causal, {jnp.dtype(dtype)})] * count
            calls.clear()


def test_the_attention_of_jax_attends_alike():
    model = _transformers.gpt(shapes.TINY_GPT, jnp.float32)
    attention = model.blocks[0].attention
    (changed,) = {type(block.attention).__name__ for block in _transformers.with_jax_nn(model).blocks}
    assert changed == "JaxNNAttention"
    x = jax.random.normal(jax.random.key(1), (7, shapes.TINY_GPT.embedding))
    for mask in (None, jnp.tril(jnp.ones((7, 7), bool))):
        got = _transformers.JaxNNAttention(attention)(x, x, x, mask=mask)
        np.testing.assert_allclose(got, attention(x, x, x, mask=mask), atol=1e-5)
