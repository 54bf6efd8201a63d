"""The kernels that multiply tiles, with tiles in plain C++: what they compute on a processor without AMX, and what they read."""

import os

import pytest

from eqxcallback import _ext

from .kernel_output import assert_same, compiled, kernel_output


pytestmark = pytest.mark.skipif(
    "avx512_bf16" not in _ext.available_isas(),
    reason="this machine has no instructions for bf16, which these kernels use too",
)

# In assembler, tiles read and write what no sanitizer sees.
SANITIZED = ["-O0", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]


@pytest.mark.parametrize(
    "options", [pytest.param([], id="plain"), pytest.param(SANITIZED, id="sanitized", marks=pytest.mark.sanitizers)]
)
def test_tiles_compute_what_the_portable_table_does(options, tmp_path, isa_flags):
    program = compiled(
        *("g++", tmp_path, {name: isa_flags[name] for name in ("avx512_amx", "portable")}),
        *("-DEQXCALLBACK_EMULATED_TILES", "-Wno-unused-function", *options),
        others=["amx"],
        link=options,
    )
    outputs = kernel_output(program, env={**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"})
    assert list(outputs) == ["avx512_amx", "portable"]
    assert_same(outputs["avx512_amx"], outputs["portable"])
