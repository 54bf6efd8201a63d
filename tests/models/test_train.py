"""The program: `python -m models.train`. Sizes are tiny, and the processes that are killed are real."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.train.__main__ import begin, main
from models.train.options import parse
from models.train.run import Training
from models.train.run_folder import RunFolder
from models.train.text_data import read_text


ROOT = pathlib.Path(__file__).parents[2]
# One sentence, again and again, with a number: small models learn it by heart.
TEXT = "".join(f"The cat number {i % 10} sat on the mat, and the dog on the log.\n" for i in range(200))
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--length", "16", "--vocab", "320", "--batch", "4"]


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "cats.txt"
    path.write_text(TEXT)
    return path


def losses(folder):
    return [record["loss"] for record in RunFolder(folder).records()]


def snapshot_steps(folder):
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("*.snapshot"))


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory):
    """A run of both models, to its end, and what it printed."""
    folder = tmp_path_factory.mktemp("compared") / "run"
    arguments = f"gpt --text {text} --out {folder} --steps 150 --save-every 60 --rate 1e-2 --compare".split() + TINY
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("models.train.run.write", printed.extend)
        assert main(arguments) == 0
    return folder, "".join(printed)


def test_a_gpt_learns_a_text_by_heart(compared, capsys):
    folder, printed = compared
    curve = losses(folder)
    assert curve[0] == pytest.approx(np.log(320), rel=0.05)
    assert np.mean(curve[-10:]) < 0.7
    assert [int(step) for step in re.findall(r"^step (\d+) of 150: loss", printed, re.MULTILINE)] == [60, 120, 150]
    held_out = {record["step"]: record["held_out"] for record in RunFolder(folder).records() if "held_out" in record}
    assert held_out.keys() == {60, 120, 150}
    assert held_out[150] < 0.7  # the last tenth says the same
    assert snapshot_steps(folder) == [120, 150]
    assert main(["sample", str(folder), "The cat number 3", "--tokens", "60", "--temperature", "0"]) == 0
    assert " sat on the mat, and the dog on the log.\n" in capsys.readouterr().out
    assert main(["sample", str(folder), "The caf\udce9", "--tokens", "1"]) == 0  # an argument that is not UTF-8
    assert capsys.readouterr().out.startswith("The caf?")


def test_the_plain_model_has_the_same_curve(compared):
    folder, printed = compared
    records = RunFolder(folder).records()
    ours, theirs = (np.array([record[name] for record in records]) for name in ("loss", "plain_loss"))
    np.testing.assert_allclose(ours[:20], theirs[:20], rtol=1e-6)
    np.testing.assert_allclose(ours, theirs, rtol=5e-3)  # roundings grow from step to step
    worst = float(np.max(np.abs(ours - theirs) / theirs))
    last = printed.splitlines()[-1]
    assert re.fullmatch(
        r"\d+\.\d\d times as fast, \d\.\d\d of the memory \(\d\.\d\d beside the state\); "
        rf"losses differ by {re.escape(f'{worst:.1e}')} of themselves at most",
        last,
    )
    for name, column in (("eqxcallback", "seconds"), ("equinox.nn", "plain_seconds")):
        (row,) = re.findall(rf"^{name} +(\S+) +(\S+) +(\S+) +(\d+) +(\d+)$", printed, re.MULTILINE)
        assert float(row[1]) == pytest.approx(np.median([record[column] for record in records]) * 1e3, abs=0.1)
    svg = (folder / "losses.svg").read_text()
    assert svg.count("equinox.nn") == 1
    assert "held out" in svg


def test_without_matplotlib_there_is_no_plot(compared, monkeypatch, capsys):
    folder, _ = compared
    (folder / "losses.svg").unlink()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["resume", str(folder)]) == 0  # which has nothing more to do
    written = capsys.readouterr()
    assert written.err.endswith("losses.svg was not drawn, as matplotlib is not installed\n")
    assert "times as fast" in written.out
    assert not (folder / "losses.svg").exists()


# Killed at any moment.


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "models.train", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def interrupt_after(process, folder, steps, number):
    """Send a signal when so many steps are recorded. Returns what the process printed."""
    file = folder / "losses.jsonl"
    deadline = time.monotonic() + 200
    while not file.exists() or file.read_bytes().count(b"\n") < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(random.uniform(0, 0.02))
    process.send_signal(number)
    return process.communicate(timeout=60)[0]


@pytest.mark.usefixtures("interruptible")
def test_a_run_that_is_stopped_and_killed_ends_to_the_bit(text, tmp_path):
    arguments = [*f"gpt --text {text} --steps 3000 --save-every 5".split(), *TINY]
    folder, whole = tmp_path / "run", tmp_path / "whole"

    process = start(*arguments, "--out", str(folder))
    printed = interrupt_after(process, folder, random.randint(1, 40), signal.SIGINT)
    assert process.returncode == 130, printed
    steps = len(losses(folder))
    assert 1 <= steps < 3000
    assert snapshot_steps(folder)[-1] == steps
    assert f"stopped after step {steps}; `python -m models.train resume {folder}` goes on" in printed

    process = start("resume", str(folder))
    printed = interrupt_after(process, folder, steps + random.randint(1, 60), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, printed
    complete = (folder / "losses.jsonl").read_bytes().count(b"\n")
    assert complete > steps
    (folder / "step-00009999.unfinished").write_bytes(b"as if it was killed in the midst of a snapshot")
    last = snapshot_steps(folder)[-1]
    assert complete - 5 <= last <= complete

    # The rest is a few steps more, in this process, and so is the run that was never stopped.
    end = complete + 12
    for run in (folder, whole):
        training = begun(run, arguments, end) if run == whole else resumed(run, last, end)
        assert len(losses(run)) == end == training.step
    assert losses(folder) == losses(whole)
    assert losses(folder)[0] != losses(folder)[-1]
    assert not list(folder.glob("*.unfinished"))


def test_accumulated_batches_are_one_and_go_on_to_the_bit(text, tmp_path):
    shared = [*f"gpt --text {text} --steps 30 --save-every 5 --rate 1e-2".split(), *TINY[:-2]]
    parts = [*shared, "--batch", "2", "--accumulate", "3"]
    whole, stopped, large = tmp_path / "whole", tmp_path / "stopped", tmp_path / "large"
    assert main([*shared, "--batch", "6", "--out", str(large)]) == 0
    assert main([*parts, "--out", str(whole)]) == 0
    np.testing.assert_allclose(losses(whole), losses(large), rtol=2e-4)
    begun(stopped, parts, 13)
    assert main(["resume", str(stopped)]) == 0
    assert losses(stopped) == losses(whole)


def resumed(folder, last, end):
    training = Training(RunFolder(folder))
    training.restore()
    assert training.step == last
    return stopped_at(training, end)


def begun(folder, arguments, end):
    options = parse([*arguments, "--out", str(folder)])
    folder.mkdir()
    begin(options, RunFolder(folder), TEXT)
    training = Training(RunFolder(folder))
    training.restore()
    assert training.step == 0
    return stopped_at(training, end)


def stopped_at(training, end):
    """Train up to a step that is not the run's last one, as Ctrl-C would."""
    append = training.run.append

    def append_and_stop(record):
        append(record)
        if record["step"] == end:
            os.kill(os.getpid(), signal.SIGTERM)

    training.run.append = append_and_stop
    with pytest.raises(KeyboardInterrupt):
        training.train()
    return training


