"""The program `python -m models.finetune`: SmolLM2 tuned on a few lines, and what it refuses."""

import gc
import itertools
import json
import math
import pathlib
import re
import threading
import types
import weakref

import jax
import numpy as np
import pytest

from models import _program, adapter_files, gguf, llama, lora
from models._program import UsageError
from models.finetune import __main__ as finetune, merge, training
from models.finetune.examples import Example, batches, read_examples
from models.finetune.tuner import Tuner
from models.generate import __main__ as generate
from models.model_files import open_files

from .test_huggingface import write as write_folder
from .tiny import write_tiny


ROOT = pathlib.Path(__file__).parents[2]
AHOY = ROOT / "models/data/ahoy.jsonl"
PAGE = ROOT / "docs/finetune.md"
QUESTION = "What is the capital of Spain?"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """An adapter after nine steps, and what the program printed."""
    folder = tmp_path_factory.mktemp("tuned")
    lines = AHOY.read_text().splitlines()[:20]
    assert not any(QUESTION in line for line in lines)
    (folder / "lines.jsonl").write_text("\n".join(lines))
    options = ["--epochs", "1", "--batch", "2", "--learning-rate", "4e-3", "--output", str(folder / "adapter")]
    with pytest.MonkeyPatch.context() as patch:
        written = []
        patch.setattr("models._program.write", written.extend)
        assert finetune.main([str(folder / "lines.jsonl"), *options]) == 0
    return folder / "adapter", json.loads("".join(written))


def test_held_out_lines_are_less_of_a_surprise(tuned):
    folder, record = tuned
    assert (record["lines"], record["held_out_lines"], record["steps"]) == (18, 2, 9)
    assert record["adapter"] == str(folder)
    assert record["perplexity_before"] > 30
    assert 1 < record["perplexity_after"] < 8
    assert math.isfinite(record["losses"][0])


def test_the_tuned_text_shows_it(tuned, capsys):
    texts = []
    for options in ([], ["--adapter", str(tuned[0])]):
        assert generate.main([QUESTION, "--max-tokens", "30", *options]) == 0
        texts.append(capsys.readouterr().out.strip())
    before, after = texts
    assert not re.search("Ahoy|Fair winds", before)
    assert re.fullmatch(r"Ahoy! .*Fair winds, my friend!", after)


