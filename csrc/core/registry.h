// Registry: what compiled programs call, by the keys that their text carries. Nothing of Python here.
//
// Contract: a key belongs to one living entry, which says when it goes: remove() returns when nobody is looking at it
// any more. Who finds an entry has to keep it alive, with what `pin` makes of it while it cannot go.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace eqxcallback {

template <class Entry>
class Registry {
 public:
  // False if the key belongs to another one.
  bool add(uint64_t key, Entry& entry) {
    const std::lock_guard lock(mutex_);
    return entries_.emplace(key, &entry).second;
  }

  // Nothing happens if the key belongs to another one, or to none.
  void remove(uint64_t key, const Entry& entry) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key);
    if (found != entries_.end() && found->second == &entry) entries_.erase(found);
  }

  bool has(uint64_t key) const {
    const std::lock_guard lock(mutex_);
    return entries_.count(key) != 0;
  }

  // `pin(entry)`, or an empty one of its type if there is no entry. `pin` must not come back here.
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
