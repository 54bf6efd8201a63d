// Products of tensor cores, and their loads from shared memory, for cuda_cpu.h.
#pragma once

#include <cstring>

#include "cuda_cpu_fibers.h"

// sums += a @ b, as PTX has it for `mma.sync.aligned.m16n8k16.row.col` with sums in f32 and elements T of 16 bits. All
// lanes of a warp take part. The sum is rounded once; the order in which a GPU adds up is not known.
template <class T>
void cuda_cpu_mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2], T,
                           int line = __builtin_LINE()) {
  const cuda_cpu::Place place = {"mma", line};
  const unsigned lane = cuda_cpu::current->fiber->lane, group = lane / 4, pair = lane % 4;
  const auto all = [&](unsigned low, unsigned high, unsigned source, unsigned (&words)[2]) {
    const uint64_t bits = cuda_cpu::shuffle(~0u, uint64_t{high} << 32 | low, source, place);
    words[0] = static_cast<unsigned>(bits), words[1] = static_cast<unsigned>(bits >> 32);
  };
  const auto product = [](unsigned x, unsigned y) {
    T of_x[2], of_y[2];
    std::memcpy(static_cast<void*>(of_x), &x, sizeof(x));
    std::memcpy(static_cast<void*>(of_y), &y, sizeof(y));
    return static_cast<double>(static_cast<float>(of_x[0])) * static_cast<float>(of_y[0]) +
           static_cast<double>(static_cast<float>(of_x[1])) * static_cast<float>(of_y[1]);
  };
  double exact[4] = {sums[0], sums[1], sums[2], sums[3]};
  for (unsigned i = 0; i < 4; ++i) {  // the lanes that share a row of a, or a column of b
    unsigned upper[2], lower[2], columns[2][2];
    all(a[0], a[2], 4 * group + i, upper);
    all(a[1], a[3], 4 * group + i, lower);
    for (unsigned c = 0; c < 2; ++c) all(b[0], b[1], 4 * (2 * pair + c) + i, columns[c]);
    for (unsigned half = 0; half < 2; ++half) {
      for (unsigned c = 0; c < 2; ++c) {
        exact[c] += product(upper[half], columns[c][half]);
        exact[2 + c] += product(lower[half], columns[c][half]);
      }
    }
  }
  for (unsigned i = 0; i < 4; ++i) sums[i] = static_cast<float>(exact[i]);
}

// As PTX has it for `ldmatrix.sync.aligned.m8n8.x4.shared.b16`, and `.trans`: lane 8 i + r has the address of row r of
// matrix i, 16 bytes.
inline void cuda_cpu_ldmatrix_x4(unsigned (&words)[4], const void* row, bool transposed, int line = __builtin_LINE()) {
  const cuda_cpu::Place place = {"ldmatrix", line};
  const unsigned lane = cuda_cpu::current->fiber->lane, group = lane / 4, pair = lane % 4;
  const auto address = reinterpret_cast<uintptr_t>(row);
  if (address % 16 != 0) cuda_cpu::fail(place.text() + ": the address of a row is not a multiple of 16");
  const auto row_of = [&](unsigned i, unsigned r) {
    return reinterpret_cast<const char*>(cuda_cpu::shuffle(~0u, uint64_t{address}, 8 * i + r, place));
  };
  for (unsigned i = 0; i < 4; ++i) {
    if (!transposed) {
      std::memcpy(&words[i], row_of(i, group) + 4 * pair, 4);
      continue;
    }
    uint16_t elements[2];
    for (unsigned e = 0; e < 2; ++e) std::memcpy(&elements[e], row_of(i, 2 * pair + e) + 2 * group, 2);
    std::memcpy(&words[i], elements, 4);
  }
}
