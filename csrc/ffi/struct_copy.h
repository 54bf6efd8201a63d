// Copies of structs of XLA's C API, which may be longer at run time than the headers of this build say.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace eqxcallback {

template <typename T>
class StructCopy {
 public:
  // The size that a struct gives for itself may leave out its last field, so the copy is at least as large as our
  // struct.
  explicit StructCopy(const T& origin) : bytes_(std::max(sizeof(T), origin.struct_size)) {
    std::memcpy(bytes_.data(), &origin, bytes_.size());
  }
  StructCopy(const StructCopy&) = delete;
  StructCopy& operator=(const StructCopy&) = delete;

  T* get() { return reinterpret_cast<T*>(bytes_.data()); }
  T* operator->() { return get(); }

 private:
  std::vector<unsigned char> bytes_;  // aligned for anything
};

}  // namespace eqxcallback
