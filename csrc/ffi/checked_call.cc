// Checked mode for native kernels: lends their buffers to Python, which calls them.
#include "ffi/checked_call.h"

#include <nanobind/stl/string.h>

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "ffi/cpu_targets.h"
#include "ffi/created_error.h"
#include "ffi/struct_copy.h"
#include "python/handle.h"
#include "python/visit.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {
namespace {

namespace ffi = xla::ffi;

nb::object& checked_native() {
  static auto* hook = new nb::object();
  return *hook;
}
std::atomic<bool> is_checked{false};  // true while the hook is set, for threads without the GIL

double seconds_in_child = 0;

void set_checked_native(nb::object hook, double seconds) {
  seconds_in_child = seconds;
  is_checked = !hook.is_none();
  checked_native() = hook.is_none() ? nb::object() : std::move(hook);
}

// Makes an error of checked mode itself, which is not the kernel's.
XLA_FFI_Error* error_of(const XLA_FFI_Api* api, const std::string& text) {
  XLA_FFI_Error* error = create_error(api, XLA_FFI_Error_Code_INTERNAL, text);
  last_created_error().error = nullptr;
  return error;
}

// Makes a dictionary for Python. By index, results come before operands. See eqxcallback/debug/_child.py.
nb::object child_call_object(const ChildCall& call) {
  nb::dict said;
  said["ending"] = ending_object(call.ending);
  nb::list overruns, ignored;
  for (const ChildCall::Overrun& overrun : call.overruns) {
    overruns.append(nb::make_tuple(overrun.index, overrun.is_after, overrun.bytes.count, overrun.bytes.nearest));
  }
  for (const std::string& name : call.ignored_attributes) ignored.append(text_object(name));
  said["overruns"] = overruns;
  said["ignored_attributes"] = ignored;
  said["fault"] = nb::none();
  if (call.fault) said["fault"] = nb::make_tuple(call.fault->index, call.fault->is_after, call.fault->distance);
  return said;
}

// One call. Python decides when and where it runs. Needs the GIL.
class NativeCall {
 public:
  // With `kernel`, a user's kernel, the call runs in a child process.
  NativeCall(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame, UserKernel* kernel)
      : handler_(handler),
        kernel_(kernel),
        frame_(frame),
        outputs_(frame->rets.rets, frame->rets.size),
        inputs_(frame->args.args, frame->args.size),
        lent_(outputs_.buffers.size(), inputs_.buffers.size()) {}
  ~NativeCall() {
    forget_error();
    lent_.release(false);
  }
  NativeCall(const NativeCall&) = delete;
  NativeCall& operator=(const NativeCall&) = delete;

  // Lends the buffers. Returns false if one has a type that no Buffer has.
  bool lend() {
    size_t slot = 0;
    for (const Memory* memory : {&outputs_, &inputs_}) {
      for (const auto& buffer : memory->buffers) {
        if (!lend(slot++, *buffer->get(), memory == &outputs_)) return false;
      }
    }
    return true;
  }

  nb::object run() {
    forget_error();  // Python has handled it
    size_t slot = 0;
    for (Memory* memory : {&outputs_, &inputs_}) {
      for (const auto& buffer : memory->buffers) {
        (*buffer)->data = reinterpret_cast<void*>(nb::inst_ptr<Buffer>(lent_.buffer_object(slot++))->address());
      }
    }
    StructCopy<XLA_FFI_CallFrame> inner(*frame_);
    inner->rets.rets = outputs_.pointers.data();
    inner->args.args = inputs_.pointers.data();
    if (kernel_ != nullptr) return run_in_child(*inner.get());
    {
      nb::gil_scoped_release released;
      error_ = handler_(inner.get());
    }
    if (error_ != nullptr) throw std::runtime_error("the kernel failed");
    return nb::none();
  }

  const Frame& lent() const { return lent_; }
  // True if the kernel goes on after its call, so that no one can look at what it writes.
  bool is_asynchronous() const { return is_asynchronous_; }
  // Returns the kernel's own error, if it made one. The caller owns it.
  XLA_FFI_Error* take_error() { return std::exchange(error_, nullptr); }

 private:
  // Copies of XLA's descriptions of operands or results, with memory of our choice.
  struct Memory {
    Memory(void* const* all, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        buffers.push_back(std::make_unique<StructCopy<XLA_FFI_Buffer>>(*static_cast<XLA_FFI_Buffer*>(all[i])));
        pointers.push_back(buffers.back()->get());
      }
    }

    std::vector<std::unique_ptr<StructCopy<XLA_FFI_Buffer>>> buffers;
    std::vector<void*> pointers;
  };

