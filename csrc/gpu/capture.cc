// Capture of a stream into a CUDA graph, by functions of the driver.
#include "gpu/capture.h"

#include <vector>

namespace eqxcallback::gpu {
namespace {

using Node = struct NodeTag*;
using Executable = struct ExecutableTag*;

// CU_STREAM_DEFAULT: unlike XLA's own streams, this stream waits for the legacy default stream. So the driver refuses a
// kernel that is launched on that stream by mistake, at the call; XLA would record nothing and say nothing.
constexpr unsigned kBlocking = 0;
// CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, XLA's mode: the driver refuses what this thread may not do, and other threads go
// on.
constexpr int kThreadLocal = 1;

}  // namespace

// Functions that are looked up when the first graph is recorded: a driver that lacks one of them still launches
// kernels.
struct Capture::Functions {
  explicit Functions(const Driver& driver) {
    find(driver, "cuStreamCreate", StreamCreate);
    find(driver, "cuStreamDestroy_v2", StreamDestroy);
    find(driver, "cuStreamBeginCapture_v2", StreamBeginCapture);
    find(driver, "cuStreamEndCapture", StreamEndCapture);
    find(driver, "cuGraphGetNodes", GraphGetNodes);
    find(driver, "cuGraphNodeGetType", GraphNodeGetType);
    find(driver, "cuGraphInstantiateWithFlags", GraphInstantiate);
    find(driver, "cuGraphLaunch", GraphLaunch);
    find(driver, "cuGraphExecDestroy", GraphExecDestroy);
    find(driver, "cuGraphDestroy", GraphDestroy);
    find(driver, "cuCtxSynchronize", CtxSynchronize);
    find(driver, "cuMemsetD8Async", MemsetD8Async);
  }

  int (*StreamCreate)(Stream* stream, unsigned flags);
  int (*StreamDestroy)(Stream stream);
  int (*StreamBeginCapture)(Stream stream, int mode);
  int (*StreamEndCapture)(Stream stream, Graph* graph);
  int (*GraphGetNodes)(Graph graph, Node* nodes, size_t* count);
  int (*GraphNodeGetType)(Node node, int* kind);
  int (*GraphInstantiate)(Executable* executable, Graph graph, unsigned long long flags);
  int (*GraphLaunch)(Executable executable, Stream stream);
  int (*GraphExecDestroy)(Executable executable);
  int (*GraphDestroy)(Graph graph);
  int (*CtxSynchronize)();
  int (*MemsetD8Async)(uintptr_t address, unsigned char value, size_t count, Stream stream);
};

Capture::Capture(int device) : driver_(driver()), functions_(std::make_unique<Functions>(driver_)) {
  activate(driver_, device);
  check(driver_, functions_->StreamCreate(&stream_, kBlocking), "cuStreamCreate");
  const int code = functions_->StreamBeginCapture(stream_, kThreadLocal);
  if (code != 0) functions_->StreamDestroy(stream_);  // the destructor does not run
  check(driver_, code, "cuStreamBeginCapture");
  recording_ = true;
}

Capture::~Capture() {
  // A destructor can report no error.
  if (recording_) functions_->StreamEndCapture(stream_, &graph_);
  if (graph_ != nullptr) functions_->GraphDestroy(graph_);
  functions_->StreamDestroy(stream_);
}

void Capture::end() {
  recording_ = false;
  check(driver_, functions_->StreamEndCapture(stream_, &graph_), "cuStreamEndCapture");
  size_t count = 0;
  check(driver_, functions_->GraphGetNodes(graph_, nullptr, &count), "cuGraphGetNodes");
  std::vector<Node> nodes(count);
  if (count > 0) check(driver_, functions_->GraphGetNodes(graph_, nodes.data(), &count), "cuGraphGetNodes");
  for (Node node : nodes) {
    int kind = 0;
    check(driver_, functions_->GraphNodeGetType(node, &kind), "cuGraphNodeGetType");
    ++nodes_[kind];
  }
}

void Capture::wait() const { check(driver_, functions_->CtxSynchronize(), "cuCtxSynchronize"); }

void Capture::fill(uintptr_t address, size_t bytes, uint8_t value, Stream stream) const {
  if (bytes == 0) return;
  check(driver_, functions_->MemsetD8Async(address, value, bytes, stream), "cuMemsetD8Async");
}

void Capture::replay(Stream stream) const {
  Executable executable = nullptr;
  check(driver_, functions_->GraphInstantiate(&executable, graph_, 0), "cuGraphInstantiateWithFlags");
  const int code = functions_->GraphLaunch(executable, stream);
  functions_->GraphExecDestroy(executable);  // a graph that runs is freed when it has run
  check(driver_, code, "cuGraphLaunch");
}

}  // namespace eqxcallback::gpu
