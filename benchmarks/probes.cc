// What this machine can do at the moment of a measurement: multiply-adds, in f32, of pairs of bf16 and of fours of
// int8, reads from memory, and copies. One call uses `threads` threads and returns when all of them are done.
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#include <cstddef>
#include <cstring>
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

// Keeps this thread on the i-th of the cores that it may use: the system may start a new thread on the core of its
// parent, and move it only when a probe is over.
static void stay_on_core(int i) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  i %= CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed) || i-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
#else
  (void)i;
#endif
}

template <typename F>
static void on_threads(int threads, const F& work) {
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&work, i] {
      stay_on_core(i);
      work(i);
    });
  }
  for (auto& thread : all) thread.join();
}

// Of f32, in vectors of which each multiply-add does so many operations.
struct Floats {
  using Sum = Vector;
  static constexpr double kOperations = 2.0 * kBytes / sizeof(float);
  Vector a = Vector{} + 0.999f, b = Vector{} + 0.001f;

  static Sum start(int i) { return Vector{} + static_cast<float>(i); }
  // The loop is not worked out by the compiler.
  void hide() { asm volatile("" : "+v"(a), "+v"(b)); }
  Sum step(Sum sum) const { return sum * a + b; }
};
#if defined(__AVX512BF16__)
struct Pairs {
  using Sum = __m512;
  static constexpr double kOperations = 64;
  __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x3a80);

  static Sum start(int i) { return _mm512_set1_ps(static_cast<float>(i)); }
  void hide() { asm volatile("" : "+v"(a), "+v"(b)); }
  Sum step(Sum sum) const { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif
#if defined(__AVX512VNNI__)
struct Fours {
  using Sum = __m512i;
  static constexpr double kOperations = 128;
  __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);

  static Sum start(int i) { return _mm512_set1_epi32(i); }
  void hide() { asm volatile("" : "+v"(a), "+v"(b)); }
  Sum step(Sum sum) const { return _mm512_dpbusd_epi32(sum, a, b); }
};
#endif

// Operations of one call with so many steps.
template <class Kind>
static double run(int threads, long steps) {
  on_threads(threads, [=](int) {
    Kind kind;
    typename Kind::Sum sums[kChains];
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sums[i] = Kind::start(i);
    for (long step = 0; step < steps; ++step) {
#pragma GCC unroll 32
      for (int i = 0; i < kChains; ++i) sums[i] = kind.step(sums[i]);
      kind.hide();
    }
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) asm volatile("" : : "v"(sums[i]));
  });
  return Kind::kOperations * kChains * threads * static_cast<double>(steps);
}

extern "C" {

// How many operations of f32 (0), bf16 (1) or int8 (2) one call did: 0 where there are no instructions for them.
double multiply_probe(int kind, int threads, long steps) {
  if (kind == 0) return run<Floats>(threads, steps);
#if defined(__AVX512BF16__)
  if (kind == 1) return run<Pairs>(threads, steps);
#endif
#if defined(__AVX512VNNI__)
  if (kind == 2) return run<Fours>(threads, steps);
#endif
  return 0;
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

// So many times.
void copy_probe(int threads, const char* from, char* to, size_t bytes, int times) {
  on_threads(threads, [=](int thread) {
    const size_t begin = bytes / threads * thread, end = thread + 1 == threads ? bytes : begin + bytes / threads;
    for (int i = 0; i < times; ++i) {
      std::memcpy(to + begin, from + begin, end - begin);
      asm volatile("" : : "r"(to) : "memory");  // or the compiler copies once
    }
  });
}

}  // extern "C"
