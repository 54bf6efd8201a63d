"""Triton: functions compiled ahead, to the same kind of image."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core import DType, strict
from ..kernel import TritonKernel, check_readable, dims
from ._architecture import OLDEST_OF_TRITON, architecture, version_of
from ._device_call import DeviceCall
from ._image import kernels_of
from ._step import Program, Step, check_scratch


# Architectures that all supported versions of Triton know: LLVM ends the process for others.
_VERSIONS = (OLDEST_OF_TRITON, 86, 87, 89, 90, 100, 103, 120, 121)
# From 90 on, Triton writes PTX that runs on one architecture alone.
_NEWEST_PORTABLE = 89

# What Triton calls the types of arrays and scalars.
_TYPES = {
    "bool": "i1",
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}

# Columns of tensor memory, which GPUs have since sm_100.
_TENSOR_MEMORY = 512

# Held while Triton compiles: its settings are the process's.
_compiling = threading.Lock()

_Settings = dict[str, Any]
# Options of the compiler: fields of a kernel, which `choose` may say as well.
_OPTIONS = "num_warps", "num_stages", "num_ctas", "launch_pdl", "launch_cooperative_grid"


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """**Attributes:**

    - `about`: what Triton says of it.
    - `hidden`: the number of parameters after those of the function.
    """

    image: bytes
    about: Any
    hidden: int

    def step(self, image: int, grid: Any, what: str) -> Step:
        """Make the step that Triton's own launcher would launch."""
        about = self.about
        x, y, z = dims(grid, f"{what}: expected grid")
        return Step.checked(
            image,
            about.name,
            what,
            grid=(x * about.num_ctas, y, z),
            # Kernels that give their warps different work have more than they were asked for.
            block=32 * about.num_warps,
            shared_bytes=about.shared,
            cluster=about.num_ctas,
            cooperative=about.launch_cooperative_grid,
            programmatic=about.launch_pdl,
            spread=about.num_ctas > 1,
            scratch_bytes=x * y * z * about.num_ctas * (about.global_scratch_size or 0),
        )


def compiled(kernel: TritonKernel, call: DeviceCall) -> Program:
    arch = architecture(kernel.arch)
    version = version_of(arch)
    if version < OLDEST_OF_TRITON:
        raise ValueError(f"{call.who}: expected arch to be sm_{OLDEST_OF_TRITON} or newer; got {arch}.")
    is_cubin, known = _target(arch)
    types = _types(call)
    # A value that is a multiple of 16 lets the compiler load more at once.
    scalars = tuple((name, _type(dtype, name, call), _is_multiple(value)) for name, dtype, value in call.scalars)
    images, steps, hidden = [], [], 0
    for part in (kernel, *kernel.then):
        settings = _settings(part, known, call)
        options = {name: settings.pop(name) for name in _OPTIONS}
        grid = call.value(part.grid, "grid", **settings)
        if part is not kernel and 0 in dims(grid, f"{call.who}: expected grid of {part.name}"):
            continue  # nothing of it is launched: it need not be compiled
        fn = _function(part, call.who)
        made = _compiled_function(
            fn,
            known,
            is_cubin,
            types,
            scalars,
            tuple((name, value, strict(value)) for name, value in sorted(settings.items())),
            tuple(options.items()),
            call.who,
        )
        hidden = made.hidden
        images.append(made.image)
        steps.append(made.step(len(steps), grid, f"{call.who}: {part.name}"))
    return Program(tuple(images), tuple(steps), hidden)


def launches(kernel: TritonKernel, call: DeviceCall) -> Iterator[tuple[Any, _Settings, Any]]:
    """Yield for each launch the function, its constexprs and its grid."""
    _types(call)
    for part in (kernel, *kernel.then):
        settings = _settings(part, _target(architecture(kernel.arch))[1], call)
        for name in _OPTIONS:
            del settings[name]
        fn, grid = _imported(part, call.who), call.value(part.grid, "grid", **settings)
        yield fn, settings, dims(grid, f"{call.who}: expected grid")


def _target(arch: str) -> tuple[bool, int]:
    """Tell whether kernels are compiled to binaries, and the version that they are compiled for. Their tiles are for that one: a
    newer GPU may have less shared memory.
    """
    version = version_of(arch)
    if arch.startswith("sm_") and version in _VERSIONS:
        return True, version
    # Several devices, and those that are newer than Triton, get PTX.
    portable = min(version, _NEWEST_PORTABLE)
    return False, max((older for older in _VERSIONS if older <= portable), default=version)


def _settings(kernel: TritonKernel, version: int, call: DeviceCall) -> _Settings:
    settings = {name: call.value(value, f"the constexpr {name}") for name, value in kernel.constexprs.items()}
    settings |= {name: getattr(kernel, name) for name in _OPTIONS}
    if kernel.choose is not None:
        settings |= call.value(functools.partial(kernel.choose, version), "choose")
    return settings


def _function(kernel: TritonKernel, who: str) -> Any:
    fn = _imported(kernel, who)
    if not hasattr(fn, "cache_key"):
        raise ValueError(
            f"{who}: expected a process in which Triton compiles; got one in which it interprets. Unset TRITON_INTERPRET."
        )
    check_readable(fn, who)
    return fn


