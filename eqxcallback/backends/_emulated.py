"""Kernels for a GPU on a CPU: bodies in Python that XLA calls, and that do what our launcher does on a GPU."""

import ctypes
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .. import xla
from ..core import Aval, OwnCallable
from ..emulation import CudaLibrary, NotEmulated, TritonFunction, need_triton, portable_constants
from ..kernel import Emulated, EmulatedCuda, EmulatedTriton
from . import _cuda, _nvrtc, _signature, _triton
from ._bound_kernel import BoundKernel
from ._device_call import DeviceCall
from ._guarded import Guarded
from ._launches import launches
from ._resident import call_of
from ._source import read_source
from ._step import Step


# Runs a kernel on the memory of its pointers, `None` for a null pointer.
Run = Callable[[Sequence[np.ndarray | None]], None]

_SEEDS = 4
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")


def prepare(bound: BoundKernel, kernel: Emulated, platform: str, who: str) -> xla.PythonLowering:
    who = f"{who}[{kernel.backend}, emulated]"
    if platform != "cpu":
        raise ValueError(f"{who}: expected the platform cpu, on which kernels are emulated; got {platform}.")
    return xla.PythonLowering(xla.FlatBody(EmulatedBody(kernel, bound, who)), bound.call)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EmulatedBody(OwnCallable):
    """A kernel as a body `(ctx, outputs, inputs)`. What is compiled for one type of buffers is kept."""

    kernel: Emulated
    bound: BoundKernel
    who: str
    _known: dict[Any, tuple[DeviceCall, Run]] = dataclasses.field(default_factory=dict)

    def _identity(self) -> object:
        return self  # not its `id`, which another one has after it

    def _named_like(self) -> str:
        return self.bound.name

    def __call__(self, ctx: xla.ExecutionContext, outputs: Sequence[xla.Buffer], inputs: Sequence[xla.Buffer]) -> None:
        del ctx
        key = tuple((buffer.shape, buffer.dtype) for buffer in (*inputs, *outputs))
        if key not in self._known:
            self._known[key] = self._prepared(_types(inputs), _types(outputs))
        call, run = self._known[key]
        # An output that overwrites an input is the same memory.
        blocks: dict[int, Guarded] = {}
        pointers = [
            *(None if i is None else _copied(inputs[i], blocks) for _, i in self.bound.operands),
            *(None if i is None else _copied(outputs[i], blocks) for _, i in self.bound.results),
            *(Guarded(workspace.dtype, math.prod(workspace.shape)) for workspace in call.workspaces),
        ]
        run([None if pointer is None else pointer.array for pointer in pointers])
        results = pointers[len(self.bound.operands) :][: len(self.bound.results)]
        for (name, _), pointer in zip(call.pointers, pointers, strict=True):
            if pointer is not None and pointer.is_overrun:
                raise RuntimeError(f"{self.who}: the kernel writes before or beyond the memory of {name}.")
            if pointer is not None and pointer not in results and pointer.is_changed:
                raise RuntimeError(f"{self.who}: the kernel writes to {name}, which is an operand.")
        for pointer in results:
            if pointer is not None:
                pointer.copy_back()

    def _prepared(self, operands: Sequence[Aval], results: Sequence[Aval]) -> tuple[DeviceCall, Run]:
        kernel, call = self.kernel, call_of(self.kernel, self.bound, operands, results, self.who)
        return call, _run_of_cuda(kernel, call) if isinstance(kernel, EmulatedCuda) else _run_of_triton(kernel, call)


def _types(buffers: Sequence[xla.Buffer]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in buffers]


