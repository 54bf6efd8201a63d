// The handlers of the python lane: lend the buffers, call the Handle, and end the loans.
#include "ffi/python_call.h"

#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/host_calls.h"
#include "ffi/capsule.h"
#include "ffi/host_callback_scope.h"
#include "python/handle.h"
#include "python/visit.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {
namespace {

namespace ffi = xla::ffi;

// The place of the key: in an attribute of the program's text, or for an eager call in the first operand, so that one
// compiled program serves all callables.
enum class KeyIn { kAttribute, kOperand };

ffi::Error unknown_key(uint64_t key) {
  return ffi::Error(
      ffi::ErrorCode::kNotFound,
      "eqxcallback: no Python callable of this process has the key " + std::to_string(key) +
          ". The program was made in another process, or its callable was freed. Trace and compile it here.");
}

// Points slot `slot` at an operand or result.
ffi::Error lend(Frame& frame, size_t slot, const ffi::AnyBuffer& buffer, bool writeable, const Place& place) {
  const auto type = static_cast<XLA_FFI_DataType>(buffer.element_type());
  const DType* dtype = find_dtype(type);
  if (dtype == nullptr) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "eqxcallback: XLA element type number " + std::to_string(type) +
                          " is not known to this version. Cast to a type that NumPy has.");
  }
  if (dtype->packed() && place.platform != Platform::kCpu) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string("eqxcallback: ") + dtype->name +
                                                          " is packed several to a byte on a GPU, which no array "
                                                          "library can view. Cast to int8 around the call.");
  }
  const auto dims = buffer.dimensions();
  if (!frame.buffer(slot).lend(buffer.untyped_data(), dims.begin(), dims.size(), *dtype, writeable, place)) {
    frame.set_proven(std::nullopt);
  }
  return ffi::Error::Success();
}

// Tells all buffers how their axes lie in memory: `layouts` has the axes of each buffer, from major to minor.
ffi::Error lay_out(Frame& frame, const ffi::Dictionary& attrs) {
  if (!attrs.contains("layouts")) return ffi::Error::Success();
  auto layouts = attrs.get<ffi::Span<const int64_t>>("layouts");
  const auto invalid = [] {
    return ffi::Error::InvalidArgument("eqxcallback: expected `layouts` to have the axes of each buffer");
  };
  if (layouts.has_error()) return invalid();
  size_t begin = 0;
  for (size_t slot = 0; slot < frame.size(); ++slot) {
    Buffer& buffer = frame.buffer(slot);
    const size_t rank = buffer.ndim();
    if (begin + rank > layouts->size()) return invalid();
    std::vector<bool> seen(rank, false);
    for (size_t i = 0; i < rank; ++i) {
      const int64_t axis = (*layouts)[begin + i];
      if (axis < 0 || static_cast<size_t>(axis) >= rank || seen[static_cast<size_t>(axis)]) return invalid();
      seen[static_cast<size_t>(axis)] = true;
    }
    buffer.set_order(layouts->begin() + begin);
    if (!buffer.row_major() && buffer.dtype().packed()) {
      return ffi::Error(ffi::ErrorCode::kUnimplemented, "eqxcallback: packed types are row-major only");
    }
    begin += rank;
  }
  return begin == layouts->size() ? ffi::Error::Success() : invalid();
}

