"""Kernels whose source is a text, compiled by the machine's own compiler."""

import os
import re
import stat
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxcallback as eqxc
from eqxcallback import CKernel, NativeKernel, Op
from eqxcallback.backends import load, store

from . import library


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


TIMES = """
#include <math.h>
void times(long n, float a, const float* x, float* out) {
  for (long i = 0; i < n; ++i) out[i] = a * fabsf(x[i]);
}
"""
PARAMETERS = ("x.size", "float a", "const float* x", "float* out")
HANDLER = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error times(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> out, double a) {
  for (size_t i = 0; i < x.element_count(); ++i) out->typed_data()[i] = static_cast<float>(a) * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    Times, times, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>().Attr<double>("a"));
"""


def op_of(kernel):
    return Op("times", kernels={"cpu": kernel}, reference=lambda x, *, a: a * jnp.abs(x), vmap_method="fold")


def test_c():
    op = op_of(CKernel("times", source=TIMES, parameters=PARAMETERS, options="-lm"))
    assert eqxc.testing.check(op, jnp.arange(1.0, 5.0), a=3.0).passed


def test_cpp_that_says_extern_c():
    standard = "#if __cplusplus < 201703L\n#error old\n#endif\n"
    source = standard + '#include <cmath>\nextern "C" ' + TIMES.split("\n", 2)[2].replace("fabsf", "std::abs")
    op = op_of(CKernel("times", source=source, parameters=PARAMETERS))
    np.testing.assert_array_equal(op(jnp.array([-1.0, 2.0]), a=2.0), [2, 4])


def test_a_handler():
    op = op_of(NativeKernel("Times", source=HANDLER))
    assert eqxc.testing.check(op, jnp.arange(1.0, 5.0), a=3.0).passed
    op.register()


def test_a_file_and_what_is_beside_it(tmp_path):
    (tmp_path / "factor.h").write_text("#define FACTOR 5\n")
    file = tmp_path / "times.c"
    file.write_text('#include "factor.h"\n' + TIMES.replace("a *", "FACTOR *"))
    op = op_of(CKernel("times", source=file, parameters=PARAMETERS))
    assert op(jnp.ones(1), a=1.0).tolist() == [5]
    (tmp_path / "factor.h").write_text("#define FACTOR 6\n")
    assert jax.jit(lambda x: op(x, a=1.0))(jnp.ones(1)).tolist() == [6]


@pytest.mark.parametrize("include", ['"factor.h"', "<factor.h>"])
@pytest.mark.parametrize("joined", [True, False])
def test_headers_in_a_folder_of_the_options(tmp_path, include, joined):
    (tmp_path / "factor.h").write_text('#include "inner.h"\n')
    inner = tmp_path / "inner.h"
    source = f"#include {include}\n" + TIMES.replace("a *", "FACTOR *")
    options = (f"-I{tmp_path}",) if joined else ("-I", str(tmp_path))
    op = op_of(CKernel("times", source=source, parameters=PARAMETERS, options=options))
    for factor in (5, 6, 5):
        inner.write_text(f"#define FACTOR {factor}\n")
        assert jax.jit(lambda x: op(x, a=1.0))(jnp.ones(1)).tolist() == [factor]


def test_a_header_before_the_source(tmp_path):
    header = tmp_path / "factor.h"
    options = ("-include", str(header), f"-DLONG={'x' * 300}")  # no file has so long a name
    op = op_of(CKernel("times", source=TIMES.replace("a *", "FACTOR *"), parameters=PARAMETERS, options=options))
    for factor in (5, 6):
        header.write_text(f"#define FACTOR {factor}\n")
        assert jax.jit(lambda x: op(x, a=1.0))(jnp.ones(1)).tolist() == [factor]


def test_files_that_are_included_more_than_once(tmp_path):
    """A list of the same lines for several macros; and files with guards that include each other."""
    (tmp_path / "list.h").write_text("ADD(2)\nADD(3)\n")
    (tmp_path / "a.h").write_text('#ifndef A\n#define A\n#include "b.h"\n#define FACTOR (SUM * TERMS)\n#endif\n')
    (tmp_path / "b.h").write_text(
        '#ifndef B\n#define B\n#include "a.h"\nenum { SUM = 0\n#define ADD(n) + n\n#include "list.h"\n#undef ADD\n'
        '#define ADD(n) + 1\n, TERMS = 0\n#include "list.h"\n};\n#endif\n'
    )
    file = tmp_path / "times.c"
    file.write_text('#include "a.h"\n#include "b.h"\n#include "a.h"\n' + TIMES.replace("a *", "FACTOR *"))
    op = op_of(CKernel("times", source=file, parameters=PARAMETERS))
    assert op(jnp.ones(1), a=1.0).tolist() == [10]


def test_a_header_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    op = op_of(
        CKernel("times", source='#include "factor.h"\n' + TIMES.replace("a *", "FACTOR *"), parameters=PARAMETERS)
    )
    for factor in (5, 6):
        (tmp_path / "factor.h").write_text(f"#define FACTOR {factor}\n")
        assert jax.jit(lambda x: op(x, a=1.0))(jnp.ones(1)).tolist() == [factor]


@pytest.mark.parametrize("options", [("{}/factor.o",), ("-L{}", "-lfactor")], ids=["an object", "a library"])
def test_what_options_link_changes(tmp_path, options):
    source = "float factor(void);\n" + TIMES.replace("a *", "factor() *")
    options = tuple(option.format(tmp_path) for option in options)
    op = op_of(CKernel("times", source=source, parameters=PARAMETERS, options=options))
    for factor in (5, 6):
        (tmp_path / "factor.c").write_text(f"float factor(void) {{ return {factor}; }}\n")
        subprocess.run(["gcc", "-fPIC", "-c", "factor.c"], cwd=tmp_path, check=True)
        subprocess.run(["ar", "rcs", "libfactor.a", "factor.o"], cwd=tmp_path, check=True)
        assert jax.jit(lambda x: op(x, a=1.0))(jnp.ones(1)).tolist() == [factor]


def test_c_whose_header_is_for_cpp_too(tmp_path):
    """`extern "C"` for the case of a compiler of C++ does not make it C++, which has no `restrict`."""
    declared = "void times(long, float, const float*, float*);"
    header = f'#ifdef __cplusplus\nextern "C" {{\n#endif\n{declared}\n#ifdef __cplusplus\n}}\n#endif\n'
    (tmp_path / "times.h").write_text(header)
    source = TIMES.replace("float* out", "float* restrict out")
    file = tmp_path / "times.c"
    file.write_text('#include "times.h"\n' + source)
    for given in (file, header + source):
        assert op_of(CKernel("times", source=given, parameters=PARAMETERS))(jnp.ones(1), a=3.0).tolist() == [3]


def test_the_encoding_of_a_file(tmp_path):
    file = tmp_path / "times.c"
    file.write_bytes(b"\xef\xbb\xbf" + TIMES.encode())  # as editors on Windows write it
    assert op_of(CKernel("times", source=file, parameters=PARAMETERS))(jnp.ones(1), a=3.0).tolist() == [3]
    file.write_bytes(b"/* caf\xe9 */" + TIMES.encode())
    with pytest.raises(
        ValueError, match=r"times\[c\]: expected the source .*times\.c to be in UTF-8; got .* Save it so"
    ):
        op_of(CKernel("times", source=file, parameters=PARAMETERS))(jnp.ones(2), a=3.0)


def test_it_is_compiled_once(cache, monkeypatch):
    op = op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))
    op(jnp.ones(2), a=1.0)
    (made,) = cache.iterdir()
    before = made.stat().st_mtime_ns
    op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(3), a=1.0)
    assert [(path, path.stat().st_mtime_ns) for path in cache.iterdir()] == [(made, before)]
    op_of(CKernel("times", source=TIMES, parameters=PARAMETERS, options=("-O3",)))(jnp.ones(3), a=1.0)
    assert len(list(cache.iterdir())) == 2


def test_an_error_shows_the_lines_of_the_source():
    source = "void times(long n, float a, const float* x, float* out) {\n  return n + ;\n}\n"
    with pytest.raises(ValueError, match=r"times\[c\]: the source does not compile:\n(?s:.*)source\.c:2:\d+: .*"):
        op_of(CKernel("times", source=source, parameters=PARAMETERS))(jnp.ones(2), a=1.0)
    with pytest.raises(ValueError, match=r"times\[native\]: the source does not compile:\n(?s:.*)source\.cc:\d+"):
        op_of(NativeKernel("Times", source=HANDLER.replace("return", "retrun")))(jnp.ones(2), a=1.0)


def test_a_symbol_that_the_source_lacks():
    with pytest.raises(ValueError, match="has no symbol 'other'"):
        op_of(CKernel("other", source=TIMES, parameters=PARAMETERS))(jnp.ones(2), a=1.0)


def test_a_machine_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ValueError, match="expected a compiler of C to compile the source; found none of cc, gcc, clang"
    ):
        op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(2), a=1.0)


def test_the_compiler_that_the_environment_names(tmp_path, monkeypatch):
    compiler = tmp_path / "mine"
    compiler.write_text('#!/bin/sh\nexec gcc -DFACTOR=7 "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    op = op_of(CKernel("times", source=TIMES.replace("a *", "FACTOR *"), parameters=PARAMETERS))
    assert op(jnp.ones(1), a=1.0).tolist() == [7]


def test_a_compiler_with_arguments(monkeypatch):
    monkeypatch.setenv("CC", "env gcc -DFACTOR=7")  # a launcher, as ccache is
    op = op_of(CKernel("times", source=TIMES.replace("a *", "FACTOR *"), parameters=PARAMETERS))
    assert op(jnp.ones(1), a=1.0).tolist() == [7]


def test_a_compiler_that_is_not_there(tmp_path, monkeypatch):
    """Another one in its place would go unnoticed."""
    op = op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))
    monkeypatch.setenv("CC", "gcc-that-is-not-there")
    with pytest.raises(ValueError, match=r"times\[c\]: expected a compiler of C .*found none of gcc-that-is-not-there"):
        op(jnp.ones(2), a=1.0)
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"\0")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ValueError, match=r"times\[c\]: the compiler .*compiler cannot be run \(.*Exec format error"):
        op(jnp.ones(2), a=1.0)


@pytest.mark.parametrize("part", [0, 0.001, 0.5], ids=["empty", "a few bytes", "half"])
def test_a_library_in_the_cache_that_is_not_whole(cache, part):
    code = f"""
