// Launches of the kernels of one call: loading, parameters, and the driver's calls.
#include "gpu/launch.h"

#include <utility>

namespace eqxcallback::gpu {
namespace {

std::string text(const std::array<unsigned, 3>& dims) {
  return "(" + std::to_string(dims[0]) + ", " + std::to_string(dims[1]) + ", " + std::to_string(dims[2]) + ")";
}

std::string text(const Step& step) {
  const Attributes& attributes = step.attributes;
  return std::string(attributes.any() ? "cuLaunchKernelEx(" : "cuLaunchKernel(") + step.entry + ", grid " +
         text(step.grid) + ", block " + text(step.block) + ", " + std::to_string(step.shared_bytes) +
         " bytes of shared memory" +
         (attributes.cluster_size() != 1 ? ", clusters of " + text(attributes.cluster) : "") +
         (attributes.cooperative ? ", cooperative" : "") + (attributes.programmatic ? ", programmatic" : "") + ")";
}

}  // namespace

Launch::~Launch() {
  for (const Loaded* entry = first_.load(); entry != nullptr;) delete std::exchange(entry, entry->next);
}

void Launch::load(int device) { loaded(device); }

const Launch::Loaded& Launch::loaded(int device) {
  const Driver& driver = gpu::driver();
  const Context context = activate(driver, device);
  const auto find = [&]() -> const Loaded* {
    const Loaded* entry = first_.load(std::memory_order_acquire);
    while (entry != nullptr && (entry->context != context || entry->driver != &driver)) entry = entry->next;
    return entry;
  };
  if (const Loaded* known = find()) return *known;
  std::lock_guard<std::mutex> lock(mutex_);
  if (const Loaded* known = find()) return *known;
  auto added = std::make_unique<Loaded>(Loaded{&driver, context, {}, {}, first_.load()});
  if (!values_.maps.empty()) gpu::find(driver, "cuTensorMapEncodeTiled", added->encode_tiled);
  for (const Step& step : steps_) {
    const Function function = step.image->function(driver, context, step.entry, step.shared_bytes);
    if (step.attributes.any()) gpu::find(driver, "cuLaunchKernelEx", added->launch_with_attributes);
    if (step.attributes.cluster_size() > Attributes::kPortableCluster) {
      check(driver, driver.FuncSetAttribute(function, Driver::kNonPortableClusterSize, 1), [&] {
        return "cuFuncSetAttribute(" + step.entry + ", clusters of " + text(step.attributes.cluster) + ")";
      });
    }
    added->functions.push_back(function);
    added->parameters.push_back(parameters_of(driver, function));
  }
  first_.store(added.get(), std::memory_order_release);
  return *added.release();
}

void Launch::run(int device, Stream stream, void* const* pointers, size_t count, void* scratch) {
  const Loaded& on_device = loaded(device);
  std::vector<uint64_t> filled;  // by this run alone: other runs may be under way
  uint64_t* words = values_.words.data();
  if (values_.depend_on_addresses()) {
    filled = values_.words;
    words = filled.data();
  }
  for (const Address& address : values_.addresses) {
    if (address.pointer >= count) throw std::invalid_argument("an address of no pointer");
    words[address.word] = reinterpret_cast<uintptr_t>(pointers[address.pointer]);
  }
  // The driver takes the address of each parameter.
  const size_t known = count + values_.starts.size();
  const size_t given = values_.order.empty() ? known : values_.order.size();
  Pointers addresses(known);
  void** parameters = addresses.data();
  for (size_t i = 0; i < count; ++i) parameters[i] = const_cast<void**>(pointers + i);
  for (size_t i = 0; i < values_.starts.size(); ++i) parameters[count + i] = words + values_.starts[i];
  Pointers ordered(values_.order.size());
  if (!values_.order.empty()) {
    for (size_t i = 0; i < values_.order.size(); ++i) {
      if (values_.order[i] >= known) throw std::invalid_argument("a parameter that is not there");
      ordered.data()[i] = parameters[values_.order[i]];
    }
    parameters = ordered.data();
  }

  bool encoded = false;
  for (size_t i = 0; i < steps_.size(); ++i) {
    const Step& step = steps_[i];
    if (step.is_empty()) continue;  // the driver would call an empty grid an error
    if (const auto& has = on_device.parameters[i]; has && *has != given) {
      throw std::invalid_argument(step.entry + " has " + std::to_string(*has) + " parameters; the call gives it " +
                                  std::to_string(given));
    }
    if (!std::exchange(encoded, true)) {  // empty arrays have no maps
      for (const TensorMap& map : values_.maps) {
        if (map.pointer >= count) throw std::invalid_argument("a tensor map of no pointer");
        map.encode(*on_device.driver, on_device.encode_tiled, pointers[map.pointer], words + map.word);
      }
    }
    if (values_.scratch) words[*values_.scratch] = reinterpret_cast<uintptr_t>(scratch) + step.scratch;
    launch(on_device, i, step, stream, parameters);
  }
}

void Launch::launch(const Loaded& on_device, size_t i, const Step& step, Stream stream, void** parameters) {
  const Driver& driver = *on_device.driver;
  const auto& [gx, gy, gz] = step.grid;
  const auto& [bx, by, bz] = step.block;
  int code;
  if (step.attributes.any()) {
    const LaunchAttributes attributes(step.attributes);
    const LaunchConfig config{{gx, gy, gz}, {bx, by, bz},      step.shared_bytes,
                              stream,       attributes.data(), attributes.size()};
    code = on_device.launch_with_attributes(&config, on_device.functions[i], parameters, nullptr);
  } else {
    code = driver.LaunchKernel(on_device.functions[i], gx, gy, gz, bx, by, bz, step.shared_bytes, stream, parameters,
                               nullptr);
  }
  check(driver, code, [&] { return text(step); });
}

}  // namespace eqxcallback::gpu
