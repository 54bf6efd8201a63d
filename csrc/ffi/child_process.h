// Runs a function in a child process, so that the parent goes on whatever the function does to memory. This file needs
// neither Python nor XLA.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace eqxcallback {

// The end of a child: by itself, by a signal, by an exception, or by us.
struct Ending {
  enum class Kind { kReturned, kThrew, kSignal, kExit, kTimeLimit, kNotStarted };

  Kind kind = Kind::kNotStarted;
  int number = 0;  // the signal's number, the exit status, or `errno`
  const void* address =
      nullptr;  // for SIGSEGV and SIGBUS: the address that was touched; null if the processor does not say
  bool is_write = false;
  std::string text;  // the text of a C++ exception
};

// Memory that a child and its parent share. Zeros at first, and freed by the parent.
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

// Calls `function` in a forked child, and kills the child after `seconds`. The child has no other threads, and ends
// without running what is registered for the end of a process. The parent sees what it writes in SharedMemory alone.
//
// The child holds the locks that the caller holds. `waiting`, if given, is called with a function that waits for the
// child, and may release locks around that.
using Waiting = std::function<void(const std::function<void()>&)>;
Ending run_in_child(double seconds, const std::function<void()>& function, const Waiting& waiting = nullptr);

}  // namespace eqxcallback
