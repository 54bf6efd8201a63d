// A function that is run in a child process, so that whatever it does to memory, the parent goes on. Nothing of Python
// or XLA here.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace eqxcallback {

// How a child has ended.
struct Ending {
  enum class Kind { kReturned, kThrew, kSignal, kExit, kTimeLimit, kNotStarted };

  Kind kind = Kind::kNotStarted;
  int number = 0;                 // of the signal, the exit status, or `errno`
  const void* address = nullptr;  // of SIGSEGV and SIGBUS: what was touched; null if the processor does not say
  bool is_write = false;
  std::string text;  // of a C++ exception
};

// Memory that a child and its parent share, of zeros. Freed by the parent.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes);  // throws std::bad_alloc
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

// Calls `function` in a forked child, and kills it after `seconds`. The child has no other threads, and ends without
// running what is registered for the end of a process. What it writes is seen in SharedMemory alone.
//
// Locks that the caller holds are the child's as well. With `waiting`, that function waits: it is called with one that
// does, and may let go of locks around it.
using Waiting = std::function<void(const std::function<void()>&)>;
Ending run_in_child(double seconds, const std::function<void()>& function, const Waiting& waiting = nullptr);

}  // namespace eqxcallback
