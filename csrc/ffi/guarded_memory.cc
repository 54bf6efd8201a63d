// Guarded memory: its pages, its noise, and what was overwritten.
#include "ffi/guarded_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace eqxcallback {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kBand = 1024;
constexpr size_t kForbidden = 1 << 20;  // on each side; costs addresses only

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

uint8_t* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<uint8_t*>(memory);
}

size_t distance(const uint8_t* from, const uint8_t* to) { return static_cast<size_t>(to - from); }

}  // namespace

// The noise depends on the distance from the memory and not on the address, so that each run has the same. A byte of it
// differs from its neighbours, from other memories' noise at the same distance, and from zero.
uint8_t GuardedMemory::noise(const uint8_t* place) const {
  const auto i = static_cast<size_t>(place - data_);
  return static_cast<uint8_t>(1 + (i * 97 + (i >> 8) * 31 + number_ * 53) % 255);
}

GuardedMemory::GuardedMemory(size_t size, size_t number) : size_(size), number_(number) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t open = round_up(kBand + round_up(size, kAlignment), page);
  region_size_ = kForbidden + open + kForbidden;
  region_ = map(region_size_);
  first_ = region_ + kForbidden;
  last_ = first_ + open;
  data_ = last_ - round_up(size, kAlignment);
  if (mprotect(first_, open, PROT_READ | PROT_WRITE) != 0) {
    munmap(region_, region_size_);
    throw std::bad_alloc();
  }
  for (uint8_t* place = first_; place < data_; ++place) *place = noise(place);
  for (uint8_t* place = data_ + size_; place < last_; ++place) *place = noise(place);
}

GuardedMemory::~GuardedMemory() { munmap(region_, region_size_); }

Beside GuardedMemory::before() const {
  Beside beside;
  for (const uint8_t* place = first_; place < data_; ++place) {
    if (*place == noise(place)) continue;
    ++beside.count;
    beside.nearest = distance(place, data_);
  }
  return beside;
}

Beside GuardedMemory::after() const {
  Beside beside;
  for (const uint8_t* place = last_; place-- > data_ + size_;) {
    if (*place == noise(place)) continue;
    ++beside.count;
    beside.nearest = distance(data_ + size_, place) + 1;
  }
  return beside;
}

std::optional<size_t> GuardedMemory::before(const void* address) const {
  const auto* place = static_cast<const uint8_t*>(address);
  if (place < region_ || place >= first_) return std::nullopt;
  return distance(place, data_);
}

std::optional<size_t> GuardedMemory::after(const void* address) const {
  const auto* place = static_cast<const uint8_t*>(address);
  if (place < last_ || place >= region_ + region_size_) return std::nullopt;
  return distance(data_ + size_, place) + 1;
}

ForbiddenMemory::ForbiddenMemory() : data_(map(kForbidden)) {}
ForbiddenMemory::~ForbiddenMemory() { munmap(data_, kForbidden); }

bool ForbiddenMemory::has(const void* address) const {
  const auto* first = static_cast<const uint8_t*>(data_);
  return address >= first && address < first + kForbidden;
}

}  // namespace eqxcallback
