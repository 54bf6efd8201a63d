// A CUDA driver without a GPU: it checks and records what it is called with, can be told to fail, and runs kernels that
// were built for the CPU (see cuda_cpu.h), whose image is a shared library.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kInvalidContext = 201, kInvalidClusterSize = 912, kNotFound = 500, kLaunchFailed = 719,
              kCooperativeTooLarge = 720, kNotSupported = 801, kCaptureUnsupported = 900;
constexpr int kDevices = 8;
// Of each device, what an H100 has. The system takes 1 KiB of shared memory for each block.
constexpr unsigned kMultiprocessors = 132, kResidentThreads = 2048, kResidentBlocks = 32, kSharedBytes = 228 << 10,
                   kSystemSharedBytes = 1 << 10;

// A library for this processor in the place of an image that only a GPU runs, and what it calls the kernels of that.
struct StandIn {
  std::string image, library;
  std::map<std::string, std::string> symbols = {};
};
struct Context {
  int device;
  int references = 0;  // of who has retained it
};
struct Function;
struct Module {
  Context* context;
  std::string magic;
  void* library = nullptr;
  const StandIn* stand_in = nullptr;
  std::vector<size_t> parameters = {};              // of a kernel, each one's bytes, as an image without code says it
  std::map<std::string, Function*> functions = {};  // one of each name, which all calls share
};
using Run = int (*)(void**, const unsigned*, const unsigned*, unsigned, unsigned, char*, size_t);
struct Function {
  Module* module;
  std::string name;
  Run run = nullptr;
  int max_shared_bytes = 48 << 10;
  bool large_clusters = false;
};

std::recursive_mutex mutex;
std::string log_text, failing, last_error;
int failing_code = 0;
unsigned seed = 1;
Context contexts[kDevices] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
std::set<Module*> modules;
std::vector<std::unique_ptr<StandIn>> stand_ins;
std::atomic<int> generation{0};
thread_local int seen_generation = 0;
thread_local Context* current_context = nullptr;

// The context of this thread. Tests make all threads forget theirs.
Context*& current_of_thread() {
  if (seen_generation != generation) {
    seen_generation = generation;
    current_context = nullptr;
  }
  return current_context;
}
#define current current_of_thread()

template <class... Args>
void record(const char* format, Args... args) {
  char line[4096];
  std::snprintf(line, sizeof(line), format, args...);
  log_text += std::string(line) + "\n";
}

// The code that the test wants this call to return, once.
int told(const char* call) {
  if (failing != call) return 0;
  failing.clear();
  return failing_code;
}

}  // namespace

#define CALLED(name)                                 \
  std::lock_guard<std::recursive_mutex> lock(mutex); \
  if (const int code = told(name); code != 0) return code

#include "driver_graphs.h"

API int cuInit(unsigned) {
  CALLED("cuInit");
  return 0;
}

API int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

API int cuDeviceGetCount(int* count) {
  CALLED("cuDeviceGetCount");
  *count = kDevices;
  return 0;
}

