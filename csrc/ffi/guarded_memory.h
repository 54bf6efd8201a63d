// Memory for one operand or result of a kernel in a child process: a write beside it is noticed, and an access farther
// away is forbidden. This file needs neither Python nor XLA.
//
//   forbidden | noise, 1 KiB or more | the memory | noise, up to 63 bytes | forbidden
//
// XLA aligns memory to 64 bytes, and kernels may rely on that, so the end lies at most 63 bytes before a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace eqxcallback {

// Bytes beside the memory: their number, and the distance of the nearest one. The adjacent byte has the distance 1.
struct Beside {
  size_t count = 0;
  size_t nearest = 0;
};

class GuardedMemory {
 public:
  // The memories of a call have different numbers, and so different noise. Throws std::bad_alloc.
  GuardedMemory(size_t size, size_t number);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // The bytes of the noise that were overwritten.
  Beside before() const;
  Beside after() const;

  // The distance of an address before or after the memory, if it is a forbidden address beside it.
  std::optional<size_t> before(const void* address) const;
  std::optional<size_t> after(const void* address) const;

 private:
  uint8_t noise(const uint8_t* place) const;

  size_t size_;
  size_t number_;
  uint8_t* region_;
  size_t region_size_;
  uint8_t* first_;  // the first byte that is not forbidden
  uint8_t* last_;   // behind the last such byte
  uint8_t* data_;
};

// Memory that must not be touched.
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
