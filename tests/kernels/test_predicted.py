"""The counts of instructions in compiled kernels, and the page that has them."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks.gpu import predicted
from eqxcallback.backends import Launched

from .. import one_device
from .compiling import unavailable


# The page is of the newest compilers.
pytestmark = pytest.mark.any_jax_version

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs/design/gpu_predictions.md"


def sass(*texts):
    return [(16 * i, text) for i, text in enumerate(texts)]


LOADS = ("LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "@P0 LDG.E.U16 R4, desc[UR4][R2.64]", "FADD R1, R2, R3")


def test_bytes_of_a_loop_are_those_of_its_widest_path():
    loop = predicted.main_loop(sass("MOV R1, R2", *LOADS, "@!P1 STG.E.64 [R2.64], R4", "@P2 BRA 0x10", "EXIT"))
    assert loop == predicted.Loop(instructions=5, read=16, written=8, products=0)


def test_single_numbers_count_where_there_are_no_vectors():
    loop = predicted.main_loop(sass(*LOADS[1:], "LDG.E R4, desc[UR4][R2.64]", "@P2 BRA.U 0x0", "EXIT"))
    assert (loop.read, loop.instructions) == (6, 4)


def test_of_loops_in_loops_the_inner_one_is_counted():
    loop = predicted.main_loop(sass("MOV R1, R2", LOADS[0], "@P2 BRA 0x10", "BRA 0x0", "EXIT"))
    assert (loop.read, loop.instructions, loop.is_whole) == (16, 2, False)


def test_without_a_loop_all_is_counted():
    loop = predicted.main_loop(sass(*LOADS, "EXIT"))
    assert (loop.read, loop.instructions, loop.is_whole) == (16, 4, True)


@pytest.mark.parametrize(
    ("text", "products"), [("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8]", 32_768), ("HMMA.16816.F32.BF16 R4, R8", 2048)]
)
def test_products_of_a_loop(text, products):
    loop = predicted.main_loop(sass(text, "FADD R1, R2, R3", "@P0 BRA 0x0", *LOADS, "@P0 BRA 0x30", "EXIT"))
    assert (loop.products, loop.instructions) == (products, 3)


def test_blocks_that_are_resident():
    """Registers of 256 threads fill a multiprocessor four times, shared memory three times."""
    launch = Launched("kernel", (1, 1, 1), (256, 1, 1), 0, 64, 0, b"")
    assert predicted.resident(launch) == 4
    assert predicted.resident(dataclasses.replace(launch, shared_bytes=75 * 1024)) == 3


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_the_page_has_what_is_counted():
    pytest.importorskip("triton", reason="Triton is not installed")
    command = [sys.executable, "-m", "benchmarks.gpu.predicted"]
    environment = {**one_device.environment(), "JAX_PLATFORMS": "cpu"}
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    page = PAGE.read_text()
    if made.splitlines()[0] in page:  # by these compilers
        assert made in page, f"run: python -m benchmarks.gpu.predicted\n{made}"
    else:
        assert kernels(made) == kernels(page)


def kernels(text):
    """The names in the first column of the tables."""
    return re.findall(r"^\| (\S.*?: \w+) \|", text, re.MULTILINE)
