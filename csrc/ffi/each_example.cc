// Calls a handler for each example of a batch: frames, threads, errors, futures.
#include "ffi/each_example.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "ffi/aligned_example.h"
#include "ffi/c_call.h"
#include "ffi/created_error.h"
#include "ffi/example_futures.h"
#include "ffi/huge_pages.h"
#include "ffi/struct_copy.h"
#include "ffi/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {
namespace {

namespace ffi = xla::ffi;

thread_local XLA_FFI_Handler* called_handler = nullptr;
thread_local const void* called_function = nullptr;

constexpr std::string_view kAttribute = "eqxcallback_examples";
// The number of parts of the batch for each thread: a thread may start late, or be slow.
constexpr int64_t kPartsPerThread = 8;

// The data that all examples of a call share.
class Batch {
 public:
  explicit Batch(const XLA_FFI_CallFrame& frame) : frame_(frame) {
    const XLA_FFI_Array* mapped = nullptr;
    for (int64_t i = 0; i < frame.attrs.size; ++i) {
      const XLA_FFI_ByteSpan& name = *frame.attrs.names[i];
      if (std::string_view(name.ptr, name.len) == kAttribute && frame.attrs.types[i] == XLA_FFI_AttrType_ARRAY) {
        mapped = static_cast<const XLA_FFI_Array*>(frame.attrs.attrs[i]);
        continue;
      }
      types_.push_back(frame.attrs.types[i]);
      names_.push_back(frame.attrs.names[i]);
      attributes_.push_back(frame.attrs.attrs[i]);
    }
    const auto count = static_cast<size_t>(frame.args.size + frame.rets.size);
    if (mapped == nullptr || mapped->dtype != XLA_FFI_DataType_S64 || mapped->size != count) {
      throw std::invalid_argument("expected to be called by eqxcallback");
    }
    for (size_t i = 0; i < count; ++i) add(buffer(i), static_cast<const int64_t*>(mapped->data)[i] != 0);
  }

  int64_t examples() const { return std::max<int64_t>(examples_, 0); }

  // Puts these operands, results and attributes in place of the caller's.
  void put(XLA_FFI_CallFrame& frame, void** buffers) {
    frame.args.args = buffers;
    frame.rets.rets = buffers + frame.args.size;
    frame.attrs.size = static_cast<int64_t>(types_.size());
    frame.attrs.types = types_.data();
    frame.attrs.names = names_.data();
    frame.attrs.attrs = attributes_.data();
  }

  size_t size() const { return bytes_.size(); }
  const XLA_FFI_CallFrame& frame() const { return frame_; }
  const XLA_FFI_Buffer& buffer(size_t i) const {
    const auto args = static_cast<size_t>(frame_.args.size);
    return *static_cast<const XLA_FFI_Buffer*>(i < args ? frame_.args.args[i] : frame_.rets.rets[i - args]);
  }
  // The bytes from one example to the next; nothing for an array that the examples share.
  std::optional<size_t> bytes(size_t i) const { return bytes_[i]; }

 private:
  void add(const XLA_FFI_Buffer& buffer, bool is_mapped) {
    if (!is_mapped) {
      bytes_.push_back(std::nullopt);
      return;
    }
    if (buffer.rank == 0 || (examples_ >= 0 && buffer.dims[0] != examples_)) {
      throw std::invalid_argument("expected one number of examples");
    }
    examples_ = buffer.dims[0];
    const DType* dtype = find_dtype(buffer.dtype);
    const size_t elements = elements_of(buffer.dims + 1, buffer.rank - 1);
    if (dtype == nullptr || elements * dtype->bits % 8 != 0) {
      throw std::invalid_argument(std::string("expected examples that begin with a byte; got an array of ") +
                                  (dtype == nullptr ? "another type" : dtype->name) +
                                  ", of which several elements share one. Use vmap_method=\"sequential\"");
    }
    bytes_.push_back(dtype->bytes_for(elements));
  }

