"""A fine-tuning that is stopped or killed, and goes on."""

import json
import os
import re
import signal

import pytest

from models._locking import locked
from models.finetune import __main__ as finetune
from models.finetune.tuner import Tuner

from .tiny import write_tiny


@pytest.fixture
def folder(tmp_path):
    write_tiny(tmp_path / "model.gguf", speaks=True, context=512)
    write_lines(tmp_path, "ab")
    return tmp_path


def write_lines(folder, first):
    texts = [first, "the quick brown fox jumps over it " * 8, "one more"]
    (folder / "lines.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def tune(folder, name, *options):
    """The exit code, what the program prints, and the files of the adapter. A step has one line, of two that are not held out."""
    arguments = [str(folder / "lines.jsonl"), "--weights", str(folder / "model.gguf"), "--output", str(folder / name)]
    arguments += ["--held-out", "0.3", "--rank", "1", "--batch", "1", "--epochs", "3", "--learning-rate", "1e-2"]
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models._program.write", written.extend)
        code = finetune.main([*arguments, *options])
    record = json.loads("".join(written) or "{}")
    for key in ("adapter", "tokens_per_second"):
        record.pop(key, None)
    path = folder / name
    return code, record, {file.name: file.read_bytes() for file in path.iterdir()} if path.exists() else {}


def ended_after(monkeypatch, steps, end):
    """Call `end` when so many steps were taken, once."""
    step, taken = Tuner.step, []

    def step_and_end(tuner, batch):
        loss = step(tuner, batch)
        taken.append(loss)
        if len(taken) == steps:
            end()
        return loss

    monkeypatch.setattr(Tuner, "step", step_and_end)
    return taken


def killed():
    raise BrokenPipeError


def terminated():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("end", "code", "last", "rest"), [(terminated, 130, 5, 1), (killed, 0, 4, 2)], ids=["stopped", "killed"]
)
def test_it_goes_on_to_the_bit(end, code, last, rest, folder, monkeypatch, capsys):
    whole = tune(folder, "whole")
    assert whole[0] == 0
    assert len(whole[1]["losses"]) == 3
    assert whole[1]["perplexity_after"] != whole[1]["perplexity_before"]
    kept = ["--snapshots", str(folder / "kept"), "--save-every", "2"]
    taken = ended_after(monkeypatch, 5, end)
    assert tune(folder, "stopped", *kept) == (code, {}, {})
    error = capsys.readouterr().err
    assert ("stopped after step 5; the same command goes on" in error) == (end is terminated)
    assert (folder / f"kept/step-{last:08}.snapshot").exists()
    assert tune(folder, "stopped", *kept) == whole
    assert f"step {last} of 6, of the snapshot in {folder / 'kept'}\n" in capsys.readouterr().err
    assert len(taken) == 5 + rest
    assert tune(folder, "again", *kept) == whole  # there is nothing more to do
    assert len(taken) == 5 + rest
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            ["--learning-rate", "1e-3"], r"expected learning_rate 0\.01, which .* was written with; got 0\.001"
        ),
        pytest.param(
            "lines",
            r"expected lines_checksum \d+, which .* was written with; got \d+\. Put the run's options and data back",
        ),
        pytest.param("model", r"expected model_checksum \d+, which .* was written with; got \d+"),
        pytest.param("snapshots", "step-00000006.snapshot to be whole; .* and there is no other one"),
        pytest.param("lock", "expected .*kept for this process alone; another one trains there. Wait for it, or stop"),
    ],
    ids=["options", "lines", "model", "snapshots", "lock"],
)
def test_another_run_is_refused(change, message, folder, capsys):
    kept = ["--snapshots", str(folder / "kept"), "--save-every", "10"]
    assert tune(folder, "adapter", *kept)[0] == 0
    assert [path.name for path in sorted((folder / "kept").iterdir())] == ["lock", "step-00000006.snapshot"]
    capsys.readouterr()
    if change == "lines":
        write_lines(folder, "cd")
    elif change == "model":
        write_tiny(folder / "model.gguf", speaks=True, context=512, other="F16")
    elif change == "snapshots":
        (folder / "kept/step-00000006.snapshot").write_bytes(b"cut")
    if change == "lock":
        with locked(folder / "kept", b""):
            assert tune(folder, "other", *kept) == (2, {}, {})
    else:
        options = change if isinstance(change, list) else []
        assert tune(folder, "other", *kept, *options) == (2, {}, {})
    assert re.fullmatch(rf"(?s).*finetune: error: [^\n]*{message}[^\n]*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "files",
    [{"essay.unfinished": "Once"}, {"lock": "python -m models.train\n", "options.json": "{}"}],
    ids=["files", "train"],
)
def test_a_folder_of_another_program_stays_as_it_is(files, folder, capsys):
    """A run of `train` that has no snapshot yet is one, too: with ours it could not go on."""
    kept = folder / "kept"
    kept.mkdir()
    for name, text in files.items():
        (kept / name).write_text(text)
    assert tune(folder, "adapter", "--snapshots", str(kept)) == (2, {}, {})
    message = f"expected a new folder, or an empty one; got {kept} with {max(files)}. Pass another --snapshots.\n"
    assert capsys.readouterr().err == f"finetune: error: {message}"
    assert {path.name: path.read_text() for path in kept.iterdir()} == files


def test_the_folder_of_the_adapter_may_have_the_snapshots(folder, monkeypatch):
    kept = ["--snapshots", str(folder / "adapter"), "--save-every", "2"]
    taken = ended_after(monkeypatch, 5, killed)
    assert tune(folder, "adapter", *kept)[0] == 0
    assert tune(folder, "adapter", *kept)[0] == 0
    assert len(taken) == 7
    again = tune(folder, "adapter", *kept)
    assert again[0] == 0
    assert sorted(again[2]) == [
        *("adapter_config.json", "adapter_model.safetensors", "lock"),
        *("step-00000004.snapshot", "step-00000006.snapshot"),
    ]
    assert len(taken) == 7
