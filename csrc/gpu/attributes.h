// What a launch may ask for beyond its geometry. A launch that asks for nothing takes the plain call, which all drivers
// have.
#pragma once

#include <array>

#include "gpu/driver.h"

namespace eqxcallback::gpu {

struct Attributes {
  std::array<unsigned, 3> cluster{1, 1, 1};  // blocks that run together and share their shared memory
  bool cooperative = false;                  // all blocks run at once, and may wait for each other
  bool programmatic = false;                 // begins before what is ahead of it on the stream has ended
  bool spread = false;                       // the blocks of a cluster on as many multiprocessors as there are

  unsigned cluster_size() const { return cluster[0] * cluster[1] * cluster[2]; }
  bool any() const { return cluster_size() != 1 || cooperative || programmatic; }

  // Every device has clusters of 8 blocks if it has any. For more, a kernel must be told that it may.
  static constexpr unsigned kPortableCluster = 8;
};

// As in cuda.h, whose ABI is stable: CUlaunchAttribute and CUlaunchConfig.
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

// The attributes in the form of the driver's.
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
