"""The attention kernels, compiled for GPUs: what they need, and which instructions they use.

Not every pair is compiled, since one takes seconds. Forward: all head sizes and architectures in bf16; f16, f32 and cards with
little shared memory in one or two. Backward: one head size for each tile of sm_90, and one elsewhere and in f32.
"""

import re

import pytest


pytest.importorskip("triton", reason="Triton is not installed")

import triton

from eqxcallback.ops.attention import (
    _triton_backward as attention_backward,
    _triton_backward_options as attention_backward_options,
    _triton_forward as attention,
    _triton_tiles as tiles,
)
from eqxcallback.ops.attention._operands import OPTIONAL

from .compiled import HAS, SHARED_MEMORY, compiled, loops, spills_in_the_main_loop
from .spilled import SPILLED


pytestmark = [pytest.mark.compiled_code, pytest.mark.usefixtures("triton_cache")]

VERSION = ".".join(triton.__version__.split(".")[:2])

SIZES = [64, 80, 96, 128, 256]
# The bytes that kernels of forward may keep there, although registers are left: in f32 two numbers, with Triton 3.6.
ON_THE_STACK = {"float32": 8}
BACKWARD = {
    "rows": (attention_backward.attention_backward_rows, tiles.choose_rows),
    "keys": (attention_backward.attention_backward_keys, tiles.choose_keys),
    "queries": (attention_backward.attention_backward_queries, tiles.choose_queries),
}


def forward(arch, size, dtype, causal=True, queries=4096):
    choice = tiles.choose_forward(arch, size, dtype, queries=queries)
    return compiled(attention.attention_forward, arch, dtype, choice, causal=causal)


def backward(step, arch, size, dtype, absent=()):
    kernel, choose = BACKWARD[step]
    return compiled(kernel, arch, dtype, choose(arch, size, dtype), absent)


EVERY_OPTION = {
    "has": tuple(name for name in OPTIONAL if name != "kept"),
    "window": 700,
    "soft_cap": 30.0,
    "dropout": 0.1,
}
KERNELS = {
    "forward": (attention.attention_forward, tiles.choose_forward),
    **BACKWARD,
    "slopes": (attention_backward_options.attention_backward_slopes, tiles.choose_queries),
    "bias": (attention_backward_options.attention_backward_bias, tiles.choose_bias),
}


@pytest.fixture
def check_spilled(request):
    """A function that compares a kernel's bytes on the stack with those that are known, or with `most`."""

    def check(made, most):
        known = SPILLED.get(VERSION)
        if known is None:  # nobody has counted what this Triton makes of it
            assert made.spilled <= most
        else:
            assert made.spilled == known.get(request.node.name, 0), "if it has to be: tests/triton/spilled.py"

    return check


def within_limits(made, arch):
    print(f"{made.registers} registers, {made.spilled} bytes spilled, {made.shared} bytes shared")  # shown by -rP
    assert made.registers <= 255
    assert made.shared <= SHARED_MEMORY[arch]
    assert made.tensor_memory <= 512


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
def test_forward(arch, size, dtype, check_spilled):
    made = forward(arch, size, dtype)
    within_limits(made, arch)
    if arch == 90:
        assert not made.warnings
    check_spilled(made, ON_THE_STACK.get(dtype, 0) if size <= 128 else 512)


@pytest.mark.parametrize(("causal", "queries"), [(False, 4096), (True, 64), (True, 1)])
def test_forward_of_other_options(causal, queries):
    made = forward(90, 128, "bfloat16", causal, queries)
    within_limits(made, 90)
    assert made.spilled == 0
    assert not made.warnings


