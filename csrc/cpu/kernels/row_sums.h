// Sums over rows, such as the gradients of parameters that all rows share: first the sums of parts of the rows, then
// the sums over the parts. They are the same for any number of threads.
#pragma once

#include "cpu/kernels/common.h"

namespace eqxcallback::cpu {
namespace {

// result[i] = the sum over the parts of sums[part * stride + i]. Nothing is done if `result` is null.
void add_parts(float* result, const float* sums, int64_t parts, int64_t stride, int64_t size,
               const Executor& executor) {
  parallel_for(
      executor, result == nullptr ? 0 : size, static_cast<double>(parts) * 0.1,
      [&](int64_t begin, int64_t end) {
        for_vectors(end - begin, [&](int64_t i, auto count) {
          F total = Simd::zero();
          for (int64_t part = 0; part < parts; ++part) {
            total = Simd::add(total, load(sums + part * stride + begin + i, count));
          }
          store(result + begin + i, total, count);
        });
      },
      kLanes);
}

// Calls body(first row, row after the last, sums) for parts of the rows, then adds the parts up into the results.
// sums[k] has `size` zeros to add to, or is null if results[k] is null.
template <size_t n, class Body>
void sum_rows(float* const (&results)[n], int64_t rows, int64_t size, double nanoseconds_per_row,
              const Executor& executor, const Body& body) {
  // A part has work for two tasks, but sums no more than 32 rows for that: its own sums are memory to be filled, and
  // read.
  constexpr int64_t kParts = 64, kFewest = 8, kMost = 32;
  const auto of_two_tasks = static_cast<int64_t>(2 * kTaskNanoseconds / nanoseconds_per_row);
  const int64_t rows_of_part = larger((rows + kParts - 1) / kParts, smaller(kMost, larger(kFewest, of_two_tasks)));
  const int64_t parts = (rows + rows_of_part - 1) / rows_of_part;
  int64_t wanted = 0;
  for (const float* result : results) wanted += result != nullptr ? 1 : 0;
  const Scratch scratch(larger<int64_t>(1, parts * wanted * size));
  parallel_for(executor, parts, nanoseconds_per_row * static_cast<double>(rows_of_part),
               [&](int64_t begin, int64_t end) {
                 for (int64_t part = begin; part < end; ++part) {
                   float* next = scratch.data() + part * wanted * size;
                   std::memset(next, 0, static_cast<size_t>(wanted * size) * sizeof(float));
                   float* sums[n];
                   for (size_t k = 0; k < n; ++k) {
                     sums[k] = results[k] == nullptr ? nullptr : next;
                     if (sums[k] != nullptr) next += size;
                   }
                   body(part * rows_of_part, smaller(rows, (part + 1) * rows_of_part), sums);
                 }
               });
  const float* first = scratch.data();
  for (float* result : results) {
    add_parts(result, first, parts, wanted * size, size, executor);
    if (result != nullptr) first += size;
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