# A ViT, and bf16.


def test_a_vit_reads_digits_it_has_not_seen(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = f"vit --out {folder} --layers 1 --width 32 --batch 32 --steps 300 --save-every 300 --rate 1e-2"
    assert main(arguments.split()) == 0
    record = RunFolder(folder).records()[-1]
    assert record["accuracy"] > 0.88
    printed = capsys.readouterr().out
    assert f"held out {record['held_out']:.4f}, accuracy {record['accuracy']:.4f}\n" in printed
    assert re.search(r"^eqxcallback .* \d+\n$", printed, re.MULTILINE)
    assert "images/s" in printed
    assert main(["sample", str(folder), "7"]) == 2
    assert capsys.readouterr().err == f"train: error: expected the run of a gpt; {folder} has a vit\n"


def test_bf16_learns_too_and_has_masters_in_f32(text, tmp_path):
    folder = tmp_path / "run"
    arguments = f"gpt --text {text} --out {folder} --steps 150 --save-every 150 --rate 1e-2 --dtype bf16".split() + TINY
    assert main(arguments) == 0
    assert np.mean(losses(folder)[-10:]) < 0.7
    training = Training(RunFolder(folder))
    training.restore()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(training.model()) if eqx.is_array(leaf)} == {"bfloat16"}
    masters = jax.tree.leaves(training.states["fused"].weights)
    assert {leaf.dtype.name for leaf in masters} == {"float32"}
    assert any(np.any(leaf != leaf.astype(jnp.bfloat16).astype(jnp.float32)) for leaf in masters)


