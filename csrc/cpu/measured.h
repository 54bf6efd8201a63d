// Which of two tables multiplies bf16 faster, by kernel family: measured once on a machine, and remembered in a file.
//
// A processor may have instructions for bf16 that are slower than widening to f32: nothing that it says of itself
// tells.
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

// The kernels to run, and for each family that multiplies bf16 the name of the table that it is from.
struct Mixed {
  Kernels kernels;
  std::vector<std::pair<std::string, std::string>> families;
};

// `usual`, with the families of `other` that are faster here.
Mixed faster_of(const Table& usual, const Table& other);

}  // namespace eqxcallback::cpu