import eqxcallback as eqxc, jax.numpy as jnp
kernel = eqxc.CKernel("times", source={TIMES!r}, parameters={PARAMETERS!r}, options="-lm")
op = eqxc.Op("times", kernels={{"cpu": kernel}}, reference=lambda x, *, a: a * jnp.abs(x))
print(op(jnp.ones(2), a=3.0).tolist())
"""
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout == "[3.0, 3.0]\n"
        (made,) = cache.iterdir()
        content = made.read_bytes()
        made.unlink()  # it is loaded by nobody
        made.write_bytes(content[: int(part * len(content))])


def test_a_library_that_lacks_a_function():
    source = "float nowhere(float);\n" + TIMES.replace("fabsf", "nowhere")
    with pytest.raises(
        ValueError, match=r"times\[c\]: the library .* cannot be loaded \(.*nowhere\). Name what it lacks"
    ):
        op_of(CKernel("times", source=source, parameters=PARAMETERS))(jnp.ones(2), a=1.0)


def test_a_cache_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", ".")
    assert op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(1), a=3.0).tolist() == [3]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("EQXCALLBACK_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(ValueError, match=r"cannot be kept in /proc/nowhere .* Set EQXCALLBACK_CACHE_DIR"):
        op_of(CKernel("times", source=TIMES, parameters=PARAMETERS))(jnp.ones(2), a=1.0)


def test_an_image_that_cannot_be_kept(cache, monkeypatch):
    """Nothing of it is left over, as on a disk that is full."""
    (cache / "key").mkdir(parents=True)
    store("key", {}, b"image")
    assert [path.name for path in cache.iterdir()] == ["key"]
    store("other", {"names": 1}, b"image")
    assert load("other") == ({"names": 1}, b"image")


def test_a_user_without_a_home():
    """As in a container that runs as any user: a cache for this process alone."""
    code = f"""
