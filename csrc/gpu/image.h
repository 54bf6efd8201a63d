// Compiled code, and where it is loaded.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "gpu/driver.h"

namespace eqxcallback::gpu {

// A cubin or PTX, of which there is one object for each content: programs with many calls of a kernel load it once on
// each device. It is unloaded with the last of those who share it.
class Image {
 public:
  static std::shared_ptr<Image> of(std::string_view bytes);

  explicit Image(std::string_view bytes) : bytes_(bytes) {}
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  // A kernel of it in the current context. Loads the image there if that was not done before.
  Function function(const Driver& driver, Context context, const std::string& name);

 private:
  struct Loaded {
    const Driver* driver;
    Module module;
  };
  const std::string bytes_;
  std::mutex mutex_;
  std::map<Context, Loaded> loaded_;
};

}  // namespace eqxcallback::gpu
