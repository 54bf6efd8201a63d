"""The instruction set that the kernels run on."""

import ast
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

from eqxcallback import _ext


ROOT = pathlib.Path(__file__).parents[2]
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c"}
# The best one first, by what Linux calls what they need.
NEEDS = {
    "x86_64": {
        "avx512_amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
        "avx512_bf16": AVX512 | {"avx512_bf16"},
        "avx512": AVX512,
        "avx2": {"avx2", "fma", "f16c"},
    },
    "aarch64": {"neon_bf16": {"asimddp", "bf16"}, "neon_dot": {"asimddp"}, "neon": {"asimd"}},
}
CPUINFO = pathlib.Path("/proc/cpuinfo")
# Some virtual machines announce AMX, and raise SIGILL where it is used.
TILES = "avx512_amx" in _ext.available_isas()

PROGRAM = """
import numpy as np
from eqxcallback import _ext, ops

try:
    print(np.asarray(ops.rms_norm(np.ones(3, np.float32), eps=0.0)).tolist())
except Exception as error:
    print(type(error).__name__, isinstance(error, ValueError), str(error).splitlines()[0])
try:
    print(_ext.isa())
except Exception as error:
    print(type(error).__name__, error)
print("alive")
"""


def run(name):
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "EQXCALLBACK_ISA")}
    if name is not None:
        environment["EQXCALLBACK_ISA"] = name
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


@pytest.mark.skipif(not CPUINFO.exists(), reason=f"what this machine has is not in {CPUINFO}")
def test_what_this_machine_runs():
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    words = set() if match is None else set(match[1].split())
    needs = NEEDS.get(platform.machine(), {})
    names = [name for name in needs if needs[name] <= words]
    if "avx512_amx" in names and not TILES:
        names.remove("avx512_amx")
    assert _ext.available_isas() == [*names, "portable"]


@pytest.mark.parametrize("name", _ext.available_isas())
def test_the_variable_is_obeyed(name):
    assert run(name) == ["[1.0, 1.0, 1.0]", name, "alive"]


@pytest.mark.parametrize("name", [None, ""])
def test_the_best_one_runs_without_it(name):
    assert run(name) == ["[1.0, 1.0, 1.0]", _ext.available_isas()[0], "alive"]


@pytest.mark.parametrize("name", ["sse2", "AVX2", "avx2 "])
def test_a_wrong_name_is_an_error_where_an_op_runs(name):
    names = ", ".join(_ext.available_isas())
    message = f"eqxcallback: expected EQXCALLBACK_ISA to be one of {names}, which this machine can run; got '{name}'."
    op, query, alive = run(name)
    assert op == f"InvalidArgument True {message} [failure 1]"
    assert query == f"ValueError {message}"
    assert alive == "alive"


def test_a_wrong_name_for_set_isa():
    before = _ext.isa()
    with pytest.raises(ValueError, match=r"one of .*portable, which this machine can run; got 'sse2'"):
        _ext.set_isa("sse2")
    assert _ext.isa() == before


def test_without_vnni_there_is_no_avx512():
    """Its kernels use all of them: a machine that lacks one runs AVX2. The flags are those it is compiled with."""
    text = (ROOT / "csrc/cpu/CMakeLists.txt").read_text()
    flags = set(re.findall(r"-m(avx512\w+)", text))
    asked = set(re.findall(r'supports\("(avx512\w+)"', (ROOT / "csrc/cpu/isa.cc").read_text()))
    assert flags == asked


