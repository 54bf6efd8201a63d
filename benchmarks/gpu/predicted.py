"""Predict what the instructions of each kernel allow on a GPU that is not here.

`python -m benchmarks.gpu.predicted` prints the tables of docs/design/gpu_predictions.md, which says how they are counted.
"""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata

import eqxcallback as eqxc
from eqxcallback.backends import Launched
from eqxcallback.backends._image import Compiled
from eqxcallback.backends._resident import resident_blocks

from .kernels import EVERY, programs


# A program of kernels that have a row already, and one that a GPU runs if it is asked for alone.
WITHOUT_A_ROW = ("swiglu packed", "quantized_linear of many rows Q4_1")
ARCH = "sm_90"
# An H200: NVIDIA's data sheet, and the guide to tuning for Hopper. The copy is what a kernel that copies reaches of 4.8 TB/s.
MULTIPROCESSORS, SCHEDULERS, CLOCK = 132, 4, 1.755e9
COPY = 4.3e12
# Bytes that a multiprocessor has to wait for at a time, so that memory never does: its part of the copy in 700 ns.
IN_FLIGHT = COPY * 700e-9 / MULTIPROCESSORS
# Products of 16-bit numbers that a multiprocessor adds up in one cycle.
PRODUCTS = 2048
# What multiplies matrices, but so little that reading is what takes time.
_READING = ("decode_attention", "quantized_linear")


@dataclasses.dataclass(frozen=True)
class Loop:
    """**Attributes:**

    - `instructions`: of one iteration, whether a predicate lets them run or not.
    - `read`, `written`: bytes of global memory, of one thread.
    - `products`: multiply-adds by tensor cores, of a warp.
    - `is_whole`: there is no loop, and these are all instructions of the kernel.
    """

    instructions: int
    read: int
    written: int
    products: int
    is_whole: bool = False


def main_loop(sass: Sequence[tuple[int, str]]) -> Loop:
    """**Arguments:** `sass`: the address and the text of each instruction of a kernel."""
    places = {address: i for i, (address, _) in enumerate(sass)}
    loops = []
    for i, (address, text) in enumerate(sass):
        target = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            loops.append(_loop(sass[places[int(target[1], 16)] : i + 1]))
    if with_products := [loop for loop in loops if loop.products]:
        return min(with_products, key=lambda loop: loop.instructions)
    # Of a loop in a loop, the inner one: what is around it runs once in many iterations.
    moving = [loop for loop in loops if loop.read + loop.written]
    if not moving:
        return dataclasses.replace(_loop(sass), is_whole=True)
    return max(moving, key=lambda loop: (loop.read + loop.written, loop.read, -loop.instructions))


def _loop(sass: Sequence[tuple[int, str]]) -> Loop:
    texts = [re.sub(r"^@\S+\s+", "", text) for _, text in sass]
    read = [_bytes(text) for text in texts if re.match(r"(LDG|LDGSTS)\b", text)]
    written = [_bytes(text) for text in texts if re.match(r"(STG|RED|REDG|ATOMG)\b", text)]
    # Single numbers beside vectors are another path, for rows that are not aligned, or their last columns.
    least = 8 if max([*read, *written], default=0) == 16 else 0
    return Loop(
        len(texts),
        sum(size for size in read if size >= least),
        sum(size for size in written if size >= least),
        sum(_products(text) for text in texts),
    )


def _bytes(text: str) -> int:
    """Return the bytes that an instruction moves for a thread: 32 bits if it does not say how many."""
    width = re.search(r"\.[SU]?(8|16|64|128)\b", text.split()[0])
    return int(width[1]) // 8 if width else 4


def _products(text: str) -> int:
    """Return the products of an instruction for a warp, which has a quarter of what a group of four multiplies."""
    if match := re.search(r"\bHGMMA\.(\d+)x(\d+)x(\d+)", text):
        rows, columns, depth = map(int, match.groups())
        return rows * columns * depth // 4
    # m16n8k16 is written 16816.
    return 16 * 8 * 16 if re.search(r"\bHMMA\.16816", text) else 0


def _warps(launch: Launched) -> int:
    """Count the warps of a block."""
    return -(-math.prod(launch.block) // 32)


def resident(launch: Launched) -> int:
    """The blocks that are on a multiprocessor at a time."""
    usage = Compiled((), launch.registers or 0, launch.stack_bytes or 0, launch.shared_bytes)
    return resident_blocks(int(ARCH.removeprefix("sm_")), usage, math.prod(launch.block), 0)


def disassembled(launch: Launched) -> list[tuple[int, str]]:
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.image)
        file.flush()
        text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    for part in text.split("Function : ")[1:]:
        if part.split(None, 1)[0] == launch.entry:
            return [
                (int(at, 16), instruction) for at, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", part)
            ]
    raise ValueError(f"{launch.entry} is not in its image")


def _moving(launch: Launched, loop: Loop) -> tuple[str, ...]:
    rate = MULTIPROCESSORS * SCHEDULERS * CLOCK / loop.instructions * 32 * (loop.read + loop.written)
    return (
        f"{loop.instructions:,}" + (" in all" if loop.is_whole else ""),
        f"{loop.read} / {loop.written}",
        f"{rate / COPY:.1f}",
        f"{loop.read * 32 * _warps(launch) * resident(launch) / IN_FLIGHT:.1f}",
    )


def _multiplying(loop: Loop) -> tuple[str, ...]:
    cycles = loop.products * SCHEDULERS // PRODUCTS
    return f"{loop.instructions:,}", f"{cycles:,}", f"{cycles / (cycles + loop.instructions):.0%}"


def _launches() -> Iterator[tuple[str, Launched]]:
    """Each kernel once, with the name of its program: that of gradients has the forward pass in it."""
    os.environ["EQXCALLBACK_CUDA_ARCH"] = ARCH
    seen = set()
    names = [name for name in EVERY if name not in WITHOUT_A_ROW]
    for name, program in programs(large=True, names=names):
        for call in eqxc.inspect(program.function, *program.args, platform="cuda").calls:
            for launch in call.launches:
                if (key := (launch.entry, launch.image)) not in seen:
                    seen.add(key)
                    yield name.split(",")[0], launch


_OF_ALL = ("kernel", "blocks", "threads", "registers", "resident")
_MOVING = ("instructions", "bytes read / written", "issue", "in flight")
_MULTIPLYING = ("instructions", "cycles of products", "of the products' peak")


def tables() -> str:
    """Make one table of kernels that move bytes, and one of kernels that multiply matrices."""
    moving, multiplying = [], []
    for name, launch in _launches():
        loop = main_loop(disassembled(launch))
        about = (
            f"{name}: {str(launch).partition(':')[0]}",
            f"{math.prod(launch.grid):,}",
            str(math.prod(launch.block)),
            f"{launch.registers}" + (f", {launch.stack_bytes:,} bytes beside" if launch.stack_bytes else ""),
            str(resident(launch)),
        )
        if loop.products and not name.startswith(_READING):
            multiplying.append((*about, *_multiplying(loop)))
        else:
            moving.append((*about, *_moving(launch, loop)))
    return "\n\n".join((_table(_MOVING, moving), _table(_MULTIPLYING, multiplying)))


def _table(more: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header = (*_OF_ALL, *more)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def compilers() -> str:
    import triton

    return f"NVRTC {metadata.version('nvidia-cuda-nvrtc')} and Triton {triton.__version__}"


if __name__ == "__main__":
    print(f"Compiled for `{ARCH}` by {compilers()}.\n\n{tables()}")
