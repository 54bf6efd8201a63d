// Memory for one operand or result of a kernel in a child process: what is written beside it is found, and what is
// touched farther away is forbidden. Nothing of Python or XLA here.
//
//   forbidden | noise, 1 KiB or more | the memory | noise, up to 63 bytes | forbidden
//
// XLA aligns memory to 64 bytes, and kernels may rely on that: so the end lies at most 63 bytes before a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace eqxcallback {

// Bytes beside the memory: how many, and the distance of the nearest one, where the adjacent byte has 1.
struct Beside {
  size_t count = 0;
  size_t nearest = 0;
};

class GuardedMemory {
 public:
  // Memories of a call have different numbers, and so different noise. Throws std::bad_alloc.
  GuardedMemory(size_t size, size_t number);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // What of the noise was overwritten.
  Beside before() const;
  Beside after() const;

  // How far before or after the memory an address lies, if it is one of the forbidden ones beside it.
  std::optional<size_t> before(const void* address) const;
  std::optional<size_t> after(const void* address) const;

 private:
  uint8_t noise(const uint8_t* place) const;

  size_t size_;
  size_t number_;
  uint8_t* region_;
  size_t region_size_;
  uint8_t* first_;  // of what is not forbidden
  uint8_t* last_;   // behind it
  uint8_t* data_;
};

// Memory that nobody may touch.
class ForbiddenMemory {
 public:
  ForbiddenMemory();  // throws std::bad_alloc
  ~ForbiddenMemory();
  ForbiddenMemory(const ForbiddenMemory&) = delete;
  ForbiddenMemory& operator=(const ForbiddenMemory&) = delete;

  void* data() const { return data_; }
  bool has(const void* address) const;

 private:
  void* data_;
};

}  // namespace eqxcallback
