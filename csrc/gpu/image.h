// Image: compiled code for GPUs, and the contexts in which it is loaded.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "gpu/driver.h"

namespace eqxcallback::gpu {

// A cubin or PTX. There is one object for each content, so programs with many calls of a kernel load it once on each
// device. The last owner that goes unloads it.
class Image {
 public:
  static std::shared_ptr<Image> of(std::string_view bytes);

  explicit Image(std::string_view bytes) : bytes_(bytes) {}
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  // Returns a kernel of the image in the current context, in which the image is loaded first if it is not yet. From now
  // on a launch of it may have that much dynamic shared memory.
  Function function(const Driver& driver, Context context, const std::string& name, unsigned shared_bytes);

 private:
  struct Loaded {
    Loaded(const Driver& driver, Context context) : driver(&driver), retained(driver, context) {}

    const Driver* driver;
    Retained retained;
    Module module = nullptr;
    // The most that each kernel may have. The driver keeps one number for all calls of a kernel, the one set last.
    std::map<std::string, unsigned> shared_bytes = {};
  };
  const std::string bytes_;
  std::mutex mutex_;
  std::map<Context, Loaded> loaded_;
};

}  // namespace eqxcallback::gpu
