// Linear layers of few rows and many, over weights of all kinds.
#pragma once

#include <cstdlib>
#include <cstring>

#include "shown_numbers.h"

template <class T>
static void linear(cpu::Element element, int64_t rows, int64_t in, int64_t out) {
  const cpu::Kernels& kernels = cpu::kernels();
  const auto x = numbers<T>(rows * in), matrix = numbers<T>(out * in);
  const auto scales = numbers<float>(out);
  std::vector<T> product(static_cast<size_t>(rows * out));
  if (element != cpu::Element::kF32) {
    const auto run = rows < cpu::kSeveralRows ? kernels.linear : kernels.linear_rows;
    run(element, {product.data(), x.data(), matrix.data(), scales.data(), rows, out, in}, kExecutor);
    show(product);
  }
  const auto integers = bytes(out * in);
  for (const bool quantized_activations : {false, true}) {
    kernels.int8_linear(element,
                        {product.data(), x.data(), reinterpret_cast<const int8_t*>(integers.data()), scales.data(),
                         rows, out, in, quantized_activations},
                        kExecutor);
    show(product);
    if (in % cpu::kBlockSize != 0) continue;
    using cpu::Encoding;
    for (const auto encoding : {Encoding::kQ4_1, Encoding::kQ8_0, Encoding::kQ4_0, Encoding::kQ5_0, Encoding::kQ5_1,
                                Encoding::kQ4_K, Encoding::kQ5_K, Encoding::kQ6_K}) {
      if (in % cpu::weights_of_block(encoding) != 0) continue;
      const int64_t block = cpu::block_bytes(encoding);
      auto blocks = bytes(out * in / cpu::weights_of_block(encoding) * block);
      for (size_t i = 0; i < blocks.size(); i += static_cast<size_t>(block)) {
        cpu::F16 halves[2];
        // Those of 256 weights multiply scales of up to 128 by them: sums of these still have to fit into f16.
        const float size = cpu::weights_of_block(encoding) > cpu::kBlockSize ? 1.0f / 256 : 1.0f;
        cpu::from_float(size * number(), halves[0]), cpu::from_float(size * number(), halves[1]);
        const bool has_minimum = encoding == Encoding::kQ4_1 || encoding == Encoding::kQ5_1 ||
                                 encoding == Encoding::kQ4_K || encoding == Encoding::kQ5_K;
        std::memcpy(&blocks[i + (encoding == Encoding::kQ6_K ? 208 : 0)], halves, has_minimum ? 4 : 2);
      }
      kernels.quantized_linear(
          element, {product.data(), x.data(), blocks.data(), rows, out, in, encoding, quantized_activations},
          kExecutor);
      show(product);
    }
    for (const auto encoding : {Encoding::kQ4_1_R16, Encoding::kQ8_0_R16}) {
      const int64_t features = 2 * cpu::kGroupRows, group = cpu::kGroupRows * cpu::block_bytes(encoding);
      auto groups = bytes(features / cpu::kGroupRows * in / cpu::kBlockSize * group);
      for (size_t i = 0; i < groups.size(); i += static_cast<size_t>(group)) {
        cpu::F16 halves[2 * cpu::kGroupRows];
        for (cpu::F16& half : halves) cpu::from_float(number(), half);
        std::memcpy(&groups[i], halves, encoding == Encoding::kQ4_1_R16 ? sizeof(halves) : sizeof(halves) / 2);
      }
      std::vector<T> of_groups(static_cast<size_t>(rows * features));
      kernels.quantized_linear(
          element, {of_groups.data(), x.data(), groups.data(), rows, features, in, encoding, quantized_activations},
          kExecutor);
      show(of_groups);
    }
  }
}

// What is prefetched says in which order tiles and their parts are multiplied, and changes no result.
template <class T>
static void linear_however_it_prefetches(cpu::Element element, int64_t rows, int64_t in) {
  constexpr int64_t out = 22;
  const cpu::Kernels& kernels = cpu::kernels();
  const auto x = numbers<T>(rows * in), matrix = numbers<T>(out * in);
  const auto scales = numbers<float>(out);
  const auto integers = bytes(out * in);
  std::vector<T> expected, expected_of_integers;
  for (const auto& prefetching : {cpu::Prefetching{}, cpu::Prefetching{false, 0}, cpu::Prefetching{true, 4096}}) {
    std::vector<T> product(static_cast<size_t>(rows * out)), of_integers(product.size());
    kernels.linear(element, {product.data(), x.data(), matrix.data(), scales.data(), rows, out, in, prefetching},
                   kExecutor);
    kernels.int8_linear(element,
                        {of_integers.data(), x.data(), reinterpret_cast<const int8_t*>(integers.data()), scales.data(),
                         rows, out, in, false, prefetching},
                        kExecutor);
    if (expected.empty()) {
      show(product, of_integers);
      expected = product, expected_of_integers = of_integers;
    }
    const size_t size = product.size() * sizeof(T);
    if (std::memcmp(product.data(), expected.data(), size) != 0 ||
        std::memcmp(of_integers.data(), expected_of_integers.data(), size) != 0) {
      std::abort();
    }
  }
}
