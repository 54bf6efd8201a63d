// Products of matrices by vectors, where the processor has no tiles: sums of outer products of a few lines of the left
// factor with some vectors of lines of the right one, in registers. Panels of so many lines are packed first: of the
// left factor for all threads, of the right one by each thread for the columns that it computes next, which then has
// them in its second cache. A slice of what is summed is taken at a time, so that that of a right panel stays in the
// first cache.
#pragma once

#include "cpu/kernels/matrix_factors.h"
#include "cpu/kernels/outer.h"

namespace eqxcallback::cpu {
namespace {

// What one multiply-add takes of a line: a number of f32, or a pair of bf16 where the processor multiplies these.
template <class N>
using UnitOf = std::conditional_t<kHasPairs<N>, Bf16Pair, float>;
template <class N>
inline constexpr int64_t kNumbersOfUnit = kHasPairs<N> ? 2 : 1;
template <class N>
int64_t units_of(int64_t numbers) {
  return (numbers + kNumbersOfUnit<N> - 1) / kNumbersOfUnit<N>;
}

// Lines of a panel of each factor.
inline constexpr int64_t kLeftLines = Simd::kOuterRows, kRightLines = Simd::kOuterVectors * kLanes;
// Units of a slice: those of a right panel take 24 KiB.
inline constexpr int64_t kSliceUnits = smaller<int64_t>(512, 6144 / kRightLines);
// Rows and columns of a part of the result: its sums, and the lines of a slice, have room in a second cache.
inline constexpr int64_t kPartRows = 96, kPartColumns = 64;
static_assert(kPartRows % kLeftLines == 0 && kPartColumns % kRightLines == 0);

int64_t panels_of(int64_t lines, int64_t of_panel) { return (lines + of_panel - 1) / of_panel; }

// What is summed, and the result, are taken in groups: the panels of a group of left lines are packed, and where there
// are several groups of what is summed, the sums so far have a place.
struct VectorProductPlan {
  int64_t depth;                    // numbers that are summed at a time
  int64_t left_group, right_group;  // lines
  int64_t packed, sums;             // numbers of f32

  explicit VectorProductPlan(const MatrixProduct& args) {
    const bool is_narrow = args.element == Element::kBf16;
    const int64_t of_unit = is_narrow ? kNumbersOfUnit<Bf16> : 1, size = larger<int64_t>(1, args.size);
    const int64_t groups = panels_of(size, kMostUnits * of_unit);
    depth = panels_of(panels_of(size, groups), of_unit) * of_unit;
    const int64_t units = depth / of_unit;
    const int64_t rows = whole(larger<int64_t>(1, args.rows), kPartRows);
    left_group = smaller(rows, whole(kPackedNumbers / units, kPartRows));
    packed = left_group * units;
    const bool has_sums = groups > 1 && is_narrow;
    right_group = has_sums ? smaller(args.columns, kSums / left_group) : args.columns;
    sums = has_sums ? left_group * right_group : 0;
  }

  int64_t bytes() const { return (packed + sums) * int64_t{sizeof(float)}; }

 private:
  // The panels of a part's columns, of so many units, have room in a second cache.
  static constexpr int64_t kMostUnits = 1024, kPackedNumbers = int64_t{1} << 21, kSums = int64_t{1} << 22;