  const XLA_FFI_CallFrame& frame_;
  int64_t examples_ = -1;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> attributes_;
  std::vector<std::optional<size_t>> bytes_;
};

// A call frame with the operands and results of one example.
class ExampleFrame {
 public:
  ExampleFrame(std::shared_ptr<Batch> batch, const XLA_FFI_Api* api)
      : batch_(std::move(batch)), frame_(batch_->frame()) {
    for (size_t i = 0; i < batch_->size(); ++i) {
      buffers_.push_back(std::make_unique<StructCopy<XLA_FFI_Buffer>>(batch_->buffer(i)));
      if (batch_->bytes(i)) {
        (*buffers_[i])->rank -= 1;
        (*buffers_[i])->dims += 1;
      }
      pointers_.push_back(buffers_[i]->get());
      const bool is_result = i >= static_cast<size_t>(batch_->frame().args.size);
      if (batch_->bytes(i).value_or(0) % AlignedExample::kAlignment == 0) continue;
      // Arrays that share memory, as a result in the place of an operand does, share the copy.
      Copy& copy = copies_[batch_->buffer(i).data];
      copy.buffers.push_back(i);
      copy.is_result |= is_result;
      if (copy.example == nullptr) copy.example = std::make_unique<AlignedExample>(*batch_->bytes(i));
    }
    frame_->api = api;
    batch_->put(*frame_.get(), pointers_.data());
  }

  ~ExampleFrame() { finish(); }
  ExampleFrame(const ExampleFrame&) = delete;
  ExampleFrame& operator=(const ExampleFrame&) = delete;

  XLA_FFI_CallFrame* of(int64_t example) {
    for (size_t i = 0; i < batch_->size(); ++i) {
      if (!batch_->bytes(i)) continue;
      (*buffers_[i])->data =
          static_cast<char*>(batch_->buffer(i).data) + static_cast<size_t>(example) * *batch_->bytes(i);
    }
    for (auto& [data, copy] : copies_) {
      void* const own = copy.example->take((*buffers_[copy.buffers[0]])->data);
      for (const size_t i : copy.buffers) (*buffers_[i])->data = own;
    }
    frame_->future = nullptr;
    return frame_.get();
  }

  // To be called when the handler has ended. Names an operand or result beside which it has written, as far as that
  // shows.
  std::optional<std::string> finish() {
    std::optional<std::string> beside;
    const auto args = static_cast<size_t>(frame_->args.size);
    for (auto& [data, copy] : copies_) {
      if (copy.example->give_back(copy.is_result)) continue;
      const size_t i = copy.buffers.back();
      beside = i < args ? "operand " + std::to_string(i) : "result " + std::to_string(i - args);
    }
    return beside;
  }

 private:
  struct Copy {
    std::vector<size_t> buffers;
    bool is_result = false;
    std::unique_ptr<AlignedExample> example;
  };

  std::shared_ptr<Batch> batch_;
  StructCopy<XLA_FFI_CallFrame> frame_;
  std::vector<std::unique_ptr<StructCopy<XLA_FFI_Buffer>>> buffers_;
  std::vector<void*> pointers_;
  std::map<void*, Copy> copies_;
};

// The first example's error, of those that have one.
class FirstError {
 public:
  explicit FirstError(const XLA_FFI_Api* api) : api_(api) {}

  // The last error that this thread made, if it is `error`, says more of it.
  void add(int64_t example, XLA_FFI_Error* error) {
    const CreatedError& last = last_created_error();
    const CreatedError created = last.error == error ? last : CreatedError{error, XLA_FFI_Error_Code_UNKNOWN, ""};
    const std::lock_guard lock(mutex_);
    XLA_FFI_Error* lost = error;
    if (first_.error == nullptr || example < example_) {
      lost = std::exchange(first_, created).error;
      example_ = example;
    }
    if (lost == nullptr) return;
    destroy_error(api_, lost);
  }

  // Returns the error as if this thread had made it.
  XLA_FFI_Error* take(int64_t examples) {
    if (first_.error == nullptr) return nullptr;
    last_created_error() = first_;
    if (first_.message.empty()) return first_.error;
    std::string where = "example " + std::to_string(example_) + " of " + std::to_string(examples) + ": ";
    last_created_error().message = where + first_.message;
    return first_.error;
  }

