// Executor: spreads the work of a kernel over threads, whosever threads they are.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace eqxcallback::cpu {

// Throws std::bad_alloc, whose constructor is an inline function of the standard library: see types.h.
[[noreturn]] void throw_bad_alloc();

struct Executor {
  using Task = void (*)(void* state, int64_t index);

  void* pool;
  int64_t (*threads)(void* pool);
  // Calls task(state, i) for each i below `tasks`, on the caller's thread and others, and returns when all are done.
  void (*run)(void* pool, int64_t tasks, Task task, void* state);
};

namespace {

// Waking another thread takes 4 to 16 us: less work than this is done faster alone.
inline constexpr double kSerialNanoseconds = 16'000;
inline constexpr double kTaskNanoseconds = 4'000;

// Calls body(begin, end) on ranges that cover [0, n), in multiples of `multiple`, where an item takes about so long.
template <class Body>
void parallel_for(const Executor& executor, int64_t n, double nanoseconds_per_item, const Body& body,
                  int64_t multiple = 1) {
  const double nanoseconds = static_cast<double>(n) * nanoseconds_per_item;
  const int64_t threads = nanoseconds < kSerialNanoseconds ? 1 : executor.threads(executor.pool);
  // Several tasks for each thread, as a thread may start late, or be slow.
  const int64_t wanted = smaller(threads * 8, static_cast<int64_t>(nanoseconds / kTaskNanoseconds));
  if (threads <= 1 || wanted <= 1 || n <= multiple) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  // Tasks of as equal length as can be: of longer ones and a short one, a thread would wait for another longer.
  const int64_t items = (n + multiple - 1) / multiple, tasks = smaller(items, wanted);
  struct State {
    const Body& body;
    int64_t n, multiple, items, tasks;

    int64_t begin(int64_t index) const { return smaller(n, items * index / tasks * multiple); }
  } state{body, n, multiple, items, tasks};
  executor.run(
      executor.pool, tasks,
      [](void* data, int64_t index) {
        const State& s = *static_cast<State*>(data);
        s.body(s.begin(index), s.begin(index + 1));
      },
      &state);
}

}  // namespace
}  // namespace eqxcallback::cpu
