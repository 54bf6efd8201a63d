"""Kernels compiled ahead of time, for GPUs that are not there, and what their binaries need of one."""

import contextlib
import dataclasses
import functools
import io
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eqxcallback.ops.attention._operands import OF_KEYS, OPTIONAL
from eqxcallback.ops.attention._reference_dropout import threshold


# The most that one program may have of a multiprocessor's.
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_POINTERS = {
    **dict.fromkeys(
        (
            "lse",
            "dlse",
            "part_out",
            "part_lse",
            "sums",
            "delta",
            "of_slopes",
            "alibi_slopes",
            "dalibi_slopes",
        ),
        "*fp32",
    ),
    **dict.fromkeys(("bias", "dbias"), "*bf16"),
    **dict.fromkeys(("mask", "kept"), "*i1"),
    **dict.fromkeys(("query_segments", "key_segments", "lengths", "offset"), "*i32"),
    "dropout_keys": "*u32",
}
# The bits of the constant of that name.
HAS = {name: 1 << i for i, name in enumerate(OPTIONAL)} | {f"{name} of keys": bit for name, bit in OF_KEYS.items()}
# What no kernel asks for: they have no gradient.
_INTEGERS = ("mask", "query_segments", "key_segments", "lengths", "offset", "dropout_keys", "kept")


@dataclasses.dataclass(frozen=True)
class Compiled:
    ptx: str
    cubin: bytes
    registers: int
    # Bytes of a thread's stack: these kernels have one for spilled registers alone.
    spilled: int
    shared: int
    # Columns of tensor memory, which GPUs since sm_100 have 512 of.
    tensor_memory: int
    # What the assembler says of speed.
    warnings: list[str]


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
    known = dict(constants) | {name: None for name in kernel.arg_names if name in absent}
    signature = {name: _type(name, dtype, known) for name in kernel.arg_names}
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned: Any = {(index,): [["tt.divisibility", 16]] for index in pointers}
    said = io.StringIO()
    nvidia, compilation = knobs.nvidia, knobs.compilation
    with nvidia.scope(), compilation.scope(), contextlib.redirect_stdout(said):
        nvidia.dump_ptxas_log = True
        compilation.always_compile = True  # from its cache, Triton says nothing
        made: Any = triton.compile(
            ASTSource(kernel, signature, known, aligned),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
        )
    assert "registers" in said.getvalue()
    usage = _usage(made.asm["cubin"])
    spilled = usage["STACK"] + usage["LOCAL"]
    about = made.metadata
    return Compiled(
        ptx=made.asm["ptx"],
        cubin=made.asm["cubin"],
        registers=usage["REG"],
        spilled=spilled,
        shared=about.shared,
        tensor_memory=getattr(about, "tmem_size", None) or 0,
        warnings=[line for line in said.getvalue().splitlines() if "Performance Loss" in line],
    )


def compiled(
    kernel,
    arch: int,
    dtype: str,
    choice,
    absent: tuple[str, ...] = (),
    *,
    has: tuple[str, ...] = (),
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    dropout: float = 0.0,
) -> Compiled:
    """`absent`: gradients that are not needed. `has`: of `OPTIONAL`, what the call has."""
    lacking = [name for name in OPTIONAL if name not in has]
    absent = (*absent, *lacking, *(f"d{name}" for name in (*lacking, *_INTEGERS)))
    settings = {
        **choice.constants,
        **{"CAUSAL": causal, "NEGATIVE": False, "WINDOW": window, "SOFT_CAP": soft_cap, "DROPOUT": dropout},
        "KEEP": threshold(dropout),
        "HAS": sum(HAS[name] for name in has),
    }
    return _compiled(kernel, arch, dtype, tuple(settings.items()), absent, choice.num_warps, choice.num_stages)


def _type(name: str, dtype: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _POINTERS:
        return _POINTERS[name]
    if name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        return f"*{_TYPES[dtype]}"
    return "fp32" if name == "scale" else "i32"


def loops(made: Compiled) -> list[list[str]]:
    """The instructions of each loop that has products, the shortest loop first: that one asks no pair anything."""
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", _cuobjdump("-sass", made.cubin))
    places = {int(address, 16): i for i, (address, _) in enumerate(instructions)}
    bodies = []
    for i, (address, text) in enumerate(instructions):
        target = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) <= int(address, 16):
            body = [line for _, line in instructions[places[int(target[1], 16)] : i + 1]]
            if any("MMA" in line for line in body):
                bodies.append(body)
    return sorted(bodies, key=len)


def spills_in_the_main_loop(made: Compiled) -> int:
    """Instructions that move registers to memory and back."""
    return sum("LDL" in line or "STL" in line for line in loops(made)[0])


def _cuobjdump(option: str, cubin: bytes) -> str:
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


def _usage(cubin: bytes) -> dict[str, int]:
    text = _cuobjdump("-res-usage", cubin)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
