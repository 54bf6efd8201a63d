// Streams and graphs of the fake driver, which includes this in its middle. What is enqueued on a stream that is
// captured is kept, and runs when its graph is launched; anything else runs at once. What may not be done meanwhile
// ends the capture, as it does in CUDA's driver.
#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int kCaptureInvalidated = 901, kCaptureImplicit = 906;
constexpr int kKernelNode = 0, kCopyNode = 1, kFillNode = 2, kAllocationNode = 10;

struct Node {
  int kind;
  std::function<int()> run;
};
struct Graph {
  std::vector<Node> nodes;
};
struct Stream {
  bool is_blocking;
  Graph* recorded = nullptr;  // while it is captured
  bool is_valid = true;
  int mode = 0;
  std::thread::id thread = {};
};
std::set<Stream*> streams;
std::set<Graph*> graphs, executables;

Stream* captured(void* stream) {
  const auto found = streams.find(static_cast<Stream*>(stream));
  return found != streams.end() && (*found)->recorded != nullptr ? *found : nullptr;
}

// Ends the captures for which `ends` holds: the error of a call that they do not allow, or 0 if there is none.
template <class Ends>
int refused(int code, const Ends& ends) {
  bool any = false;
  for (Stream* stream : streams) {
    if (stream->recorded == nullptr || !ends(*stream)) continue;
    any = true;
    stream->is_valid = false;
  }
  return any ? code : 0;
}

constexpr int kRelaxed = 2;
thread_local int mode_of_thread = 0;

// Of a call that is not enqueued: this thread may make none while it captures, unless one of the two is relaxed.
int unsafe() {
  if (mode_of_thread == kRelaxed) return 0;
  return refused(kCaptureUnsupported, [](const Stream& stream) {
    return stream.mode != kRelaxed && (stream.mode == 0 || stream.thread == std::this_thread::get_id());
  });
}

// Of work on a stream: the legacy default one, which others wait for, is not to be used while one of those is captured.
int implicit(void* stream) {
  if (stream != nullptr && stream != reinterpret_cast<void*>(1)) return 0;
  return refused(kCaptureImplicit, [](const Stream& other) { return other.is_blocking; });
}

int enqueue(void* stream, int kind, std::function<int()> run) {
  if (const int code = implicit(stream); code != 0) return code;
  Stream* found = captured(stream);
  if (found == nullptr) return run();
  if (!found->is_valid) return kCaptureInvalidated;
  found->recorded->nodes.push_back({kind, std::move(run)});
  return 0;
}

}  // namespace

API int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, mode_of_thread);
  return 0;
}

API int cuStreamCreate(Stream** stream, unsigned flags) {
  CALLED("cuStreamCreate");
  if (current == nullptr) return kInvalidContext;
  *stream = new Stream{flags == 0};
  streams.insert(*stream);
  return 0;
}

API int cuStreamDestroy_v2(Stream* stream) {
  CALLED("cuStreamDestroy");
  if (streams.erase(stream) == 0) return kInvalidValue;
  if (graphs.erase(stream->recorded) > 0) delete stream->recorded;
  delete stream;
  return 0;
}

API int cuStreamBeginCapture_v2(Stream* stream, int mode) {
  CALLED("cuStreamBeginCapture");
  if (streams.count(stream) == 0 || stream->recorded != nullptr) return kInvalidValue;
  stream->recorded = new Graph;
  stream->is_valid = true;
  stream->mode = mode;
  stream->thread = std::this_thread::get_id();
  graphs.insert(stream->recorded);
  return 0;
}

API int cuStreamEndCapture(Stream* stream, Graph** graph) {
  CALLED("cuStreamEndCapture");
  *graph = nullptr;
  if (captured(stream) == nullptr) return kInvalidValue;
  if (stream->thread != std::this_thread::get_id()) return 908;
  Graph* recorded = stream->recorded;
  stream->recorded = nullptr;
  record("cuStreamEndCapture %zu nodes%s", recorded->nodes.size(), stream->is_valid ? "" : ", invalid");
  if (stream->is_valid) {
    *graph = recorded;
    return 0;
  }
  graphs.erase(recorded);
  delete recorded;
  return kCaptureInvalidated;
}

API int cuGraphGetNodes(Graph* graph, Node** nodes, size_t* count) {
  CALLED("cuGraphGetNodes");
  if (graphs.count(graph) == 0) return kInvalidValue;
  for (size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = &graph->nodes.at(i);
  *count = graph->nodes.size();
  return 0;
}

API int cuGraphNodeGetType(Node* node, int* kind) {
  *kind = node->kind;
  return 0;
}

API int cuGraphDestroy(Graph* graph) {
  CALLED("cuGraphDestroy");
  if (graphs.erase(graph) == 0) return kInvalidValue;
  delete graph;
  return 0;
}

API int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
  CALLED("cuGraphInstantiate");
  if (graphs.count(graph) == 0) return kInvalidValue;
  *executable = new Graph(*graph);
  executables.insert(*executable);
  return 0;
}

API int cuGraphExecDestroy(Graph* executable) {
  CALLED("cuGraphExecDestroy");
  if (executables.erase(executable) == 0) return kInvalidValue;
  delete executable;
  return 0;
}

API int cuGraphLaunch(Graph* executable, void* stream) {
  CALLED("cuGraphLaunch");
  if (executables.count(executable) == 0 || captured(stream) != nullptr) return kInvalidValue;
  record("cuGraphLaunch %zu nodes stream=%p", executable->nodes.size(), stream);
  for (const Node& node : executable->nodes) {
    if (const int code = node.run(); code != 0) return code;
  }
  return 0;
}

API int cuStreamSynchronize(void* stream) {
  CALLED("cuStreamSynchronize");
  if (Stream* found = captured(stream)) {
    if (!found->is_valid) return kCaptureInvalidated;
    found->is_valid = false;
    return kCaptureUnsupported;
  }
  return 0;
}

API int cuCtxSynchronize() {
  CALLED("cuCtxSynchronize");
  return refused(kCaptureUnsupported, [](const Stream&) { return true; });
}

API int cuMemAlloc_v2(void** memory, size_t size) {
  CALLED("cuMemAlloc");
  if (const int code = unsafe(); code != 0) return code;
  *memory = std::malloc(size);
  return 0;
}

API int cuMemAllocAsync(void** memory, size_t size, void* stream) {
  CALLED("cuMemAllocAsync");
  *memory = std::malloc(size);
  return enqueue(stream, kAllocationNode, [] { return 0; });
}

API int cuMemFree_v2(void* memory) {
  CALLED("cuMemFree");
  if (const int code = unsafe(); code != 0) return code;
  std::free(memory);
  return 0;
}

// Waits for the copy: it goes through the legacy default stream.
API int cuMemcpyDtoH_v2(void* to, const void* from, size_t size) {
  CALLED("cuMemcpyDtoH");
  return enqueue(nullptr, kCopyNode, [=] { return std::memcpy(to, from, size), 0; });
}

API int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* stream) {
  CALLED("cuMemcpyDtoDAsync");
  return enqueue(stream, kCopyNode, [=] { return std::memcpy(to, from, size), 0; });
}

API int cuMemsetD8Async(void* memory, unsigned char value, size_t size, void* stream) {
  CALLED("cuMemsetD8Async");
  return enqueue(stream, kFillNode, [=] { return std::memset(memory, value, size), 0; });
}

// -- for tests

// Streams, graphs, and graphs that can be launched, which nobody has destroyed.
API int software_graphs() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return static_cast<int>(streams.size() + graphs.size() + executables.size());
}
