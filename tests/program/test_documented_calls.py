"""The calls in the table of programs, on the page that has all: each of them runs as it is written there."""

import pathlib
import re

import jax.numpy as jnp

import eqxcallback as eqxc


PAGE = pathlib.Path(__file__).parents[2] / "docs/start/all_of_it.md"


def test_each_call_of_the_table_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path))  # where `tune` keeps what it finds
    table = PAGE.read_text().partition("| call | does | page |")[2].partition("\n\n")[0]
    calls = [call for line in table.splitlines() for call in re.findall(r"`(eqxc\.[^`]*)`", line.split(" | ")[0])]
    assert len(calls) >= 6
    there = {"eqxc": eqxc, "fn": eqxc.ops.softmax, "args": (jnp.ones(3),)}
    there["data"] = eqxc.export(there["fn"])(*there["args"]).serialize()
    for call in calls:
        eval(compile(call, f"{PAGE.name}: {call}", "eval"), there)