// Ends the loans when the call ends, however it ends.
class Loan {
 public:
  Loan(Handle& handle, size_t num_outputs, size_t num_inputs)
      : handle_(handle), frame_(handle.take_frame(num_outputs, num_inputs)) {}
  ~Loan() {
    frame_->release(commit_);
    handle_.give_back(std::move(frame_));
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  Frame& frame() { return *frame_; }
  void commit() { commit_ = true; }

 private:
  Handle& handle_;
  std::unique_ptr<Frame> frame_;
  bool commit_ = false;
};

// True for an ordered call, whose first operand and first result are tokens, which the callable does not see.
bool is_ordered(const ffi::RemainingRets& rets) {
  if (rets.size() == 0) return false;
  auto first = rets.get<ffi::AnyBuffer>(0);
  return first.has_value() && (*first)->element_type() == ffi::TOKEN;
}

ffi::Error call_python(uint64_t key, const Place& place, const ffi::RemainingArgs& args, size_t first_arg,
                       const ffi::RemainingRets& rets, const ffi::Dictionary& attrs) {
  const Visit visit;
  if (!visit.is_allowed()) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "eqxcallback: a callback was due while Python exits, or after");
  }
  nb::gil_scoped_acquire gil;
  host_calls.fetch_add(1, std::memory_order_relaxed);
  try {
    nb::object alive = Handle::find(key);  // the callable may drop the last other reference to itself
    if (!alive.is_valid()) {
      // An exported program names its callable, so that another process can import it.
      auto portable = attrs.get<std::string_view>("portable");
      if (portable.has_error()) return unknown_key(key);
      if (std::string problem = import_portable(key, std::string(*portable)); !problem.empty()) {
        return ffi::Error(ffi::ErrorCode::kNotFound, problem);
      }
      alive = Handle::find(key);
      if (!alive.is_valid()) return unknown_key(key);
    }
    Handle* handle = nb::inst_ptr<Handle>(alive);

    const size_t first_ret = is_ordered(rets) ? 1 : 0;
    first_arg += first_ret;
    if (args.size() < first_arg) return ffi::Error::InvalidArgument("eqxcallback: expected a token as a first operand");
    const size_t num_outputs = rets.size() - first_ret, num_inputs = args.size() - first_arg;
    Loan loan(*handle, num_outputs, num_inputs);
    Frame& frame = loan.frame();
    frame.context() = ExecutionContext{Stage::kExecute, place};
    for (size_t i = 0; i < num_outputs; ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(first_ret + i);
      if (buffer.has_error()) return buffer.error();
      if (ffi::Error error = lend(frame, i, *buffer.value(), true, place); error.failure()) return error;
    }
    for (size_t i = 0; i < num_inputs; ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(first_arg + i);
      if (buffer.has_error()) return buffer.error();
      if (ffi::Error error = lend(frame, num_outputs + i, buffer.value(), false, place); error.failure()) return error;
    }
    if (ffi::Error error = lay_out(frame, attrs); error.failure()) return error;
    try {
      handle->call(frame);
    } catch (nb::python_error& error) {
      auto name_stack = attrs.get<std::string_view>("name_stack");  // eager programs have none
      return ffi::Error::Internal(report_failure(handle->body(), error, frame,
                                                 name_stack.has_value() ? std::string(*name_stack) : std::string()));
    }
    loan.commit();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("eqxcallback: ") + error.what());
  } catch (...) {
    return ffi::Error::Internal("eqxcallback: an unknown C++ exception");
  }
  return ffi::Error::Success();
}

template <KeyIn where>
ffi::Error dispatch(const Place& place, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                    const ffi::Dictionary& attrs) {
  if constexpr (where == KeyIn::kAttribute) {
    auto key = attrs.get<uint64_t>("key");
    if (key.has_error()) {
      return ffi::Error::InvalidArgument("eqxcallback: expected an attribute `key` of type ui64");
    }
    return call_python(*key, place, args, 0, rets, attrs);
  } else {
    auto operand = args.get<ffi::Buffer<ffi::U32>>(0);
    if (operand.has_error() || operand->element_count() != 2) {
      return ffi::Error::InvalidArgument("eqxcallback: expected the key as a first operand of type ui32[2]");
    }
    uint64_t key;
    std::memcpy(&key, operand->untyped_data(), sizeof(key));
    return call_python(key, place, args, 1, rets, attrs);
  }
}

template <KeyIn where>
ffi::Error on_cpu(int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return dispatch<where>({Platform::kCpu, ordinal, 0}, args, rets, attrs);
}

ffi::Error on_cuda(void* stream, int32_t ordinal, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary attrs) {
  const Place place{Platform::kCuda, ordinal, reinterpret_cast<uintptr_t>(stream)};
  return dispatch<KeyIn::kAttribute>(place, args, rets, attrs);
}

// A stream does not decode on a CPU, and the trait belongs to the handler, so each has a handler of its own.
auto cpu_binding() { return ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs(); }
auto cuda_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<void*>>()
      .Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kUnscopedCpu, on_cpu<KeyIn::kAttribute>, cpu_binding());
XLA_FFI_DEFINE_HANDLER(kUnscopedCpuEager, on_cpu<KeyIn::kOperand>, cpu_binding());
XLA_FFI_Error* python_cpu(XLA_FFI_CallFrame* frame) { return run_in_host_callback_scope(kUnscopedCpu, frame); }
XLA_FFI_Error* python_cpu_eager(XLA_FFI_CallFrame* frame) {
  return run_in_host_callback_scope(kUnscopedCpuEager, frame);
}
XLA_FFI_DEFINE_HANDLER(kPythonCuda, on_cuda, cuda_binding());
XLA_FFI_DEFINE_HANDLER(kPythonCudaCaptured, on_cuda, cuda_binding(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

nb::dict python_call_targets() {
  nb::dict eager, plain, captured, targets;
  eager["cpu"] = capsule(python_cpu_eager);
  plain["cpu"] = capsule(python_cpu);
  plain["CUDA"] = capsule(kPythonCuda);
  captured["CUDA"] = capsule(kPythonCudaCaptured);
  targets["eqxcallback_python_eager"] = eager;
  targets["eqxcallback_python"] = plain;
  targets["eqxcallback_python_captured"] = captured;
  return targets;
}

}  // namespace eqxcallback
