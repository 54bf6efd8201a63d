// What is known of this machine's processor beside its instructions.
#pragma once

#include <string>

#include "cpu/kernels.h"

namespace eqxcallback::cpu {

// How it is best told what will be read. It has so many places for lines that are on their way into a cache, and
// nothing that it says of itself tells how many: what differs from `Prefetching{}` was measured.
const Prefetching& prefetching();

// "GenuineIntel", "AuthenticAMD" or what others call themselves; nothing on ARM.
const std::string& vendor();

}  // namespace eqxcallback::cpu