 private:
  const XLA_FFI_Api* api_;
  std::mutex mutex_;
  CreatedError first_;
  int64_t example_ = 0;
};

struct Call {
  XLA_FFI_Handler* handler;
  const void* function;
  std::shared_ptr<Batch> batch;
  const XLA_FFI_Api* api;
  std::shared_ptr<Unfinished> unfinished;
  FirstError error;

  void one(int64_t example, std::shared_ptr<ExampleFrame>& frame) {
    if (frame == nullptr) frame = std::make_shared<ExampleFrame>(batch, api);
    XLA_FFI_CallFrame* of_example = frame->of(example);
    XLA_FFI_Error* failed = handler(of_example);
    XLA_FFI_Future* future = of_example->future;
    if (failed != nullptr) error.add(example, failed);
    if (future != nullptr) {
      unfinished->add(future, std::exchange(frame, nullptr), unfinished);  // the handler may still read it
    } else if (const auto beside = frame->finish(); beside && failed == nullptr) {
      const std::string text = "it has written before or beyond the memory of " + *beside;
      error.add(example, create_error(api, XLA_FFI_Error_Code_INTERNAL, text));
      frame = nullptr;
    }
  }

  void some(int64_t begin, int64_t end) {
    const CalledFunction called(function);
    std::shared_ptr<ExampleFrame> frame;
    for (int64_t example = begin; example < end; ++example) {
      std::string thrown = "it threw a C++ exception";
      try {
        one(example, frame);
        continue;
      } catch (const std::exception& exception) {
        thrown += std::string(": ") + exception.what();
      } catch (...) {
      }
      error.add(example, create_error(api, XLA_FFI_Error_Code_INTERNAL, thrown));
    }
  }
};

void run(const XLA_FFI_CallFrame& frame, Call& call) {
  ffi::DiagnosticEngine diagnostics;
  auto pool = ffi::CtxDecoding<ffi::ThreadPool>::Decode(frame.api, frame.ctx, diagnostics);
  const cpu::Executor executor = executor_on(*pool);
  const int64_t examples = call.batch->examples();
  const int64_t threads = std::max<int64_t>(executor.threads(executor.pool), 1);
  const int64_t parts = threads == 1 ? std::min<int64_t>(examples, 1) : std::min(examples, threads * kPartsPerThread);
  if (parts <= 1) {
    call.some(0, examples);
    return;
  }
  struct State {
    Call& call;
    int64_t examples, parts;
  } state{call, examples, parts};
  executor.run(
      executor.pool, parts,
      [](void* of, int64_t i) {
        const State& s = *static_cast<State*>(of);
        s.call.some(i * s.examples / s.parts, (i + 1) * s.examples / s.parts);
      },
      &state);
}

}  // namespace

CalledForEach::CalledForEach(XLA_FFI_Handler* handler, const void* function)
    : handler_before_(std::exchange(called_handler, handler)),
      function_before_(std::exchange(called_function, function)) {}
CalledForEach::~CalledForEach() {
  called_handler = handler_before_;
  called_function = function_before_;
}

XLA_FFI_Error* call_each_example(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Api* api = frame->api;
  auto unfinished = std::make_shared<Unfinished>(api);
  try {
    if (called_handler == nullptr) throw std::invalid_argument("expected to be called by eqxcallback");
    prefer_huge_pages(*frame);  // those of one example may be too small for it
    Call call{called_handler, called_function, std::make_shared<Batch>(*frame), with_example_futures(api),
              unfinished,     FirstError(api)};
    run(*frame, call);
    XLA_FFI_Error* error = call.error.take(call.batch->examples());
    frame->future = unfinished->close(error);
    return frame->future == nullptr ? error : nullptr;
  } catch (const std::invalid_argument& error) {
    return create_error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return create_error(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, error.what());
  }
}

}  // namespace eqxcallback
