// The attributes of a launch, written in the form of the driver.
#include "gpu/attributes.h"

#include <algorithm>

namespace eqxcallback::gpu {
namespace {

// CU_LAUNCH_ATTRIBUTE_...
constexpr int kCooperative = 2, kClusterDimension = 4, kClusterSchedulingPolicy = 5, kProgrammaticSerialization = 6;
constexpr int kSpread = 1;  // CU_CLUSTER_SCHEDULING_POLICY_SPREAD

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

}  // namespace

LaunchAttributes::LaunchAttributes(const Attributes& attributes) {
  if (attributes.cluster_size() != 1) std::copy_n(attributes.cluster.data(), 3, add(kClusterDimension).value.cluster);
  if (attributes.spread) add(kClusterSchedulingPolicy).value.number = kSpread;
  if (attributes.cooperative) add(kCooperative).value.number = 1;
  if (attributes.programmatic) add(kProgrammaticSerialization).value.number = 1;
}

LaunchAttribute& LaunchAttributes::add(int id) {
  LaunchAttribute& added = found_[count_++];
  added.id = id;
  return added;
}

}  // namespace eqxcallback::gpu
