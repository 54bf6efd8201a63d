// Numbers that are the same everywhere, and those that kernels compute from them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/isa.h"

namespace cpu = eqxcallback::cpu;

static const cpu::Executor kExecutor{nullptr, [](void*) -> int64_t { return 2; },
                                     [](void*, int64_t tasks, cpu::Executor::Task task, void* state) {
                                       for (int64_t i = 0; i < tasks; ++i) task(state, i);
                                     }};

static uint32_t state = 1;
static uint32_t next() { return state = state * 1664525u + 1013904223u; }
static float number() { return static_cast<float>(static_cast<int32_t>(next() >> 8) - (1 << 23)) * 0x1p-22f; }

template <class T>
static std::vector<T> numbers(int64_t count) {
  std::vector<T> found(static_cast<size_t>(count));
  for (T& x : found) cpu::from_float(number(), x);
  return found;
}
static std::vector<uint8_t> bytes(int64_t count) {
  std::vector<uint8_t> found(static_cast<size_t>(count));
  for (uint8_t& x : found) x = static_cast<uint8_t>(next() >> 24);
  return found;
}

static std::vector<float> shown;
template <class T>
static void show(const std::vector<T>& out) {
  for (const T& x : out) shown.push_back(cpu::to_float(x));
}
template <class T, class... Others>
static void show(const std::vector<T>& out, const Others&... others) {
  show(out);
  (show(others), ...);
}
