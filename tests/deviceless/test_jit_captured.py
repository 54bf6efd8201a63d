"""The options that `jit_captured` asks XLA for. Its use as a function: tests/inspection/test_jit_captured.py."""

import re

import jax
import pytest

import eqxcallback as eqxc
from eqxcallback import xla

from .programs import X, callback, captured, reports


def commands(**options):
    config = xla.compile_deviceless(callback, X, compiler_options=options).config
    return set(re.findall("xla_gpu_enable_command_buffer: (.*)", config))


def test_the_commands_are_those_of_xla_and_loops():
    """XLA has no way to add one to its own. If this fails, a new JAX has others: mend
    eqxcallback/program/_jit_captured.py."""
    assert commands(**eqxc.jit_captured(callback).compiler_options) == {*commands(), "WHILE"}
    assert commands(**eqxc.jit_captured(callback, loops=False).compiler_options) == commands()


def test_options_reach_the_program():
    assert reports(captured)[0][0] is False
    assert reports(eqxc.jit_captured(captured))[0][0] is True
    assert reports(eqxc.jit_captured(captured, min_graph_size=4))[0][0] is False
    off = eqxc.jit_captured(captured, compiler_options={"xla_gpu_enable_command_buffer": ""})
    assert reports(off)[0] == (
        False,
        "CUSTOM_CALL is not among the recorded commands (xla_gpu_enable_command_buffer)",
    )


@pytest.mark.parametrize(("donate", "state"), [("none", "copied"), ("all", "in place")])
def test_donation(donate, state):
    (call,) = eqxc.inspect(eqxc.jit_captured(captured, donate=donate), X, platform="cuda").calls
    assert call.in_place[0].state == state


def test_methods():
    class Model:
        @eqxc.jit_captured
        def step(self, x):
            return captured(x)

    assert reports(Model().step)[0][0] is True


def test_inside_of_another_program_the_options_are_its():
    assert reports(jax.jit(lambda x: eqxc.jit_captured(captured)(x)))[0][0] is False
