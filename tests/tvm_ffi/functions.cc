// Functions of the TVM-FFI ABI: some in its C++, and some that look at what the ABI itself hands them.
#include <dlfcn.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <cmath>
#include <cstring>

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

static float* floats(TensorView x) {
  if (x.dtype() != DLDataType{kDLFloat, 32, 1}) TVM_FFI_THROW(TypeError) << "expected float32; got " << x.dtype();
  return static_cast<float*>(x.data_ptr());
}

static void saxpy(TensorView x, TensorView y, TensorView out, double a) {
  if (x.numel() != y.numel()) TVM_FFI_THROW(ValueError) << "expected as many elements; got " << y.numel();
  for (int64_t i = 0; i < x.numel(); ++i) floats(out)[i] = static_cast<float>(a) * floats(x)[i] + floats(y)[i];
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(saxpy, saxpy);

// A gradient that is smaller is of an operand that all examples share. One that is absent is not needed.
static void saxpy_backward(TensorView dout, Optional<TensorView> dx, Optional<TensorView> dy, double a) {
  for (bool is_x : {true, false}) {
    if (!(is_x ? dx : dy).has_value()) continue;
    const TensorView grad = (is_x ? dx : dy).value();
    std::memset(floats(grad), 0, grad.numel() * sizeof(float));
    for (int64_t i = 0; i < dout.numel(); ++i) {
      floats(grad)[i % grad.numel()] += (is_x ? static_cast<float>(a) : 1.0f) * floats(dout)[i];
    }
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(saxpy_backward, saxpy_backward);

static void cumulate(TensorView x, TensorView room, TensorView out) {
  float sum = 0;
  for (int64_t i = 0; i < x.numel(); ++i) floats(room)[i] = sum += floats(x)[i];
  std::memcpy(floats(out), floats(room), x.numel() * sizeof(float));
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cumulate, cumulate);

static void activation(TensorView x, tvm::ffi::String kind, Optional<double> shift, TensorView out) {
  if (kind != "tanh" && kind != "none") TVM_FFI_THROW(KeyError) << "no kind " << kind;
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float value = floats(x)[i] + static_cast<float>(shift.value_or(0));
    floats(out)[i] = kind == "none" ? value : std::tanh(value);
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation, activation);

// Objects that stay, so that their references can be counted.
static const tvm::ffi::Shape& kept_object() {
  static const tvm::ffi::Shape kept({1, 2, 3});
  return kept;
}
static const tvm::ffi::Error& kept_error() {
  static const tvm::ffi::Error kept("RuntimeError", "the one that is kept", "");
  return kept;
}

static tvm::ffi::Shape returns_an_object(TensorView) { return kept_object(); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(returns_an_object, returns_an_object);

static void raises_an_object(TensorView) { throw kept_error(); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(raises_an_object, raises_an_object);

// A tensor that has an owner, and could be kept.
static void takes_an_owner(tvm::ffi::Tensor) {}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(takes_an_owner, takes_an_owner);

static void asks_for_memory(TensorView x) {
  tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, x.shape(), x.dtype(), x.device());
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(asks_for_memory, asks_for_memory);

static void references(TensorView, TensorView out) {
  auto* counts = static_cast<int32_t*>(out.data_ptr());
  counts[0] = static_cast<int32_t>(kept_object().use_count());
  counts[1] = static_cast<int32_t>(kept_error().use_count());
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(references, references);

static void writes_too_much(TensorView x, TensorView out) {
  for (int64_t i = 0; i < x.numel() + 8; ++i) floats(out)[i] = 1;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(writes_too_much, writes_too_much);

// Whether the thread has Python's lock, and what the environment says of the streams of two devices.
static void surroundings(TensorView out) {
  const auto has_lock = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  auto* said = static_cast<int64_t*>(out.data_ptr());
  said[0] = has_lock();
  for (int device : {0, 2}) said[1 + device / 2] = reinterpret_cast<int64_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  said[3] = out.device().device_type;
  said[4] = out.device().device_id;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(surroundings, surroundings);

static void describe_pointer(void* pointer, TensorView out) {
  static_cast<int64_t*>(out.data_ptr())[0] = reinterpret_cast<int64_t>(pointer);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe_pointer, describe_pointer);

extern "C" {
// Eight numbers for each argument but the last, which takes them: see test_calls.py.
TVM_FFI_DLL_EXPORT int __tvm_ffi_describe(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  auto* said = static_cast<int64_t*>(static_cast<DLTensor*>(args[count - 1].v_ptr)->data);
  for (int32_t i = 0; i < count - 1; ++i, said += 8) {
    const TVMFFIAny& value = args[i];
    std::memset(said, 0, 8 * sizeof(*said));
    said[0] = value.type_index;
    said[1] = value.zero_padding;
    if (value.type_index == kTVMFFIDLTensorPtr) {
      const auto& x = *static_cast<const DLTensor*>(value.v_ptr);
      said[2] = x.dtype.code * 10000 + x.dtype.bits * 10 + x.dtype.lanes;
      said[3] = x.device.device_type * 10 + x.device.device_id + static_cast<int64_t>(x.byte_offset);
      said[4] = x.ndim;
      for (int32_t axis = 0; axis < x.ndim; ++axis) {
        said[5] = said[5] * 10 + x.shape[axis];
        said[6] = said[6] * 10 + x.strides[axis];
      }
    } else if (value.type_index == kTVMFFIRawStr) {
      said[2] = static_cast<int64_t>(std::strlen(value.v_c_str));
      said[3] = value.v_c_str[0];
    } else {
      said[2] = value.v_int64;
    }
  }
  return 0;
}

TVM_FFI_DLL_EXPORT int __tvm_ffi_fails_silently(void*, const TVMFFIAny*, int32_t, TVMFFIAny*) { return -7; }
}
