// Which instruction set the kernels run on: the best of the machine, or the one that EQXCALLBACK_ISA names.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace eqxcallback::cpu {

// The table in use.
const Kernels& kernels();

// Names that `set_isa` takes on this machine, the best one first.
std::vector<std::string> available_isas();
std::string isa();
// Throws std::invalid_argument for a name that is not available.
void set_isa(const std::string& name);

}  // namespace eqxcallback::cpu
