// Calls in a child process: the guarded copies, and what the child reports.
#include "ffi/call_in_child.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <set>

#include "core/dtype.h"
#include "ffi/created_error.h"
#include "ffi/struct_copy.h"

namespace eqxcallback {
namespace {

// The child's report of a call that has ended.
struct Said {
  int code;  // the code of an error, or -1
  bool is_asynchronous;
  char message[4096];
};

// Copies of operands and results in guarded memory. Arrays that shared memory share it again.
class GuardedBuffers {
 public:
  explicit GuardedBuffers(const XLA_FFI_CallFrame& frame) {
    add(frame.rets.rets, frame.rets.size);
    add(frame.args.args, frame.args.size);
    std::map<void*, size_t> sizes;
    for (const auto& buffer : buffers_) {
      size_t& size = sizes[(*buffer)->data];
      size = std::max(size, bytes_of(*buffer->get()));
    }
    for (const auto& buffer : buffers_) {
      // An array without elements is nowhere, whichever address it has.
      std::shared_ptr<GuardedMemory> nowhere;
      std::shared_ptr<GuardedMemory>& memory = bytes_of(*buffer->get()) == 0 ? nowhere : by_origin_[(*buffer)->data];
      if (memory == nullptr) {
        const size_t size = &memory == &nowhere ? 0 : sizes[(*buffer)->data];
        memory = std::make_shared<GuardedMemory>(size, memory_.size());
        if (size != 0) std::memcpy(memory->data(), (*buffer)->data, size);
      }
      memory_.push_back(memory);
    }
    for (size_t i = 0; i < buffers_.size(); ++i) {
      (*buffers_[i])->data = memory_[i]->data();
      pointers_.push_back(buffers_[i]->get());
    }
  }

  void** results() { return pointers_.data(); }
  void** operands(const XLA_FFI_CallFrame& frame) { return pointers_.data() + frame.rets.size; }

  void copy_back() const {
    for (const auto& [origin, memory] : by_origin_) std::memcpy(origin, memory->data(), memory->size());
  }

  void find(ChildCall& call) const {
    std::set<const GuardedMemory*> seen;
    for (size_t i = 0; i < memory_.size(); ++i) {
      const GuardedMemory& memory = *memory_[i];
      if (!seen.insert(&memory).second) continue;
      if (const Beside before = memory.before(); before.count > 0) call.overruns.push_back({i, false, before});
      if (const Beside after = memory.after(); after.count > 0) call.overruns.push_back({i, true, after});
      const void* address = call.ending.address;
      if (call.ending.kind != Ending::Kind::kSignal || address == nullptr) continue;
      if (const auto far = memory.before(address)) call.fault = ChildCall::Fault{i, false, *far};
      if (const auto far = memory.after(address)) call.fault = ChildCall::Fault{i, true, *far};
    }
  }

 private:
  void add(void* const* buffers, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      buffers_.push_back(std::make_unique<StructCopy<XLA_FFI_Buffer>>(*static_cast<XLA_FFI_Buffer*>(buffers[i])));
    }
  }

  std::vector<std::unique_ptr<StructCopy<XLA_FFI_Buffer>>> buffers_;
  std::vector<std::shared_ptr<GuardedMemory>> memory_;
  std::vector<void*> pointers_;
  std::map<void*, std::shared_ptr<GuardedMemory>> by_origin_;
};

// Runs tasks where they are scheduled, since a child has none of XLA's threads.
XLA_FFI_Error* run_here(XLA_FFI_ThreadPool_Schedule_Args* args) {
  args->task(args->data);
  return nullptr;
}
XLA_FFI_Error* one_thread(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 1;
  return nullptr;
}

void call(const UserKernel& kernel, XLA_FFI_CallFrame& frame, Said& said) {
  if (kernel.set_threads != nullptr) kernel.set_threads(1);
  StructCopy<XLA_FFI_Api> api(*frame.api);
  api->XLA_FFI_ThreadPool_Schedule = run_here;
  api->XLA_FFI_ThreadPool_NumThreads = one_thread;
  frame.api = api.get();
  frame.future = nullptr;
  const XLA_FFI_Error* error = kernel.handler(&frame);
  said.is_asynchronous = frame.future != nullptr;
  if (error == nullptr) return;
  const CreatedError& created = last_created_error();
  const bool is_known = created.error == error;
  said.code = is_known ? created.code : XLA_FFI_Error_Code_UNKNOWN;
  std::strncpy(said.message, is_known ? created.message.c_str() : "an error", sizeof(said.message) - 1);
}

}  // namespace

ChildCall call_in_child(UserKernel& kernel, const XLA_FFI_CallFrame& frame, double seconds, const Waiting& waiting) {
  // Attributes are out of reach until the kernel reads them: a kernel that never does ignores them. XLA counts
  // attributes for handlers that name some, and for others only the handler itself knows them.
  const ForbiddenMemory forbidden;
  const bool is_watched = frame.attrs.size > 0 && !kernel.reads_attributes;
  ChildCall result;
  std::unique_ptr<GuardedBuffers> buffers;
  const auto run = [&](bool hides_attributes) {
    result = ChildCall();
    buffers = std::make_unique<GuardedBuffers>(frame);
    SharedMemory shared(sizeof(Said));
    Said& said = *static_cast<Said*>(shared.data());
    said.code = -1;
    StructCopy<XLA_FFI_CallFrame> inner(frame);
    inner->rets.rets = buffers->results();
    inner->args.args = buffers->operands(frame);
    if (hides_attributes) {
      inner->attrs.types = static_cast<XLA_FFI_AttrType*>(forbidden.data());
      inner->attrs.names = static_cast<XLA_FFI_ByteSpan**>(forbidden.data());
      inner->attrs.attrs = static_cast<void**>(forbidden.data());
    }
    result.ending = run_in_child(seconds, [&] { call(kernel, *inner.get(), said); }, waiting);
    result.is_asynchronous = said.is_asynchronous;
    if (said.code >= 0) result.error = {static_cast<XLA_FFI_Error_Code>(said.code), said.message};
  };
  run(is_watched);
  if (is_watched && result.ending.kind == Ending::Kind::kSignal && forbidden.has(result.ending.address)) {
    kernel.reads_attributes = true;
    run(false);
  } else if (is_watched && result.ending.kind == Ending::Kind::kReturned && !result.error) {
    for (int64_t i = 0; i < frame.attrs.size; ++i) {
      result.ignored_attributes.emplace_back(frame.attrs.names[i]->ptr, frame.attrs.names[i]->len);
    }
  }
  buffers->find(result);
  if (result.ending.kind == Ending::Kind::kReturned && !result.error) buffers->copy_back();
  return result;
}

}  // namespace eqxcallback