@pytest.mark.parametrize(
    ("arch", "size", "dtype", "rows"),
    [
        *[(90, 128, "bfloat16", rows) for rows in (16, 32, 64)],
        (90, 256, "bfloat16", 64),
        (90, 128, "float32", 16),
        (80, 128, "bfloat16", 64),
        (86, 128, "bfloat16", 64),
    ],
)
def test_few_queries(arch, size, dtype, rows, check_spilled):
    """Two programs fit on a multiprocessor: the number of parts is such."""
    choice = tiles.choose_packed(arch, size, dtype, rows=rows)
    made = compiled(attention.attention_forward, arch, dtype, choice)
    within_limits(made, arch)
    check_spilled(made, ON_THE_STACK.get(dtype, 0))
    assert 2 * made.registers * 32 * choice.num_warps <= 65536
    assert 2 * (made.shared + 1024) <= SHARED_MEMORY[arch]


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
@pytest.mark.parametrize("step", list(BACKWARD))
def test_backward(step, arch, size, dtype, check_spilled):
    made = backward(step, arch, size, dtype)
    within_limits(made, arch)
    if arch == 90:
        assert not made.warnings
    # The masked loop of keys spills, more with Triton 3.6 than with 3.9; the main loop spills less than one accumulator, which is
    # 64 registers, each written and read.
    check_spilled(made, 1024 if step == "keys" else 64)
    if made.spilled > 64:
        spills = spills_in_the_main_loop(made)
        print(spills, "instructions of the main loop spill")
        assert spills <= 64


@pytest.mark.parametrize(
    ("step", "absent"), [("keys", ("dk",)), ("keys", ("dv",)), ("keys", ("dk", "dv")), ("queries", ("dq",))], ids=str
)
def test_backward_without_gradients_that_are_not_needed(step, absent):
    some = backward(step, 90, 64, "bfloat16", absent)
    within_limits(some, 90)
    # What is not stored is not computed.
    products = [made.ptx.count("wgmma.mma_async.sync") for made in (some, backward(step, 90, 64, "bfloat16"))]
    assert products[0] < products[1]


@pytest.mark.parametrize(
    ("name", "arch", "size", "chosen"),
    [
        *[(name, 90, 128, EVERY_OPTION) for name in KERNELS if name != "rows"],
        *[(name, 86, 256, EVERY_OPTION) for name in ("forward", "keys", "queries")],
        *[(name, 120, 80, {"has": ("bias",)}) for name in ("forward", "keys", "queries", "bias")],
        *[(name, 90, 128, {"has": ("bias", "bias of keys")}) for name in ("forward", "keys", "queries", "bias")],
        ("forward", 100, 128, {"has": ("lengths", "offset")}),  # a prompt into a cache
        ("forward", 90, 128, {"window": 1000}),
        *[
            (name, 86, 256, {"has": (option,), "dtype": "float32"})
            for name in ("keys", "queries")
            for option in ("bias", "mask")
        ],
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else str(x),
)
def test_options(name, arch, size, chosen, check_spilled):
    kernel, choose = KERNELS[name]
    dtype, chosen = chosen.get("dtype", "bfloat16"), {key: x for key, x in chosen.items() if key != "dtype"}
    has = sum(HAS[option] for option in chosen.get("has", ()))
    choice = choose(arch, size, dtype, queries=4096, has=has, soft_cap=chosen.get("soft_cap", 0.0))
    made = compiled(kernel, arch, dtype, choice, **chosen)
    within_limits(made, arch)
    check_spilled(made, 512)


# Instructions of the loop that asks no pair anything, and of the one that asks each pair whether the key is seen. By Triton.
INSTRUCTIONS = {
    ("forward", 64): {"3.6": (513, 687), "3.9": (525, 700)},
    ("forward", 128): {"3.6": (527, 753), "3.9": (553, 786)},
    ("queries", 64): {"3.6": (240, 326), "3.9": (263, 357)},
    ("queries", 128): {"3.6": (304, 402), "3.9": (324, 439)},
    # One loop is enough, within that of the heads that share keys.
    ("keys", 64): {"3.6": (462, 653), "3.9": (368, 497)},
    ("keys", 128): {"3.6": (543, 760), "3.9": (447, 604)},
}


def instructions(name, size, **chosen):
    kernel, choose = KERNELS[name]
    choice = choose(90, size, "bfloat16", queries=4096)  # the same tile whatever is chosen
    return tuple(map(len, loops(compiled(kernel, 90, "bfloat16", choice, causal=False, **chosen))))


@pytest.mark.parametrize(("name", "size"), list(INSTRUCTIONS))
def test_options_leave_nothing_in_the_main_loop(name, size):
    """An option's code is compiled where the option is, and nowhere else: each loop is as long as without options."""
    if VERSION not in INSTRUCTIONS[name, size]:
        pytest.skip(f"nobody has counted what Triton {VERSION} makes of it")
    plain = instructions(name, size)
    assert plain == INSTRUCTIONS[name, size][VERSION]
    assert sum(instructions(name, size, has=("mask",))) != sum(plain)


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
