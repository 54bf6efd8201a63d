"""A plugin of pytest: our layers in place of Equinox's, everywhere in Equinox. scripts/run_equinox_tests has Equinox's own
tests run with it."""

import collections
import functools
import sys
from typing import Any

import equinox as eqx
import pytest

from eqxcallback import nn, ops


LAYERS = (
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "MultiheadAttention",
    "RotaryPositionalEmbedding",
    "Embedding",
    "Linear",
    "MLP",
    "GRUCell",
    "LSTMCell",
)
# What says that they ran. Equinox has no tests of RMSNorm.
OPS = ("layer_norm", "group_norm", "attention", "rotary_embedding", "embedding", "linear", "gru_gates", "lstm_gates")

_calls: collections.Counter[str] = collections.Counter()


def pytest_configure(config: Any) -> None:
    for name in LAYERS:
        theirs = getattr(eqx.nn, name)
        for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == "equinox"]:
            for attribute in [key for key, value in vars(module).items() if value is theirs]:
                setattr(module, attribute, getattr(nn, name))
    for name in OPS:
        setattr(ops, name, _counted(name, getattr(ops, name)))


def pytest_collection_modifyitems(items: Any) -> None:
    """Tests of Equinox's loops that measure time: they say how busy the machine is."""
    items[:] = [item for item in items if not item.name.startswith("test_speed_")]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    text = ", ".join(f"{name}: {_calls[name]}" for name in OPS)
    terminalreporter.write_line(f"calls of our ops: {text}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: Any) -> None:
    whole = not session.config.getoption("keyword") and not session.config.getoption("deselect")
    if whole and session.exitstatus == 0 and not all(_calls[name] for name in OPS):
        session.exitstatus = 1


def _counted(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        _calls[name] += 1
        return function(*args, **options)

    return call
