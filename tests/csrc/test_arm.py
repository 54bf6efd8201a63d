"""The kernels on ARM, which is emulated: each table computes what the portable one does, on a processor that has all of them and
on those that lack some; and the portable one computes what it does here, where all other tests are run.
"""

import functools
import shutil

import numpy as np
import pytest

from .kernel_output import assert_same, compiled, kernel_output


CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TABLES = ["neon_bf16", "neon_dot", "neon", "portable"]
# What QEMU's processors run: all, no bf16 as on Apple's M1 and Graviton2, and nothing that not all have.
PROCESSORS = {"max": TABLES, "neoverse-n1": TABLES[1:], "cortex-a53": TABLES[2:]}

pytestmark = [
    pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"no {CROSS} here: Debian's package g++-aarch64-linux-gnu"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR} here: Debian's package qemu-user"),
]


@pytest.fixture(scope="module")
def output(tmp_path_factory, isa_flags):
    """Return what a processor computes, by the name of the table."""
    program = compiled(CROSS, tmp_path_factory.mktemp("arm"), {name: isa_flags[name] for name in TABLES})
    return functools.cache(lambda processor: kernel_output(EMULATOR, "-cpu", processor, program))


@pytest.mark.parametrize("name", TABLES[:-1])
def test_a_table_computes_what_the_portable_one_does(name, output):
    assert_same(output("max")[name], output("max")["portable"])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_runs_what_it_has(processor, output):
    """An instruction that it lacks ends the program."""
    assert list(output(processor)) == PROCESSORS[processor]
    for name, results in output(processor).items():
        np.testing.assert_array_equal(results, output("max")[name])


def test_arm_computes_what_this_processor_does(output, tmp_path):
    program = compiled("g++", tmp_path, {"portable": []}, "-DEQXCALLBACK_PORTABLE")
    assert_same(output("max")["portable"], kernel_output(program)["portable"])
