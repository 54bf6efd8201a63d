// Tiles of matrix products by AMX: simd/tiles.h says what each function means. In assembler, whose operands may be
// template parameters.
#pragma once

#include <cstdint>

// Tells cpu/kernels that products of tiles are fast.
#define EQXCALLBACK_TILES

namespace eqxcallback::cpu {
namespace {

class TileRegisters {
 public:
  static constexpr int64_t kRows = 16, kColumns = 16;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  template <int t>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(t));
  }
  template <int t>
  static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(t) : "memory");
  }
  template <int t>
  static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(t) : "memory");
  }
  template <int c, int a, int b>
  static void dot_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }

 protected:
  struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, zeros[14] = {};
    uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  explicit TileRegisters(const Configuration& configuration) { asm volatile("ldtilecfg %0" ::"m"(configuration)); }
  ~TileRegisters() { asm volatile("tilerelease"); }
};

class Tiles : public TileRegisters {
 public:
  static constexpr int64_t kPairs = 16;

  Tiles() : TileRegisters({}) {}
  template <int c, int a, int b>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
};

class BlockTiles : public TileRegisters {
 public:
  static constexpr int kLeft = 6, kRight = 7;

  BlockTiles() : TileRegisters(configuration()) {}

 private:
  static Configuration configuration() {
    Configuration of_blocks;
    of_blocks.bytes_of_row[kLeft] = 32, of_blocks.rows[kRight] = 8;
    return of_blocks;
  }
};

}  // namespace
}  // namespace eqxcallback::cpu