  void forget_error() {
    if (error_ == nullptr) return;
    destroy_error(frame_->api, take_error());
  }

  nb::object run_in_child(const XLA_FFI_CallFrame& inner) {
    // The child holds the GIL, as a kernel may want it.
    const ChildCall call = call_in_child(*kernel_, inner, seconds_in_child, [](const std::function<void()>& wait) {
      nb::gil_scoped_release released;
      wait();
    });
    is_asynchronous_ = call.is_asynchronous;
    if (is_asynchronous_) throw std::runtime_error("the kernel is asynchronous");
    if (call.error) {
      error_ = create_error(frame_->api, call.error->code, call.error->message);
      throw std::runtime_error("the kernel failed");
    }
    return child_call_object(call);
  }

  bool lend(size_t slot, const XLA_FFI_Buffer& buffer, bool writeable) {
    const DType* dtype = find_dtype(buffer.dtype);
    if (dtype == nullptr) return false;
    const auto rank = static_cast<size_t>(buffer.rank);
    if (!dtype->packed()) {
      lent_.buffer(slot).lend(buffer.data, buffer.dims, rank, *dtype, writeable, {});
      return true;
    }
    // Python gets the bytes of the elements, which it would otherwise unpack.
    const auto bytes = static_cast<int64_t>(bytes_of(buffer));
    lent_.buffer(slot).lend(buffer.data, &bytes, 1, *find_dtype(XLA_FFI_DataType_U8), writeable, {});
    return true;
  }

  XLA_FFI_Handler* handler_;
  UserKernel* kernel_;
  XLA_FFI_CallFrame* frame_;
  bool is_asynchronous_ = false;
  Memory outputs_, inputs_;
  Frame lent_;
  XLA_FFI_Error* error_ = nullptr;
};

XLA_FFI_Error* run(const std::function<std::string()>& who, XLA_FFI_Handler* handler, UserKernel* kernel,
                   XLA_FFI_CallFrame* frame, const XLA_FFI_Api* api) {
  const bool is_call = frame->extension_start == nullptr && frame->stage == XLA_FFI_ExecutionStage_EXECUTE;
  const Visit visit;
  if (!is_call || !visit.is_allowed()) return handler(frame);

  nb::gil_scoped_acquire gil;
  try {
    nb::object hook = checked_native();
    NativeCall call(handler, frame, kernel);
    if (!hook.is_valid() || !call.lend()) {
      nb::gil_scoped_release released;
      return handler(frame);
    }
    nb::object run = nb::cpp_function([&call] { return call.run(); });
    const std::string symbol = who();
    try {
      hook(symbol, run, call.lent().outputs(), call.lent().inputs());
    } catch (nb::python_error& error) {
      if (XLA_FFI_Error* of_call = call.take_error()) return of_call;
      if (!call.is_asynchronous())
        return error_of(api, report_failure(nb::str(symbol.c_str()), error, call.lent(), ""));
    }
    if (!call.is_asynchronous()) return nullptr;
  } catch (const std::exception& error) {
    return error_of(api, std::string("eqxcallback: ") + error.what());
  }
  nb::gil_scoped_release released;
  return handler(frame);
}

}  // namespace

XLA_FFI_Error* run_checked(const char* symbol, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (!is_checked.load(std::memory_order_relaxed)) return handler(frame);
  return run([symbol] { return std::string(symbol); }, handler, nullptr, frame, frame->api);
}

XLA_FFI_Error* run_checked_in_child(const std::function<std::string()>& who, UserKernel& kernel,
                                    XLA_FFI_CallFrame* frame, const XLA_FFI_Api* api) {
  if (!is_checked.load(std::memory_order_relaxed)) return kernel.handler(frame);
  return run(who, kernel.handler, &kernel, frame, api);
}

nb::object text_object(const std::string& text) {
  const auto size = static_cast<Py_ssize_t>(text.size());
  return nb::steal(PyUnicode_DecodeUTF8(text.data(), size, "backslashreplace"));
}

nb::object ending_object(const Ending& ending) {
  constexpr const char* kKinds[] = {"returned", "threw", "signal", "exit", "time limit", "not started"};
  return nb::make_tuple(kKinds[static_cast<int>(ending.kind)], ending.number,
                        reinterpret_cast<uintptr_t>(ending.address), ending.is_write, text_object(ending.text));
}

void bind_checked_call(nb::module_& m) {
  m.def("set_checked_native", &set_checked_native, nb::arg("hook").none(), nb::arg("seconds") = 10.0);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { set_checked_native(nb::none(), 0); }));
}

}  // namespace eqxcallback
