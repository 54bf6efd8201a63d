// Attributes: what a launch may ask for beyond its geometry. A launch without attributes takes the plain call, which
// all drivers have.
#pragma once

#include <array>

#include "gpu/driver.h"

namespace eqxcallback::gpu {

struct Attributes {
  std::array<unsigned, 3> cluster{1, 1, 1};  // blocks that run together and share their shared memory
  bool cooperative = false;                  // all blocks run at once, and may wait for each other
  bool programmatic = false;                 // begins before the work ahead of it on the stream has ended
  bool spread = false;                       // the blocks of a cluster go to as many multiprocessors as there are

  unsigned cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
  bool any() const { return cluster_size() != 1 || cooperative || programmatic; }

  // A device that has clusters has clusters of 8 blocks. For larger ones, a kernel must be told that it may have them.
  static constexpr unsigned kPortableCluster = 8;
};

// CUlaunchAttribute and CUlaunchConfig of cuda.h, whose ABI is stable.
struct LaunchAttribute {
  int id;
  alignas(8) union {
    char bytes[64];
    unsigned cluster[3];
    int number;
  } value;
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned count;
};
using LaunchKernelEx = int (*)(const LaunchConfig* config, Function function, void** parameters, void** extra);

// The attributes in the form of the driver.
class LaunchAttributes {
 public:
  explicit LaunchAttributes(const Attributes& attributes);

  const LaunchAttribute* data() const { return found_.data(); }
  unsigned size() const { return count_; }

 private:
  LaunchAttribute& add(int id);

  std::array<LaunchAttribute, 4> found_{};
  unsigned count_ = 0;
};

}  // namespace eqxcallback::gpu