@pytest.mark.parametrize(("machine", "name"), [(machine, name) for machine, names in NEEDS.items() for name in names])
def test_files_of_an_instruction_set_share_no_functions(machine, name, tmp_path, isa_flags):
    """A weak symbol is an inline function of which the linker keeps one copy for all: the one with the newest instructions,
    say, which a machine without them then meets in its portable kernels. See csrc/cpu/types.h. Without optimization every
    function that is called is there."""
    compiler = "g++" if platform.machine() == machine else f"{machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here: Debian's package g++-{machine.replace('_', '-')}-linux-gnu")
    target = tmp_path / "isa.o"
    source = ROOT / f"csrc/cpu/isa_{name}.cc"
    options = ["-std=c++17", "-O0", "-c", *isa_flags[name], f"-I{ROOT / 'csrc'}"]
    subprocess.run([compiler, *options, str(source), "-o", str(target)], check=True)
    symbols = subprocess.run(["nm", "-C", str(target)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in symbols if re.search(r" [Wwu] ", line)] == []
    # What is there and visible to others: the table.
    table = f"k{name.title().replace('_', '')}Kernels"
    assert [line.split(" ", 2)[2] for line in symbols if re.search(r" [TDRB] ", line)] == [f"eqxcallback::cpu::{table}"]


# -- products of bf16, which may be slower with the processor's own instructions

# Tables that differ in how they multiply bf16, the best one first.
ALIKE = [name for name in _ext.available_isas() if name.startswith(("avx512", "neon_bf16", "neon_dot"))]
BEST = _ext.available_isas()[0]
with_bf16 = pytest.mark.skipif(len(ALIKE) < 2, reason="this machine has no instructions for bf16")
FAMILIES = ["attention", "attention_backward", "linear", "linear_rows"]

# Products of bf16 have other sums with the instructions for them.
PRODUCTS = """
import jax, jax.numpy as jnp
from eqxcallback import ops

q, k, v = (jax.random.normal(key, (33, 2, 64), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
x, weight = (jax.random.normal(jax.random.key(i), (i, 500), jnp.bfloat16) for i in (8, 50))
x, weight = jnp.concatenate([x, x[:, ::-1]], 1), jnp.concatenate([weight, -weight[:, ::-1]], 1)  # sums are of rounding errors
for out in (
    ops.attention(q, k, v),
    jnp.stack(jax.grad(lambda qkv: ops.attention(*qkv).astype(jnp.float32).sum())((q, k, v))),  # rounding hides some differences
    ops.linear(x[:3], weight, implementation="native"),
    ops.linear(x, weight, implementation="native"),
):
    print(hash(out.tobytes()))
"""


# Without JAX, which takes a second to import.
CHOICE = f"""
import importlib.util

spec = importlib.util.spec_from_file_location("_ext", {_ext.__file__!r})
_ext = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_ext)
print(_ext.isas_of_bf16())
"""
FILE = CHOICE.replace("isas_of_bf16", "file_of_bf16")


def lines(program, folder, isa):
    environment = {**os.environ, "EQXCALLBACK_CACHE_DIR": str(folder), "EQXCALLBACK_ISA": isa, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def products(folder, isa=""):
    return lines(PRODUCTS, folder, isa)


def choice(folder, isa=""):
    (chosen,) = lines(CHOICE, folder, isa)
    return ast.literal_eval(chosen)


def files(folder):
    return [path for path in folder.glob("bf16-*") if ".new-" not in path.name]


@with_bf16
def test_the_faster_products_are_measured_once(tmp_path):
    chosen = choice(tmp_path)
    assert list(chosen) == FAMILIES
    (file,) = files(tmp_path)
    assert lines(FILE, tmp_path, "") == [str(file)]
    assert lines(FILE, tmp_path, BEST) == [""]
    measured = [line.split() for line in file.read_text().splitlines()]
    for (family, isa, *times), known in zip(measured, chosen.items(), strict=True):
        assert (family, isa) == known
        fastest = 0
        for i, time in enumerate(map(float, times)):
            fastest = i if time < 0.95 * float(times[fastest]) else fastest
        assert len(times) == len(ALIKE)
        assert isa == ALIKE[fastest]
    # What is in the file runs, whatever another process would measure.
    of = {isa: products(tmp_path, isa) for isa in ALIKE}
    for other in ALIKE[1:]:
        differ = [a != b for a, b in zip(of[BEST], of[other], strict=True)]
        # Of one row tiles would be empty.
        assert differ == [True, True, (BEST, other) != ("avx512_amx", "avx512_bf16"), True]
    for shift in range(len(ALIKE)):
        isas = [ALIKE[(i + shift) % len(ALIKE)] for i in range(len(FAMILIES))]
        file.write_text("".join(f"{name} {isa} 1 1\n" for name, isa in zip(FAMILIES, isas, strict=True)))
        assert products(tmp_path) == [of[isa][i] for i, isa in enumerate(isas)]
        assert choice(tmp_path) == dict(zip(FAMILIES, isas, strict=True))


@with_bf16
@pytest.mark.parametrize(
    "text", ["", "attention", "attention avx2 1 1\n", "linear {best} 1 1\n", "attention {best} 1 1\n"]
)
def test_a_file_that_is_not_whole_is_written_anew(text, tmp_path):
    choice(tmp_path)
    (file,) = files(tmp_path)
    file.write_text(text.format(best=BEST))
    assert list(choice(tmp_path)) == FAMILIES
    assert [line.split()[0] for line in file.read_text().splitlines()] == FAMILIES


@with_bf16
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert list(choice(tmp_path / "file" / "folder")) == FAMILIES


def test_what_is_chosen_is_not_measured(tmp_path):
    assert choice(tmp_path, "portable") == {}
    assert files(tmp_path) == []
