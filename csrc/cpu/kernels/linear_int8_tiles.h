// Many rows that are quantised to int8 times rows of int8, by tiles: 32 rows of x and 32 of weights have their sums in
// registers, and a panel of weights is multiplied with all of x.
#pragma once

#include "cpu/kernels/linear_byte_panels.h"
#ifdef EQXCALLBACK_EMULATED_TILES
#include "cpu/simd/tiles.h"
#endif

namespace eqxcallback::cpu {
namespace {

static_assert(kLanes == Tiles::kColumns && kPanel % (2 * kLanes) == 0);

// Rows of x whose last ones may be any bytes, see ByteRows, times 32 columns of the panel.
void multiply_rows_of_bytes(int32_t (*sums)[2 * kLanes], const int8_t* x, int64_t stride, const ByteFour* panel,
                            int64_t steps) {
  constexpr int64_t kStride = kPanel * int64_t{sizeof(ByteFour)}, kSums = sizeof(*sums);
  Tiles::zero<0>(), Tiles::zero<1>(), Tiles::zero<2>(), Tiles::zero<3>();
  for (int64_t i = 0; i < steps; ++i, x += kBytes, panel += kLanes * kPanel) {
    Tiles::load<4>(x, stride);
    Tiles::load<6>(panel, kStride);
    Tiles::dot_bytes<0, 4, 6>();
    Tiles::load<7>(panel + kLanes, kStride);
    Tiles::dot_bytes<1, 4, 7>();
    Tiles::load<5>(x + Tiles::kRows * stride, stride);
    Tiles::dot_bytes<2, 5, 6>(), Tiles::dot_bytes<3, 5, 7>();
  }
  Tiles::store<0>(sums[0], kSums), Tiles::store<1>(sums[0] + kLanes, kSums);
  Tiles::store<2>(sums[Tiles::kRows], kSums), Tiles::store<3>(sums[Tiles::kRows] + kLanes, kSums);
}

// As multiply_panels does.
template <class T>
void multiply_tiles_of_bytes(T* out, const ByteRows& x, int64_t num_rows, const int8_t* weights, const float* scale,
                             int64_t num_weights, int64_t size, const Executor& executor) {
  const int64_t steps = x.stride() / kBytes;
  const double nanoseconds = static_cast<double>(size) * (0.02 + 0.0006 * static_cast<double>(num_rows));
  parallel_for(
      executor, num_weights, nanoseconds,
      [&](int64_t begin, int64_t end) {
        [[maybe_unused]] const Tiles tiles;
        Scratch scratch(steps * kLanes * kPanel);
        auto* panel = reinterpret_cast<ByteFour*>(scratch.data());
        alignas(64) int32_t sums[2 * Tiles::kRows][2 * kLanes];
        for (int64_t o = begin; o < end; o += kPanel) {
          const int64_t columns = smaller(kPanel, end - o);
          arrange_weights<true>(panel, weights + o * size, columns, size);
          for (int64_t r = 0; r < num_rows; r += 2 * Tiles::kRows) {
            for (int64_t c = 0; c < columns; c += 2 * kLanes) {
              multiply_rows_of_bytes(sums, x.integers(r), x.stride(), panel + c, steps);
              for (int64_t i = 0; i < smaller(2 * Tiles::kRows, num_rows - r); ++i) {
                const F of_x = Simd::broadcast(x.scale(r + i));
                for_vectors(smaller<int64_t>(2 * kLanes, columns - c), [&](int64_t w, auto count) {
                  const F scaled = Simd::mul(__builtin_convertvector(Bytes::load(sums[i] + w), F), of_x);
                  const int64_t column = o + c + w;
                  store(out + (r + i) * num_weights + column, Simd::mul(scaled, load(scale + column, count)), count);
                });
              }
            }
          }
        }
      },
      kPanel);
}

}  // namespace
}  // namespace eqxcallback::cpu
