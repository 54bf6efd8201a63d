// Registry: finds what compiled programs call by the keys that their text carries. This file needs no Python.
//
// Contract: a key belongs to one living entry. An entry that goes calls remove(), which returns when no thread is
// looking at the entry any more. `pin` makes of an entry, while it cannot go, the object that keeps it alive for the
// caller.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace eqxcallback {

template <class Entry>
class Registry {
 public:
  // Returns false if the key belongs to another entry.
  bool add(uint64_t key, Entry& entry) {
    const std::lock_guard lock(mutex_);
    return entries_.emplace(key, &entry).second;
  }

  // Does nothing if the key belongs to another entry, or to none.
  void remove(uint64_t key, const Entry& entry) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end() && found->second == &entry) entries_.erase(found);
  }

  bool has(uint64_t key) const {
    const std::lock_guard lock(mutex_);
    return entries_.count(key) != 0;
  }

  // Returns `pin(entry)`, or an empty object of its type if there is no entry. `pin` must not call the Registry.
  template <class Pin>
  auto find(uint64_t key, const Pin& pin) const -> decltype(pin(*static_cast<Entry*>(nullptr))) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found == entries_.end()) return {};
    return pin(*found->second);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Entry*> entries_;
};

}  // namespace eqxcallback
