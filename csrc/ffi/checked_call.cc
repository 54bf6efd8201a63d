#include "ffi/checked_call.h"

#include <atomic>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "ffi/cpu_targets.h"
#include "python/handle.h"
#include "python/interpreter.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {
namespace {

namespace ffi = xla::ffi;

nb::object& checked_native() {
  static auto* hook = new nb::object();
  return *hook;
}
std::atomic<bool> is_checked{false};  // the same, for those who do not have the GIL

void set_checked_native(nb::object hook) {
  is_checked = !hook.is_none();
  checked_native() = hook.is_none() ? nb::object() : std::move(hook);
}

XLA_FFI_Error* error_of(const XLA_FFI_CallFrame* frame, const std::string& text) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 XLA_FFI_Error_Code_INTERNAL};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// One call, of which Python decides when and where it runs. Needs the GIL.
class NativeCall {
 public:
  NativeCall(XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame)
      : handler_(handler),
        frame_(frame),
        outputs_(frame->rets.rets, frame->rets.size),
        inputs_(frame->args.args, frame->args.size),
        lent_(outputs_.buffers.size(), inputs_.buffers.size()) {}
  ~NativeCall() { lent_.release(false); }
  NativeCall(const NativeCall&) = delete;
  NativeCall& operator=(const NativeCall&) = delete;

  // False if there is a type that no Buffer has.
  bool lend() {
    size_t slot = 0;
    for (const Memory* memory : {&outputs_, &inputs_}) {
      for (const XLA_FFI_Buffer& buffer : memory->buffers) {
        if (!lend(slot++, buffer, memory == &outputs_)) return false;
      }
    }
    return true;
  }

  void run() {
    if (error_ != nullptr) throw std::logic_error("eqxcallback: the kernel has failed already");
    size_t slot = 0;
    for (Memory* memory : {&outputs_, &inputs_}) {
      for (XLA_FFI_Buffer& buffer : memory->buffers) {
        buffer.data = reinterpret_cast<void*>(nb::inst_ptr<Buffer>(lent_.buffer_object(slot++))->address());
      }
    }
    XLA_FFI_CallFrame inner = *frame_;
    inner.rets.rets = outputs_.pointers.data();
    inner.args.args = inputs_.pointers.data();
    {
      nb::gil_scoped_release released;
      error_ = handler_(&inner);
    }
    if (error_ != nullptr) throw std::runtime_error("the kernel failed");
  }

  const Frame& lent() const { return lent_; }
  // What the kernel itself has said, if anything.
  XLA_FFI_Error* error() const { return error_; }

 private:
  // Copies of what XLA says of operands or results, with memory of our choice.
  struct Memory {
    Memory(void* const* all, int64_t size) {
      for (int64_t i = 0; i < size; ++i) buffers.push_back(*static_cast<XLA_FFI_Buffer*>(all[i]));
      for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::vector<XLA_FFI_Buffer> buffers;
    std::vector<void*> pointers;
  };

  bool lend(size_t slot, const XLA_FFI_Buffer& buffer, bool writeable) {
    const DType* dtype = find_dtype(buffer.dtype);
    if (dtype == nullptr) return false;
    const auto rank = static_cast<size_t>(buffer.rank);
    if (!dtype->packed()) {
      lent_.buffer(slot).lend(buffer.data, buffer.dims, rank, *dtype, writeable, {});
      return true;
    }
    // Python would unpack the elements: what it gets are their bytes.
    size_t elements = 1;
    for (size_t i = 0; i < rank; ++i) elements *= static_cast<size_t>(buffer.dims[i]);
    const auto bytes = static_cast<int64_t>(dtype->bytes_for(elements));
    lent_.buffer(slot).lend(buffer.data, &bytes, 1, *find_dtype(XLA_FFI_DataType_U8), writeable, {});
    return true;
  }

  XLA_FFI_Handler* handler_;
  XLA_FFI_CallFrame* frame_;
  Memory outputs_, inputs_;
  Frame lent_;
  XLA_FFI_Error* error_ = nullptr;
};

}  // namespace

XLA_FFI_Error* run_checked(const char* symbol, XLA_FFI_Handler* handler, XLA_FFI_CallFrame* frame) {
  if (!is_checked.load(std::memory_order_relaxed)) return handler(frame);
  const bool is_call = frame->extension_start == nullptr && frame->stage == XLA_FFI_ExecutionStage_EXECUTE;
  if (!is_call || !python_is_running()) return handler(frame);

  nb::gil_scoped_acquire gil;
  try {
    nb::object hook = checked_native();
    NativeCall call(handler, frame);
    if (!hook.is_valid() || !call.lend()) {
      nb::gil_scoped_release released;
      return handler(frame);
    }
    nb::object run = nb::cpp_function([&call] { call.run(); });
    try {
      hook(symbol, run, call.lent().outputs(), call.lent().inputs());
    } catch (nb::python_error& error) {
      if (call.error() != nullptr) return call.error();
      return error_of(frame, report_failure(nb::str(symbol), error, call.lent(), ""));
    }
    return nullptr;
  } catch (const std::exception& error) {
    return error_of(frame, std::string("eqxcallback: ") + error.what());
  }
}

void bind_checked_call(nb::module_& m) {
  m.def("set_checked_native", &set_checked_native, nb::arg("hook").none());
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { set_checked_native(nb::none()); }));
}

}  // namespace eqxcallback