  static int64_t whole(int64_t lines, int64_t multiple) { return panels_of(lines, multiple) * multiple; }
};

// Units of neighbouring lines that are columns. Numbers of a line that ends within a pair are zero.
template <class N, class Count>
F units_of_columns(const N* x, [[maybe_unused]] const N* next, Count count) {
#ifdef EQXCALLBACK_PAIRS
  if constexpr (kHasPairs<N>) {
    Bf16 copied[2][kLanes] = {};
    if constexpr (std::is_same_v<Count, Full>) {
      if (next != nullptr) return Simd::pairs(x, next);
      std::memcpy(copied[0], x, sizeof(copied[0]));
    } else {
      std::memcpy(copied[0], x, static_cast<size_t>(count) * sizeof(N));
      if (next != nullptr) std::memcpy(copied[1], next, static_cast<size_t>(count) * sizeof(N));
    }
    return Simd::pairs(copied[0], copied[1]);
  }
#endif
  return load(x, count);
}

// Units of one line that is a row.
template <class N>
F units_of_row(const N* x, Full) {
  if constexpr (!kHasPairs<N>) return load(x, Full{});
  float units[kLanes];
  std::memcpy(units, x, sizeof(units));
  return Simd::load(units);
}
template <class N>
F units_of_row(const N* x, int numbers) {
  if constexpr (!kHasPairs<N>) return load(x, numbers);
  float units[kLanes] = {};
  std::memcpy(units, x, static_cast<size_t>(numbers) * sizeof(N));
  return Simd::load(units);
}

// Packs lines of a panel, unit by unit. So many numbers of a row may be read, past the lines too: a whole vector is
// read faster than a part of one.
template <int64_t kWidth, class N>
void pack_columns(float* out, const FactorLines<N>& from, int64_t readable) {
  for (int64_t i = 0; i < from.size; i += kNumbersOfUnit<N>, out += kWidth) {
    const N* x = from.data + i * from.stride;
    const N* next = i + 1 < from.size ? x + from.stride : nullptr;
    if (kWidth < kLanes && readable >= kLanes) {
      Simd::store(out, units_of_columns(x, next, Full{}), static_cast<int>(kWidth));
      continue;
    }
    int64_t line = 0;
    for (; line + kLanes <= from.count; line += kLanes) {
      Simd::store(out + line, units_of_columns(x + line, next == nullptr ? next : next + line, Full{}));
    }
    for (; line < kWidth; line += kLanes) {
      const int lines = static_cast<int>(larger<int64_t>(0, smaller<int64_t>(kLanes, from.count - line)));
      const F units = units_of_columns(x + line, next == nullptr ? next : next + line, lines);
      Simd::store(out + line, units, static_cast<int>(smaller<int64_t>(kLanes, kWidth - line)));
    }
  }
}

template <int64_t kWidth, class N>
void pack_rows(float* out, const FactorLines<N>& from) {
  constexpr int64_t kNumbers = kNumbersOfUnit<N> * kLanes;
  for (int64_t line = 0; line < kWidth; line += kLanes) {
    constexpr int64_t kLines = smaller<int64_t>(kLanes, kWidth);
    for (int64_t i = 0; i < from.size; i += kNumbers) {
      F tile[kLanes];
      const auto load_lines = [&](auto numbers) {
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
          const bool is_there = r < kLines && line + r < from.count;
          tile[r] = is_there ? units_of_row(from.data + (line + r) * from.stride + i, numbers) : Simd::zero();
        }
      };
      const int64_t rest = from.size - i, units = smaller<int64_t>(kLanes, units_of<N>(rest));
      rest >= kNumbers ? load_lines(Full{}) : load_lines(static_cast<int>(rest));
      Simd::transpose(tile);
      float* to = out + i / kNumbersOfUnit<N> * kWidth + line;
      for (int64_t u = 0; u < units; ++u) {
        if constexpr (kLines == kLanes) {
          Simd::store(to + u * kWidth, tile[u]);
        } else {
          Simd::store(to + u * kWidth, tile[u], kLines);
        }
      }
    }
  }
}

// Packs panels: of each its units, one after the other. Lines past the end are zero. A matrix is read along its rows.
template <int64_t kWidth, class N>
void pack_panels(float* out, const FactorLines<N>& from, int64_t begin, int64_t end) {
  const int64_t units = units_of<N>(from.size);
  constexpr int64_t kRows = 32;
  const auto pack = [&](int64_t panel, int64_t at, int64_t numbers) {
    const FactorLines<N> lines = from.part(panel * kWidth, kWidth, at, numbers);
    float* to = out + (panel * units + at / kNumbersOfUnit<N>)*kWidth;
    from.are_columns ? pack_columns<kWidth>(to, lines, from.count - panel * kWidth) : pack_rows<kWidth>(to, lines);
  };
  if (from.are_columns) {
    for (int64_t at = 0; at < from.size; at += kRows) {
      for (int64_t panel = begin; panel < end; ++panel) pack(panel, at, kRows);
    }
  } else {
    for (int64_t panel = begin; panel < end; ++panel) pack(panel, 0, from.size);
  }
}

// Packs all panels on all threads.
template <int64_t kWidth, class N>
void pack_on_threads(float* out, const FactorLines<N>& from, const Executor& executor) {
  const double nanoseconds = static_cast<double>(units_of<N>(from.size) * kWidth) * 0.2;
  parallel_for(executor, panels_of(from.count, kWidth), nanoseconds,
               [&](int64_t begin, int64_t end) { pack_panels<kWidth>(out, from, begin, end); });
}

// Slices of a left and a right panel, and what is prefetched before they are multiplied.
struct PanelSlices {
  const float *left, *right;
  int64_t units;
  const float* next;
  int64_t next_numbers;
};

// Prefetches a row of the result.
template <class T>
[[gnu::always_inline]] inline void prefetch_row(T* row) {
  auto* bytes = reinterpret_cast<char*>(row);
  for (int64_t i = 0; i < kRightLines * int64_t{sizeof(T)}; i += 64) __builtin_prefetch(bytes + i, 1, 3);
}

// Adds the sums of a slice to `sums`, which the first one sets. Those of the last one go into the result. A panel that
// is not full has fewer vectors.
template <class N, int kVectors = Simd::kOuterVectors, class T>
void multiply_panels(const PartOfResult<T>& to, float* sums, bool is_first, bool is_last, const PanelSlices& slices) {
  if constexpr (kVectors > 1) {
    constexpr int kFewer = kVectors - 1;
    if (to.columns <= kFewer * kLanes) return multiply_panels<N, kFewer>(to, sums, is_first, is_last, slices);
  }
  constexpr int kRows = Simd::kOuterRows;
  F acc[kRows][kVectors];
  const auto for_sums = [&](const auto& body) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) body(m, v, sums + m * kRightLines + v * kLanes);
    }
  };
  for_sums([&](int m, int v, float*) __attribute__((always_inline)) { acc[m][v] = Simd::zero(); });
  if (!is_first) prefetch<3>(sums, kLeftLines * kRightLines);
  for (int64_t m = 0; is_last && m < smaller(kLeftLines, to.rows); ++m) {
    if (!to.is_first || !to.is_last) prefetch_row(to.sums_of(m));
    if (to.is_last) prefetch_row(to.out + m * to.stride);
  }
  prefetch(slices.next, slices.next_numbers);
  const auto* left = reinterpret_cast<const UnitOf<N>*>(slices.left);
  const auto* right = reinterpret_cast<const UnitOf<N>*>(slices.right);
  add_outer(acc, left, 1, kLeftLines, right, slices.units, kRightLines);
  if (!is_first) {
    for_sums([&](int m, int v, float* p)
                 __attribute__((always_inline)) { acc[m][v] = Simd::add(acc[m][v], Simd::load(p)); });
  }
  if (!is_last || to.rows < kLeftLines || to.columns < kVectors * kLanes) {
    for_sums([&](int m, int v, float* p) __attribute__((always_inline)) { Simd::store(p, acc[m][v]); });
    if (is_last) {
      for (int64_t m = 0; m < smaller(kLeftLines, to.rows); ++m) {
        for_vectors(to.columns,
                    [&](int64_t i, auto count) { to.put(m, i, load(sums + m * kRightLines + i, count), count); });
      }
    }
    return;
  }
  for_sums([&](int m, int v, float*) __attribute__((always_inline)) { to.put(m, v * kLanes, acc[m][v], Full{}); });
}

