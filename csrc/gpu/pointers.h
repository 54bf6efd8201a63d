// Pointers: as many as a call has, without an allocation if they are few.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace eqxcallback::gpu {

class Pointers {
 public:
  explicit Pointers(size_t count) : many_(count > kUsual ? count : 0) {}
  Pointers(const Pointers&) = delete;
  Pointers& operator=(const Pointers&) = delete;

  void** data() { return many_.empty() ? usual_.data() : many_.data(); }

 private:
  static constexpr size_t kUsual = 48;
  std::array<void*, kUsual> usual_;
  std::vector<void*> many_;
};

}  // namespace eqxcallback::gpu
