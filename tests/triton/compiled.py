"""Kernels compiled ahead of time, for GPUs that are not there, and what their binaries need of one."""

import dataclasses
import functools
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


# The most that one program may have of a multiprocessor's.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_INTEGERS = ("batch", "queries", "keys", "heads", "kv_heads", "kv_batch")
_STATISTICS = ("lse", "delta")
# What the op has after q, k and v, and the gradients of it: the kernels get none of them.
_OPTIONAL = (
    *("bias", "mask", "alibi_slopes", "query_segments", "key_segments"),
    *("lengths", "offset", "dropout_keys", "kept"),
)
_ABSENT = {*_OPTIONAL, *(f"d{name}" for name in _OPTIONAL)}


@dataclasses.dataclass(frozen=True)
class Compiled:
    ptx: str
    registers: int
    # Bytes of a thread's stack: these kernels have one for spilled registers alone.
    spilled: int
    shared: int


@functools.cache
def _compiled(
    kernel,
    arch: int,
    dtype: str,
    constants: tuple[tuple[str, Any], ...],
    absent: tuple[str, ...],
    warps: int,
    stages: int,
) -> Compiled:
    known = dict(constants) | {name: None for name in kernel.arg_names if name in _ABSENT or name in absent}
    signature = {name: _type(name, dtype, known) for name in kernel.arg_names}
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned: Any = {(index,): [["tt.divisibility", 16]] for index in pointers}
    made: Any = triton.compile(
        ASTSource(kernel, signature, known, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    usage = _usage(made.asm["cubin"])
    return Compiled(made.asm["ptx"], usage["REG"], usage["STACK"] + usage["LOCAL"], made.metadata.shared)


def compiled(kernel, arch: int, dtype: str, choice, absent: tuple[str, ...] = ()) -> Compiled:
    """`absent`: gradients that are not needed."""
    return _compiled(kernel, arch, dtype, tuple(choice.constants.items()), absent, choice.num_warps, choice.num_stages)


def _type(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _INTEGERS:
        return "i32"
    if name == "scale":
        return "fp32"
    return "*fp32" if name in _STATISTICS else f"*{_TYPES[dtype]}"


def assembler_warnings(ptx: str) -> list[str]:
    """What it says of speed, of code for sm_90."""
    tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    # Triton 3.9 has two, and takes the newer for sm_90.
    tool = next(path for path in (tools / "ptxas-blackwell", tools / "ptxas") if path.exists())
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [tool, "-v", "--gpu-name=sm_90a", source, "-o", pathlib.Path(folder, "kernel.cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return [line for line in said.splitlines() if "Performance Loss" in line]


def _usage(cubin: bytes) -> dict[str, int]:
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
