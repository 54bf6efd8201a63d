// Linear layers over int8 weights with a scale for each output. Few rows of x read each weight once; for more rows of
// x, a few rows of weights at a time are put into cache: as bytes, linear_digit_panels.h, or widened to f32.
#pragma once

#include "cpu/kernels/few_rows.h"
#include "cpu/kernels/linear_activations.h"
#include "cpu/kernels/linear_quantized.h"
#ifdef EQXCALLBACK_BYTES
#include "cpu/kernels/linear_byte_panels.h"
#include "cpu/kernels/linear_side_by_side.h"
#ifdef EQXCALLBACK_TILES
#include "cpu/kernels/linear_int8_tiles.h"
#endif
#endif

namespace eqxcallback::cpu {
namespace {

inline constexpr int64_t kFewRows = 16, kFewRowsOfBytes = kHasTiles<Bf16> ? 8 : kFewRows;

#ifdef EQXCALLBACK_BYTES
// Returns false if x has no form in bytes, or is so long that sums have no form in integers.
template <class T, class Put>
bool multiply_quantized(T* out, const float* x, int64_t x_stride, const Int8Linear& args, const Executor& executor,
                        const Put& put) {
  const int64_t rows = args.rows, size = args.in_features;
  if (size > kLanes * kPanelSize) return false;
  ByteRows bytes(rows, size);
  Scratch has_form(rows);
  parallel_for(executor, rows, static_cast<double>(size) * 0.15, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) has_form.data()[r] = bytes.set(r, x + r * x_stride, size);
  });
  for (int64_t r = 0; r < rows; ++r) {
    if (has_form.data()[r] == 0) return false;
  }
  if (rows > kFewRowsOfBytes && size <= kPanelSize) {
#ifdef EQXCALLBACK_TILES
    multiply_tiles_of_bytes(out, bytes, rows, args.weight, args.scale, args.out_features, size, executor);
#else
    multiply_panels(out, bytes, rows, args.weight, args.scale, args.out_features, size, executor);
#endif
  } else {
    multiply_few(bytes, rows, args.weight, args.out_features, size, args.prefetching, executor, put);
  }
  return true;
}

// Does the same with rows that are not quantised, and have zeros up to a whole number of blocks.
template <class T>
bool multiply_panels_of_rows(T* out, const float* x, const Int8Linear& args, const Executor& executor) {
  using Panel = DigitPanel<Encoding::kQ8_0>;
  const int64_t size = args.in_features, num_blocks = (size + kBlockSize - 1) / kBlockSize;
  const auto set = [&](auto panel, int64_t first, int64_t rows) {
    for (int64_t w = 0; w < Panel::kRows; w += kLanes) {
      for (int64_t i = 0; i < size; i += kBytes) {
        const Bytes::Mask mask = Bytes::first(smaller(kBytes, size - i));
        F parts[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          const int8_t* row = args.weight + (first + smaller(w + r, rows - 1)) * size;
          parts[r] = reinterpret_cast<F>(Bytes::as_weights(Bytes::load(row + i, mask)));
        }
        panel.put(parts, i / kBlockSize, static_cast<int>(i % kBlockSize / kBytes), w);
      }
      for (int64_t r = w; r < w + kLanes; ++r) {
        for (int64_t b = 0; b < num_blocks; ++b) panel.scales(b, 0)[r] = args.scale[first + smaller(r, rows - 1)];
      }
    }
  };
  const auto for_panels = [&](auto panel, int64_t begin, int64_t end, const auto& multiply) {
    for (int64_t o = begin; o < end; o += Panel::kRows) {
      const int64_t rows = smaller(Panel::kRows, end - o);
      set(panel, o, rows);
      multiply(o, rows);
    }
  };
  return multiply_side_by_side<Encoding::kQ8_0, 3>(out, x, args.rows, args.out_features, num_blocks, executor,
                                                   for_panels);
}
#endif

template <class T>
void int8_linear_as(const Int8Linear& args, const Executor& executor) {
  const int64_t rows = args.rows, size = args.in_features, padded = (size + kBlockSize - 1) / kBlockSize * kBlockSize;
  const bool as_it_is = std::is_same_v<T, float> && size == padded && !args.quantized_activations;
  Scratch scratch(as_it_is ? 1 : larger<int64_t>(1, rows * padded));
  const float* x = scratch.data();  // rows are `padded` apart, with zeros at the end
  const auto clear_end = [&](float* row) {
    if (padded > 0) std::memset(row + padded - kBlockSize, 0, kBlockSize * sizeof(float));
  };
  if (as_it_is) {
    x = static_cast<const float*>(args.x);
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = scratch.data() + r * padded;
      clear_end(row);
      for_vectors(size, [&](int64_t i, auto count) {
        Simd::store(row + i, load(static_cast<const T*>(args.x) + r * size + i, count));
      });
    }
  }
  T* out = static_cast<T*>(args.out);
  const auto put = [&](int64_t r, int64_t o, float sum) {
    from_float(sum * args.scale[o], out[r * args.out_features + o]);
  };
#ifdef EQXCALLBACK_BYTES
  const auto apart = [&](float limit, const auto& multiply) {
    return multiply_apart(x, rows, padded, limit, multiply, [&](int64_t r) {
      Int8Linear row = args;
      row.rows = 1;
      row.x = static_cast<const T*>(args.x) + r * size;
      row.out = out + r * args.out_features;
      int8_linear_as<T>(row, executor);
    });
  };
#endif
  if (args.quantized_activations) {
#ifdef EQXCALLBACK_BYTES
    const auto quantized = [&](const float* some) {
      return multiply_quantized(out, some, padded, args, executor, put);
    };
    if (apart(-kLowest, quantized)) return;
#endif
    for (int64_t r = 0; r < rows; ++r) quantize_activations(scratch.data() + r * padded, size, size);
  }
  if (rows <= kFewRows) {
    const FewRows<float, int8_t> few_rows(x, padded, rows, size, args.prefetching);
    const double nanoseconds = static_cast<double>(size) * (0.05 + 0.02 * static_cast<double>(rows)) + 5;
    return parallel_for(
        executor, args.out_features, nanoseconds,
        [&](int64_t begin, int64_t end) { few_rows.multiply(args.weight, begin, end, put); }, 8);
  }
#ifdef EQXCALLBACK_BYTES
  if (apart(kSummable, [&](const float* some) { return multiply_panels_of_rows(out, some, args, executor); })) return;
#endif
  multiply_decoded(
      out, x, rows, args.out_features, padded, static_cast<double>(size) * 0.1, executor,
      [&](float* row, int64_t o) {
        clear_end(row);
        for_vectors(size,
                    [&](int64_t i, auto count) { Simd::store(row + i, load(args.weight + o * size + i, count)); });
      },
      [&](int64_t o) { return args.scale[o]; });
}

void int8_linear(Element element, const Int8Linear& args, const Executor& executor) {
  with_type(element, [&](auto* type) { int8_linear_as<Pointee<decltype(type)>>(args, executor); });
}

}  // namespace
}  // namespace eqxcallback::cpu
