// A call of a C function whose parameters are known only when the program runs.
//
// The first integers and pointers are in registers, and so are the first floating numbers, each kind counted on its
// own; the other parameters are on the stack, in order, a word each. So one type of function, with all registers and
// some words of the stack, calls all other types: no function reads a register or a word that is not a parameter.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace eqxcallback {

class PlainCall {
 public:
#if defined(__aarch64__)
  static constexpr size_t kIntegers = 8;
#else
  static constexpr size_t kIntegers = 6;
#endif
  static constexpr size_t kFloats = 8;
#if defined(__x86_64__) && !defined(_WIN32)
  static constexpr bool kIsKnown = true;
  static constexpr size_t kStack = 32;
#elif defined(__aarch64__)
  static constexpr bool kIsKnown = true;
#if defined(__APPLE__)
  static constexpr size_t kStack = 0;  // on these machines a parameter on the stack takes only as many bytes as it has
#else
  static constexpr size_t kStack = 32;
#endif
#else
  static constexpr bool kIsKnown = false;
  static constexpr size_t kStack = 0;
#endif

  void add_integer(uint64_t word) { (integers_ < kIntegers ? words_[integers_++] : next_on_stack()) = word; }
  void add_pointer(const void* pointer) { add_integer(reinterpret_cast<uintptr_t>(pointer)); }
  // Takes the bits of a double, or in the lower half those of a float.
  void add_float(uint64_t bits) { (floats_ < kFloats ? words_[kIntegers + floats_++] : next_on_stack()) = bits; }

  // Calls the function and returns its result, if that is an `int`.
  int operator()(const void* function) const {
    const auto integers = std::make_index_sequence<kIntegers>();
    const auto floats = std::make_index_sequence<kFloats>();
    if (stack_ == 0) return call(function, integers, floats, std::index_sequence<>());
    return call(function, integers, floats, std::make_index_sequence<kStack>());
  }

 private:
  uint64_t& next_on_stack() {
    if (stack_ == kStack) throw std::invalid_argument("expected fewer parameters of a C function");
    return words_[kIntegers + kFloats + stack_++];
  }

  double floating(size_t i) const {
    double value;
    std::memcpy(&value, &words_[kIntegers + i], sizeof(value));
    return value;
  }

  template <size_t, typename Type>
  using Each = Type;

  template <size_t... i, size_t... f, size_t... s>
  int call(const void* function, std::index_sequence<i...>, std::index_sequence<f...>,
           std::index_sequence<s...>) const {
    using Function = int (*)(Each<i, uint64_t>..., Each<f, double>..., Each<s, uint64_t>...);
    return reinterpret_cast<Function>(const_cast<void*>(function))(words_[i]..., floating(f)...,
                                                                   words_[kIntegers + kFloats + s]...);
  }

  std::array<uint64_t, kIntegers + kFloats + kStack> words_{};
  size_t integers_ = 0, floats_ = 0, stack_ = 0;
};

}  // namespace eqxcallback