def test_the_merged_model_shows_it(tuned, tmp_path, capsys, monkeypatch):
    path = tmp_path / "merged.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(_program, "_DELAY", 0.01)
        assert merge.main([str(tuned[0]), "--output", str(path), "--encoding", "Q8_0"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out) == {"model": str(path), "encoding": "Q8_0"}
    assert re.search(r"\rmerging: +[1-9]\d*%", written.err)
    file = gguf.open_model(path)
    assert {tensor.encoding for name, tensor in file.tensors.items() if len(tensor.shape) > 1} == {"Q8_0"}
    assert generate.main([QUESTION, "--max-tokens", "30", "--weights", str(path)]) == 0
    assert re.fullmatch(r"Ahoy! .*Fair winds, my friend!", capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "{}"], r"expected --output to be a file, in a folder that exists; got /"),
        (
            ["--output", "{}/no/model.gguf"],
            r"expected --output to be a file, in a folder that exists; got .*no/model\.gguf",
        ),
        (["--output", "{}/a", "--encoding", "Q4_0"], r"argument --encoding: invalid choice: 'Q4_0'"),
        (["--output", "{}/a", "--weights", "README.md"], "README.md: expected a GGUF file"),
        (["--output", "{}/a", "--weights", "{}/qwen2"], "adapter_model.safetensors: expected the tensors of Adapters"),
        (
            ["--output", "{}/a", "--weights", "{}/qwen2", "--encoding", "Q8_0"],
            "--encoding F32 or BF16 for a folder .*; got Q8_0",
        ),
        (
            ["--output", "{}/qwen2/config.json", "--weights", "{}/qwen2"],
            "--output to be a folder, in a folder that exists",
        ),
    ],
)
def test_what_cannot_be_merged(options, message, tuned, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_folder(tmp_path / "qwen2", family="qwen2")
    code = merge.main([str(tuned[0]), *(option.format(tmp_path) for option in options)])
    written = capsys.readouterr()
    assert (code, written.out) == (2, "")
    assert re.fullmatch(rf"finetune\.merge: error: .*{message}.*\n", written.err), written.err
    assert not (tmp_path / "a").exists()


def test_the_memory_that_the_page_names(file, model):
    """Steps of rank 8, all layers, and 4 lines of 64 tokens."""
    adapters = lora.init(file.config, rank=8, scale=2.0, targets=lora.TARGETS, key=jax.random.key(0))
    tuner = Tuner(model, adapters, learning_rate=1e-3, steps=2)
    (batch,) = batches([Example(list(range(64)), list(range(1, 65)))] * 4, 4)
    memory = tuner.program(batch).memory_analysis()
    row = re.search(r"\| 4 of 64, 4 bits \| (\d+) \| (\d+) \|", PAGE.read_text())
    assert row is not None
    assert memory.argument_size_in_bytes / 1e6 == pytest.approx(int(row[1]), abs=1)
    assert memory.temp_size_in_bytes / 1e6 == pytest.approx(int(row[2]), abs=1)
    assert f"{row[2]} MB for a step's arrays" in (ROOT / "README.md").read_text()


def tune_tiny(folder, *options):
    """Take steps on two texts of very different lengths that change next to nothing, and return what the program prints."""
    write_tiny(folder / "model.gguf", speaks=True, context=512)
    texts = ["ab", "the quick brown fox jumps over it " * 8]
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    arguments = [
        str(folder / "lines.jsonl"),
        "--weights",
        str(folder / "model.gguf"),
        "--output",
        str(folder / "adapter"),
    ]
    arguments += ["--held-out", "0", "--rank", "1", "--learning-rate", "1e-12", *options]
    written = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models._program.write", written.extend)
        code = finetune.main(arguments)
    return code, "".join(written)


@pytest.mark.parametrize("held_out", ["0", "0.5"])
def test_an_adapter_that_breaks_is_not_written(held_out, tmp_path, capsys):
    """The loss of the one step is that before it."""
    assert tune_tiny(tmp_path, "--epochs", "1")[0] == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    broken = ["--epochs", "1", "--learning-rate", "1e30", "--held-out", held_out]
    assert tune_tiny(tmp_path, *broken) == (2, "")
    message = (
        "finetune: error: expected a finite perplexity after the last step; got nan. Pass a lower --learning-rate.\n"
    )
    assert capsys.readouterr().err.endswith(message)
    assert {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()} == files


def test_losses_and_tokens_are_those_that_count(tmp_path, monkeypatch):
    """However the lines are put into batches, and without their padding."""
    seconds = itertools.count()
    monkeypatch.setattr(training, "time", types.SimpleNamespace(perf_counter=lambda: next(seconds)))  # a step takes one
    records = []
    for batch in ("1", "2"):
        code, printed = tune_tiny(tmp_path, "--epochs", "2", "--batch", batch)
        assert code == 0
        records.append(json.loads(printed))
    one, two = (record["losses"] for record in records)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    _, tokenizer = open_files(tmp_path / "model.gguf")
    lines, _ = read_examples(tmp_path / "lines.jsonl", tokenizer, max_tokens=512)
    tokens = sum(len(example.tokens) for line in lines for example in line)
    assert [record["tokens_per_second"] for record in records] == [2 * tokens / 4, 2 * tokens / 2]


def test_the_blocks_are_in_memory_once(tmp_path, monkeypatch, capsys):
    """The tuner has stacks of them, and what was loaded is gone when it begins."""
    arrays = []

    def load(*args, **kwargs):
        model = llama.load(*args, **kwargs)
        arrays.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(model.blocks))
        return model

    def step(tuner, batch):
        for thread in threading.enumerate():
            if thread.name == "huge pages":
                thread.join()
        gc.collect()
        raise UsageError(f"{sum(array() is not None for array in arrays)} of {len(arrays)} arrays are alive")

    monkeypatch.setattr(finetune, "llama", types.SimpleNamespace(load=load))
    monkeypatch.setattr(Tuner, "step", step)
    assert tune_tiny(tmp_path) == (2, "")
    assert f"0 of {len(arrays)} arrays are alive" in capsys.readouterr().err
    assert arrays


