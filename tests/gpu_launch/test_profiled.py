"""The kernels that the profiler and the sanitizers are shown: all of ours. They are lowered, and nothing is compiled."""

import pathlib
import re
from types import SimpleNamespace

import jax
import pytest

import eqxcallback
from benchmarks.gpu import kernels, tools
from eqxcallback.backends import _triton

from .cuda_programs import all_attributes


OPS = pathlib.Path(eqxcallback.__file__).parent / "ops"
PROFILED = re.compile(tools._OURS.removeprefix("regex:"))
_BOUNDS = r"(?:\s+__launch_bounds__\((?:[^()]|\([^()]*\))*\))?"


def in_cuda_sources():
    texts = [path.read_text() for path in OPS.rglob("*.cu*")]
    names = [name for text in texts for name in re.findall(rf"__global__ void{_BOUNDS}\s+(\w+)\(", text)]
    assert len(names) == sum(text.count("__global__") for text in texts)
    return set(names)


def in_triton_sources():
    """The functions that programs launch, which have the name of their op; those that they call have other names."""
    texts = [path.read_text() for path in OPS.rglob("_triton*.py")]
    return {name for text in texts for name in re.findall(r"@triton\.jit\n(?:@.*\n)*def (attention_\w+)\(", text)}


@pytest.fixture
def uncompiled(compiler, monkeypatch):
    """Kernels in Triton that have only names."""
    pytest.importorskip("triton", reason="Triton is not installed")
    options = {"num_ctas": 1, "num_warps": 4, "shared": 0, "global_scratch_size": 0}
    attributes = {"launch_cooperative_grid": False, "launch_pdl": False}

    def made(fn, *_):
        return _triton._Compiled(b"image", SimpleNamespace(name=fn.__name__, **options, **attributes), 0)

    monkeypatch.setattr(_triton, "_compiled_function", made)
    monkeypatch.setenv("EQXCALLBACK_CUDA_ARCH", "sm_90")


def launched(program):
    """The entries of the launches that have blocks."""
    lowered = jax.jit(program.function).trace(*program.args).lower(lowering_platforms=("cuda",))
    for attributes in all_attributes(lowered):
        geometry = attributes["geometry"].reshape(-1, 8)
        for entry, (*grid, _, _, _, _, _) in zip(attributes["entries"].split("\n"), geometry, strict=True):
            if all(grid):
                yield entry.removesuffix("_lowered")


def named(entry):
    return re.sub(r"<.*", "", entry).removeprefix("eqxcallback::")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("large", [False, True])
def test_every_kernel_is_run_and_profiled(large):
    entries = {entry for _, program in kernels.programs(large) for entry in launched(program)}
    assert sorted(set(map(named, entries))) == sorted(in_cuda_sources() | in_triton_sources())
    of_int8 = {named(entry) for entry in entries if "signed char" in entry}
    backward = {f"decode_attention_backward{kernel}" for kernel in ("", "_join", "_keys")}
    assert of_int8 == {"decode_attention", "decode_attention_mma", "decode_attention_join", *backward}
    assert [entry for entry in entries if not PROFILED.search(entry)] == []


@pytest.mark.parametrize("name", sorted(in_cuda_sources() | in_triton_sources()))
def test_names_as_a_tool_may_write_them(name):
    mangled = f"_ZN11eqxcallback{len(name)}{name}IfLb1EEEvPKfPfll"
    assert all(
        PROFILED.search(text) for text in (name, f"eqxcallback::{name}", f"void eqxcallback::{name}<float>", mangled)
    )


@pytest.mark.parametrize(
    "name",
    [
        "triton_softmax_0",
        "loop_add_fusion",
        "input_reduce_fusion_2",
        "wrapped_convert",
        "gemm_fusion_dot_5",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_cga1x1x1_kernel0_0",
    ],
)
def test_those_of_xla_are_not_profiled(name):
    assert not PROFILED.search(name)


@pytest.mark.parametrize("seconds", ["100", "-1"])
def test_programs_begin_as_long_as_there_is_time(seconds, monkeypatch, capsys):
    """On a CPU, they show that they can be called with their values."""
    monkeypatch.setattr("sys.argv", ["kernels", "--seconds", seconds])
    every = [name for name, _ in kernels.programs(large=False)]
    begun = every if seconds == "100" else []
    assert kernels.main() == (not begun)
    assert capsys.readouterr().out.splitlines() == [*begun, f"{len(begun)} of {len(every)} programs ran on cpu"]
