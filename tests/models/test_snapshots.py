"""Snapshots: what is read is what was written, and never half of it."""

import json
import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import snapshots
from models._errors import ModelFileError


OPTIONS = {"width": 32, "dtype": "bf16", "vocab": None}


def state(number):
    """Arrays of some dtypes and ranks, f32 that are subnormal or not numbers among them."""
    x = np.random.default_rng(number).normal(size=(3, 5)).astype(np.float32)
    x[0] = np.array([np.nan, np.inf, -0.0, 1e-42, 1.0], np.float32)
    return {"x": jnp.asarray(x), "y": [jnp.asarray(x, jnp.bfloat16), jnp.asarray(number, jnp.int32)], "z": None}


LIKE = eqx.filter_eval_shape(state, 0)


def load(folder, options=OPTIONS, like=LIKE) -> tuple[Any, list[str]]:
    reports: list[str] = []
    return snapshots.load_last(folder, like, options, reports.append), reports


def assert_is_state(got, number):
    assert jax.tree.structure(got) == jax.tree.structure(state(number))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state(number)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def folder(tmp_path):
    for step in (5, 10, 15):
        snapshots.save(tmp_path, step, state(step), OPTIONS)
    return tmp_path


def test_the_last_one_comes_back_to_the_bit_and_two_are_kept(folder):
    (step, got), reports = load(folder)
    assert step == 15
    assert_is_state(got, 15)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010.snapshot", "step-00000015.snapshot"]
    assert reports == []


def test_small_dtypes_and_keys_come_back(tmp_path):
    """NumPy's format does not have their names."""

    def small():
        x = jnp.arange(-4, 4, dtype=jnp.float32).reshape(2, 4)
        numbers = [x.astype(dtype) for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4)]
        return {"numbers": numbers, "keys": [jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), 3)]}

    expected, like = small(), jax.eval_shape(small)
    snapshots.save(tmp_path, 1, expected, OPTIONS)
    (_, got), _ = load(tmp_path, like=like)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    for a, b in zip(got["numbers"], expected["numbers"], strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a, b in zip(got["keys"], expected["keys"], strict=True):
        np.testing.assert_array_equal(jax.random.key_data(a), jax.random.key_data(b))
    for name, other, message in (
        ("numbers", like["numbers"][1::-1] + like["numbers"][2:], "float8_e4m3fn in place of float8_e5m2"),
        ("keys", [jax.ShapeDtypeStruct((), like["keys"][1].dtype), like["keys"][1]], "got "),
    ):
        with pytest.raises(ModelFileError, match=f"^expected the arrays of this model in .*1.snapshot; .*{message}"):
            load(tmp_path, like=like | {name: other})


def test_snapshots_of_older_versions_come_back(tmp_path):
    """They have no dtypes in their first line."""
    snapshots.save(tmp_path, 1, state(1), OPTIONS)
    (path,) = tmp_path.iterdir()
    first, rest = path.read_bytes()[:-4].split(b"\n", 1)
    header = json.loads(first)
    assert header.pop("dtypes") == ["float32", "bfloat16", "int32"]
    data = json.dumps(header).encode() + b"\n" + rest
    path.write_bytes(data + zlib.crc32(data).to_bytes(4, "big"))
    assert_is_state(load(tmp_path)[0][1], 1)


def test_there_may_be_none(tmp_path):
    assert load(tmp_path) == (None, [])


@pytest.mark.parametrize("damage", ["empty", "cut by a byte", "cut", "a bit", "longer"])
def test_one_that_is_not_whole_is_told_and_the_one_before_is_taken(folder, damage):
    path = folder / "step-00000015.snapshot"
    data = bytearray(path.read_bytes())
    if damage == "a bit":
        data[len(data) // 2] ^= 1
    path.write_bytes(
        {"empty": b"", "cut by a byte": data[:-1], "cut": data[:200], "longer": data + b"x"}.get(damage, data)
    )
    (step, got), reports = load(folder)
    assert step == 10
    assert_is_state(got, 10)
    broken = f"expected {path} to be whole; its checksum is another: it was cut or changed"
    assert reports == [f"{broken}; the one before is taken"]

    other = folder / "step-00000010.snapshot"
    other.write_bytes(other.read_bytes()[:100])
    with pytest.raises(
        ModelFileError, match=r"010.snapshot to be whole; .*no other one. Remove it to begin with step 0\.$"
    ):
        load(folder)


def test_one_that_was_being_written_is_not_there(folder, monkeypatch):
    """As after `kill -9`, or a disk that is full: before the new name there is no new snapshot."""
    (folder / "step-00000020.unfinished").write_bytes(b"half")
    assert load(folder)[0][0] == 15

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            snapshots.save(folder, 20, state(20), OPTIONS)
    assert load(folder)[0][0] == 15
    snapshots.save(folder, 20, state(20), OPTIONS)
    assert_is_state(load(folder)[0][1], 20)
    assert not list(folder.glob("*.unfinished"))


def test_a_full_disk_is_told_and_gets_its_room_back(folder, full_disk):
    """The first bytes stay in a buffer, and an array that is too large for it fails inside Equinox."""
    large = {"x": np.zeros(100_000), "y": np.zeros(10)}
    (folder / "step-00000019.unfinished").write_bytes(b"half")
    for most in (10, 500_000, 800_200):
        with full_disk(most), pytest.raises(OSError, match="File too large"):
            snapshots.save(folder, 20, large, OPTIONS)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000010.snapshot", "step-00000015.snapshot"]
    snapshots.save(folder, 20, state(20), OPTIONS)
    assert_is_state(load(folder)[0][1], 20)


def test_other_options_are_told(folder):
    with pytest.raises(
        ModelFileError, match=r"^expected width 32, which .*015.snapshot was written with; got 64\. Put"
    ):
        load(folder, OPTIONS | {"width": 64})
    with pytest.raises(ModelFileError, match=r"expected dtype 'bf16', which .* got None"):
        load(folder, {"width": 32, "vocab": None})


def test_another_model_is_told(folder):
    like = LIKE | {"x": jax.ShapeDtypeStruct((3, 6), jnp.float32)}
    with pytest.raises(ModelFileError, match=r"^expected the arrays of this model in .*015.snapshot; got "):
        load(folder, like=like)
