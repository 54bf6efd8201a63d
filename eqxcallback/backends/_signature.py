"""A check, by the compiler itself, that a kernel has the parameters that it is called with.

Compiled code knows the sizes of parameters, but not what pointers point to. So a few assertions are added to the source.
"""

import re
from collections.abc import Sequence

import numpy as np

from ..core import DType
from ..kernel import CudaKernel
from ._device_call import Parameter


# What a type is: 1 floating, 2 integer, 3 to 6 one of the types with a header of their own, 7 raw bytes, 0 anything else.
_KINDS = """
#line 1 "parameters"
namespace eqxcallback_parameters {
template <class... P> struct list {};
template <class... P> __device__ list<P...> of(void (*)(P...));
template <class T> struct plain { using type = T; };
template <class T> struct plain<const T> { using type = T; };
template <class T> struct plain<volatile T> { using type = T; };
template <class T> struct kind { static constexpr int value = 0, size = sizeof(T); };
template <> struct kind<void> { static constexpr int value = 7, size = 1; };
template <> struct kind<char> { static constexpr int value = 7, size = 1; };
template <> struct kind<unsigned char> { static constexpr int value = 7, size = 1; };
%s
#ifdef __CUDA_FP16_TYPES_EXIST__
template <> struct kind<__half> { static constexpr int value = 3, size = 2; };
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
template <> struct kind<__nv_bfloat16> { static constexpr int value = 4, size = 2; };
#endif
#ifdef __CUDA_FP8_TYPES_EXIST__
template <> struct kind<__nv_fp8_e4m3> { static constexpr int value = 5, size = 1; };
template <> struct kind<__nv_fp8_e5m2> { static constexpr int value = 6, size = 1; };
#endif
// A pointer to what an array has: the same, vectors or structures of it, raw bytes, or raw words of a type that C++ lacks.
template <class T> struct pointee { __device__ static constexpr bool fits(int, int) { return false; } };
template <class T> struct pointee<T*> {
  using K = kind<typename plain<T>::type>;
  __device__ static constexpr bool fits(int want, int size) {
    return want < 0 || (K::value == want && K::size == size) || (K::value == 0 && K::size %% size == 0) || K::value == 7 ||
           (want > 2 && K::value == 2 && K::size == size);
  }
};
template <class T> struct scalar {
  using K = kind<T>;
  __device__ static constexpr bool fits(int want, int size) {
    return K::size == size && (K::value == want || (want == 2 && K::value == 7));
  }
};
template <class T> struct scalar<T*> { __device__ static constexpr bool fits(int, int) { return false; } };
template <class T> struct scalar<T&> { __device__ static constexpr bool fits(int, int) { return false; } };
template <unsigned N, class L> struct nth;
template <unsigned N, class P, class... Q> struct nth<N, list<P, Q...>> : nth<N - 1, list<Q...>> {};
template <class P, class... Q> struct nth<0, list<P, Q...>> { using type = typename plain<P>::type; };
template <unsigned N> struct nth<N, list<>> { using type = int&; };  // there is none
template <class L> struct count;
template <class... P> struct count<list<P...>> { static constexpr int value = sizeof...(P); };
}
"""
_ARITHMETIC = {
    1: ("float", "double"),
    2: (
        *("bool", "signed char", "short", "int", "long", "long long"),
        *("unsigned short", "unsigned int", "unsigned long", "unsigned long long"),
    ),
}
# For a compiler of the host: the same when it runs, so that one build serves all dtypes and null pointers.
_FITTING = """
#include <utility>
namespace eqxcallback_parameters {
template <class L> struct fitting;
template <class... P> struct fitting<list<P...>> {
  static int wrong(int total, const int* pointer, const int* want, const int* size) {
    if (total != static_cast<int>(sizeof...(P))) return -1;
    int i = 0, wrong = 0;
    ((wrong = wrong != 0 || fits<typename plain<P>::type>(pointer[i] != 0, want[i], size[i]) ? wrong : i + 1, ++i), ...);
    return wrong;
  }
  template <class Q> static bool fits(bool is_pointer, int want, int size) {
    return is_pointer ? pointee<Q>::fits(want, size) : scalar<Q>::fits(want, size);
  }
};
}
"""
_OWN_HEADER = {"float16": 3, "bfloat16": 4, "float8_e4m3fn": 5, "float8_e5m2": 6}
_MARK = "eqxcallback: "


