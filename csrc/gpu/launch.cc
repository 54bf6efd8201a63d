#include "gpu/launch.h"

#include <utility>

namespace eqxcallback::gpu {
namespace {

std::string text(const std::array<unsigned, 3>& dims) {
  return "(" + std::to_string(dims[0]) + ", " + std::to_string(dims[1]) + ", " + std::to_string(dims[2]) + ")";
}

std::string text(const Step& step) {
  return "cuLaunchKernel(" + step.entry + ", grid " + text(step.grid) + ", block " + text(step.block) + ", " +
         std::to_string(step.shared_bytes) + " bytes of shared memory)";
}

}  // namespace

Launch::~Launch() {
  for (const Loaded* each = first_.load(); each != nullptr;) delete std::exchange(each, each->next);
}

void Launch::load(int device) { loaded(device); }

const Launch::Loaded& Launch::loaded(int device) {
  const Driver& driver = gpu::driver();
  const Context context = activate(driver, device);
  const auto find = [&]() -> const Loaded* {
    const Loaded* each = first_.load(std::memory_order_acquire);
    while (each != nullptr && (each->context != context || each->driver != &driver)) each = each->next;
    return each;
  };
  if (const Loaded* known = find()) return *known;
  std::lock_guard<std::mutex> lock(mutex_);
  if (const Loaded* known = find()) return *known;
  auto added = std::make_unique<Loaded>(Loaded{&driver, context, {}, first_.load()});
  for (const Step& step : steps_) {
    const Function function = step.image->function(driver, context, step.entry);
    if (step.shared_bytes > 0) {  // more than 48 KiB must be asked for, those that the kernel itself declares included
      check(driver,
            driver.FuncSetAttribute(function, Driver::kMaxDynamicSharedBytes, static_cast<int>(step.shared_bytes)),
            [&] {
              return "cuFuncSetAttribute(" + step.entry + ", " + std::to_string(step.shared_bytes) +
                     " bytes of shared memory)";
            });
    }
    added->functions.push_back(function);
  }
  first_.store(added.get(), std::memory_order_release);
  return *added.release();
}

void Launch::run(int device, Stream stream, void* const* pointers, size_t count) {
  const Loaded& on_device = loaded(device);
  // The driver takes the address of each parameter.
  Pointers addresses(count + scalars_.size());
  void** parameters = addresses.data();
  for (size_t i = 0; i < count; ++i) parameters[i] = const_cast<void**>(pointers + i);
  for (size_t i = 0; i < scalars_.size(); ++i) parameters[count + i] = &scalars_[i];

  const Driver& driver = *on_device.driver;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.is_empty()) continue;  // there is nothing to do, which the driver calls an error
    const auto& [gx, gy, gz] = step.grid;
    const auto& [bx, by, bz] = step.block;
    check(driver,
          driver.LaunchKernel(on_device.functions[i], gx, gy, gz, bx, by, bz, step.shared_bytes, stream, parameters,
                              nullptr),
          [&] { return text(step); });
  }
}

}  // namespace eqxcallback::gpu
