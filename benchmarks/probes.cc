// What this machine can do at the moment of a measurement: multiply-adds in f32, and reads from memory. One call uses
// `threads` threads and returns when all of them are done.
#include <cstddef>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int kBytes = 64;
constexpr int kChains = 24;  // enough for two units with a latency of four cycles, and few enough for the registers
#else
constexpr int kBytes = 32;
constexpr int kChains = 12;
#endif
typedef float Vector __attribute__((vector_size(kBytes)));
typedef unsigned long long Words __attribute__((vector_size(kBytes)));

template <typename F>
static void on_threads(int threads, const F& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&work, i] { work(i); });
  work(0);
  for (auto& other : others) other.join();
}

extern "C" {

// Floating-point operations of one call with so many steps.
double fma_operations(int threads, long steps) {
  return 2.0 * threads * static_cast<double>(steps) * kChains * (kBytes / sizeof(float));
}

void fma_probe(int threads, long steps, float* out) {
  on_threads(threads, [=](int thread) {
    Vector sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = Vector{} + static_cast<float>(i);
    Vector a = Vector{} + 0.999f, b = Vector{} + 0.001f;
    for (long step = 0; step < steps; ++step) {
#pragma GCC unroll 32
      for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * a + b;
      asm volatile("" : "+v"(a), "+v"(b));  // the loop is not worked out by the compiler
    }
    Vector total = {};
    for (int i = 0; i < kChains; ++i) total += sums[i];
    float sum = 0;
    for (size_t i = 0; i < kBytes / sizeof(float); ++i) sum += total[i];
    out[thread] = sum;
  });
}

// `bytes` is a multiple of 4096 times `threads`.
void read_probe(int threads, const char* data, size_t bytes, unsigned long long* out) {
  on_threads(threads, [=](int thread) {
    const size_t count = bytes / threads / kBytes;
    const Words* words = reinterpret_cast<const Words*>(data + thread * (bytes / threads));
    Words sums[8] = {};
    for (size_t i = 0; i + 8 <= count; i += 8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) sums[j] |= words[i + j];
    }
    Words total = {};
    for (const Words& sum : sums) total |= sum;
    out[thread] = total[0];
  });
}

}  // extern "C"
