"""A model whose heads, hidden features and vocabulary are split over devices."""

import collections
import io
import re
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import adapter_files, gguf, huggingface, llama, lora
from models._errors import ModelFileError
from models._program import UsageError
from models.decoding.batch import Batch
from models.decoding.generator import Generator
from models.decoding.sampling import Sampling
from models.generate.__main__ import main
from models.parallel import processes, tensor_parallel
from models.parallel.data_parallel import replicate, split_rows

from .. import one_device
from ..devices.test_processes import free_port
from . import families
from .test_generate import ROOT, SPEED
from .tiny import write_tiny


PROMPT = [1, 17, 5, 60, 33, 2, 2, 41]
# Queries and keys are one layer; values, gates and the rest are each their own.
MIXED = {"attn_v": "Q4_1", "attn_output": "Q4_1", "ffn_up": "Q4_1"}


def mesh_of(count):
    return tensor_parallel.mesh_of(jax.devices()[:count])


def collectives(program):
    """Count those of each kind in a compiled program."""
    kinds = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
    return collections.Counter(re.findall(kinds, program.as_text()))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder / "f32.gguf")
    write_tiny(folder / "mixed.gguf", MIXED, "Q8_0", hidden=128)
    write_tiny(folder / "wide.gguf", heads=16, kv_heads=8)
    return {name: gguf.open_model(folder / f"{name}.gguf") for name in ("f32", "mixed", "wide")}


