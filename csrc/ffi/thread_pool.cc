// Jobs, and the helpers that run their tasks on XLA's threads.
#include "ffi/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

namespace eqxcallback {
namespace {

// The tasks of one call. The call and its helpers share it, and the last of them frees it: a helper that comes after
// the call has returned has nothing left to do.
struct Job {
  Job(int64_t tasks, cpu::Executor::Task task, void* state) : tasks(tasks), task(task), state(state) {}

  const int64_t tasks;
  const cpu::Executor::Task task;
  void* const state;  // on the caller's stack: only a thread that has claimed a task may touch it
  std::atomic<int> owners{1};
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure{};  // of the first task that failed; to be read when all are done

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

  Job* share() {
    owners.fetch_add(1, std::memory_order_relaxed);
    return this;
  }
  void release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// The processor that runs this thread, or -1 if the system does not say.
int this_processor() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

// A program calls one kernel after another, and waking a thread of XLA's takes longer than many of them run. So a
// helper that has nothing left to do keeps its thread for a short while, and polls a place where the next call leaves
// its job. At least one thread of each pool does not wait here.
class WaitingHelpers {
 public:
  // Returns the next job, or null if none comes in time.
  Job* wait(int64_t places) {
    for (int64_t i = 0; i < std::min(places, kPlaces); ++i) {
      Place& place = places_[i];
      void* content = nullptr;
      if (!place.content.compare_exchange_strong(content, &place, std::memory_order_relaxed)) continue;
      for (const auto end = Clock::now() + kWait; Clock::now() < end;) {
        place.processor.store(this_processor(), std::memory_order_relaxed);
        for (int polls = 0; polls < 16; ++polls) {
          pause();
          if (place.content.load(std::memory_order_relaxed) != &place) return job_of(place);
        }
        std::this_thread::yield();
      }
      content = &place;
      const bool nobody_came = place.content.compare_exchange_strong(content, nullptr, std::memory_order_relaxed);
      return nobody_came ? nullptr : job_of(place);
    }
    return nullptr;
  }

  // Gives the job to at most `helpers` waiting helpers, and returns how many have it. One on the caller's own processor
  // does not run now: it would begin when the caller has done all by itself, while another processor is idle.
  int64_t give(Job& job, int64_t helpers, int64_t places) {
    const int processor = this_processor();
    int64_t given = 0;
    for (int64_t i = 0; i < std::min(places, kPlaces) && given < helpers; ++i) {
      Place& place = places_[i];
      void* content = &place;
      if (place.content.load(std::memory_order_relaxed) != content) continue;
      if (processor >= 0 && place.processor.load(std::memory_order_relaxed) == processor) continue;
      if (place.content.compare_exchange_strong(content, job.share(), std::memory_order_release,
                                                std::memory_order_relaxed)) {
        ++given;
      } else {
        job.release();
      }
    }
    return given;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Longer than the time between two kernels of a program, and short for a program that has ended.
  static constexpr std::chrono::microseconds kWait{100};
  static constexpr int64_t kPlaces = 64;

  struct alignas(64) Place {
    // Null if no helper waits, the place itself while one waits, and then its job.
    std::atomic<void*> content{nullptr};
    std::atomic<int> processor{-1};  // of the helper
  };

  static Job* job_of(Place& place) {
    return static_cast<Job*>(place.content.exchange(nullptr, std::memory_order_acquire));
  }

  Place places_[kPlaces];
};

WaitingHelpers waiting_helpers;

void help(Job* job, int64_t places) {
  while (job != nullptr) {
    job->work();
    job->release();
    job = waiting_helpers.wait(places);
  }
}

int64_t threads(void* pool) { return static_cast<xla::ffi::ThreadPool*>(pool)->num_threads(); }

void run(void* data, int64_t tasks, cpu::Executor::Task task, void* state) {
  auto& pool = *static_cast<xla::ffi::ThreadPool*>(data);
  auto* const job = new Job(tasks, task, state);
  const int64_t places = pool.num_threads() - 1;
  const int64_t helpers = std::min(places, tasks - 1);
  try {
    for (int64_t i = waiting_helpers.give(*job, helpers, places); i < helpers; ++i) {
      pool.Schedule([owned = job->share(), places] { help(owned, places); });
    }
  } catch (const std::bad_alloc&) {  // the call has fewer helpers then
    job->release();
  }
  job->work();
  // Another thread has started each task that is not yet done, so the wait is short.
  for (int spins = 0; job->done.load(std::memory_order_acquire) < tasks; ++spins) {
    if (spins < 4000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  const std::exception_ptr failure = job->failure;
  job->release();
  if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace

cpu::Executor executor_on(xla::ffi::ThreadPool& pool) { return {&pool, threads, run}; }

}  // namespace eqxcallback
