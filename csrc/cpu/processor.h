// What is known of this machine's processor beside its instructions.
#pragma once

#include "cpu/kernels.h"

namespace eqxcallback::cpu {

// How it is best told what will be read. It has so many places for lines that are on their way into a cache, and
// nothing that it says of itself tells how many: what differs from `Prefetching{}` was measured.
const Prefetching& prefetching();

}  // namespace eqxcallback::cpu