def _run_of_cuda(kernel: EmulatedCuda, call: DeviceCall) -> Run:
    entries, geometry = launches(kernel, call)
    if call.maps:
        raise NotEmulated(f"{call.who}: copies by the tensor memory accelerator, of tensor maps, are not emulated.")
    names = tuple(dict.fromkeys(entries))
    text, file = read_source(kernel.source, call.who, kernel.options)
    text = f'#line 1 "{file}"\n{text}\n{_signature.checks_at_run_time(names)}'
    try:
        library = CudaLibrary.built(text, names, _flags(kernel.options))
    except NotEmulated as error:
        _blame_the_source(kernel, call)
        raise NotEmulated(f"{call.who}: {error}") from None
    for i, entry in enumerate(names):
        if code := library.wrong(i, *_signature.wanted(call.parameters)):
            expected = _signature.wrong(code, call.parameters)
            raise ValueError(_cuda.wrong_parameters(call.who, entry, expected, "another"))
    steps = [
        Step.checked(names.index(entry), entry, f"{call.who}: {entry}", **asked)
        for entry, asked in zip(entries, geometry, strict=True)
    ]
    if any(step.cluster != (1, 1, 1) or step.cooperative for step in steps):
        raise NotEmulated(
            f"{call.who}: blocks that wait for each other, in clusters and cooperative launches, are not emulated."
        )
    starts = call.starts
    # A missing barrier shows in some orders of threads only.
    seeds = itertools.cycle(range(1, _SEEDS + 1))

    def run(arrays: Sequence[np.ndarray | None]) -> None:
        pointers = (ctypes.c_void_p * len(arrays))(*(None if a is None else a.ctypes.data for a in arrays))
        words = call.words
        for word, position in call.addresses:
            words[word] = pointers[position] or 0
        places = [ctypes.addressof(pointers) + 8 * i for i in range(len(arrays))]
        places += [words.ctypes.data + 8 * start for start in starts]
        places = [places[parameter.position] for parameter in call.parameters]
        for step in steps:
            error = library.launch(step.image, step.grid, step.block, step.shared_bytes, places, next(seeds))
            if error is not None:
                raise RuntimeError(f"{call.who}: {step.entry}: {error}.")

    return run


def _run_of_triton(kernel: EmulatedTriton, call: DeviceCall) -> Run:
    try:
        need_triton()
        runs = [
            (fn, _triton.parameters(fn, settings, call), portable_constants(settings), grid)
            for fn, settings, grid in _triton.launches(kernel, call)
        ]
        functions = [TritonFunction.of(fn) for fn, *_ in runs]
    except NotEmulated as error:
        raise NotEmulated(f"{call.who}: {error}") from None
    scalars = {name: value for name, _, value in call.scalars}

    def run(arrays: Sequence[np.ndarray | None]) -> None:
        for function, (fn, names, constants, grid) in zip(functions, runs, strict=True):
            pointers = dict(zip(names, arrays, strict=False))
            try:
                overruns = function.run(grid, pointers, scalars, constants)
            except RuntimeError as error:
                raise RuntimeError(f"{call.who}: {fn.__name__}: {error}.") from None
            if overruns:
                described = dict(zip(names, (name for name, _ in call.pointers), strict=False))
                raise RuntimeError(f"{call.who}: {fn.__name__} writes beyond {described[overruns[0]]}.")

    return run


def _blame_the_source(kernel: EmulatedCuda, call: DeviceCall) -> None:
    """Raises what NVIDIA's compiler says of a source that is wrong, where it is installed."""
    try:
        _nvrtc.find()
    except ImportError:
        return
    _cuda.compiled(kernel, call)


def _flags(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options of NVRTC that g++ knows, in the spelling of g++."""
    flags = []
    for option in options:
        name, _, value = option.partition("=")
        if name in ("--define-macro", "--include-path", "--undefine-macro"):
            flags.append({"d": "-D", "i": "-I", "u": "-U"}[name[2]] + value)
        elif option.startswith(("-D", "-I", "-U")):
            flags.append(option)
        elif name in ("-std", "--std"):
            flags.append(f"-std={value}")
    return tuple(flags)


def _copied(buffer: Any, blocks: dict[int, Guarded]) -> Guarded:
    if buffer.dtype.name in _PACKED:
        raise NotEmulated(f"elements of less than a byte, of {buffer!r}, are not emulated.")
    array = np.asarray(buffer)
    if not array.size:
        return Guarded(array.dtype, 0)
    address = array.ctypes.data
    if address not in blocks:
        blocks[address] = Guarded(array.dtype, array.size, array)
    return blocks[address]
