// Calls of C functions whose parameters are known only when the program runs. Says "ok".
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "core/plain_call.h"

using eqxcallback::PlainCall;

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (false)

namespace {

bool called = false;

// Integers and floating numbers in turns, more of each than there are registers.
int many(int8_t a, float b, const char* c, double d, uint16_t e, float f, int64_t g, double h, bool i, float j,
         int32_t k, double l, uint64_t m, float n, int8_t o, double p, uint32_t q, float r, const char* s, double t,
         int16_t u, float v) {
  called = true;
  CHECK(a == -7 && b == 0.5f && std::strcmp(c, "first") == 0 && d == 1e300 && e == 60'000 && f == -2.5f);
  CHECK(g == INT64_MIN && h == -0.125 && i && j == 3.25f && k == -2'000'000'000 && l == 7.0);
  CHECK(m == UINT64_MAX && n == 1e-30f && o == -128 && p == 2.0 && q == 4'000'000'000u && r == 9.5f);
  CHECK(std::strcmp(s, "last") == 0 && t == -1e-300 && u == -30'000 && v == 6.5f);
  return -5;
}

uint64_t bits(double value) {
  uint64_t word;
  std::memcpy(&word, &value, sizeof(word));
  return word;
}
uint64_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  return word;
}

template <class Type>
void add(PlainCall& call, Type value) {
  if constexpr (std::is_floating_point_v<Type>) {
    call.add_float(bits(value));
  } else if constexpr (std::is_pointer_v<Type>) {
    call.add_pointer(value);
  } else {
    call.add_integer(static_cast<uint64_t>(static_cast<int64_t>(value)));
  }
}

template <class... Types>
int call(const void* function, Types... values) {
  PlainCall plain;
  (add(plain, values), ...);
  return plain(function);
}

int none() { return 42; }
int pointer_and_float(const float* x, float a) { return static_cast<int>(*x * a); }

}  // namespace

int main() {
  CHECK(call(reinterpret_cast<const void*>(&none)) == 42);
  const float three = 3;
  CHECK(call(reinterpret_cast<const void*>(&pointer_and_float), &three, 2.5f) == 7);
  CHECK(call(reinterpret_cast<const void*>(&many), -7, 0.5f, "first", 1e300, 60'000, -2.5f, INT64_MIN, -0.125, true,
             3.25f, -2'000'000'000, 7.0, UINT64_MAX, 1e-30f, -128, 2.0, 4'000'000'000u, 9.5f, "last", -1e-300, -30'000,
             6.5f) == -5);
  CHECK(called);
  PlainCall full;
  for (size_t i = 0; i < PlainCall::kIntegers + PlainCall::kStack; ++i) full.add_integer(1);
  bool refused = false;
  try {
    full.add_integer(1);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  full.add_float(0);  // these have registers of their own
  std::puts("ok");
}
