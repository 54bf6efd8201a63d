"""The attention kernels, compiled for GPUs: what they need, and which instructions they use.

Not every pair is compiled, since one takes seconds. Forward: all head sizes and architectures in bf16; f16, f32 and cards with
little shared memory in one or two. Backward: one head size for each tile of sm_90, and one elsewhere and in f32.
"""

import re

import pytest


pytest.importorskip("triton", reason="Triton is not installed")

from eqxcallback.ops.attention import (
    _triton_backward as attention_backward,
    _triton_forward as attention,
    _triton_tiles as tiles,
)

from .compiled import SHARED_MEMORY, assembler_warnings, compiled


pytestmark = pytest.mark.usefixtures("triton_cache")

SIZES = [64, 80, 96, 128, 256]
BACKWARD = [
    attention_backward.attention_backward_rows,
    attention_backward.attention_backward_keys,
    attention_backward.attention_backward_queries,
]


def forward(arch, size, dtype, causal=True, queries=4096):
    choice = tiles.choose_forward(arch, size, dtype, causal=causal, queries=queries, keys=4096)
    return compiled(attention.attention_forward, arch, dtype, choice)


def within_limits(made, arch):
    print(f"{made.registers} registers, {made.spilled} bytes spilled, {made.shared} bytes shared")  # shown by -rP
    assert made.registers <= 255
    assert made.shared <= SHARED_MEMORY[arch]


@pytest.mark.parametrize(
    ("arch", "size", "dtype"),
    [
        *[(arch, size, "bfloat16") for arch in (80, 90, 100) for size in SIZES],
        (90, 80, "float16"),
        (90, 80, "float32"),
        (90, 256, "float32"),
        (120, 128, "bfloat16"),
    ],
)
def test_forward(arch, size, dtype):
    made = forward(arch, size, dtype)
    within_limits(made, arch)
    if arch == 90:
        assert not assembler_warnings(made.ptx)
    if size <= 128:
        assert made.spilled == 0


@pytest.mark.parametrize(("causal", "queries"), [(False, 4096), (True, 64), (True, 1)])
def test_forward_of_other_options(causal, queries):
    made = forward(90, 128, "bfloat16", causal, queries)
    within_limits(made, 90)
    assert made.spilled == 0
    assert not assembler_warnings(made.ptx)


@pytest.mark.parametrize(
    ("arch", "size", "dtype"),
    [
        *[(90, size, "bfloat16") for size in (64, 80, 128, 256)],
        (80, 128, "bfloat16"),
        (86, 256, "bfloat16"),
        (100, 128, "bfloat16"),
        (90, 128, "float32"),
    ],
)
@pytest.mark.parametrize("step", [0, 1, 2], ids=["rows", "keys", "queries"])
def test_backward(step, arch, size, dtype):
    choices = tiles.choose_backward(arch, size, dtype, causal=True, queries=4096, keys=4096)
    made = compiled(BACKWARD[step], arch, dtype, choices[step])
    within_limits(made, arch)
    if arch == 90:
        assert not assembler_warnings(made.ptx)
    # A loop that spills its accumulators would need far more.
    assert made.spilled <= (512 if step == 1 else 64)


@pytest.mark.parametrize(("step", "absent"), [(1, ("dk",)), (1, ("dv",)), (1, ("dk", "dv")), (2, ("dq",))], ids=str)
def test_backward_without_gradients_that_are_not_needed(step, absent):
    choices = tiles.choose_backward(90, 64, "bfloat16", causal=True, queries=4096, keys=4096)
    some = compiled(BACKWARD[step], 90, "bfloat16", choices[step], absent)
    within_limits(some, 90)
    # What is not stored is not computed.
    products = [
        made.ptx.count("wgmma.mma_async.sync")
        for made in (some, compiled(BACKWARD[step], 90, "bfloat16", choices[step]))
    ]
    assert products[0] < products[1]


def test_hopper_multiplies_with_warpgroups():
    """Queries and keys from shared memory, weights from registers, and copies that run ahead."""
    ptx = forward(90, 128, "bfloat16").ptx
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in ptx
    assert "mma.sync" not in ptx
    assert "cp.async.cg.shared.global" in ptx
    from_registers = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, \{", ptx)
    assert len(from_registers) * 2 == len(re.findall(r"wgmma\.mma_async", ptx))


def test_f32_is_not_rounded_to_tf32():
    assert "tf32" not in forward(90, 80, "float32").ptx


@pytest.mark.parametrize(
    ("size", "columns"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (24, (32, 0)),
        (40, (32, 16)),
        (64, (64, 0)),
        (72, (64, 16)),
        (80, (64, 16)),
        (96, (64, 32)),
        (112, (128, 0)),
        (160, (128, 32)),
        (200, (256, 0)),
        (256, (256, 0)),
    ],
)
def test_split_of_a_head(size, columns):
    assert tiles.split(size) == columns


def test_every_size_is_covered():
    for size in range(1, 257):
        main, tail = tiles.split(size)
        assert main + tail >= size
        assert main + tail <= max(16, 1 << (size - 1).bit_length())
        assert tail < main


def test_a_launch_has_a_program_for_each_block():
    choice = tiles.choose_forward(90, 128, "bfloat16", causal=True, queries=4097, keys=4096)
    assert tiles.queries_grid(choice, 2, 4097, 8) == 33 * 2 * 8
    assert tiles.queries_grid(choice, 2, 0, 8) == 0
    assert tiles.keys_grid(choice, 2, 4097, 8) == 33 * 2 * 8
