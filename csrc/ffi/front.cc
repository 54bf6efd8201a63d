// Fronts: handlers of ours that name kernels and ops in the errors of other handlers.
#include "ffi/front.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "ffi/c_call.h"
#include "ffi/capsule.h"
#include "ffi/checked_call.h"
#include "ffi/cpu_targets.h"
#include "ffi/created_error.h"
#include "ffi/each_example.h"
#include "ffi/probe.h"
#include "ffi/struct_copy.h"
#include "python/visit.h"

namespace eqxcallback {
namespace {

namespace nb = nanobind;

constexpr size_t kFronts = 512;

struct Front {
  UserKernel kernel;
  const void* function = nullptr;       // for the handler of C functions: the function to call
  XLA_FFI_Handler* for_each = nullptr;  // the handler that is called for each example, if `kernel` does that
  std::string symbol;                   // empty for handlers of this package
  bool is_checked = false;

  std::mutex mutex;
  std::vector<std::string> ops;  // the ops that call it
  // XLA's API with our own `Error_Create`. It is never freed, as promises of handlers may use it at any time.
  std::atomic<StructCopy<XLA_FFI_Api>*> api{nullptr};
  const XLA_FFI_Api* theirs = nullptr;

  std::string op_names() {
    const std::lock_guard lock(mutex);
    std::string names;
    for (const std::string& op : ops) names += (names.empty() ? "" : " or ") + op;
    return names;
  }
  // Returns `saxpy[native]: kernel Saxpy`.
  std::string who() { return op_names() + "[native]: kernel " + symbol; }
};

std::array<Front, kFronts>& fronts() {
  static auto* all = new std::array<Front, kFronts>();
  return *all;
}
std::atomic<size_t> taken{0};

nb::object& error_hook() {
  static auto* hook = new nb::object();
  return *hook;
}

void type_texts(std::string& text, void* const* buffers, int64_t size) {
  text += "(";
  for (int64_t i = 0; i < size; ++i) {
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(buffers[i]);
    const DType* dtype = find_dtype(buffer.dtype);
    text += std::string(i > 0 ? ", " : "") + (dtype == nullptr ? "token" : dtype->name) + "[";
    for (int64_t axis = 0; axis < buffer.rank; ++axis) {
      text += (axis > 0 ? "," : "") + std::to_string(buffer.dims[axis]);
    }
    text += "]";
  }
  text += ")";
}

// Lets Python record the error, and returns the same error with the text that Python gives it.
XLA_FFI_Error* recorded(Front& front, const XLA_FFI_CallFrame& frame, XLA_FFI_Error* error) {
  const CreatedError created = last_created_error();
  const Visit visit;
  if (created.error != error || !visit.is_allowed()) return error;
  std::string operands;
  type_texts(operands, frame.args.args, frame.args.size);
  operands += " -> ";
  type_texts(operands, frame.rets.rets, frame.rets.size);
  std::string text;
  {
    nb::gil_scoped_acquire gil;
    if (!error_hook().is_valid()) return error;
    try {
      text = nb::cast<std::string>(error_hook()(front.op_names(), front.symbol, static_cast<int>(created.code),
                                                text_object(created.message), operands));
    } catch (const nb::python_error&) {
      return error;
    }
  }
  destroy_error(frame.api, error);
  return create_error(frame.api, created.code, text);
}

XLA_FFI_Error* create_error_of(Front& front, XLA_FFI_Error_Create_Args* args) {
  XLA_FFI_Error* error =
      create_error(front.theirs, args->errc, front.symbol.empty() ? args->message : front.who() + ": " + args->message);
  last_created_error() = {error, args->errc, args->message};
  return error;
}

const XLA_FFI_Api* api_of(Front& front, const XLA_FFI_Api* theirs, XLA_FFI_Error_Create* create) {
  if (StructCopy<XLA_FFI_Api>* api = front.api.load(std::memory_order_acquire)) return api->get();
  const std::lock_guard lock(front.mutex);
  if (front.api.load(std::memory_order_relaxed) == nullptr) {
    auto api = std::make_unique<StructCopy<XLA_FFI_Api>>(*theirs);
    (*api)->XLA_FFI_Error_Create = create;
    front.theirs = theirs;
    front.api.store(api.release(), std::memory_order_release);
  }
  return front.api.load(std::memory_order_relaxed)->get();
}

XLA_FFI_Error* call(Front& front, XLA_FFI_CallFrame* frame, XLA_FFI_Error_Create* create) {
  // XLA's questions about the handler, such as its traits, go to the handler.
  if (frame->extension_start != nullptr) return (front.for_each ? front.for_each : front.kernel.handler)(frame);
  const XLA_FFI_Api* theirs = frame->api;
  frame->api = api_of(front, theirs, create);
  const CalledFunction function(front.function);
  const CalledForEach for_each(front.for_each, front.function);
  XLA_FFI_Error* error = nullptr;
  try {
    error = front.is_checked ? run_checked_in_child([&front] { return front.who(); }, front.kernel, frame, theirs)
                             : front.kernel.handler(frame);
  } catch (const std::exception& exception) {
    const std::string text = std::string("it threw a C++ exception: ") + exception.what();
    error = create_error(frame->api, XLA_FFI_Error_Code_INTERNAL, text);
  } catch (...) {
    error = create_error(frame->api, XLA_FFI_Error_Code_INTERNAL, "it threw a C++ exception");
  }
  frame->api = theirs;
  return error == nullptr ? nullptr : recorded(front, *frame, error);
}

template <size_t i>
XLA_FFI_Error* create_error_at(XLA_FFI_Error_Create_Args* args) {
  return create_error_of(fronts()[i], args);
}

template <size_t i>
XLA_FFI_Error* call_at(XLA_FFI_CallFrame* frame) {
  return call(fronts()[i], frame, create_error_at<i>);
}

template <size_t... i>
constexpr std::array<XLA_FFI_Handler*, kFronts> handlers(std::index_sequence<i...>) {
  return {call_at<i>...};
}
constexpr std::array<XLA_FFI_Handler*, kFronts> kHandlers = handlers(std::make_index_sequence<kFronts>());

// Takes a free front. Returns its number, or `kFronts` if none is free.
size_t take() {
  size_t number = taken.load();
  while (number < kFronts && !taken.compare_exchange_weak(number, number + 1)) {
  }
  return number;
}

// Puts a front before the handler `symbol` of a user's library, at `address`. Returns the front's number and its
// capsule; without a free front -1 and a capsule of the handler itself. With `is_checked`, checked mode calls the
// handler in a child process, in which `set_threads`, an address or zero, is first called with 1. `function` is what
// the handler of C functions calls, or zero. With `for_each` the handler is called for each example of a batch.
nb::tuple front(uintptr_t address, std::string symbol, bool is_checked, uintptr_t set_threads, uintptr_t function,
                bool for_each) {
  auto* handler = reinterpret_cast<XLA_FFI_Handler*>(address);
  const size_t number = take();
  if (number == kFronts) return nb::make_tuple(-1, capsule(handler));
  Front& front = fronts()[number];
  front.kernel.handler = for_each ? call_each_example : handler;
  front.for_each = for_each ? handler : nullptr;
  front.kernel.set_threads = reinterpret_cast<void (*)(int)>(set_threads);
  front.function = reinterpret_cast<const void*>(function);
  front.symbol = std::move(symbol);
  front.is_checked = is_checked;
  return nb::make_tuple(number, capsule(kHandlers[number]));
}

// Lets errors of the front `number` name the op `op` from now on.
void name_caller(size_t number, std::string op) {
  Front& front = fronts().at(number);
  const std::lock_guard lock(front.mutex);
  if (std::find(front.ops.begin(), front.ops.end(), op) == front.ops.end()) front.ops.push_back(std::move(op));
}

// Returns None if the function at `address` is an XLA FFI handler, or else how it ended when it was asked: see
// `ending_object`.
nb::object describe_function(uintptr_t address, double seconds) {
  const Waiting waiting = [](const std::function<void()>& wait) {
    nb::gil_scoped_release released;
    wait();
  };
  const Answer answer = ask_for_metadata(reinterpret_cast<XLA_FFI_Handler*>(address), seconds, waiting);
  return answer.is_handler ? nb::none() : ending_object(answer.ending);
}

void on_native_error(nb::object hook) { error_hook() = hook.is_none() ? nb::object() : std::move(hook); }

}  // namespace

XLA_FFI_Handler* front_of_ours(XLA_FFI_Handler* handler, bool for_each) {
  XLA_FFI_Handler* const called = for_each ? call_each_example : handler;
  XLA_FFI_Handler* const of_one = for_each ? handler : nullptr;
  for (size_t number = 0; number < taken; ++number) {
    const Front& front = fronts()[number];
    if (front.kernel.handler == called && front.for_each == of_one) return kHandlers[number];
  }
  const size_t number = take();
  if (number == kFronts) throw std::logic_error("eqxcallback: there are more CPU kernels than fronts");
  fronts()[number].kernel.handler = called;
  fronts()[number].for_each = of_one;
  return kHandlers[number];
}

void bind_front(nb::module_& m) {
  m.def("front", &front, nb::arg("address"), nb::arg("symbol"), nb::arg("is_checked"), nb::arg("set_threads"),
        nb::arg("function") = 0, nb::arg("for_each") = false);
  m.def("name_caller", &name_caller, nb::arg("number"), nb::arg("op"));
  m.def("describe_function", &describe_function, nb::arg("address"), nb::arg("seconds"));
  m.def("on_native_error", &on_native_error, nb::arg("hook").none());
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { on_native_error(nb::none()); }));
}

}  // namespace eqxcallback
