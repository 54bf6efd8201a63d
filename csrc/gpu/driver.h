// The CUDA driver, opened when it is first needed: to build this code, no CUDA toolkit and no GPU are needed.
#pragma once

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace eqxcallback::gpu {

// Opaque types, as in cuda.h.
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;

// The functions of the driver that we call. The numbers are from the driver's stable ABI.
struct Driver {
  static constexpr int kInvalidValue = 1;             // CUDA_ERROR_INVALID_VALUE
  static constexpr int kMaxDynamicSharedBytes = 8;    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  static constexpr int kNonPortableClusterSize = 14;  // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
  static constexpr int kRelaxed = 2;                  // CU_STREAM_CAPTURE_MODE_RELAXED

  void* library = nullptr;
  int (*Init)(unsigned flags) = nullptr;
  int (*GetErrorName)(int code, const char** name) = nullptr;
  int (*GetErrorString)(int code, const char** text) = nullptr;
  int (*DriverGetVersion)(int* version) = nullptr;
  int (*DeviceGetCount)(int* count) = nullptr;
  int (*CtxGetCurrent)(Context* context) = nullptr;
  int (*CtxSetCurrent)(Context context) = nullptr;
  int (*CtxGetDevice)(int* device) = nullptr;
  int (*DevicePrimaryCtxRetain)(Context* context, int device) = nullptr;
  int (*DevicePrimaryCtxRelease)(int device) = nullptr;
  int (*ThreadExchangeStreamCaptureMode)(int* mode) = nullptr;
  int (*ModuleLoadData)(Module* module, const void* image) = nullptr;
  int (*ModuleUnload)(Module module) = nullptr;
  int (*ModuleGetFunction)(Function* function, Module module, const char* name) = nullptr;
  // Null before CUDA 12.4.
  int (*FuncGetParamInfo)(Function function, size_t index, size_t* offset, size_t* size) = nullptr;
  int (*FuncSetAttribute)(Function function, int attribute, int value) = nullptr;
  int (*LaunchKernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters,
                      void** extra) = nullptr;
};

// Returns a function of the driver by its name. Throws std::runtime_error if the driver, being too old, lacks it.
void* find_symbol(void* library, const char* name);
template <class Symbol>
void find(const Driver& driver, const char* name, Symbol& symbol) {
  symbol = reinterpret_cast<Symbol>(find_symbol(driver.library, name));
}

// A call of the driver that failed.
class DriverError : public std::runtime_error {
 public:
  DriverError(const Driver& driver, int code, const std::string& call);
  int code;
};

// Returns the driver, which lives as long as the process. Throws std::runtime_error, naming what is missing, if there
// is none.
const Driver& driver();

// From now on opens the library at `path` in place of the system's driver: in tests, a fake one. "" is the system's.
void set_driver(const std::string& path);

// Returns the version of CUDA that the driver supports: 13000 is 13.0. Throws as `driver` does, also if there is no
// device.
int driver_version();

// Throws DriverError unless `code` is zero. `call` names the call: a text, or a function that makes one if there is an
// error.
template <class Call>
void check(const Driver& driver, int code, const Call& call) {
  if (code == 0) return;
  if constexpr (std::is_invocable_v<Call>) {
    throw DriverError(driver, code, call());
  } else {
    throw DriverError(driver, code, call);
  }
}

// While a Relaxed lives, its thread may do what the driver otherwise refuses during a capture. Loading and unloading
// enqueue nothing, and Python's garbage collector may free a program anywhere, also inside of a kernel that is being
// recorded: if the driver refused that, the graph would be lost.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) : driver_(driver) { driver_.ThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver_.ThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const Driver& driver_;
  int mode_ = Driver::kRelaxed;  // after the exchange, the mode that the thread had before
};

// While a Retained lives, so does the current context of the thread that made it, if it is the primary one of its
// device: with a context the driver unloads what is in it, and the next one may get the same address. XLA lets go of
// its own when its backends are cleared.
class Retained {
 public:
  Retained(const Driver& driver, Context current);
  ~Retained();
  Retained(const Retained&) = delete;
  Retained& operator=(const Retained&) = delete;

 private:
  const Driver& driver_;
  int device_ = 0;
  bool is_primary_;
};

// Returns how many parameters a kernel has, if the driver knows. A launch reads so many of those that it is given.
std::optional<size_t> parameters_of(const Driver& driver, Function function);

// Makes the context of a device current in this thread, if no context is. Where XLA calls a handler, it has already
// made one current: the primary context of its device.
Context activate(const Driver& driver, int device);

// Leaves no context current: for threads that serve several devices in turn and do not say which, as XLA's on a CPU.
void deactivate(const Driver& driver);

}  // namespace eqxcallback::gpu