// The panels of a part of the result, of so many units each.
struct PartPanels {
  const float *left, *right;
  int64_t units;
};

// Computes a part of the result.
template <class N, class T>
void multiply_part(const PartOfResult<T>& out, const PartPanels& panels, float* sums) {
  const int64_t lefts = panels_of(out.rows, kLeftLines), rights = panels_of(out.columns, kRightLines);
  const int64_t units = panels.units;
  for (int64_t u = 0; u == 0 || u < units; u += kSliceUnits) {
    const int64_t of_slice = smaller(kSliceUnits, units - u);
    const bool is_last = u + kSliceUnits >= units;
    const auto left = [&](int64_t i, int64_t unit) { return panels.left + (i * units + unit) * kLeftLines; };
    const auto right = [&](int64_t i) { return panels.right + (i * units + u) * kRightLines; };
    for (int64_t r = 0; r < rights; ++r) {
      for (int64_t l = 0; l < lefts; ++l) {
        PanelSlices slices{left(l, u), right(r), of_slice, nullptr, 0};
        if (r + 1 < rights) {
          // A share of the next right panel.
          slices.next_numbers = (of_slice * kRightLines + lefts - 1) / lefts;
          slices.next = right(r + 1) + l * slices.next_numbers;
        } else {
          // The left one's next slice, or the first one of the next part's.
          slices.next_numbers = kSliceUnits * kLeftLines;
          slices.next = is_last ? left(lefts + l, 0) : left(l, u + kSliceUnits);
        }
        multiply_panels<N>(out.part(l * kLeftLines, r * kRightLines, kLeftLines, kRightLines),
                           sums + (r * lefts + l) * kLeftLines * kRightLines, u == 0, is_last, slices);
      }
    }
  }
}

