"""NVIDIA's table of compute capabilities: the shared memory for a block, and the blocks that a multiprocessor runs at a time."""

import dataclasses
import math
from collections.abc import Sequence

from ..core import Aval
from ..kernel import CudaKernel, DeviceKernel, EmulatedCuda
from . import _cuda
from ._architecture import architecture, version_of
from ._bound_kernel import BoundKernel
from ._device_call import DeviceCall
from ._image import Compiled, kernels_of
from ._step import Step


# Where nothing was compiled whose registers could be counted: on a CPU, and of PTX, which the driver compiles.
_UNKNOWN = 2


@dataclasses.dataclass(frozen=True)
class _Multiprocessor:
    threads: int
    blocks: int
    shared_bytes: int


_OF_DATA_CENTRES = _Multiprocessor(2048, 32, 228 << 10)
_MULTIPROCESSORS = {
    70: _Multiprocessor(2048, 32, 96 << 10),
    75: _Multiprocessor(1024, 16, 64 << 10),
    80: _Multiprocessor(2048, 32, 164 << 10),
    86: _Multiprocessor(1536, 16, 100 << 10),
    87: _Multiprocessor(1536, 16, 164 << 10),
    89: _Multiprocessor(1536, 24, 100 << 10),
    90: _OF_DATA_CENTRES,
    100: _OF_DATA_CENTRES,
    103: _OF_DATA_CENTRES,
    110: _Multiprocessor(1536, 24, 228 << 10),
    120: _Multiprocessor(1536, 24, 100 << 10),
    121: _Multiprocessor(1536, 24, 100 << 10),
}
# Registers are given to a warp 256 at a time, and lie in four parts of one size: each has as many warps as it has registers for.
_REGISTERS, _REGISTERS_AT_A_TIME, _PARTS = 65_536, 256, 4
# Shared memory that each block has beside its own, since 8.0.
_SHARED_OF_SYSTEM = 1024


# Before 7.0 a block cannot ask for more.
_SHARED_OF_OLD = 48 << 10


def most_shared_bytes(arch: str) -> int:
    """Return the shared memory that a block may have at most, on every device that runs code for `arch`."""
    version = version_of(arch)
    if version < min(_MULTIPROCESSORS):
        return _SHARED_OF_OLD
    oldest = max(number for number in _MULTIPROCESSORS if number <= version)
    # Newer devices run PTX too, and some of them have less.
    runs = [n for n in _MULTIPROCESSORS if n == oldest or (n > oldest and arch.startswith("compute_"))]
    return min(_MULTIPROCESSORS[n].shared_bytes - (_SHARED_OF_SYSTEM if n >= 80 else 0) for n in runs)


def resident_blocks(version: int, usage: Compiled, threads: int, shared_bytes: int) -> int:
    """**Arguments:**

    - `version`: 90 of a compute capability of 9.0. A newer one than the table has counts as the last before it.
    - `threads`: of a block, and `shared_bytes` of its dynamic shared memory.
    """
    known = _MULTIPROCESSORS[max(number for number in _MULTIPROCESSORS if number <= max(version, 70))]
    warps = -(-threads // 32)
    of_warp = -(-max(usage.registers, 1) * 32 // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
    by_registers = _REGISTERS // _PARTS // of_warp * _PARTS // warps
    shared = usage.shared_bytes + shared_bytes + (_SHARED_OF_SYSTEM if version >= 80 else 0)
    by_shared = known.shared_bytes // shared if shared else known.blocks
    # A launch that fits nowhere fails by itself.
    return max(1, min(by_registers, by_shared, known.threads // (32 * warps), known.blocks))


def call_of(
    kernel: DeviceKernel, bound: BoundKernel, operands: Sequence[Aval], results: Sequence[Aval], who: str
) -> DeviceCall:
    """The call, of which a kernel that asks is told how many blocks are resident."""
    if not (isinstance(kernel, CudaKernel) and kernel.asks_resident_blocks):
        return DeviceCall.of(kernel, bound, operands, results, who)
    call = DeviceCall.of(kernel, bound, operands, results, who, resident_blocks=_UNKNOWN)
    if isinstance(kernel, EmulatedCuda):
        return call
    return DeviceCall.of(kernel, bound, operands, results, who, resident_blocks=_compiled(kernel, call))


def _compiled(kernel: CudaKernel, call: DeviceCall) -> int:
    program = _cuda.compiled(kernel, call)
    first: Step = program.steps[0]
    kernels = kernels_of(program.images[0])
    if kernels is None:
        return _UNKNOWN
    version = version_of(architecture(kernel.arch))
    return resident_blocks(version, kernels[first.entry], math.prod(first.block), first.shared_bytes)
