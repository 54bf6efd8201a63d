"""The program `python -m models.train`: weights that break, folders of other programs, and runs that were changed."""

import json
import os
import random
import re
import shutil
import signal
import threading

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from models.train import text_data
from models.train.__main__ import begin, main
from models.train.options import parse
from models.train.run import Training
from models.train.run_folder import RunFolder
from models.train.text_data import prepare

from .test_train import TEXT, TINY, losses, promotion as promotion, refused, snapshot_steps, text as text


# Weights that break.


def test_a_last_step_that_breaks_the_weights_is_not_saved(text, tmp_path, capsys):
    """The loss of a step is that before it."""
    folder = tmp_path / "run"
    assert main(["gpt", "--text", str(text), "--out", str(folder), "--steps", "1", "--rate", "1e30", *TINY]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"error: the held-out loss after step 1 is nan\. Begin anew with a lower --rate than this run's\.$", error
    )
    assert snapshot_steps(folder) == []


def test_nor_is_one_that_is_stopped(tmp_path):
    arguments = ["gpt", "--out", str(tmp_path), "--steps", "30", "--rate", "1e30", *TINY]
    begin(parse(arguments), RunFolder(tmp_path), TEXT)
    training = Training(RunFolder(tmp_path))
    training.restore()
    append = training.run.append

    def append_and_stop(record):
        append(record)
        if record["step"] == 2:  # the first one with a rate
            os.kill(os.getpid(), signal.SIGTERM)

    training.run.append = append_and_stop
    with pytest.raises(Exception, match="the held-out loss after step 2 is nan"):
        training.train()
    assert snapshot_steps(tmp_path) == []


# Folders.


@pytest.mark.parametrize("name", ["tokenizer.json", "lock"])
def test_a_folder_of_another_program_stays_as_it_is(name, text, tmp_path, capsys):
    (tmp_path / name).write_text("{}")
    message = f"expected a new folder, or an empty one; got {tmp_path} with {name}. Pass another --out."
    refused(["gpt", "--text", text, "--out", tmp_path, *TINY], message, capsys)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "{}"}


def test_a_folder_of_finetune_is_not_a_run(text, tmp_path, capsys):
    """`resume`, the remedy for a run's folder, could not go on with it."""
    files = {"lock": "python -m models.finetune\n", "step-00000006.snapshot": "{}"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    message = f"expected a new folder, or an empty one; got {tmp_path} with step-00000006.snapshot. Pass another --out."
    refused(["gpt", "--text", text, "--out", tmp_path, *TINY], message, capsys)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_run_that_was_killed_before_it_had_begun_begins_again(tmp_path):
    options = parse(["vit", "--out", str(tmp_path / "run")])
    folder = RunFolder(tmp_path / "run")
    folder.expect_new()
    with folder.locked():
        (folder.path / "tokens.npy").write_bytes(b"half")
    folder.expect_new()
    with folder.locked():
        begin(options, folder, None)
    assert folder.options().model == "vit"


def test_two_that_begin_at_once(tmp_path):
    """The lock of the first one is there before its mark is."""
    (tmp_path / "lock").touch()
    RunFolder(tmp_path).expect_new()


# Changed runs.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step."""
    folder = tmp_path_factory.mktemp("run") / "run"
    (folder.parent / "text").write_text(TEXT)
    assert main(["gpt", "--text", str(folder.parent / "text"), "--out", str(folder), "--steps", "1", *TINY]) == 0
    return folder


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_token_that_was_changed_is_told(copy, capsys):
    path, options = copy / "tokens.npy", json.loads((copy / "options.json").read_text())
    tokens = np.load(path)
    tokens[7] += 1
    np.save(path, tokens)
    message = f"expected {path} as the run began with it; it was changed. Put it back, or begin anew."
    refused(["resume", copy], message, capsys)
    # Runs of older versions have no checksum, in the snapshots neither.
    for step in copy.glob("*.snapshot"):
        step.unlink()
    del options["checksum"]
    (copy / "options.json").write_text(json.dumps(options))
    (copy / "losses.jsonl").write_text("")
    assert main(["resume", str(copy)]) == 0
    assert len(losses(copy)) == 1
    for token, got in ((320, r"\d+ to 320"), (-1, r"-1 to \d+")):
        tokens[7] = token
        np.save(path, tokens)
        capsys.readouterr()
        assert main(["resume", str(copy)]) == 2
        assert re.search(rf"expected tokens from 0 to 319 in {path}; got {got}\. Put it back", capsys.readouterr().err)
    np.save(path, tokens.astype(np.float32))
    refused(["resume", copy], f"expected tokens in {path}; got float32 of shape {tokens.shape}", capsys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"save_every": 0}, "save_every of 1 or more in {}; got 0"),
        ({"model": "bert"}, "model of gpt, vit in {}; got bert"),
        ({"dtype": "f64"}, "dtype of f32, bf16 in {}; got f64"),
        ({"contestants": "none"}, "contestants of fused, plain, both in {}; got none"),
        ({"length": None}, "length of a gpt in {}; got None"),
        ({"accumulate": 0}, "accumulate of 1 or more in {}; got 0"),
        ({"devices": 3}, "batch to be a multiple of the 3 devices in {}; got 4"),
        ({"heads": 5}, "width to be a multiple of --heads in {}; got 32 and 5"),
    ],
)
def test_values_that_were_changed_are_told(changes, message, copy, capsys):
    path = copy / "options.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(["resume", copy], f"expected {message.format(path)}. Put the run's options back.", capsys)


# Long lines.


def plain_progress(items, **_):
    return items


def test_a_line_of_dna_is_prepared(tmp_path):
    """Without spaces it is one word, which the tokenizer alone would not end with."""
    dna = "".join(random.Random(0).choices("acgt", k=400_000))
    prepare(dna, tmp_path, vocab_size=512, progress=plain_progress)
    tokens = np.load(tmp_path / "tokens.npy")
    assert len(tokens) < 150_000
    assert text_data.open_tokenizer(tmp_path).decode(tokens.tolist()) == dna


@pytest.mark.parametrize("space", ["\n", " ", "\t", "  ", "、"])
def test_lines_of_any_length_have_the_tokens_of_their_words(space, tmp_path):
    """As the tokenizer has them if nothing is cut."""
    line = "The cat's hat, x_1 = f(x_0) \t and 10 caf\u00e9s: don't they've it?" + space
    whole = "".join(line.replace("10", str(i)) for i in range(400))
    prepare(whole, tmp_path, vocab_size=400, progress=plain_progress)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: object = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(whole.splitlines(keepends=True), trainer)
    assert text_data.open_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    expected = [token for part in whole.splitlines(keepends=True) for token in tokenizer.encode(part).ids]
    assert np.load(tmp_path / "tokens.npy").tolist() == expected


def test_ctrl_c_ends_the_training_of_a_tokenizer(tmp_path):
    """It is in Rust, and Python would wait for its end. Other threads cannot say so, and need not."""
    handlers = []

    def watched(items, **_):
        for item in items:
            handlers.append(signal.getsignal(signal.SIGINT))
            yield item

    before = signal.getsignal(signal.SIGINT)
    prepare(TEXT, tmp_path, vocab_size=256, progress=watched)
    assert handlers[0] == signal.SIG_DFL
    assert handlers[-1] == signal.getsignal(signal.SIGINT) == before
    handlers.clear()
    thread = threading.Thread(target=prepare, args=(TEXT, tmp_path), kwargs={"vocab_size": 256, "progress": watched})
    thread.start()
    thread.join()
    assert set(handlers) == {before}
