"""The profile of one token's time."""

import jax
import pytest

from models import gguf, llama
from models.generate.__main__ import main
from models.generate.profile import Part, profile, read_speed, table

from .tiny import write_tiny


def test_each_weight_is_counted_once(tmp_path):
    write_tiny(tmp_path / "tiny.gguf", {"output": None}, "Q8_0")
    model = llama.load(gguf.open_model(tmp_path / "tiny.gguf"))
    shown = []
    parts = {part.name: part for part in profile(model, 20, lambda kinds: (shown.extend(kinds), kinds)[1])}
    assert len(shown) == len(parts) - 2
    whole, rest = parts.pop("a whole step"), parts.pop("all else")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    assert parts["attention"].bytes == 2 * 2 * 20 * 2 * 16 * 4  # k and v, blocks, tokens, heads, size, f32
    assert whole.bytes == weights + parts["attention"].bytes == sum(part.bytes for part in parts.values())
    assert {name: part.calls for name, part in parts.items() if part.calls != 2} == {"norms": 4, "logits": 1}
    assert min(part.seconds for part in parts.values()) > 0
    assert rest.seconds == pytest.approx(max(0, whole.seconds - sum(part.seconds for part in parts.values())))


def test_the_table():
    lines = table([Part("down", 30, 0.002, 40_000_000), Part("all else", 1, 0.0, 0)], 25e9).split("\n")
    assert [line.split() for line in lines] == [
        ["calls", "ms", "MB", "GB/s", "of", "reading", "memory"],
        ["down", "30", "2.00", "40.0", "20.0", "80%"],
        ["all", "else", "1", "0.00", "0.0", "0.0", "0%"],
        ["reading", "memory", "25.0"],
    ]


def test_memory_is_read_at_some_speed():
    assert 1e8 < read_speed() < 1e13


def test_the_option_needs_a_prompt(capsys):
    assert main(["--chat", "--profile"]) == 2
    assert capsys.readouterr().err == "generate: error: expected --profile with a prompt; got it without\n"
