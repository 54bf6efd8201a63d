// How cuda_cpu.h runs a grid of blocks of threads.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_cpu_types.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_cpu {

// Where threads meet: an operation in a line of the source.
struct Place {
  const char* name;
  int line;
  bool operator==(const Place& other) const { return line == other.line && std::strcmp(name, other.name) == 0; }
  std::string text() const { return std::string(name) + " in line " + std::to_string(line); }
};

enum class State { kReady, kAtBarrier, kInWarp, kDone };

// An asynchronous one, and how many groups of its thread had ended when it began.
struct Copy {
  void* to;
  const void* from;
  unsigned bytes, read, group;
};

struct Fiber {
  State state = State::kReady;
  bool started = false;
  jmp_buf context;
  uint3 index;
  unsigned warp, lane;
  Place place;      // where it waits
  uint64_t given;   // what it brings there,
  uint64_t taken;   // and gets
  unsigned source;  // the lane whose value it wants, or kBallot
  char* stack;
  std::vector<Copy> copies;  // that have not arrived
  unsigned groups;           // of copies, which have ended
};
constexpr unsigned kBallot = 32;

// A warp operation that waits for lanes of its mask. One warp may have several, with disjoint masks.
struct Meeting {
  unsigned mask, arrived;
  Place place;
};

struct Warp {
  unsigned alive = 0;  // lanes that have not ended
  std::vector<Meeting> meetings;
};

struct Block;
inline thread_local Block* current = nullptr;

struct Block {
  uint3 index;
  dim3 size, grid;
  const std::function<void()>* kernel;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;  // for the next round
  unsigned alive, at_barrier;
  void* dynamic = nullptr;  // shared memory
  Fiber* fiber = nullptr;   // the running one
  jmp_buf scheduler;
  ucontext_t first_context;
  std::string error;
  bool copies_arrive_early = false;
};

// The lowest bytes of a stack may not be touched: a multiple of all sizes of pages.
constexpr size_t kGuardBytes = 64 << 10, kStackBytes = kGuardBytes + (256 << 10);

// Of names of dynamic shared memory that are those of a file.
struct DynamicName {
  using Set = void (*)(void* memory);
  static inline std::vector<Set> all;
  explicit DynamicName(Set set) { all.push_back(set); }
};

// AddressSanitizer has to know which stack is in use.
inline void announce_fiber([[maybe_unused]] Fiber& fiber) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, fiber.stack, kStackBytes);
#endif
}
inline void arrive_on_stack() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}
struct OwnStack {  // of the scheduler
  const void* bottom = nullptr;
  size_t bytes = 0;
};
inline thread_local OwnStack own_stack;

[[noreturn]] inline void to_scheduler() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(nullptr, own_stack.bottom, own_stack.bytes);
#endif
  _longjmp(current->scheduler, 1);
}

// Until somebody makes this fiber ready.
inline void wait() {
  if (_setjmp(current->fiber->context) == 0) to_scheduler();
  arrive_on_stack();
}

[[noreturn]] inline void fail(const std::string& error) {
  current->error = error;
  to_scheduler();
}

// The running thread, which begins a sentence.
inline std::string who() {
  const auto text = [](const uint3& of) {
    return "(" + std::to_string(of.x) + ", " + std::to_string(of.y) + ", " + std::to_string(of.z) + ") ";
  };
  return "thread " + text(current->fiber->index) + "of block " + text(current->index);
}

inline void wake(Fiber& fiber) {
  fiber.state = State::kReady;
  current->ready.push_back(static_cast<unsigned>(&fiber - current->fibers.data()));
}

// -- barriers. Threads that have ended do not count.

inline void open_barrier_if_all_came() {
  Block& block = *current;
  if (block.at_barrier == 0 || block.at_barrier < block.alive) return;
  uint64_t count = 0;
  const Fiber* first = nullptr;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &fiber;
    if (!(fiber.place == first->place)) {
      block.error = "threads of a block met at different barriers: " + first->place.text() + ", " + fiber.place.text();
      return;
    }
    count += fiber.given;
  }
  for (Fiber& fiber : block.fibers) {
    if (fiber.state != State::kAtBarrier) continue;
    fiber.taken = count;
    wake(fiber);
  }
  block.at_barrier = 0;
}

// How many of the threads bring `flag`.
inline unsigned barrier(bool flag, Place place) {
  Fiber& fiber = *current->fiber;
  fiber.place = place;
  fiber.given = flag;
  fiber.state = State::kAtBarrier;
  ++current->at_barrier;
  open_barrier_if_all_came();
  wait();
  return static_cast<unsigned>(fiber.taken);
}

// -- warp operations

inline Fiber& lane_of(unsigned warp, unsigned lane) { return current->fibers[warp * 32 + lane]; }

// Returns whether the meeting is over: all lanes of its mask that are alive have come.
inline bool hold(unsigned warp, const Meeting& meeting) {
  if ((meeting.mask & current->warps[warp].alive) != meeting.arrived) return false;
  uint64_t ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (meeting.arrived >> lane & 1 && lane_of(warp, lane).given != 0) ballot |= uint64_t{1} << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(meeting.arrived >> lane & 1)) continue;
    Fiber& fiber = lane_of(warp, lane);
    if (fiber.source != kBallot && !(meeting.arrived >> fiber.source & 1)) {
      current->error = meeting.place.text() + ": lane " + std::to_string(lane) + " reads from lane " +
                       std::to_string(fiber.source) + ", which takes no part";
      return true;
    }
    fiber.taken = fiber.source == kBallot ? ballot : lane_of(warp, fiber.source).given;
    wake(fiber);
  }
  return true;
}

