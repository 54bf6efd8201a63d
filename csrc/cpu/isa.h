// The instruction set of the kernels: the one that EQXCALLBACK_ISA names, or the best one of the machine, except for
// kernels that multiply bf16 faster with another one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"

namespace eqxcallback::cpu {

// The table in use.
const Kernels& kernels();

// Names that `set_isa` takes on this machine, the best one first.
std::vector<std::string> available_isas();
std::string isa();
// For each family of kernels that was measured, the instruction set that it runs on. Empty if one was chosen.
std::vector<std::pair<std::string, std::string>> isas_of_bf16();
// The file that remembers them; empty if nothing was measured, or there is no folder for it.
std::string file_of_bf16();
// Throws std::invalid_argument for a name that is not available.
void set_isa(const std::string& name);

}  // namespace eqxcallback::cpu
