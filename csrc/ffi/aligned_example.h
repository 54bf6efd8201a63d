// AlignedExample: memory of its own for one example of an array, in which examples begin where the one before ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace eqxcallback {

class AlignedExample {
 public:
  // XLA's, on which kernels may rely.
  static constexpr size_t kAlignment = 64;

  explicit AlignedExample(size_t bytes) : bytes_(bytes), memory_(bytes + 3 * kAlignment, kMargin) {
    const auto begin = reinterpret_cast<uintptr_t>(memory_.data()) + kAlignment;
    data_ = memory_.data() + kAlignment + (kAlignment - begin % kAlignment) % kAlignment;
  }
  AlignedExample(const AlignedExample&) = delete;
  AlignedExample& operator=(const AlignedExample&) = delete;

  // Copies the example at `origin`. Returns where the copy is.
  void* take(void* origin) {
    origin_ = origin;
    std::memcpy(data_, origin, bytes_);
    return data_;
  }

  // Copies it back to where it came from, if it is a result. Returns false if a kernel has written beside it.
  bool give_back(bool is_result) {
    if (origin_ != nullptr && is_result) std::memcpy(origin_, data_, bytes_);
    origin_ = nullptr;
    return is_margin(data_ - kAlignment) && is_margin(data_ + bytes_);
  }

 private:
  static constexpr unsigned char kMargin = 0xEB;

  static bool is_margin(const unsigned char* begin) {
    return std::all_of(begin, begin + kAlignment, [](unsigned char byte) { return byte == kMargin; });
  }

  size_t bytes_;
  std::vector<unsigned char> memory_;
  unsigned char* data_;
  void* origin_ = nullptr;
};

}  // namespace eqxcallback
