"""Files that are replaced: the old one or the new one, whatever happens, and nothing of anybody else's."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import adapter_files, gguf, lora
from models._errors import ModelFileError
from models._replacing import replace_file, replace_files
from models._safetensors import write_tensors

from .tiny import write_tiny


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_nothing_else_in_the_folder_changes(tmp_path):
    (tmp_path / "x.partial").write_text("mine")
    replace_file(tmp_path / "x", lambda partial: partial.write_text("new"))
    assert texts(tmp_path) == {"x": "new", "x.partial": "mine"}


def test_a_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    for text in ("first", "second"):
        replace_file(tmp_path / "link", lambda partial, text=text: partial.write_text(text))
        assert (tmp_path / "link").is_symlink()
        assert texts(tmp_path / "elsewhere") == {"file": text}


def test_two_writers_do_not_meet(tmp_path):
    """The one that ends last has the file."""

    def write(partial):
        partial.write_text("outer")
        replace_file(tmp_path / "x", lambda partial: partial.write_text("inner"))
        assert (tmp_path / "x").read_text() == "inner"

    replace_file(tmp_path / "x", write)
    assert texts(tmp_path) == {"x": "outer"}


KILLED = """
import os, pathlib, signal, sys
from models._replacing import replace_file

def write(partial):
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

replace_file(sys.argv[1], write)
"""


@pytest.mark.parametrize("name", ["x", "x" * 255])
def test_what_a_killed_process_left_goes_with_the_next_write(name, tmp_path):
    """Nothing of another name goes, nor of a process that lives, as `test_two_writers_do_not_meet` says."""
    (tmp_path / ".x.mine.partial").write_text("mine")
    root = pathlib.Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / name)], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert texts(left) == {name: "half"}
    replace_file(tmp_path / name, lambda partial: partial.write_text("new"))
    assert texts(tmp_path) == {name: "new", ".x.mine.partial": "mine"}


def test_permissions_are_those_of_a_new_file(tmp_path):
    """Also if the package that writes it makes a file of its own."""
    before = os.umask(0o027)
    try:
        (tmp_path / "plain").touch()
        replace_file(tmp_path / "x", lambda partial: partial.write_text("new"))
        write_tensors(tmp_path / "x.safetensors", {"a": np.ones(3, np.float32)}, {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_before_it_is_on_the_disk_it_has_no_name(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    (tmp_path / "x").write_text("old")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "x", lambda partial: partial.write_text("new"))
    assert texts(tmp_path) == {"x": "old"}


def test_if_one_of_several_cannot_be_written_all_stay(tmp_path):
    def refuse(partial):
        partial.write_text("half")
        raise OSError("no")

    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("old")
    with pytest.raises(OSError, match="no"):
        replace_files({tmp_path / "a": lambda partial: partial.write_text("new"), tmp_path / "b": refuse})
    assert texts(tmp_path) == {"a": "old", "b": "old"}


class Interrupted(BaseException):
    """An interruption of this process, as Ctrl-C is."""


def interrupt(patch, step):
    """Raise `Interrupted` in place of a step that changes the disk, the first of which is 0."""
    left = [step]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == -1:
                raise Interrupted
            return function(*args, **kwargs)

        return call

    patch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink", "write_text"):
        patch.setattr(pathlib.Path, name, counted(getattr(pathlib.Path, name)))


def test_an_adapter_whose_save_is_interrupted_is_the_old_one_or_refused(tmp_path):
    write_tiny(tmp_path / "model.gguf")
    config = gguf.open_model(tmp_path / "model.gguf").config
    old = lora.init(config, rank=1, scale=2.0, targets=["q_proj"], key=jax.random.key(0))
    new = lora.init(config, rank=1, scale=8.0, targets=["q_proj"], key=jax.random.key(0))
    new = jax.tree.map(jnp.ones_like, new)
    outcomes = []
    for step in range(20):
        adapter_files.save(tmp_path / "adapter", old, alpha=2.0)
        try:
            with pytest.MonkeyPatch.context() as patch:
                interrupt(patch, step)
                adapter_files.save(tmp_path / "adapter", new, alpha=8.0)
        except Interrupted:
            outcomes.append(_adapter(tmp_path / "adapter", config))
        else:
            break
    assert outcomes[0] == (2.0, False)
    assert "refused" in outcomes
    assert set(outcomes) <= {(2.0, False), "refused", (8.0, True)}
    assert _adapter(tmp_path / "adapter", config) == (8.0, True)


def _adapter(folder, config):
    """The scale of an adapter, and whether its tensors are the new ones."""
    if not (folder / "adapter_config.json").exists():
        with pytest.raises(ModelFileError, match="expected the configuration of an adapter; got: No such file"):
            adapter_files.load(folder, config)
        return "refused"
    loaded = adapter_files.load(folder, config)
    return loaded.blocks[0]["qkv"].scale, bool((jax.tree.leaves(loaded)[0] == 1).all())


def test_an_adapter_on_a_disk_that_fills_up_at_its_end_stays(tmp_path, monkeypatch, full_disk):
    """The configuration is the last file, and has more bytes than there is room for."""
    write_tiny(tmp_path / "model.gguf")
    config = gguf.open_model(tmp_path / "model.gguf").config
    old = lora.init(config, rank=1, scale=2.0, targets=["q_proj"], key=jax.random.key(0))
    new = lora.init(config, rank=1, scale=8.0, targets=["q_proj"], key=jax.random.key(0))
    adapter_files.save(tmp_path / "adapter", old, alpha=2.0)
    with full_disk(100), monkeypatch.context() as patch:
        patch.setattr(adapter_files.checkpoints, "save_safetensors", lambda *_: None)
        with pytest.raises(OSError, match="File too large"):
            adapter_files.save(tmp_path / "adapter", new, alpha=8.0)
    assert _adapter(tmp_path / "adapter", config) == (2.0, False)
    assert len(list((tmp_path / "adapter").iterdir())) == 2