@pytest.mark.parametrize(
    ("name", "count", "dtype", "bound"),
    [
        ("f32", 2, "float32", 2e-5),
        ("wide", 8, "float32", 2e-5),
        ("mixed", 2, "float32", 2e-5),
        ("mixed", 2, "bfloat16", 0.2),
    ],
)
def test_logits_and_cache(files, name, count, dtype, bound):
    whole = llama.load(files[name], dtype=dtype)
    split = tensor_parallel.load(files[name], mesh_of(count), dtype=dtype)

    @eqx.filter_jit
    def read(model, tokens, cache, valid):
        x, cache = model(tokens, cache, valid)
        return model.logits(x), cache

    caches = [whole.init_cache(12), split.init_cache(12)]
    for tokens, valid in ((PROMPT, 6), ([7], 1), ([9], 1)):
        results = []
        for i, model in enumerate((whole, split)):
            logits, caches[i] = read(model, jnp.asarray(tokens, jnp.int32), caches[i], jnp.asarray(valid))
            results.append(logits[:valid])
        np.testing.assert_allclose(results[1], results[0], rtol=0, atol=bound)
    for want, got in zip(*map(jax.tree.leaves, caches), strict=True):
        filled = slice(8) if want.ndim else ()
        np.testing.assert_allclose(*(np.asarray(x, np.float32)[filled] for x in (got, want)), rtol=0, atol=bound)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_families(family, tmp_path):
    """Biases of queries, keys and values, and norms of heads, are split with their rows."""
    settings = families.settings_of(family)
    folder = families.write_folder(tmp_path / "folder", settings, families.random_weights(settings))
    files = huggingface.open_folder(folder)

    @eqx.filter_jit
    def logits(model, tokens):
        x, cache = model(tokens[:-1], model.init_cache(len(tokens)))
        return model.logits(x), model.logits(model(tokens[-1:], cache)[0])

    tokens = jnp.asarray(PROMPT, jnp.int32)
    whole, split = (logits(model, tokens) for model in (llama.load(files), tensor_parallel.load(files, mesh_of(2))))
    for want, got in zip(whole, split, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_draws_are_the_same(files):
    sampling = Sampling(0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    texts = [
        list(Generator(model, room=64, sampling=sampling, seed=3).generate(PROMPT, max_tokens=30))
        for model in (llama.load(files["mixed"]), tensor_parallel.load(files["mixed"], mesh_of(2)))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("name", "count", "prompt"), [("SmolLM2", 3, [1, 504, 1978, 282]), ("wide", 8, PROMPT)])
def test_a_device_has_its_part_and_nothing_is_gathered(name, count, prompt, file, model, files):
    """The language model, of 3 key/value heads, and a small one of 8."""
    if name != "SmolLM2":
        file = files[name]
        model = llama.load(file)
    split = tensor_parallel.load(file, mesh_of(count))
    generators = [Generator(model, room=64), Generator(split, room=64)]
    texts = [list(generator.generate(prompt, max_tokens=24)) for generator in generators]
    assert texts[0] == texts[1]

    reader = generators[1].reader
    whole_bytes, part_bytes = map(tensor_parallel.bytes_per_device, (model, split.part))
    every_norm = [model.norm, *((block.attention_norm, block.feed_forward_norm) for block in model.blocks)]
    norms = sum(x.nbytes for x in jax.tree.leaves(every_norm))
    assert part_bytes == (whole_bytes - norms) / count + norms  # a norm needs its weights whole
    cache_bytes = tensor_parallel.bytes_per_device(generators[0].reader.blocks)
    assert tensor_parallel.bytes_per_device(reader.blocks) == cache_bytes / count

    of_choice = 2  # the largest logit of all devices, and the first word that has it
    (step,) = reader._step_programs.values()
    for program in (*reader._programs.values(), step):
        sums = 2 * len(model.blocks) + 1 + (of_choice if program is step else 0)
        assert collectives(program) == {"all-reduce": sums}
        assert program.memory_analysis().alias_size_in_bytes == cache_bytes / count  # it is updated in place
    assert collectives(generators[1]._chooser._program) == {"all-reduce": of_choice}


def test_numbers_of_devices_that_do_not_divide(file, tmp_path):
    with pytest.raises(ModelFileError, match=r"that divides 3 key/value heads; got 2\. Use 1 or 3\."):
        tensor_parallel.load(file, mesh_of(2))
    write_tiny(tmp_path / "blocks.gguf", other="Q8_0")
    with pytest.raises(ModelFileError, match=r"that divides 3 blocks of hidden features; got 2\. Use 1\."):
        tensor_parallel.load(gguf.open_model(tmp_path / "blocks.gguf"), mesh_of(2))


def test_more_devices_than_there_are():
    with (
        pytest.raises(UsageError, match="expected --devices of at most 8, which is what JAX has; got 9"),
        processes.joined(9, None, 1, 0),
    ):
        pass


def test_the_program_and_a_conversation():
    messages = "What is the capital of France?\nAnd of Italy?\n"
    command = [sys.executable, "-m", "models.generate", "--chat", "--devices", "3"]
    environment = one_device.environment()
    result = subprocess.run(command, cwd=ROOT, env=environment, input=messages, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\nThe capital of Italy is Rome.\n"
    assert len(re.findall(SPEED.replace("tokens,", "tokens.*?,", 1), result.stderr)) == 2


def test_a_prompt_of_a_file_and_of_stdin(tmp_path, capsys, monkeypatch):
    """Read on one device, and on several that share it."""
    write_tiny(tmp_path / "speaks.gguf", context=2000, speaks=True)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("\n" + "The fox says, and says again:\n" * 20)
    options = ["--weights", str(tmp_path / "speaks.gguf"), "--max-tokens", "30", "--prompt-file"]
    texts = []
    for more in ([str(prompt)], ["-"], [str(prompt), "--devices", "3", "--split", "sequence"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prompt.read_bytes())))
        assert main([*options, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > 15
    prompt.write_text(" \n")
    assert main([*options, str(prompt)]) == 2
    assert capsys.readouterr().err.endswith(f"generate: error: {prompt}: expected a prompt; got space alone\n")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with a model that speaks, and one with an adapter for it."""
    folder, random = tmp_path_factory.mktemp("tuned"), np.random.default_rng(0)
    write_tiny(folder / "speaks.gguf", MIXED, "Q8_0", hidden=128, context=256, speaks=True)
    config = gguf.open_model(folder / "speaks.gguf").config
    targets = [target for target in lora.TARGETS if target not in ("k_proj", "gate_proj")]
    adapters = lora.init(config, rank=3, scale=2.0, targets=targets, key=jax.random.key(0))
    tuned = jax.tree.map(lambda x: jnp.asarray(random.normal(scale=0.1, size=x.shape), x.dtype), adapters)
    adapter_files.save(folder / "adapter", tuned, alpha=6.0)
    return folder


SPLITS = ([], ["--devices", "2"], ["--devices", "3", "--split", "sequence"])


def test_adapters_are_split_with_the_model(tuned, capsys):
    options = ["The fox", "--weights", str(tuned / "speaks.gguf"), "--max-tokens", "30"]
    texts = []
    for more in ([], *(["--adapter", str(tuned / "adapter"), *split] for split in SPLITS)):
        assert main([*options, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize("split", ["--devices 2", "--processes 2"])
def test_adapters_wait_for_the_devices(split, tuned, capsys):
    """A process of its own has one device until the program asks for more, which it can before JAX starts."""
    options = ["The fox", "--weights", str(tuned / "speaks.gguf"), "--max-tokens", "5"]
    options += ["--adapter", str(tuned / "adapter")]
    assert main(options) == 0
    command, several = [sys.executable, "-m", "models.generate", *options, *split.split()], []
    if split == "--devices 2":
        several = [command]
    else:
        command += ["--coordinator", f"localhost:{free_port()}", "--process"]
        several = [[*command, "0"], [*command, "1"]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(each, cwd=ROOT, env=one_device.environment(), **pipes) for each in several]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), results
    assert [out for out, _ in results] == [capsys.readouterr().out, ""][: len(started)]


def test_an_adapter_of_another_model_is_told_on_all_devices(tuned, tmp_path, capsys):
    write_tiny(tmp_path / "wider.gguf", width=128, hidden=128, speaks=True)
    options = ["The fox", "--weights", str(tmp_path / "wider.gguf"), "--adapter", str(tuned / "adapter")]
    for split in ([], ["--devices", "2"]):
        assert main([*options, *split]) == 2
        expected = r"generate: error: .*adapter_model.safetensors: expected the tensors of Adapters; got .* of another shape.*\n"
        assert re.fullmatch(expected, capsys.readouterr().err)


def test_a_folder_without_an_adapter_is_told_before_processes_meet(tuned, capsys):
    options = ["The fox", "--weights", str(tuned / "speaks.gguf"), "--processes", "2", "--coordinator", "localhost:1"]
    (tuned / "half").mkdir()
    (tuned / "half" / "adapter_config.json").write_bytes((tuned / "adapter" / "adapter_config.json").read_bytes())
    for adapter, message in (
        (tuned / "none", "adapter_config.json: expected the configuration of an adapter; got: No such file"),
        (tuned / "half", "adapter_model.safetensors: expected a file that can be read; got No such file"),
    ):
        assert main([*options, "--adapter", str(adapter)]) == 2
        assert re.fullmatch(rf"generate: error: .*{message}.*\n", capsys.readouterr().err)


def test_a_file_of_prompts(tmp_path, capsys):
    """Several rows over several devices."""
    write_tiny(tmp_path / "speaks.gguf", MIXED, "Q8_0", hidden=128, context=256, speaks=True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The fox says\nA\nThe fox sleeps, and says nothing\n")
    options = [
        "--prompts",
        str(prompts),
        "--weights",
        str(tmp_path / "speaks.gguf"),
        "--max-tokens",
        "20",
        "--rows",
        "2",
    ]
    options += ["--temperature", "0.8", "--top-k", "30", "--repetition-penalty", "1.3"]
    texts = []
    for split in SPLITS:
        assert main([*options, *split]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert re.match(r"> The fox says\n.+\n\n> A\n", texts[0], re.DOTALL)


@pytest.mark.parametrize(("name", "count"), [("f32", 2), ("wide", 8)])
def test_a_step_of_several_rows_gathers_nothing(name, count, files):
    """Each device has its part of the caches of all rows."""
    split = tensor_parallel.load(files[name], mesh_of(count))
    sizes = []
    for model in (llama.load(files[name]), split):
        batch = Batch(model, widths=[2], room=64)
        _, step = batch._caches.programs(2)
        sizes.append(step.memory_analysis().alias_size_in_bytes)
    assert sizes[1] == sizes[0] / count
    assert collectives(step).keys() == {"all-reduce"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--devices", "0"], "expected --devices of 1 or more; got 0"),
        (["hi", "--devices", "2"], "expected a number of devices that divides 3 key/value heads; got 2. Use 1 or 3."),
        (["hi", "--processes", "0"], "expected --processes of 1 or more; got 0"),
        (["hi", "--processes", "3"], "expected --coordinator and --processes together; got one of them"),
        (["hi", "--coordinator", "localhost:1"], "expected --coordinator and --processes together; got one of them"),
        (["hi", "--processes", "3", "--coordinator", "here"], "expected --coordinator HOST:PORT; got here"),
        (["hi", "--processes", "3", "--coordinator", "h:65536"], "expected --coordinator HOST:PORT; got h:65536"),
        (["hi", "--processes", "3", "--coordinator", "ö:1"], "expected --coordinator HOST:PORT; got ö:1"),
        (["hi", "--process", "1"], "expected --process from 0 to 0; got 1"),
        (["hi", "--split", "sequence"], "expected several devices for --split; got one"),
        (
            ["hi", "--prompt-file", "a"],
            "expected one of a prompt, --prompt-file, --chat and --prompts; got a prompt and --prompt-file",
        ),
        (
            ["--prompt-file", "nowhere"],
            "expected nowhere to be a file that can be read; got [Errno 2] No such file or directory: 'nowhere'",
        ),
        (
            ["--chat", "--processes", "3", "--coordinator", "localhost:1"],
            "expected one process for --chat; got 3",
        ),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"generate: error: {message}\n"


def test_a_step_of_training(files):
    """Each device has some of the examples: one sum of gradients, and the same numbers as one device has."""
    model = llama.load(files["f32"])
    examples = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(model, example):
        x, _ = model(example[:-1], model.init_cache(16))
        return optax.softmax_cross_entropy_with_integer_labels(model.logits(x), example[1:]).mean()

    @eqx.filter_jit
    def step(model, state, examples):
        value, gradient = eqx.filter_value_and_grad(
            lambda model: jax.vmap(loss, in_axes=(None, 0))(model, examples).mean()
        )(model)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, value

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    mesh = mesh_of(4)
    split = replicate(model, mesh), replicate(state, mesh), split_rows(examples, mesh)
    for got, want in zip(
        jax.tree.leaves(step(*split)), jax.tree.leaves(step(model, state, jnp.asarray(examples))), strict=True
    ):
        assert got.sharding.is_fully_replicated
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    lowered: Any = step.lower(*split)  # pyright: ignore[reportFunctionMemberAccess]
    assert collectives(lowered.compile().compiled) == {"all-reduce": 1}
    with pytest.raises(
        ValueError, match=r"split_rows: expected arrays whose first axis is a multiple of 4 devices; got shape"
    ):
        split_rows(examples[:7], mesh)


def test_keys_of_draws_are_replicated_and_split():
    """A number stays as it is."""
    mesh, key = mesh_of(4), jax.random.key(3)
    tree = replicate({"key": key, "x": jnp.ones(3)}, mesh)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(tree))
    np.testing.assert_array_equal(jax.random.normal(tree["key"], (5,)), jax.random.normal(key, (5,)))

    keys = jax.random.split(key, 8)
    batch: Any = split_rows((keys, np.ones((8, 2)), 1.0), mesh)
    split, x, number = batch
    assert [leaf.sharding.spec for leaf in (split, x)] == [jax.sharding.PartitionSpec(tensor_parallel.AXIS)] * 2
    assert number == 1.0
    draw = jax.jit(jax.vmap(lambda key: jax.random.normal(key, (5,))))
    np.testing.assert_array_equal(draw(split), draw(keys))
    with pytest.raises(ValueError, match=r"a multiple of 4 devices; got shape \(7,\)"):
        split_rows(keys[:7], mesh)
