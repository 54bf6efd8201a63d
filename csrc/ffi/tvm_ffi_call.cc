// The handlers of TVM-FFI functions. Their arguments are an attribute of the call: three numbers for each, which Python
// has made of names. Arrays are lent as DLPack's tensors, made on the stack.
#include "ffi/tvm_ffi_call.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/tvm_ffi.h"
#include "ffi/c_call.h"
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

using tvm_ffi::Value;
using Numbers = ffi::Span<const int64_t>;

std::atomic<const tvm_ffi::Runtime*> loaded_runtime{nullptr};

const tvm_ffi::Runtime& runtime() {
  const tvm_ffi::Runtime* loaded = loaded_runtime.load(std::memory_order_acquire);
  if (loaded == nullptr) throw std::invalid_argument("expected to be called by eqxcallback");
  return *loaded;
}

// Kinds of arguments, as backends/_tvm_ffi_arguments.py writes them.
enum Kind : int64_t { kTensor = 0, kInteger = 1, kBool = 2, kFloat = 3, kText = 4, kNone = 5, kStream = 6 };

// An argument is its kind and two numbers: for a tensor the number of its operand or result, the results after the
// operands; for a number its bits; for a text where it begins among all texts, and its size.
constexpr size_t kNumbers = 3;

// As many items as a call has, without an allocation if they are few.
template <class Item, size_t kUsual>
class Few {
 public:
  explicit Few(size_t count) : many_(count > kUsual ? count : 0) {}
  Few(const Few&) = delete;
  Few& operator=(const Few&) = delete;

  Item* data() { return many_.empty() ? usual_.data() : many_.data(); }

 private:
  std::array<Item, kUsual> usual_;
  std::vector<Item> many_;
};

// An object that gives back the reference that it holds.
class Owned {
 public:
  explicit Owned(void* object) : object_(object) {}
  ~Owned() { runtime().release(object_); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

 private:
  void* object_;
};

std::string text_of(const tvm_ffi::Bytes& bytes) { return bytes.size == 0 ? "" : std::string(bytes.data, bytes.size); }

// Throws the error of the last function on this thread that did not return zero.
[[noreturn]] void throw_raised(int status) {
  void* raised = nullptr;
  runtime().move_raised(&raised);
  if (raised == nullptr) throw std::runtime_error("it returned " + std::to_string(status) + " without an error");
  const Owned owned(raised);
  const auto& error = *static_cast<const tvm_ffi::Error*>(raised);
  const std::string kind = text_of(error.kind), text = kind + ": " + text_of(error.message);
  if (kind == "ValueError" || kind == "TypeError") throw std::invalid_argument(text);
  throw std::runtime_error(text);
}

// Sets the stream that functions get for a device on this thread, while the object exists.
class CurrentStream {
 public:
  CurrentStream(int32_t device, void* stream) : device_(device) {
    const int status = runtime().set_stream(tvm_ffi::Device::kCuda, device, stream, &before_);
    if (status != 0) throw_raised(status);
  }
  ~CurrentStream() { runtime().set_stream(tvm_ffi::Device::kCuda, device_, before_, nullptr); }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  const int32_t device_;
  void* before_ = nullptr;
};

struct Arrays {
  const ffi::RemainingArgs& args;
  const ffi::RemainingRets& rets;

