// Measures for each family of kernels which table multiplies bf16 fastest: once on a machine, remembered in a file.
//
// A processor may have instructions for bf16 that are slower than widening to f32, and nothing that it says of itself
// tells so.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"

namespace eqxcallback::cpu {

struct Table {
  std::string name;
  const Kernels* kernels;
};

// The kernels to run, for each family that multiplies bf16 the name of its table, and the file that remembers them, if
// there is a folder for it.
struct Mixed {
  Kernels kernels;
  std::vector<std::pair<std::string, std::string>> families;
  std::string file;
};

// Returns the first of at least two tables, with the families of others that are faster on this machine.
Mixed fastest_of(const std::vector<Table>& tables);

}  // namespace eqxcallback::cpu
