"""The second start compiles nothing."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest

from models.compilation_cache import keep_programs

from .. import one_device


ROOT = pathlib.Path(__file__).parents[2]
config: Any = jax.config  # which has its options when it runs
# What happens to each program: it is loaded from the cache, or is not in it.
COUNT = """
import collections, json, runpy, sys, jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
module = sys.argv.pop(1)
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    print(json.dumps(counts))
"""


def start(folder, *arguments):
    """Return what a program printed, and how many programs it loaded and compiled."""
    command = [sys.executable, "-c", COUNT, *arguments]
    environment = {**one_device.environment(), "XDG_CACHE_HOME": str(folder)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    answer, counts = map(json.loads, result.stdout.splitlines())
    return answer, counts.get("cache_hits", 0), counts.get("cache_misses", 0)


def test_the_second_start_compiles_nothing(tmp_path):
    command = ["models.generate", "What is the capital of France?", "--max-tokens", "2", "--json"]
    first, second = start(tmp_path, *command), start(tmp_path, *command)
    answer, _, compiled = first
    assert compiled == 3  # an empty cache, a chunk, and a token with its choice: no operation is a program of its own
    assert (second[0]["text"], *second[1:]) == (answer["text"], compiled, 0)
    kept = [path.name for path in (tmp_path / "eqxcallback" / "programs").iterdir()]
    assert sum(name.startswith("jit__run") for name in kept) == 2


def test_the_second_start_of_embed_compiles_nothing(tmp_path):
    command = ["models.embed", "A cat sleeps."]
    answer, _, compiled = start(tmp_path, *command)
    assert compiled >= 3  # the embedding, a block, and the mean
    assert start(tmp_path, *command) == (answer, compiled, 0)


@pytest.fixture
def restored():
    names = ["compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes"]
    before = {f"jax_{name}": getattr(config, f"jax_{name}") for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("theirs", [None, "/somewhere/else"])
def test_the_folder(theirs, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    jax.config.update("jax_compilation_cache_dir", theirs)
    keep_programs()
    assert config.jax_compilation_cache_dir == (theirs or "/caches/eqxcallback/programs")


@pytest.mark.usefixtures("restored")
def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/of/somebody")
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    keep_programs()
    assert config.jax_compilation_cache_dir is None


def no_home():
    raise RuntimeError("Could not determine home directory.")