import pathlib
import eqxcallback as eqxc, jax.numpy as jnp
from eqxcallback.backends import cache_folder

def home():
    raise RuntimeError("Could not determine home directory.")

pathlib.Path.home = home
kernel = eqxc.CKernel("times", source={TIMES!r}, parameters={PARAMETERS!r}, options="-lm")
op = eqxc.Op("times", kernels={{"cpu": kernel}}, reference=lambda x, *, a: a * jnp.abs(x))
assert op(jnp.ones(2), a=3.0).tolist() == [3, 3]
print(cache_folder(), oct(cache_folder().stat().st_mode), [path.suffix for path in cache_folder().iterdir()])
"""
    environment = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder, rest = result.stdout.split(" ", 1)
    assert rest == "0o40700 ['.so']\n"
    assert not os.path.exists(folder)


ONE: Any = 1
NONE: Any = None


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: CKernel("times", source="times.c"), "expected source to be C; got 'times.c'. Pass a pathlib.Path"),
        (
            lambda: CKernel("times", library.path(), source=TIMES),
            "expected a library, a source or an address; got library and",
        ),
        (lambda: CKernel("times", source=TIMES, options=(ONE,)), "expected options to be strings"),
        (lambda: CKernel("times", source=TIMES, options=NONE), "expected options to be strings; got None"),
        (lambda: CKernel("times", source=TIMES, options="-DA=\0"), "expected options without the character NUL; got"),
        (lambda: CKernel("times", source=ONE), "expected source to be a text or a path; got 1"),
        (lambda: NativeKernel("Times", source="times.cc"), "expected source to be C++"),
        (lambda: NativeKernel("Times", "lib.so", source=HANDLER), "expected a library or a source; got both"),
    ],
)
def test_declarations(make, error):
    with pytest.raises((TypeError, ValueError), match=re.escape(error)):
        make()


@pytest.mark.wrong_types  # a path in bytes
def test_equal_sources_are_one_kernel(tmp_path):
    make = lambda: CKernel("times", source=tmp_path / "times.c", parameters=PARAMETERS)
    assert make() == make()
    assert hash(make()) == hash(make())
    assert os.fspath(make().source or "") == str(tmp_path / "times.c")
    in_bytes: Any = os.fsencode(tmp_path / "times.c")
    assert os.fspath(CKernel("times", source=in_bytes).source or "") == str(tmp_path / "times.c")


WORDS = """
void words(long n, const unsigned* key, const float* x, float* out) {
  for (long i = 0; i < n; ++i) out[i] = (float)(key[0] ^ key[1]) + x[i];
}
"""


def test_typed_keys():
    """A kernel gets their words, as many as their sizes say."""

    def reference(key, x):
        first, second = jax.random.key_data(key)
        return (first ^ second).astype(jnp.float32) + x

    function = CKernel(
        "words", source=WORDS, parameters=("x.size", "key", "x", "out"), supports=lambda types: types.key.shape == ()
    )
    op = Op("words", kernels={"cpu": function}, reference=reference, vmap_method={"x": "fold", "key": "threads"})
    x, key, keys = jnp.arange(3.0), jax.random.key(7), jax.random.split(jax.random.key(1), 4)
    for call in (op, jax.jit(op)):
        np.testing.assert_array_equal(call(key, x), reference(key, x))
    for axes, args in (
        ((0, None), (keys, x)),
        ((None, 0), (key, jnp.stack([x] * 4))),
        ((0, 0), (keys, jnp.stack([x] * 4))),
    ):
        np.testing.assert_array_equal(jax.vmap(op, axes)(*args), jax.vmap(reference, axes)(*args))
    counted = CKernel(
        "words",
        source=WORDS,
        parameters=("key.size", "key", "x", "out"),
        out_type=lambda key, x: jax.ShapeDtypeStruct((2,), x.dtype),
    )
    assert Op("counted", kernels={"cpu": counted})(key, x).shape == (2,)