inline uint64_t meet(unsigned mask, uint64_t given, unsigned source, Place place) {
  Fiber& fiber = *current->fiber;
  Warp& warp = current->warps[fiber.warp];
  if (!(mask >> fiber.lane & 1)) fail(place.text() + ": the calling lane is not in its own mask");
  Meeting* meeting = nullptr;
  for (Meeting& open : warp.meetings) {
    if (!(open.mask & mask)) continue;
    if (open.mask != mask || !(open.place == place)) {
      fail("lanes of a warp met in different operations or with different masks: " + open.place.text() + ", " +
           place.text());
    }
    meeting = &open;
  }
  if (meeting == nullptr) meeting = &warp.meetings.emplace_back(Meeting{mask, 0, place});
  meeting->arrived |= 1u << fiber.lane;
  fiber.place = place;
  fiber.given = given;
  fiber.source = source;
  fiber.state = State::kInWarp;
  if (hold(fiber.warp, *meeting)) warp.meetings.erase(warp.meetings.begin() + (meeting - warp.meetings.data()));
  wait();
  return fiber.taken;
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source, Place place) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet(mask, bits, source, place);
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

// -- the schedule

inline void end_of_fiber() {
  Block& block = *current;
  Fiber& fiber = *block.fiber;
  fiber.state = State::kDone;
  --block.alive;
  Warp& warp = block.warps[fiber.warp];
  warp.alive &= ~(1u << fiber.lane);
  // Those that wait for it no longer do.
  for (size_t i = 0; i < warp.meetings.size();) {
    if (hold(fiber.warp, warp.meetings[i])) {
      warp.meetings.erase(warp.meetings.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
  open_barrier_if_all_came();
}

inline void first_step() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &own_stack.bottom, &own_stack.bytes);
#endif
  (*current->kernel)();
  end_of_fiber();
  to_scheduler();
}

// Returns when the fiber waits or has ended. The first step needs a stack, the others only jump: setcontext asks the
// system each time.
inline void resume(Fiber& fiber) {
  Block& block = *current;
  block.fiber = &fiber;
  if (_setjmp(block.scheduler) == 0) {
    announce_fiber(fiber);
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    getcontext(&block.first_context);
    block.first_context.uc_stack.ss_sp = fiber.stack;
    block.first_context.uc_stack.ss_size = kStackBytes;
    block.first_context.uc_link = nullptr;
    makecontext(&block.first_context, first_step, 0);
    setcontext(&block.first_context);
  }
  arrive_on_stack();
}

inline std::string who_waits(const Block& block) {
  std::map<std::string, int> counts;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.state != State::kDone) ++counts[fiber.place.text()];
  }
  std::string text;
  for (const auto& [place, count] : counts) text += (text.empty() ? "" : ", ") + std::to_string(count) + " at " + place;
  return text;
}

// Takes the threads that run next: all that can, in order; or, shuffled, those of one warp, which mostly goes on until
// it waits for others. So warps get far ahead of each other, as they do where a barrier is missing.
inline void take_ready(Block& block, std::mt19937* random, unsigned& warp, std::vector<unsigned>& round) {
  std::vector<unsigned>& ready = block.ready;
  if (random == nullptr) {
    round.swap(ready);
    ready.clear();
    std::sort(round.begin(), round.end());
    return;
  }
  const auto of_others = [&](unsigned i) { return i / 32 != warp; };
  auto own = std::partition(ready.begin(), ready.end(), of_others);
  if (own == ready.end() || (*random)() % 8 == 0) {
    warp = ready[(*random)() % ready.size()] / 32;
    own = std::partition(ready.begin(), ready.end(), of_others);
  }
  round.assign(own, ready.end());
  ready.erase(own, ready.end());
  std::shuffle(round.begin(), round.end(), *random);
}

inline void run(Block& block, std::mt19937* random) {
  const unsigned threads = block.size.x * block.size.y * block.size.z;
  block.warps.assign((threads + 31) / 32, Warp());
  block.ready.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.state = State::kReady;
    fiber.started = false;
    fiber.copies.clear();
    fiber.groups = 0;
    fiber.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    fiber.warp = i / 32;
    fiber.lane = i % 32;
    block.warps[fiber.warp].alive |= 1u << fiber.lane;
    block.ready[i] = i;
  }
  block.alive = threads;
  block.at_barrier = 0;
  std::vector<unsigned> round;
  unsigned warp = 0;
  while (block.alive > 0) {
    if (block.ready.empty()) {
      throw std::runtime_error("threads wait for others that never come: " + who_waits(block));
    }
    take_ready(block, random, warp, round);
    for (const unsigned i : round) {
      resume(block.fibers[i]);
      if (!block.error.empty()) throw std::runtime_error(block.error);
    }
  }
}

}  // namespace cuda_cpu
