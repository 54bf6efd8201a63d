// Child processes: fork, signals, time limits, and the report of how the child ended.
#include "ffi/child_process.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#include <ucontext.h>
#endif

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

namespace eqxcallback {
namespace {

// A child's report of itself.
struct Report {
  volatile sig_atomic_t has_returned, has_thrown, has_fault, is_write;
  const void* volatile address;
  char text[512];
};

Report* report_of_child = nullptr;  // set in the child alone, for its signal handler

void note_fault(int number, siginfo_t* info, void* context) {
  report_of_child->address = info->si_addr;
  report_of_child->has_fault = 1;
#if defined(__linux__) && defined(__x86_64__)
  // The second bit of the processor's error code says that the access was a write.
  report_of_child->is_write = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  (void)context;
#endif
  signal(number, SIG_DFL);  // the same instruction runs again, and ends the process
}

// Replaces the parent's handlers, which would tell of the parent: those of Python, its faulthandler, and sanitizers.
void take_signals() {
  constexpr size_t kStack = 1 << 16;  // after an overflow, the kernel's own stack has no room
  static char stack[kStack];
  stack_t other{};
  other.ss_sp = stack;
  other.ss_size = kStack;
  sigaltstack(&other, nullptr);
  for (const int number : {SIGABRT, SIGFPE, SIGILL, SIGTRAP, SIGINT, SIGTERM, SIGALRM}) signal(number, SIG_DFL);
  struct sigaction action{};
  action.sa_sigaction = note_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int number : {SIGSEGV, SIGBUS}) sigaction(number, &action, nullptr);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_UNBLOCK, &all, nullptr);
}

[[noreturn]] void be_the_child(Report& report, const std::function<void()>& function) {
#ifdef __linux__
  prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
  const rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  report_of_child = &report;
  take_signals();
  try {
    function();
    report.has_returned = 1;
  } catch (const std::exception& error) {
    std::strncpy(report.text, error.what(), sizeof(report.text) - 1);
    report.has_thrown = 1;
  } catch (...) {
    std::strncpy(report.text, "not a std::exception", sizeof(report.text) - 1);
    report.has_thrown = 1;
  }
  std::fflush(stdout);
  std::fflush(stderr);
  _exit(0);
}

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Waits for the child, and returns true if it ended by itself.
bool wait_for(pid_t child, double seconds, int& status) {
  const double end = now() + seconds;
  constexpr long kLongest = 2'000'000;  // ns
  for (timespec pause{0, 20'000};; pause.tv_nsec = pause.tv_nsec < kLongest ? 2 * pause.tv_nsec : kLongest) {
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child) return true;
    if (ended < 0 && errno != EINTR) {  // another thread has waited for all children
      status = 0;
      return true;
    }
    if (now() > end) {
      kill(child, SIGKILL);
      while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
      }
      return false;
    }
    nanosleep(&pause, nullptr);
  }
}

}  // namespace

SharedMemory::SharedMemory(size_t bytes)
    : data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)), bytes_(bytes) {
  if (data_ == MAP_FAILED) throw std::bad_alloc();
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

Ending run_in_child(double seconds, const std::function<void()>& function, const Waiting& waiting) {
  SharedMemory shared(sizeof(Report));
  Report& report = *new (shared.data()) Report{};
  // Without this the child, too, would write what the parent has not yet written.
  std::fflush(stdout);
  std::fflush(stderr);
  Ending ending;
  const pid_t child = fork();
  if (child < 0) {
    ending.number = errno;
    return ending;
  }
  if (child == 0) be_the_child(report, function);

  int status = 0;
  bool has_ended = false;
  const auto wait = [&] { has_ended = wait_for(child, seconds, status); };
  waiting ? waiting(wait) : wait();
  ending.text = report.text;
  if (!has_ended) {
    ending.kind = Ending::Kind::kTimeLimit;
  } else if (WIFSIGNALED(status)) {
    ending.kind = Ending::Kind::kSignal;
    ending.number = WTERMSIG(status);
    if (report.has_fault) ending.address = report.address;
    ending.is_write = report.is_write != 0;
  } else if (report.has_thrown) {
    ending.kind = Ending::Kind::kThrew;
  } else if (report.has_returned) {
    ending.kind = Ending::Kind::kReturned;
  } else {
    ending.kind = Ending::Kind::kExit;
    ending.number = WEXITSTATUS(status);
  }
  return ending;
}

}  // namespace eqxcallback
