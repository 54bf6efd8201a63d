// Images: one object for each content, loaded once in each context.
#include "gpu/image.h"

#include <unordered_map>

namespace eqxcallback::gpu {

std::shared_ptr<Image> Image::of(std::string_view bytes) {
  static std::mutex mutex;
  static auto& images = *new std::unordered_map<std::string, std::weak_ptr<Image>>();  // programs outlive statics
  std::lock_guard<std::mutex> lock(mutex);
  for (auto it = images.begin(); it != images.end();) it = it->second.expired() ? images.erase(it) : std::next(it);
  std::weak_ptr<Image>& known = images[std::string(bytes)];
  std::shared_ptr<Image> image = known.lock();
  if (image == nullptr) known = image = std::make_shared<Image>(bytes);
  return image;
}

Image::~Image() {
  for (auto& [context, loaded] : loaded_) {
    // When the process ends, the driver may have unloaded the image before us, and its error concerns no one.
    Context current = nullptr;
    if (loaded.driver->CtxGetCurrent(&current) != 0 || loaded.driver->CtxSetCurrent(context) != 0) continue;
    const Relaxed relaxed(*loaded.driver);
    loaded.driver->ModuleUnload(loaded.module);
    loaded.driver->CtxSetCurrent(current);
  }
}

Function Image::function(const Driver& driver, Context context, const std::string& name, unsigned shared_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Relaxed relaxed(driver);
  auto place = loaded_.find(context);
  if (place == loaded_.end()) {
    place = loaded_.try_emplace(context, driver, context).first;
    const int code = driver.ModuleLoadData(&place->second.module, bytes_.c_str());
    if (code != 0) loaded_.erase(place);
    check(driver, code, "cuModuleLoadData");
  }
  Function function = nullptr;
  check(driver, driver.ModuleGetFunction(&function, place->second.module, name.c_str()),
        [&] { return "cuModuleGetFunction(" + name + ")"; });
  // Above 48 KiB, of which what the kernel itself declares is a part, it must be asked for. How much that is we do not
  // know, so all is asked for; but never less than another call has.
  unsigned& most = place->second.shared_bytes[name];
  if (shared_bytes > most) {
    check(driver, driver.FuncSetAttribute(function, Driver::kMaxDynamicSharedBytes, static_cast<int>(shared_bytes)),
          [&] {
            return "cuFuncSetAttribute(" + name + ", " + std::to_string(shared_bytes) + " bytes of shared memory)";
          });
    most = shared_bytes;
  }
  return function;
}

}  // namespace eqxcallback::gpu