  ffi::AnyBuffer operator[](int64_t index) const {
    const auto i = static_cast<size_t>(index);
    if (i >= args.size() + rets.size()) {
      throw std::invalid_argument("expected as many operands and results as arguments name");
    }
    return i < args.size() ? *args.get<ffi::AnyBuffer>(i) : **rets.get<ffi::AnyBuffer>(i - args.size());
  }
};

// Makes a tensor over a buffer. `strides` has room for as many numbers as the array has axes.
tvm_ffi::Tensor tensor_of(const ffi::AnyBuffer& buffer, tvm_ffi::Device device, int64_t* strides) {
  const DType* dtype = find_dtype(static_cast<XLA_FFI_DataType>(buffer.element_type()));
  if (dtype == nullptr || dtype->packed()) throw std::invalid_argument("expected arrays of whole bytes");
  const auto dims = buffer.dimensions();
  int64_t stride = 1;
  for (size_t axis = dims.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= dims[axis];
  }
  return {buffer.untyped_data(),
          device,
          static_cast<int32_t>(dims.size()),
          {static_cast<uint8_t>(dtype->dlpack), dtype->bits, 1},
          const_cast<int64_t*>(dims.begin()),
          strides,
          0};
}

void call(const Arrays& arrays, tvm_ffi::Device device, void* stream, Numbers parameters, std::string_view texts,
          int64_t handle, int64_t process) {
  if (handle != 0 && process != this_process()) {
    throw std::invalid_argument(
        "the program calls a function in the memory of another process; make it again in this one");
  }
  void* const self = reinterpret_cast<void*>(handle);
  const auto function = self != nullptr ? static_cast<const tvm_ffi::Function*>(self)->call
                                        : reinterpret_cast<tvm_ffi::SafeCall>(const_cast<void*>(CalledFunction::get()));
  if (function == nullptr || parameters.size() % kNumbers != 1) {
    throw std::invalid_argument("expected to be called by eqxcallback");
  }
  const size_t count = parameters.size() / kNumbers;
  const int64_t* const numbers = parameters.begin() + 1;  // after a number that keeps the attribute from being empty
  size_t axes = 0, num_texts = 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t* p = numbers + i * kNumbers;
    if (p[0] == kTensor) axes += arrays[p[1]].dimensions().size();
    num_texts += p[0] == kText;
  }
  Few<Value, 24> args(count);
  Few<tvm_ffi::Tensor, 16> tensors(count);
  Few<int64_t, 64> strides(axes);
  std::vector<std::string> copies;  // copies of texts, which end with a zero
  copies.reserve(num_texts);        // arguments point into them
  int64_t* next_strides = strides.data();
  for (size_t i = 0; i < count; ++i) {
    const int64_t* p = numbers + i * kNumbers;
    Value& value = args.data()[i];
    value = {tvm_ffi::kNone, 0, {p[1]}};
    switch (p[0]) {
      case kTensor: {
        tvm_ffi::Tensor& tensor = tensors.data()[i];
        tensor = tensor_of(arrays[p[1]], device, next_strides);
        next_strides += tensor.rank;
        value.type = tvm_ffi::kTensor;
        value.pointer = &tensor;
        break;
      }
      case kInteger:
        value.type = tvm_ffi::kInteger;
        break;
      case kBool:
        value.type = tvm_ffi::kBool;
        break;
      case kFloat:
        value.type = tvm_ffi::kFloat;
        break;
      case kText:
        copies.emplace_back(texts.substr(static_cast<size_t>(p[1]), static_cast<size_t>(p[2])));
        value.type = tvm_ffi::kText;
        value.text = copies.back().c_str();
        break;
      case kStream:
        value.type = tvm_ffi::kPointer;
        value.pointer = stream;
        break;
      default:
        value.integer = 0;
    }
  }
  Value result{tvm_ffi::kNone, 0, {0}};
  const int status = function(self, args.data(), static_cast<int32_t>(count), &result);
  if (status != 0) throw_raised(status);
  if (result.type >= tvm_ffi::kFirstObject) {
    const Owned owned(result.pointer);
    throw std::runtime_error(
        "it returned an object, which nobody reads: results are arrays that it is given, and writes. Return nothing");
  }
}

ffi::Error call_on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, Numbers parameters, std::string_view texts,
                       int64_t handle, int64_t process) {
  return guarded([&] { call({args, rets}, {tvm_ffi::Device::kCpu, 0}, nullptr, parameters, texts, handle, process); });
}

ffi::Error call_on_cuda(int32_t device, void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        Numbers parameters, std::string_view texts, int64_t handle, int64_t process) {
  return guarded([&] {
    const CurrentStream current(device, stream);
    call({args, rets}, {tvm_ffi::Device::kCuda, device}, stream, parameters, texts, handle, process);
  });
}

template <class Binding>
auto with_arguments(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Numbers>("parameters")
      .template Attr<std::string_view>("texts")
      .template Attr<int64_t>("handle")
      .template Attr<int64_t>("process");
}
auto on_cuda() { return with_arguments(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<void*>>()); }

XLA_FFI_DEFINE_HANDLER(kOnCpu, call_on_cpu, with_arguments(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(kOnCuda, call_on_cuda, on_cuda());
// The trait belongs to the handler, so functions that may be captured have a handler of their own.
XLA_FFI_DEFINE_HANDLER(kOnCudaCaptured, call_on_cuda, on_cuda(), {ffi::Traits::kCmdBufferCompatible});

uintptr_t address(XLA_FFI_Handler* handler) { return reinterpret_cast<uintptr_t>(handler); }

// Sets the addresses of functions of libtvm_ffi, which stays loaded.
void set_runtime(uintptr_t move_raised, uintptr_t release, uintptr_t set_stream) {
  static const tvm_ffi::Runtime runtime = {reinterpret_cast<decltype(tvm_ffi::Runtime::move_raised)>(move_raised),
                                           reinterpret_cast<decltype(tvm_ffi::Runtime::release)>(release),
                                           reinterpret_cast<decltype(tvm_ffi::Runtime::set_stream)>(set_stream)};
  loaded_runtime.store(&runtime, std::memory_order_release);
}

}  // namespace

void bind_tvm_ffi_call(nanobind::module_& m) {
  m.def("tvm_ffi_handlers", [] {
    nanobind::dict handlers;
    handlers["cpu"] = address(kOnCpu);
    handlers["cuda"] = address(kOnCuda);
    handlers["cuda captured"] = address(kOnCudaCaptured);
    return handlers;
  });
  m.def("set_tvm_ffi_runtime", &set_runtime, nanobind::arg("move_raised"), nanobind::arg("release"),
        nanobind::arg("set_stream"));
}

}  // namespace eqxcallback