API int cuGetErrorName(int code, const char** name) {
  static const std::map<int, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                   {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
                                                   {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
                                                   {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
                                                   {kNotFound, "CUDA_ERROR_NOT_FOUND"},
                                                   {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
                                                   {kCooperativeTooLarge, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"},
                                                   {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                   {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                   {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"}};
  const auto found = names.find(code);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? kInvalidValue : 0;
}

API int cuGetErrorString(int code, const char** text) {
  if (code == kLaunchFailed)
    *text = last_error.c_str();
  else if (code == kInvalidValue)
    *text = "invalid argument";
  else if (code == 2)
    *text = "out of memory";
  else if (code == kCooperativeTooLarge)
    *text = "too many blocks in cooperative launch";
  else
    *text = nullptr;
  return 0;
}

API int cuCtxGetCurrent(Context** context) {
  *context = current;
  return 0;
}

API int cuCtxSetCurrent(Context* context) {
  current = context;
  return 0;
}

API int cuDevicePrimaryCtxRetain(Context** context, int device) {
  CALLED("cuDevicePrimaryCtxRetain");
  if (device < 0 || device >= kDevices) return 101;
  record("cuDevicePrimaryCtxRetain %d", device);
  *context = &contexts[device];
  ++contexts[device].references;
  return 0;
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
  CALLED("cuDevicePrimaryCtxRelease");
  if (device < 0 || device >= kDevices) return 101;
  if (contexts[device].references == 0) return kInvalidContext;
  if (--contexts[device].references > 0) return 0;
  // The context goes, and its modules with it. The next one gets the same address.
  for (auto it = modules.begin(); it != modules.end();) {
    it = (*it)->context == &contexts[device] ? modules.erase(it) : std::next(it);
  }
  return 0;
}

API int cuCtxGetDevice(int* device) {
  CALLED("cuCtxGetDevice");
  if (current == nullptr) return kInvalidContext;
  *device = current->device;
  return 0;
}

API int cuModuleLoadData(Module** module, const void* image) {
  CALLED("cuModuleLoadData");
  if (current == nullptr) return kInvalidContext;
  if (const int code = unsafe(); code != 0) return code;
  auto* loaded = new Module{current, std::string(static_cast<const char*>(image), 4)};
  // The image of a shared library for this processor: its size is not told, so its builder has put it before the end of
  // the ELF header, into bytes that nobody reads.
  if (loaded->magic ==
          "\x7f"
          "ELF" &&
      static_cast<const unsigned char*>(image)[18] == 62) {
    uint64_t size;
    std::memcpy(&size, static_cast<const char*>(image) + 8, sizeof(size));
    std::string bytes(static_cast<const char*>(image), size);
    bytes.replace(8, sizeof(size), sizeof(size), '\0');
    // A name of its own each time: the loader takes a name that it knows for the same library.
    char path[] = "/tmp/eqxcallback-kernel-XXXXXX";
    const int file = mkstemp(path);
    if (file < 0 || write(file, bytes.data(), size) != static_cast<ssize_t>(size)) return kInvalidValue;
    loaded->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    close(file);
    unlink(path);
    if (loaded->library == nullptr) {
      last_error = dlerror();
      return kLaunchFailed;
    }
  }
  for (const auto& each : stand_ins) {  // the size of the image is not told, but no image is the beginning of another
    if (!std::equal(each->image.begin(), each->image.end(), static_cast<const char*>(image))) continue;
    loaded->stand_in = each.get();
    loaded->library = dlopen(each->library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (loaded->library == nullptr) return kLaunchFailed;
  }
  if (loaded->magic == "imag") {  // "image 3", or "image 3:8,8,128" where there are others than words
    char* rest;
    const char* text = static_cast<const char*>(image) + 6;
    loaded->parameters.assign(std::strtoul(text, &rest, 10), sizeof(uint64_t));
    for (size_t& size : loaded->parameters) size = *rest == ':' || *rest == ',' ? std::strtoul(rest + 1, &rest, 10) : 8;
  }
  modules.insert(loaded);
  record("cuModuleLoadData device %d %s", current->device, loaded->library != nullptr ? "library" : "image");
  *module = loaded;
  return 0;
}

API int cuModuleUnload(Module* module) {
  CALLED("cuModuleUnload");
  if (const int code = unsafe(); code != 0) return code;
  if (modules.erase(module) == 0 || module->context != current) return kInvalidValue;
  record("cuModuleUnload device %d", module->context->device);
  delete module;  // its code stays: functions may hold on to it
  return 0;
}

API int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  CALLED("cuModuleGetFunction");
  if (modules.count(module) == 0) return kInvalidValue;
  if (module->functions.count(name) != 0) {
    *function = module->functions.at(name);
    return 0;
  }
  auto* found = new Function{module, name};
  if (module->library != nullptr) {
    const bool is_renamed = module->stand_in != nullptr && module->stand_in->symbols.count(name) != 0;
    const char* symbol = is_renamed ? module->stand_in->symbols.at(name).c_str() : name;
    found->run = reinterpret_cast<Run>(dlsym(module->library, symbol));
    if (found->run == nullptr) return kNotFound;
  }
  *function = module->functions[name] = found;
  return 0;
}

// Of images that say their parameters.
API int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  const std::vector<size_t>& sizes = function->module->parameters;
  if (sizes.empty()) return kNotSupported;
  if (index >= sizes.size()) return kInvalidValue;
  *offset = 0, *size = sizes[index];
  for (size_t i = 0; i < index; ++i) *offset += sizes[i];
  return 0;
}

API int cuFuncSetAttribute(Function* function, int attribute, int value) {
  CALLED("cuFuncSetAttribute");
  if (attribute == 14) {
    function->large_clusters = value != 0;
    return 0;
  }
  if (attribute != 8 || value > 232448) return kInvalidValue;
  record("cuFuncSetAttribute %s %d", function->name.c_str(), value);
  function->max_shared_bytes = value;  // also where it was more
  return 0;
}

namespace {

std::string text_of(const void* parameter, size_t size) {
  if (size <= sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, parameter, sizeof(word));
    return " " + std::to_string(word);
  }
  std::string text = " 0x";
  for (size_t i = 0; i < size; ++i) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<const unsigned char*>(parameter)[i]);
    text += digits;
  }
  return text;
}

// How many blocks run at once. Of registers nothing is known: kernels here have none.
uint64_t resident_blocks(unsigned threads, unsigned shared_bytes) {
  const unsigned of_warps = kResidentThreads / ((threads + 31) / 32 * 32);
  const unsigned of_shared = kSharedBytes / (shared_bytes + kSystemSharedBytes);
  return uint64_t{kMultiprocessors} * std::min({kResidentBlocks, of_warps, of_shared});
}

// `name` and `attributes` are those of the call, for the log.
int launch(const char* name, Function* function, const unsigned (&grid)[3], const unsigned (&block)[3],
           unsigned shared_bytes, void* stream, void** parameters, const std::string& attributes = "",
           bool cooperative = false) {
  if (modules.count(function->module) == 0 || function->module->context != current) return kInvalidContext;
  const auto [gx, gy, gz] = grid;
  const auto [bx, by, bz] = block;
  if (gx == 0 || gy == 0 || gz == 0 || gy > 65535 || gz > 65535) return kInvalidValue;
  if (bx == 0 || by == 0 || bz == 0 || bx * by * bz > 1024 || bz > 64) return kInvalidValue;
  if (shared_bytes > static_cast<unsigned>(function->max_shared_bytes)) return kInvalidValue;
  if (cooperative && uint64_t{gx} * gy * gz > resident_blocks(bx * by * bz, shared_bytes)) return kCooperativeTooLarge;
  record("%s %s grid=(%u,%u,%u) block=(%u,%u,%u) shared=%u device=%d stream=%p%s", name, function->name.c_str(), gx, gy,
         gz, bx, by, bz, shared_bytes, current->device, stream, attributes.c_str());
  if (const int code = implicit(stream); code != 0) return code;
  if (captured(stream) != nullptr) {
    // Of a kernel that runs, the sizes of its parameters are not known, so that they cannot be kept.
    return enqueue(stream, kKernelNode, [name = function->name, runs = function->run != nullptr] {
      record("replayed %s", name.c_str());
      return runs ? kNotFound : 0;
    });
  }
  if (function->run == nullptr) {
    std::string text;
    size_t i = 0;
    for (const size_t size : function->module->parameters) text += text_of(parameters[i++], size);
    record("parameters%s", text.c_str());
    return 0;
  }
  char error[512] = "";
  if (function->run(parameters, grid, block, shared_bytes, seed, error, sizeof(error)) != 0) {
    last_error = error;
    return kLaunchFailed;
  }
  return 0;
}

}  // namespace

API int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared_bytes, void* stream, void** parameters, void**) {
  CALLED("cuLaunchKernel");
  return launch("cuLaunchKernel", function, {gx, gy, gz}, {bx, by, bz}, shared_bytes, stream, parameters);
}

#include "driver_hopper.h"

// -- for tests

API const char* software_log() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return log_text.c_str();
}

API void software_reset() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  log_text.clear();
  failing.clear();
}

// `names` are those of the kernels in the image, a line for each, in the order in which the library has them.
API void software_stand_in(const char* image, size_t size, const char* library, const char* names) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  for (const auto& each : stand_ins) {
    if (each->image == std::string_view(image, size)) return;
  }
  auto added = std::make_unique<StandIn>(StandIn{std::string(image, size), library});
  for (std::string_view rest = names; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    added->symbols[std::string(rest.substr(0, end))] = "soft_launch_" + std::to_string(added->symbols.size());
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  stand_ins.push_back(std::move(added));
}

API void software_fail(const char* call, int code) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  failing = call;
  failing_code = code;
}

API void software_forget_contexts() { ++generation; }

API void software_seed(unsigned value) { seed = value; }

API int software_modules() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return static_cast<int>(modules.size());
}