// Computes the result, on all threads.
template <class N, class T>
void multiply_parts(const PartOfResult<T>& out, const float* left, const FactorLines<N>& right,
                    const Executor& executor) {
  const int64_t units = units_of<N>(right.size), across = panels_of(out.columns, kPartColumns);
  // A task has columns of several parts, which share the right panels, unless there would be too few tasks.
  const int64_t threads = executor.threads(executor.pool);
  int64_t parts = panels_of(out.rows, kPartRows);
  while (threads > 1 && parts > 1 && panels_of(out.rows, parts * kPartRows) * across < 4 * threads) {
    parts = panels_of(parts, 2);
  }
  const int64_t rows = parts * kPartRows, down = panels_of(out.rows, rows);
  const double nanoseconds =
      static_cast<double>(smaller(rows, out.rows) * units * smaller(kPartColumns, out.columns)) / kLanes / 6;
  parallel_for(executor, down * across, nanoseconds, [&](int64_t begin, int64_t end) {
    Scratch sums(kPartRows * kPartColumns), panels(kPartColumns * units);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % down * rows, column = i / down * kPartColumns;
      if (i == begin || row == 0) {
        const FactorLines<N> lines = right.part(column, kPartColumns, 0, right.size);
        pack_panels<kRightLines>(panels.data(), lines, 0, panels_of(lines.count, kRightLines));
      }
      for (int64_t r = row; r < smaller(row + rows, out.rows); r += kPartRows) {
        multiply_part<N>(out.part(r, column, kPartRows, kPartColumns), {left + r * units, panels.data(), units},
                         sums.data());
      }
    }
  });
}

// Computes the result of one example, group by group.
template <class T, class N>
void multiply_factors(const PartOfResult<T>& out, const VectorProductPlan& plan, void* memory,
                      const FactorLines<N>& left, const FactorLines<N>& right, const Executor& executor) {
  auto* packed = static_cast<float*>(memory);
  for (int64_t l = 0; l < left.count; l += plan.left_group) {
    for (int64_t r = 0; r < right.count; r += plan.right_group) {
      PartOfResult<T> to = out.part(l, r, plan.left_group, plan.right_group);
      if (to.so_far == nullptr) to.so_far = packed + plan.packed, to.so_far_stride = plan.right_group;
      for (int64_t at = 0; at == 0 || at < left.size; at += plan.depth) {
        const FactorLines<N> some = left.part(l, plan.left_group, at, plan.depth);
        pack_on_threads<kLeftLines>(packed, some, executor);
        multiply_parts<N>(to.stage(at, some.size, left.size), packed, right.part(r, plan.right_group, at, plan.depth),
                          executor);
      }
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
