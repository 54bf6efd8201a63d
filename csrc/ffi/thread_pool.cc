#include "ffi/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace eqxcallback {
namespace {

// Shared with the pool's tasks: one that starts after the call has returned finds nothing left to do, and frees it.
struct Job {
  Job(int64_t tasks, cpu::Executor::Task task, void* state) : tasks(tasks), task(task), state(state) {}

  const int64_t tasks;
  const cpu::Executor::Task task;
  void* const state;  // on the caller's stack: only those who have claimed a task may touch it
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure{};  // of the first that failed; to be read when all are done

  void work() {
    for (;;) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= tasks) return;
      try {
        task(state, index);
      } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

int64_t threads(void* pool) { return static_cast<xla::ffi::ThreadPool*>(pool)->num_threads(); }

void run(void* data, int64_t tasks, cpu::Executor::Task task, void* state) {
  auto& pool = *static_cast<xla::ffi::ThreadPool*>(data);
  auto job = std::make_shared<Job>(tasks, task, state);
  const int64_t helpers = std::min(pool.num_threads(), tasks) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->work(); });
  } catch (const std::bad_alloc&) {  // fewer helpers, then
  }
  job->work();
  // What is not done yet has been started by somebody: a short wait.
  for (int spins = 0; job->done.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < 4000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  if (job->failure != nullptr) std::rethrow_exception(job->failure);
}

}  // namespace

cpu::Executor executor_on(xla::ffi::ThreadPool& pool) { return {&pool, threads, run}; }

}  // namespace eqxcallback
