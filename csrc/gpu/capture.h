// Capture: a CUDA graph of the work on a stream of our own, made as XLA makes one for a command buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "gpu/driver.h"

namespace eqxcallback::gpu {

using Graph = struct GraphTag*;

// Records, from its construction to end(), the work that one thread enqueues on stream(), which does not run.
class Capture {
 public:
  explicit Capture(int device);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  Stream stream() const { return stream_; }

  // Stops recording. Throws DriverError, with the code of the driver, if there is no graph: the thread has done
  // something that is not allowed while a stream is captured.
  void end();

  // The number of nodes of each kind in the graph. Kinds are numbered as in the driver's stable ABI (CUgraphNodeType).
  const std::map<int, size_t>& nodes() const { return nodes_; }

  // Waits for the device, as work may have been enqueued on other streams meanwhile.
  void wait() const;
  // Enqueues the filling of memory with one byte.
  void fill(uintptr_t address, size_t bytes, uint8_t value, Stream stream) const;
  // Enqueues the graph.
  void replay(Stream stream) const;

 private:
  struct Functions;

  const Driver& driver_;
  std::unique_ptr<const Functions> functions_;
  Stream stream_ = nullptr;
  Graph graph_ = nullptr;
  bool recording_ = false;
  std::map<int, size_t> nodes_;
};

}  // namespace eqxcallback::gpu
