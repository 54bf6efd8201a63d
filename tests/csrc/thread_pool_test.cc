// The executor of kernels on a pool of threads that start when they like, and kernels on that executor. Built with and
// without sanitizers; says "ok".
#include "ffi/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "cpu/isa.h"

namespace ffi = xla::ffi;
namespace cpu = eqxcallback::cpu;

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (false)

struct XLA_FFI_Error {};

namespace {

// A pool whose threads start after a delay of up to so many microseconds.
std::atomic<int> max_delay{0};
std::atomic<int> scheduled{0}, started{0};
std::mutex threads_mutex;
std::vector<std::thread> threads;

XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  thread_local std::mt19937 random(static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  const auto delay = std::chrono::microseconds(random() % static_cast<unsigned>(max_delay + 1));
  ++scheduled;
  std::lock_guard lock(threads_mutex);
  threads.emplace_back([task = args->task, data = args->data, delay] {
    std::this_thread::sleep_for(delay);
    ++started;
    task(data);
  });
  return nullptr;
}
XLA_FFI_Error* num_threads(XLA_FFI_ThreadPool_NumThreads_Args* args) { return *args->num_threads = 4, nullptr; }

void join_all() {
  for (;;) {
    std::vector<std::thread> some;
    {
      std::lock_guard lock(threads_mutex);
      some.swap(threads);
    }
    if (some.empty()) return;
    for (std::thread& thread : some) thread.join();
  }
}

ffi::ThreadPool make_pool() {
  static XLA_FFI_Api api = [] {
    XLA_FFI_Api result = {};
    result.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    result.XLA_FFI_ThreadPool_Schedule = schedule;
    result.XLA_FFI_ThreadPool_NumThreads = num_threads;
    return result;
  }();
  static ffi::DiagnosticEngine diagnostics;
  return *ffi::CtxDecoding<ffi::ThreadPool>::Decode(&api, nullptr, diagnostics);
}

void each_index_once(const cpu::Executor& executor) {
  for (int64_t n : {0, 1, 2, 3, 7, 8, 9, 31, 1000}) {
    for (int64_t multiple : {1, 4, 12}) {
      for (double nanoseconds : {1.0, 1e4, 1e6}) {
        std::vector<int> seen(static_cast<size_t>(n));  // not atomic: each is one thread's
        cpu::parallel_for(
            executor, n, nanoseconds,
            [&](int64_t begin, int64_t end) {
              CHECK(begin % multiple == 0 && begin < end && end <= n);
              for (int64_t i = begin; i < end; ++i) ++seen[static_cast<size_t>(i)];
            },
            multiple);
        for (int count : seen) CHECK(count == 1);
      }
    }
  }
}

void nobody_waits_for_a_late_thread(const cpu::Executor& executor) {
  join_all();
  max_delay = 2'000'000;
  const int before = started;
  std::atomic<int> tasks{0};
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) cpu::parallel_for(executor, 8, 1e6, [&](int64_t, int64_t) { ++tasks; });
  // 60 threads, up to 2 s late: some are.
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(1500));
  CHECK(tasks == 160 && started - before < 60);
  max_delay = 100;
  join_all();
  CHECK(tasks == 160);
}

// A helper without work waits for the next job, which needs no other thread then.
void helpers_wait(const cpu::Executor& executor) {
  join_all();
  max_delay = 0;
  const int before = scheduled;
  std::atomic<int> tasks{0};
  int calls = 0;
  // Not each call finds one: a helper may be late.
  while (calls < 100'000 && scheduled - before == 3 * calls) {
    cpu::parallel_for(executor, 8, 1e6, [&](int64_t, int64_t) { ++tasks; });
    if (++calls % 100 == 0) join_all();
  }
  join_all();
  CHECK(scheduled - before < 3 * calls && tasks == 8 * calls);
  max_delay = 100;
}

void a_task_that_throws(const cpu::Executor& executor) {
  std::atomic<int> tasks{0};
  bool thrown = false;
  try {
    cpu::parallel_for(executor, 8, 1e6, [&](int64_t begin, int64_t) {
      ++tasks;
      if (begin == 3) throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  CHECK(thrown && tasks == 8);
}

void nested(const cpu::Executor& executor) {
  std::atomic<int> tasks{0};
  cpu::parallel_for(executor, 8, 1e6,
                    [&](int64_t, int64_t) { cpu::parallel_for(executor, 8, 1e6, [&](int64_t, int64_t) { ++tasks; }); });
  CHECK(tasks == 64);
}

// One token over long caches: parts on several threads, joined by the caller.
void attention(const cpu::Executor& executor) {
  constexpr int64_t heads = 4, kv_heads = 2, size = 33, keys = 5000;
  std::vector<float> q(heads * size), k(keys * kv_heads * size), v(k.size()), out(q.size());
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (auto* array : {&q, &k, &v}) {
    for (float& x : *array) x = normal(random);
  }
  const int32_t length = 4321;
  const cpu::DecodeAttention call{out.data(), q.data(), k.data(), v.data(), &length, 1,   1,
                                  1,          keys,     heads,    kv_heads, size,    0.2f};
  for (const std::string& isa : cpu::available_isas()) {
    cpu::set_isa(isa);
    std::fill(out.begin(), out.end(), NAN);
    cpu::kernels().decode_attention(cpu::Element::kF32, call, executor);
    for (int64_t h = 0; h < heads; ++h) {
      const auto row = [&](const std::vector<float>& x, int64_t j) {
        return &x[size_t((j * kv_heads + h / 2) * size)];
      };
      std::vector<double> expected(size);
      double total = 0;
      for (int64_t j = 0; j < length; ++j) {
        double score = 0;
        for (int64_t d = 0; d < size; ++d) score += double(q[size_t(h * size + d)]) * double(row(k, j)[d]);
        const double weight = std::exp(0.2 * score);
        total += weight;
        for (int64_t d = 0; d < size; ++d) expected[size_t(d)] += weight * double(row(v, j)[d]);
      }
      for (int64_t d = 0; d < size; ++d) {
        CHECK(std::abs(expected[size_t(d)] / total - double(out[size_t(h * size + d)])) < 1e-5);
      }
    }
  }
}

}  // namespace

int main() {
  ffi::ThreadPool pool = make_pool();
  const cpu::Executor executor = eqxcallback::executor_on(pool);
  max_delay = 100;
  each_index_once(executor);
  helpers_wait(executor);
  a_task_that_throws(executor);
  nested(executor);
  attention(executor);
  nobody_waits_for_a_late_thread(executor);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back([&] { each_index_once(executor); });
  for (std::thread& caller : callers) caller.join();
  join_all();
  std::puts("ok");
}
