// One call of a kernel, prepared: what is left for the time of the call is to launch it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/image.h"
#include "gpu/pointers.h"

namespace eqxcallback::gpu {

// One launch. All of a call have the same parameters.
struct Step {
  std::shared_ptr<Image> image;
  std::string entry;
  std::array<unsigned, 3> grid, block;
  unsigned shared_bytes;

  bool is_empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

class Launch {
 public:
  // `scalars`: the parameters after the pointers, each in the first bytes of its word.
  Launch(std::vector<Step> steps, std::vector<uint64_t> scalars)
      : steps_(std::move(steps)), scalars_(std::move(scalars)) {}
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Loads the kernels on a device. May be repeated; what may not be done while a stream is captured is done here.
  void load(int device);

  // Launches them, in order, with these pointers as their first parameters. Loads them first if nobody has.
  void run(int device, Stream stream, void* const* pointers, size_t count);

 private:
  // The kernels of the steps in one context. A list that only grows, so that it is read without a lock.
  struct Loaded {
    const Driver* driver;
    Context context;
    std::vector<Function> functions;
    const Loaded* next;
  };
  const Loaded& loaded(int device);

  const std::vector<Step> steps_;
  std::vector<uint64_t> scalars_;
  std::mutex mutex_;
  std::atomic<const Loaded*> first_{nullptr};
};

}  // namespace eqxcallback::gpu
