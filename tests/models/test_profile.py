"""The profile of one token's time."""

import dataclasses

import jax
import pytest

from models import gguf, llama
from models.generate import profile as profiles
from models.generate.__main__ import main
from models.generate.profile import Part, profile, table
from models.parallel import tensor_parallel
from models.parallel.sequence_parallel import SequenceLlama

from .tiny import write_tiny


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Memory is read for a moment only: no test asks how fast that was."""
    monkeypatch.setattr(profiles, "_PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(profiles, "_ROUNDS", 2)


def test_each_weight_is_counted_once(tmp_path):
    write_tiny(tmp_path / "tiny.gguf", {"output": None}, "Q8_0")
    model = llama.load(gguf.open_model(tmp_path / "tiny.gguf"))
    shown = []
    parts = {part.name: part for part in profile(model, 20, lambda kinds: (shown.extend(kinds), kinds)[1])[0]}
    assert len(shown) == len(parts) - 2
    whole, rest = parts.pop("a whole step"), parts.pop("all else")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert parts["attention"].bytes == 2 * 2 * 20 * 2 * 16 * 4  # k and v, blocks, tokens, heads, size, f32
    assert whole.bytes == weights + parts["attention"].bytes == sum(part.bytes for part in parts.values())
    assert {name: part.calls for name, part in parts.items() if part.calls != 2} == {"norms": 4, "logits": 1}
    assert whole.seconds > 0
    assert rest.seconds == pytest.approx(whole.seconds - sum(part.seconds for part in parts.values()))


def test_the_parts_are_at_most_about_the_whole(tmp_path, monkeypatch):
    """The starts of the kinds' programs are not counted. The bounds are wide, for a busy machine."""
    monkeypatch.setattr(profiles, "_PROBE_BYTES", 1 << 24)
    monkeypatch.setattr(profiles, "_ROUNDS", 30)
    write_tiny(tmp_path / "tiny.gguf", {"output": None})
    model = llama.load(gguf.open_model(tmp_path / "tiny.gguf"))
    config = dataclasses.replace(model.config, num_layers=30)
    *parts, _, whole = profile(dataclasses.replace(model, config=config, blocks=15 * model.blocks), 20)[0]
    assert 0.2 * whole.seconds < sum(part.seconds for part in parts) < 1.2 * whole.seconds


@pytest.mark.parametrize("split", ["model", "sequence"])
def test_several_devices_read_their_parts(split, tmp_path):
    write_tiny(tmp_path / "tiny.gguf", {"output": None})
    file, mesh = gguf.open_model(tmp_path / "tiny.gguf"), tensor_parallel.mesh_of(jax.devices()[:2])
    whole = llama.load(file)
    model = tensor_parallel.load(file, mesh) if split == "model" else SequenceLlama(whole, mesh)
    parts = {part.name: part for part in profile(model, 20)[0]}
    cache = tensor_parallel.bytes_per_device(model.init_cache(20).blocks)
    assert parts["attention"].bytes == 2 * cache  # of each device
    assert parts["a whole step"].bytes == 2 * (tensor_parallel.bytes_per_device(model) + cache)
    assert parts["a whole step"].seconds > 0
    if split == "model":
        assert (parts["sums over devices"].calls, parts["sums over devices"].bytes) == (4, 0)
        assert parts["down"].bytes == sum(x.nbytes for block in whole.blocks for x in jax.tree.leaves(block.down))
    else:
        assert "sums over devices" not in parts  # but in attention
        assert parts["down"].bytes == 2 * sum(x.nbytes for b in whole.blocks for x in jax.tree.leaves(b.down))


def test_the_option_on_several_devices(tmp_path, capsys):
    write_tiny(tmp_path / "speaks.gguf", context=256, speaks=True)
    options = ["A fox", "--weights", str(tmp_path / "speaks.gguf"), "--max-tokens", "4", "--devices", "2", "--profile"]
    assert main(options) == 0
    lines = capsys.readouterr().err.split("\n")
    assert [line.rsplit(maxsplit=5)[:2] for line in lines if line.startswith("sums")] == [["sums over devices", "4"]]
    assert lines[-2].startswith("reading memory")


def test_the_table():
    parts = [Part("down", 30, 0.002, 40_000_000), Part("norms", 60, -1e-5, 100_000), Part("all else", 1, 0.001, 0)]
    assert [line.split() for line in table(parts, 25e9).split("\n")] == [
        ["calls", "ms", "MB", "GB/s", "of", "reading", "memory"],
        ["down", "30", "2.00", "40.0", "20.0", "80%"],
        ["norms", "60", "-0.01", "0.1", "-", "-"],
        ["all", "else", "1", "1.00", "0.0", "0.0", "0%"],
        ["reading", "memory", "25.0"],
    ]


def test_memory_is_read_at_some_speed(monkeypatch, tmp_path):
    monkeypatch.setattr(profiles, "_PROBE_BYTES", 1 << 24)
    write_tiny(tmp_path / "tiny.gguf", {"output": None})
    assert 1e8 < profile(llama.load(gguf.open_model(tmp_path / "tiny.gguf")), 20)[1] < 1e13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chat"], "expected --profile with a prompt; got it without"),
        (
            ["hi", "--processes", "3", "--coordinator", "localhost:1"],
            "expected one process for --profile; got 3",
        ),
    ],
)
def test_what_the_option_needs(options, message, capsys):
    assert main([*options, "--profile"]) == 2
    assert capsys.readouterr().err == f"generate: error: {message}\n"
