// The CUDA driver: opens it, looks its functions up, and explains its errors.
#include "gpu/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace eqxcallback::gpu {
namespace {

std::mutex mutex;
std::string path;                            // "": the system's driver
std::atomic<const Driver*> loaded{nullptr};  // the driver at `path`, or null; each launch reads it without the lock

// The library is never closed: modules and contexts live as long as the process.
const Driver* open(const std::string& where) {
  auto opened = std::make_unique<Driver>();
  opened->library = dlopen(where.empty() ? "libcuda.so.1" : where.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened->library == nullptr) throw std::runtime_error(std::string("there is no CUDA driver: ") + dlerror());
  Driver& d = *opened;
  find(d, "cuInit", d.Init);
  find(d, "cuGetErrorName", d.GetErrorName);
  find(d, "cuGetErrorString", d.GetErrorString);
  find(d, "cuDriverGetVersion", d.DriverGetVersion);
  find(d, "cuDeviceGetCount", d.DeviceGetCount);
  find(d, "cuCtxGetCurrent", d.CtxGetCurrent);
  find(d, "cuCtxSetCurrent", d.CtxSetCurrent);
  find(d, "cuCtxGetDevice", d.CtxGetDevice);
  find(d, "cuDevicePrimaryCtxRetain", d.DevicePrimaryCtxRetain);
  find(d, "cuDevicePrimaryCtxRelease_v2", d.DevicePrimaryCtxRelease);
  find(d, "cuThreadExchangeStreamCaptureMode", d.ThreadExchangeStreamCaptureMode);
  find(d, "cuModuleLoadData", d.ModuleLoadData);
  find(d, "cuModuleUnload", d.ModuleUnload);
  find(d, "cuModuleGetFunction", d.ModuleGetFunction);
  d.FuncGetParamInfo = reinterpret_cast<decltype(d.FuncGetParamInfo)>(dlsym(d.library, "cuFuncGetParamInfo"));
  find(d, "cuFuncSetAttribute", d.FuncSetAttribute);
  find(d, "cuLaunchKernel", d.LaunchKernel);
  check(d, d.Init(0), "cuInit");
  return opened.release();
}

std::string describe(const Driver& driver, int code, const std::string& call) {
  const char *name = nullptr, *text = nullptr;
  driver.GetErrorName(code, &name);
  driver.GetErrorString(code, &text);
  std::string message = call + " failed: " + (text != nullptr ? text : "unknown error") + " (" +
                        (name != nullptr ? name : std::to_string(code).c_str()) + ")";
  switch (code) {
    case 200:  // CUDA_ERROR_INVALID_IMAGE
    case 218:  // CUDA_ERROR_INVALID_PTX
      return message + ". The image is damaged, or its compiler is newer than the driver.";
    case 222:  // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
      return message + ". The compiler is newer than the driver: update the driver, or install an older compiler.";
    case 209:  // CUDA_ERROR_NO_BINARY_FOR_GPU
      return message + ". The kernel was compiled for another architecture: pass the device's as `arch`.";
    case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
    case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
    case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
    case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
    case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
    case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
    case 718:  // CUDA_ERROR_INVALID_PC
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
      return message + ". A kernel that ran before has done this: CUDA_LAUNCH_BLOCKING=1 shows which. No more can run.";
    case 720:  // CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
      return message +
             ". All blocks of a cooperative launch run at once: make the grid smaller, or let more blocks fit on a "
             "multiprocessor.";
    case 900:  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    case 901:  // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
      return message + ". This is not allowed while XLA records a command buffer.";
    default:
      return message + ".";
  }
}

}  // namespace

DriverError::DriverError(const Driver& driver, int code, const std::string& call)
    : std::runtime_error(describe(driver, code, call)), code(code) {}

void* find_symbol(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name + "; it is too old");
  return symbol;
}

const Driver& driver() {
  if (const Driver* known = loaded.load(std::memory_order_acquire)) return *known;
  std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) loaded = open(path);
  return *loaded;
}

void set_driver(const std::string& where) {
  std::lock_guard<std::mutex> lock(mutex);
  path = where;
  loaded = nullptr;
}

int driver_version() {
  const Driver& found = driver();
  int count = 0, version = 0;
  check(found, found.DeviceGetCount(&count), "cuDeviceGetCount");
  if (count == 0) throw std::runtime_error("the CUDA driver finds no GPU");
  check(found, found.DriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

Retained::Retained(const Driver& driver, Context current) : driver_(driver) {
  Context primary = nullptr;
  check(driver, driver.CtxGetDevice(&device_), "cuCtxGetDevice");
  check(driver, driver.DevicePrimaryCtxRetain(&primary, device_), "cuDevicePrimaryCtxRetain");
  is_primary_ = primary == current;
  if (!is_primary_) driver.DevicePrimaryCtxRelease(device_);
}

Retained::~Retained() {
  const Relaxed relaxed(driver_);
  if (is_primary_) driver_.DevicePrimaryCtxRelease(device_);
}

std::optional<size_t> parameters_of(const Driver& driver, Function function) {
  if (driver.FuncGetParamInfo == nullptr) return std::nullopt;
  size_t count = 0, offset, size;
  int code;
  while ((code = driver.FuncGetParamInfo(function, count, &offset, &size)) == 0) ++count;
  if (code != Driver::kInvalidValue) return std::nullopt;
  return count;
}

Context activate(const Driver& driver, int device) {
  Context context = nullptr;
  check(driver, driver.CtxGetCurrent(&context), "cuCtxGetCurrent");
  if (context != nullptr) return context;
  check(driver, driver.DevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(driver, driver.CtxSetCurrent(context), "cuCtxSetCurrent");
  return context;
}

void deactivate(const Driver& driver) { check(driver, driver.CtxSetCurrent(nullptr), "cuCtxSetCurrent"); }

}  // namespace eqxcallback::gpu
