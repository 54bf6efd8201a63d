"""Layouts and numbers of TVM-FFI's ABI that we declare, beside its headers."""

import pathlib
import subprocess

import jax
import pytest

from .library import tvm_ffi


pytestmark = pytest.mark.any_jax_version

SOURCE = r"""
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <type_traits>
#include "core/dtype.h"
#include "core/tvm_ffi.h"
namespace ours = eqxcallback::tvm_ffi;
using eqxcallback::DLCode;

template <class Ours, class Theirs>
constexpr bool kAlike = sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
#define AT(ours, field, theirs, name) static_assert(offsetof(ours, field) == offsetof(theirs, name))

static_assert(kAlike<ours::Device, DLDevice> && kAlike<ours::DataType, DLDataType> && kAlike<ours::Tensor, DLTensor>);
AT(ours::Device, type, DLDevice, device_type);
AT(ours::Device, id, DLDevice, device_id);
AT(ours::DataType, code, DLDataType, code);
AT(ours::DataType, bits, DLDataType, bits);
AT(ours::DataType, lanes, DLDataType, lanes);
AT(ours::Tensor, data, DLTensor, data);
AT(ours::Tensor, device, DLTensor, device);
AT(ours::Tensor, rank, DLTensor, ndim);
AT(ours::Tensor, dtype, DLTensor, dtype);
AT(ours::Tensor, shape, DLTensor, shape);
AT(ours::Tensor, strides, DLTensor, strides);
AT(ours::Tensor, byte_offset, DLTensor, byte_offset);
static_assert(ours::Device::kCpu == kDLCPU && ours::Device::kCuda == kDLCUDA);

static_assert(kAlike<ours::Value, TVMFFIAny> && kAlike<ours::Object, TVMFFIObject>);
AT(ours::Value, type, TVMFFIAny, type_index);
AT(ours::Value, padding, TVMFFIAny, zero_padding);
AT(ours::Value, integer, TVMFFIAny, v_int64);
AT(ours::Value, floating, TVMFFIAny, v_float64);
AT(ours::Value, pointer, TVMFFIAny, v_ptr);
AT(ours::Value, text, TVMFFIAny, v_c_str);
static_assert(ours::kNone == kTVMFFINone && ours::kInteger == kTVMFFIInt && ours::kBool == kTVMFFIBool);
static_assert(ours::kFloat == kTVMFFIFloat && ours::kPointer == kTVMFFIOpaquePtr && ours::kText == kTVMFFIRawStr);
static_assert(ours::kTensor == kTVMFFIDLTensorPtr && ours::kFirstObject == kTVMFFIStaticObjectBegin);

static_assert(offsetof(ours::Function, call) == sizeof(TVMFFIObject) + offsetof(TVMFFIFunctionCell, safe_call));
static_assert(offsetof(ours::Error, kind) == sizeof(TVMFFIObject) + offsetof(TVMFFIErrorCell, kind));
static_assert(offsetof(ours::Error, message) == sizeof(TVMFFIObject) + offsetof(TVMFFIErrorCell, message));
static_assert(kAlike<ours::Bytes, TVMFFIByteArray>);
AT(ours::Bytes, data, TVMFFIByteArray, data);
AT(ours::Bytes, size, TVMFFIByteArray, size);

template <class Theirs>
constexpr bool kIsSafeCall = std::is_same_v<Theirs, int (*)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*)>;
static_assert(kIsSafeCall<TVMFFISafeCallType>);
static_assert(std::is_same_v<decltype(ours::Runtime::move_raised), decltype(&TVMFFIErrorMoveFromRaised)>);
static_assert(std::is_same_v<decltype(ours::Runtime::release), decltype(&TVMFFIObjectDecRef)>);
static_assert(std::is_same_v<decltype(ours::Runtime::set_stream), decltype(&TVMFFIEnvSetStream)>);

#define CODE(ours, theirs) static_assert(static_cast<int>(DLCode::ours) == theirs)
CODE(kInt, kDLInt);
CODE(kUInt, kDLUInt);
CODE(kFloat, kDLFloat);
CODE(kBfloat, kDLBfloat);
CODE(kComplex, kDLComplex);
CODE(kBool, kDLBool);
CODE(kFloat8E3M4, kDLFloat8_e3m4);
CODE(kFloat8E4M3, kDLFloat8_e4m3);
CODE(kFloat8E4M3B11FNUZ, kDLFloat8_e4m3b11fnuz);
CODE(kFloat8E4M3FN, kDLFloat8_e4m3fn);
CODE(kFloat8E4M3FNUZ, kDLFloat8_e4m3fnuz);
CODE(kFloat8E5M2, kDLFloat8_e5m2);
CODE(kFloat8E5M2FNUZ, kDLFloat8_e5m2fnuz);
CODE(kFloat8E8M0FNU, kDLFloat8_e8m0fnu);
"""


def test_layouts_and_numbers():
    includes = [*tvm_ffi.libinfo.include_paths(), jax.ffi.include_dir(), pathlib.Path(__file__).parents[2] / "csrc"]
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-", *(f"-I{path}" for path in includes)]
    done = subprocess.run(command, input=SOURCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
