// Launch: one call of a kernel, so prepared that nothing but the launching is left for the time of the call.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gpu/attributes.h"
#include "gpu/image.h"
#include "gpu/pointers.h"
#include "gpu/tensor_map.h"

namespace eqxcallback::gpu {

// One launch. All launches of a call have the same parameters, but for the scratch memory of their compiler.
struct Step {
  std::shared_ptr<Image> image;
  std::string entry;
  std::array<unsigned, 3> grid, block;
  unsigned shared_bytes;
  Attributes attributes = {};
  size_t scratch = 0;  // where the scratch memory of this step begins, in bytes

  bool is_empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

// A pointer to an array inside of a structure.
struct Address {
  size_t word;     // the pointer's place among the words of a call
  size_t pointer;  // the array's position among the pointers
};

// The parameters beside the pointers: numbers, structures, and tensor maps, which depend on addresses.
struct Values {
  std::vector<uint64_t> words = {};     // their bytes; a parameter is in the first bytes of its words
  std::vector<size_t> starts = {};      // the word at which each parameter begins
  std::vector<size_t> order = {};       // the parameters' order, as positions among the pointers and then the values
  std::vector<Address> addresses = {};  // in place of some of the words
  std::vector<TensorMap> maps = {};     // likewise, in place of words
  std::optional<size_t> scratch = {};   // the word of the pointer to scratch memory, if there is any

  bool depend_on_addresses() const { return !addresses.empty() || !maps.empty() || scratch.has_value(); }
};

class Launch {
 public:
  Launch(std::vector<Step> steps, Values values) : steps_(std::move(steps)), values_(std::move(values)) {}
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Loads the kernels on a device, which is not allowed while a stream is captured. May be repeated.
  void load(int device);

  // Launches the kernels, in order, with these pointers and the values as parameters. Loads them first if they are not.
  void run(int device, Stream stream, void* const* pointers, size_t count, void* scratch = nullptr);

 private:
  // The kernels of the steps in one context. A list that only grows, so that threads read it without a lock.
  struct Loaded {
    const Driver* driver;
    Context context;
    std::vector<Function> functions;
    std::vector<std::optional<size_t>> parameters;  // how many each has, if that is known
    const Loaded* next;
    // Functions that old drivers lack; null if the call does not need them.
    LaunchKernelEx launch_with_attributes = nullptr;
    TensorMapEncodeTiled encode_tiled = nullptr;
  };
  const Loaded& loaded(int device);
  static void launch(const Loaded& on_device, size_t i, const Step& step, Stream stream, void** parameters);

  const std::vector<Step> steps_;
  Values values_;
  std::mutex mutex_;
  std::atomic<const Loaded*> first_{nullptr};
};

}  // namespace eqxcallback::gpu