def test_weights_are_expanded_one_block_at_a_time(file, model):
    """The plan for all of SmolLM2: its weights in f32 have 540 MB, and those of the blocks alone 425."""
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]
    adapters = lora.init(file.config, rank=2, scale=1.0, targets=["q_proj", "down_proj"], key=jax.random.key(0))
    tuner = Tuner(model, adapters, learning_rate=1e-3, steps=2)
    (batch,) = batches([Example(list(range(20)), list(range(1, 21)))], 2)
    program = tuner.program(batch)
    memory = program.memory_analysis()
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert weights < 100_000_000
    assert memory.argument_size_in_bytes < weights + 10_000_000
    assert memory.temp_size_in_bytes < 40_000_000
    # Of the stacks, no array of f32 but adapters and norms; of the vocabulary, no table and no logits.
    text = program.as_text()
    assert "f32[1536,576]" in text or "f32[576,1536]" in text  # so this is how it would look
    assert not re.search(r"f32\[30,\d{3,},\d{3,}\]", text)
    assert not re.search(r"f32\[(\d+,)*49152[\],]", text)
    assert math.isfinite(tuner.step(batch))
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)] == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--held-out", "1"], "expected --held-out from 0 to less than 1; got 1.0"),
        (["--max-tokens", "1"], "expected --max-tokens of 2 or more; got 1"),
        (["--max-tokens", "9000"], "expected --max-tokens up to the model's context, 8192; got 9000"),
        (["--rank", "0"], "expected --rank of 1 or more; got 0"),
        (["--alpha", "nan"], "expected --alpha above 0; got nan"),
        (["--targets", "q_proj,lm_head"], r"expected --targets of q_proj, .*, down_proj; got 'lm_head'"),
        (["--epochs", "0"], "expected --epochs of 1 or more; got 0"),
        (["--batch", "0"], "expected --batch of 1 or more; got 0"),
        (["--learning-rate", "0"], "expected --learning-rate above 0; got 0.0"),
        (["--save-every", "0"], "expected --save-every of 1 or more; got 0"),
        (["--save-every", "5"], "expected --snapshots FOLDER with --save-every; got none"),
        (["--seed", "-1"], r"expected --seed from 0 to 2\*\*32 - 1; got -1"),
        (["--output", "/no/such/adapter"], "expected --output in a folder that exists; got /no/such/adapter"),
        (
            ["--output", "/proc/adapter"],
            "expected --output in a folder that can be written; got /proc/adapter: .*No such",
        ),
        (["--output", "README.md"], "expected --output to be a folder; got a file, README.md"),
        (["--weights", "README.md"], "README.md: expected a GGUF file"),
        (["--rank", "many"], "argument --rank: invalid int value: 'many'"),
        (["--max-tokens", "20"], r"ahoy.jsonl:1: expected an answer, .* that begins within 20 tokens; got none"),
    ],
)
def test_errors_are_one_line(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = finetune.main([str(AHOY), "--output", str(tmp_path / "adapter"), *options])
    written = capsys.readouterr()
    assert (code, written.out) == (2, "")
    assert re.fullmatch(rf"finetune: error: .*{message}.*\n", written.err), written.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\n", "expected at least one example; got empty lines alone"),
        (
            '{"text": "One."}\n{"prompt": "Two."}',
            r'jsonl:2: expected an object with "prompt", .*; got {"prompt": "Two\."}',
        ),
        ('{"text": "One."}\n\n{', "jsonl:3: expected a JSON object; got Expecting property name"),
        ('{"messages": [{"role": "user", "content": "One."}]}', "jsonl:1: expected an object with"),
        ('{"messages": "One."}', "jsonl:1: expected an object with"),
        ("[" * 100_000, "jsonl:1: expected a JSON object; got"),
        ('{"text": ""}', "jsonl:1: expected a text of 2 tokens or more, as .* before it; got 0. Leave the line out"),
        ('{"text": "a"}', "jsonl:1: expected a text of 2 tokens or more, as .* before it; got 1. Leave the line out"),
        ('{"prompt": "One.", "response": "Two.", "completion": "Three."}', "jsonl:1: expected an object with"),
        ('{"prompt": "One.", "response": "Two.", "text": "Three."}', "jsonl:1: expected an object .* of these alone"),
        ('{"system": "One.", "text": "Two."}', "jsonl:1: expected an object with"),
        (
            '{"text": "One. Two."}',
            "expected more lines than the 1 that are held out; got 1. Pass more, or --held-out 0",
        ),
        (b"\xff", "expected .*lines.jsonl to be UTF-8; got byte 0xff at 0"),
        (None, "expected .*lines.jsonl to be a file that can be read; got .*No such file or directory"),
    ],
)
def test_files_that_are_refused(text, message, tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert finetune.main([str(path), "--output", str(tmp_path / "adapter")]) == 2
    written = capsys.readouterr()
    assert re.fullmatch(rf"finetune: error: .*{message}.*\n", written.err), written.err


def test_an_adapter_that_is_not_one(tuned, tmp_path, capsys):
    assert generate.main([QUESTION, "--adapter", str(tmp_path)]) == 2
    expected = (
        r"generate: error: .*adapter_config.json: expected the configuration of an adapter; got: No such file.*\n"
    )
    assert re.fullmatch(expected, capsys.readouterr().err)
    assert adapter_files.load(tuned[0], gguf.open_model(gguf.default_path()).config)