# Mistakes.


def refused(arguments, message, capsys):
    assert main([str(argument) for argument in arguments]) == 2
    assert capsys.readouterr().err == f"train: error: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("vit --steps 0", "expected --steps of 1 or more; got 0"),
        ("vit --width 30 --heads 4", "expected --width to be a multiple of --heads; got 30 and 4"),
        ("vit --rate nan", "expected --rate of 0 or more; got nan"),
        ("vit --seed -1", "expected --seed from 0 to 2**32 - 1; got -1"),
        ("gpt --vocab 255", "expected --vocab from 256, for all bytes, to 1048576; got 255"),
        ("gpt --vocab 1048577", "expected --vocab from 256, for all bytes, to 1048576; got 1048577"),
        ("gpt --plain --compare", "argument --compare: not allowed with argument --plain"),
        ("vit --text notes.txt", "unrecognized arguments: --text notes.txt"),
    ],
)
def test_options_are_checked(arguments, message, tmp_path, capsys):
    refused([*arguments.split(), "--out", tmp_path / "run"], message, capsys)
    assert not (tmp_path / "run").exists()


def test_a_text_that_cannot_be_used(tmp_path, capsys):
    out, latin, short = tmp_path / "run", tmp_path / "latin.txt", tmp_path / "short.txt"
    latin.write_bytes("Käse".encode("latin-1"))
    short.write_text("Too short.")
    missing = f"expected {tmp_path / 'none'} to be a file that can be read; got [Errno 2] No such file or directory: "
    refused(["gpt", "--out", out, "--text", tmp_path / "none"], f"{missing}'{tmp_path / 'none'}'", capsys)
    refused(["gpt", "--out", out, "--text", latin], f"expected {latin} to be UTF-8; got byte 0xe4 at 1", capsys)
    assert not out.exists()
    message = "expected a text of 514 tokens or more, twice --length; got 10. Lower --length, or pass another text."
    refused(["gpt", "--out", out, "--text", short, "--vocab", 256], message, capsys)
    refused(["resume", out], f"expected the folder of a run, with options.json; got {out}", capsys)


def test_a_tokenizer_that_cannot_be_written(text, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    with RunFolder(tmp_path).locked():  # as a run that was killed early
        path.mkdir()
    assert main(["gpt", "--text", str(text), "--out", str(tmp_path), *TINY]) == 2
    error = capsys.readouterr().err
    start, end = "train: error: a file cannot be read or written: [Errno 21] Is a directory: ", f" -> '{path}'\n"
    assert error.startswith(start)
    assert error.endswith(end)


def test_a_folder_has_one_run_and_one_process(compared, capsys):
    folder, _ = compared
    message = f"expected a folder without a run; got {folder}. "
    message += f"Go on with `python -m models.train resume {folder}`, or pass another --out."
    refused(["vit", "--out", folder], message, capsys)
    message = f"expected {folder} for this process alone; another one trains there. Wait for it, or stop it."
    with RunFolder(folder).locked():
        refused(["resume", folder], message, capsys)


def test_options_that_were_changed_are_told(compared, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(compared[0], folder)
    options = json.loads((folder / "options.json").read_text())
    (folder / "options.json").write_text(json.dumps(options | {"width": 64}))
    message = f"expected width 32, which {folder / 'step-00000150.snapshot'} was written with; got 64. "
    refused(["resume", folder], message + "Put the run's options and data back, or begin in another folder.", capsys)
    message = f"expected the options of a run in {folder / 'options.json'}; got "
    for changed, got in (
        ("{}", "RunOptions.__init__() missing"),
        (json.dumps(options | {"rate": "fast"}), "rate 'fast'"),
    ):
        (folder / "options.json").write_text(changed)
        assert main(["resume", str(folder)]) == 2
        assert message + got in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_ends_the_run(text, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["gpt", "--text", str(text), "--out", str(folder), "--steps", "30", "--rate", "1e30", *TINY]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"the loss of step \d+ is nan. Begin anew with a lower --rate than this run's.$", error)


def test_the_default_text_comes_with_python():
    text = read_text(None)
    assert len(text) > 300_000
    assert 'The "with" statement' in text
