"""Compile a program and keep XLA's plan of it: for the GPU that is there, or for one that is only described.

The plan is the sequence of XLA's thunks, which it writes into a folder if told so. A described GPU needs neither a device nor
a driver: JAX's CUDA plugin, which holds XLA's compiler for GPUs, and of CUDA ptxas and libdevice.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

# `config` sets an option for this thread alone, `compiler` has the options that JAX compiles with.
# Noticed by: tests/deviceless/test_compile.py.
from jax._src import compiler as _compiler, config as _config
from jax.experimental import topologies

# The compile-only client has no host callbacks, for which JAX's own `compile` fails; ours are handlers that are there anyway.
# So the client itself is asked, with the options that JAX would have given. Noticed by: tests/deviceless/test_compile.py.
from jaxlib import xla_client as _xla_client

from ...core import PyTree, Value


_H200 = pathlib.Path(__file__).with_name("h200.txtpb")
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# The second is XLA's default: see `compile_with_plan`.
_DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_full_hlo_config": True}


class DevicelessError(RuntimeError):
    """An error that says what this machine lacks to compile for a GPU."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as XLA compiled it. The texts are not a stable interface: `_hlo.py` and `_thunks.py` of `inspection` read them.

    **Attributes:**

    - `hlo_text`: the program, optimised and scheduled.
    - `thunks`: the plan, or `""` if this XLA wrote none.
    - `thunk_names`: which instruction of `hlo_text` each thunk is of.
    - `config`: the options in effect, defaults among them.
    - `device`: the name of the GPU if it is only described, or `""`.
    """

    hlo_text: str
    thunks: str
    thunk_names: str
    config: str
    device: str = ""


def compile_deviceless(
    fn: Any, *args: Value, donate_argnums: Any = (), compiler_options: Mapping[str, Any] | None = None
) -> Compiled:
    """**Arguments:**

    - `fn`: a function, what `jax.jit` made of one, or such a program, traced, or lowered for `"cuda"`. Of programs over
        several devices one GPU is described for each.
    - `args`: of a function: arrays or `jax.ShapeDtypeStruct`s.
    - `donate_argnums`: of a function that is not yet jitted.
    - `compiler_options`: on top of those that the program has.

    **Raises:** `DevicelessError` where something is missing; what lowering and compiling raise.
    """
    if (reason := deviceless_unavailable()) is not None:
        raise DevicelessError(f"eqxcallback: cannot compile for a GPU that is not there: {reason}.")
    lowered = _lowered(fn, args, donate_argnums)
    module = lowered.compiler_ir("stablehlo")
    devices = _devices(module.operation.attributes["mhlo.num_partitions"].value)
    options = {
        "xla_gpu_cuda_data_dir": str(_toolkit()),
        **dict(lowered._lowering._compiler_options_kvs),
        **(compiler_options or {}),
    }

    def compile(dump: Mapping[str, Any]) -> str:
        assigned = np.array([[device.id for device in devices]])
        every = _compiler.get_compile_options(1, len(devices), assigned, env_options_overrides={**options, **dump})
        executable = devices[0].client.compile(module, _xla_client.DeviceList(devices), every)
        return executable.hlo_modules()[0].to_string()

    return _with_plan(compile, device="NVIDIA H200")


def compile_with_plan(lowered: jax.stages.Lowered, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
    """Compile for the devices that the program was lowered for, which are there, and keep XLA's plan."""

    def compile(dump: Mapping[str, Any]) -> str:
        return str(lowered.compile(compiler_options={**(compiler_options or {}), **dump}).as_text())

    # A program from the persistent cache has no plan. JAX's key for it leaves out what says where plans are written, but no other
    # option; and what compiles faster than this is not put there.
    with _config.persistent_cache_min_compile_time_secs(math.inf):
        return _with_plan(compile)


@functools.cache
def deviceless_unavailable() -> str | None:
    """Why `compile_deviceless` cannot work here, or `None`."""
    if not any(map(_is_installed, _PLUGINS)):
        packages = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        return f"JAX's CUDA plugin is not installed (pip install --no-deps {packages}, and set JAX_PLATFORMS=cpu)"
    try:
        _devices(1)
    except NotImplementedError:
        return (
            "JAX's CUDA plugin is installed, but was not loaded: it must be of jaxlib's version, and without a GPU "
            "JAX_PLATFORMS=cpu must be set before JAX starts"
        )
    except Exception as error:
        return f"JAX's CUDA plugin does not take the description of a GPU ({str(error).partition(chr(10))[0]})"
    if _toolkit() is None:
        return (
            "there is no folder with CUDA's ptxas and libdevice, which XLA needs for kernels of its own (install the CUDA "
            "toolkit, or the packages nvidia-cuda-nvcc and nvidia-nvvm of the plugin's CUDA version)"
        )
    return None


@functools.cache
def _toolkit() -> pathlib.Path | None:
    """Find the folder of ptxas and libdevice. Not left to XLA: some versions crash where they find none, instead of raising."""
    flag = re.search(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    packages = importlib.util.find_spec("nvidia")  # a folder for each CUDA version, or for each package
    roots = [] if packages is None else [*(packages.submodule_search_locations or ())]
    program = shutil.which("ptxas")
    candidates = [
        *([flag[1]] if flag else []),
        *(os.path.join(root, name) for root in roots for name in ("cu13", "cu12", "cuda_nvcc")),
        *(os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ),
        "/usr/local/cuda",
        "/opt/cuda",
        *([os.path.dirname(os.path.dirname(os.path.realpath(program)))] if program else []),
    ]
    folders = map(pathlib.Path, candidates)
    needed = ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc")
    return next((folder for folder in folders if all((folder / name).exists() for name in needed)), None)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


@functools.cache
def _devices(count: int) -> tuple[Any, ...]:
    topology = topologies.get_topology_desc(platform="cuda", target_config=_H200.read_text(), topology=f"1x1x{count}")
    return tuple(topology.devices)


def _lowered(fn: Any, args: tuple[PyTree, ...], donate_argnums: Any) -> Any:
    if isinstance(fn, jax.stages.Lowered):
        return fn
    if not isinstance(fn, jax.stages.Traced):
        fn = (fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn, donate_argnums=donate_argnums)).trace(*args)
    return fn.lower(lowering_platforms=("cuda",))


def _with_plan(compile: Callable[[Mapping[str, object]], str], device: str = "") -> Compiled:
    with tempfile.TemporaryDirectory() as name:
        text = compile({**_DUMP, "xla_dump_to": name})
        folder = pathlib.Path(name)

        def read(suffix: str) -> str:
            # One program, one file, unless XLA has compiled parts of it apart, which come before it.
            files = sorted(folder.glob(f"*.{suffix}"))
            return files[-1].read_text() if files else ""

        # The second is only written if the passes over the first have changed something.
        thunks = read("thunk_sequence_after_thunk_passes.txt") or read("thunk_sequence.txt")
        return Compiled(text, thunks, read("thunk_metadata.txt"), read("config.pbtxt"), device)