def _imported(kernel: TritonKernel, who: str) -> Any:
    fn = kernel.fn
    if isinstance(fn, str):
        module, _, name = fn.partition(":")
        try:
            fn = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            remedy = "" if importlib.util.find_spec("triton") else " Install eqxcallback[triton]."
            raise ValueError(f"{who}: the kernel {kernel.fn} cannot be imported ({error}).{remedy}") from None
    if not (hasattr(fn, "arg_names") and inspect.isfunction(getattr(fn, "fn", None))):
        raise ValueError(
            f"{who}: expected fn to be a triton.jit function; got {fn!r}. Nothing is tuned when it runs: pass `choose` in place "
            "of `triton.autotune`, or several kernels, of which eqxcallback.tune finds the fastest."
        )
    return fn


def _types(call: DeviceCall) -> tuple[str | None, ...]:
    """Return what Triton calls the types of the pointers. Raises an error for one that it lacks."""
    return tuple(None if aval is None else f"*{_type(aval.dtype, name, call)}" for name, aval in call.pointers)


def _type(dtype: DType, name: str, call: DeviceCall) -> str:
    if dtype.name not in _TYPES:
        raise ValueError(f"{call.who}: Triton has no type for {name}, {dtype.name}; it has {', '.join(_TYPES)}.")
    return _TYPES[dtype.name]


def _is_multiple(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


@functools.lru_cache(maxsize=512)
def _compiled_function(
    fn: Any,
    version: int,
    is_cubin: bool,
    pointers: tuple[str | None, ...],  # `None` for a null pointer, which is a constant
    scalars: tuple[tuple[str, str, bool], ...],
    constexprs: tuple[tuple[str, Any, object], ...],  # with a key of the value: 2, 2.0 and True are equal
    options: tuple[tuple[str, Any], ...],
    who: str,
) -> _Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_source

    constants = {name: value for name, value, _ in constexprs}
    names = _checked_names(fn, constants, len(pointers), [name for name, _, _ in scalars], who)
    kinds = dict(zip(names, [*pointers, *(kind for _, kind, _ in scalars)], strict=True))
    nulls = [name for name, kind in kinds.items() if kind is None]
    constants |= dict.fromkeys(nulls)
    signature = {name: kinds.get(name) or "constexpr" for name in fn.arg_names}
    aligned = {*names[: len(pointers)], *(name for name, _, is_multiple in scalars if is_multiple)}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if name in aligned - set(nulls)
    }
    source = _kind_of_source(fn)(fn, signature, constants, attributes)
    try:
        # What Triton does by default, said so that a version that would change its mind does not warn of it.
        settings = {"enable_fp_fusion": True, **dict(options)}
        with _cache_of_triton():
            compiled_kernel = compile_source(source, target=GPUTarget("cuda", version, 32), options=settings)
    except Exception as error:
        raise ValueError(f"{who}: {fn.__name__} does not compile for sm_{version}: {error}") from error
    about, image = compiled_kernel.metadata, compiled_kernel.asm["cubin"]
    if getattr(about, "profile_scratch_size", 0):
        raise ValueError(f"{who}: {fn.__name__} needs memory of Triton's profiler, which is not supported.")
    if (getattr(about, "tmem_size", None) or 0) > _TENSOR_MEMORY:
        raise ValueError(
            f"{who}: expected {fn.__name__} to need at most {_TENSOR_MEMORY} columns of tensor memory, all that sm_{version} "
            f"has; got {about.tmem_size}. Take smaller blocks, or fewer sums that live at the same time."
        )
    check_scratch(about.global_scratch_align or 1, f"{who}: {fn.__name__}")
    (parameters,) = (kernel.parameters for name, kernel in (kernels_of(image) or {}).items() if name == about.name)
    hidden = len(parameters) - len(kinds) + len(nulls)
    return _Compiled(image if is_cubin else compiled_kernel.asm["ptx"].encode() + b"\0", about, hidden)


@contextlib.contextmanager
def _cache_of_triton() -> Iterator[None]:
    """Give Triton's compiler a folder for its cache, without which it refuses to run. jax-triton, which compiles in its own way,
    empties `TRITON_CACHE_DIR` when it is imported."""
    from triton import knobs

    with _compiling, knobs.cache.scope():
        knobs.cache.dir = knobs.cache.dir or knobs.cache.get_triton_dir("cache")
        yield


def _kind_of_source(fn: Any) -> Any:
    if not fn.is_gluon():
        from triton.compiler import ASTSource

        return ASTSource
    # It has no public name. `tests/triton/test_hopper.py` notices when it moves.
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def parameters(fn: Any, constants: Mapping[str, Any], call: DeviceCall) -> list[str]:
    """The names of its parameters that are not constexprs: of the pointers, then of the scalars."""
    return _checked_names(fn, constants, len(call.pointers), [name for name, _, _ in call.scalars], call.who)


def _checked_names(
    fn: Any, constants: Mapping[str, Any], num_pointers: int, scalars: Sequence[str], who: str
) -> list[str]:
    if unknown := sorted(set(constants) - set(fn.arg_names)):
        raise ValueError(f"{who}: {fn.__name__} has no parameter {unknown[0]}; it has {', '.join(fn.arg_names)}.")
    names = [name for name in fn.arg_names if name not in constants]
    if len(names) != num_pointers + len(scalars) or names[num_pointers:] != list(scalars):
        raise ValueError(
            f"{who}: expected {fn.__name__} to have {num_pointers} pointers, then the scalars "
            f"{', '.join(scalars) or '(none)'}, beside its constexprs {', '.join(constants) or '(none)'}; got "
            f"{', '.join(fn.arg_names)}."
        )
    return names
