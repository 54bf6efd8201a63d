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
# What happens to each program: it is loaded from the cache, or is not in it.
COUNT = """
import collections, json, runpy, sys, jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
sys.argv[1:] = ["What is the capital of France?", "--max-tokens", "2", "--json"]
try:
    runpy.run_module("models.generate", run_name="__main__", alter_sys=True)
finally:
    print(json.dumps(counts))
"""


def start(folder, **environment):
    environment = {**one_device.environment(), "XDG_CACHE_HOME": str(folder), **environment}
    result = subprocess.run(
        [sys.executable, "-c", COUNT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    answer, counts = map(json.loads, result.stdout.splitlines())
    return answer["text"], counts.get("cache_hits", 0), counts.get("cache_misses", 0)


def test_the_second_start_compiles_nothing(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    text, _, compiled = first
    assert compiled == 3  # an empty cache, a chunk, and a token with its choice: no operation is a program of its own
    assert second == (text, compiled, 0)
    kept = [path.name for path in (tmp_path / "eqxcallback" / "programs").iterdir()]
    assert sum(name.startswith("jit__run") for name in kept) == 2


@pytest.mark.parametrize("theirs", [None, "/somewhere/else"])
def test_the_folder(theirs, monkeypatch):
    names = ["compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes"]
    config: Any = jax.config  # which has them when it runs
    before = {f"jax_{name}": getattr(config, f"jax_{name}") for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    try:
        jax.config.update("jax_compilation_cache_dir", theirs)
        keep_programs()
        assert config.jax_compilation_cache_dir == (theirs or "/caches/eqxcallback/programs")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