def checks(entries: Sequence[str], parameters: Sequence[Parameter]) -> str:
    """C++ that compiles if the kernels have these parameters."""
    lines = [_kinds()]
    for entry in entries:
        declared = f"decltype(eqxcallback_parameters::of(&{entry}))"
        count = f"eqxcallback_parameters::count<{declared}>::value == {len(parameters)}"
        lines.append(f'static_assert({count}, "{_MARK}{_number(parameters)}");')
        for i, parameter in enumerate(parameters):
            what = "pointee" if parameter.is_pointer else "scalar"
            fits = f"eqxcallback_parameters::{what}<eqxcallback_parameters::nth<{i}, {declared}>::type>::fits"
            wants = ", ".join(map(str, _kind(parameter.dtype)))
            lines.append(f'static_assert({fits}({wants}), "{_MARK}{_one(i, parameter)}");')
    return "\n".join(lines) + "\n"


def checks_at_run_time(entries: Sequence[str]) -> str:
    """C++ that exports, for entry `i`,

        int soft_wrong_i(int total, const int* pointer, const int* want, const int* size)

    which takes what `wanted` says, and returns a number that `wrong` explains: 0 if the parameters are these.
    """
    lines = [_kinds(), _FITTING]
    for i, entry in enumerate(entries):
        parameters = f"decltype(eqxcallback_parameters::of(&{entry}))"
        lines.append(
            f'extern "C" int soft_wrong_{i}(int total, const int* pointer, const int* want, const int* size) {{\n'
            f"  return eqxcallback_parameters::fitting<{parameters}>::wrong(total, pointer, want, size);\n}}"
        )
    return "\n".join(lines) + "\n"


def wanted(parameters: Sequence[Parameter]) -> tuple[list[int], list[int], list[int]]:
    kinds = [_kind(parameter.dtype) for parameter in parameters]
    pointers = [int(parameter.is_pointer) for parameter in parameters]
    return pointers, [want for want, _ in kinds], [size for _, size in kinds]


def wrong(code: int, parameters: Sequence[Parameter]) -> str:
    """Say what was expected of the parameters."""
    return _number(parameters) if code < 0 else _one(code - 1, parameters[code - 1])


def _kinds() -> str:
    return _KINDS % "\n".join(
        f"template <> struct kind<{name}> {{ static constexpr int value = {kind}, size = sizeof({name}); }};"
        for kind, names in _ARITHMETIC.items()
        for name in names
    )


def _number(parameters: Sequence[Parameter]) -> str:
    expected = ", ".join(f"a pointer for {p.name}" if p.is_pointer else p.name for p in parameters)
    return f"{len(parameters)} parameters ({expected})"


def _one(index: int, parameter: Parameter) -> str:
    pointer = "a pointer to " if parameter.is_pointer else ""
    return f"parameter {index + 1} to be {pointer}{_ctype(parameter.dtype)}, for {parameter.name}"


def mismatch(log: str) -> str | None:
    """Return what a compiler's log says was expected of the parameters, if that is all that went wrong."""
    match = re.search(rf'assertion failed[^\n]*"{_MARK}([^"\n]+)"', log)
    if any("assertion failed" not in error for error in re.findall(r"error: ([^\n]*)", log)):
        return None
    return None if match is None else match[1].strip()


def _kind(dtype: DType) -> tuple[int, int]:
    if dtype is None:  # a null pointer, to whatever
        return -1, 0
    dtype = np.dtype(dtype)
    if dtype.name in _OWN_HEADER:
        return _OWN_HEADER[dtype.name], dtype.itemsize
    return {"f": 1, "i": 2, "u": 2, "b": 2}.get(dtype.kind, 0), dtype.itemsize


def _ctype(dtype: DType) -> str:
    if dtype is None:
        return "anything"
    if np.dtype(dtype).type is np.void:
        return f"a structure of {np.dtype(dtype).itemsize} bytes"
    try:
        return CudaKernel.ctype(dtype)
    except ValueError:
        return np.dtype(dtype).name
