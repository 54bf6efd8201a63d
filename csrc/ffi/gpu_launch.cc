// The handlers that launch GPU kernels, in three stages: a call's attributes are read and checked when a program is
// compiled, its kernels are loaded before the program runs, and launched when it runs. No stage needs Python.
#include "ffi/gpu_launch.h"

#include <array>
#include <exception>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/host_calls.h"
#include "ffi/capsule.h"
#include "gpu/launch.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {
namespace {

namespace ffi = xla::ffi;

struct State {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  State(std::string who, std::vector<size_t> nulls, bool has_scratch, std::vector<gpu::Step> steps, gpu::Values values)
      : who(std::move(who)),
        nulls(std::move(nulls)),
        has_scratch(has_scratch),
        launch(std::move(steps), std::move(values)) {}

  const std::string who;            // begins an error
  const std::vector<size_t> nulls;  // the positions of null pointers among the pointers, rising
  const bool has_scratch;           // the last result is not a parameter, but scratch memory
  gpu::Launch launch;
};
ffi::TypeId State::id = {};
ffi::TypeInfo State::info = ffi::MakeTypeInfo<State>();

using Numbers = ffi::Span<const int64_t>;

void require(bool condition, const char* expected) {
  if (!condition) throw std::invalid_argument(std::string("eqxcallback: expected ") + expected + " in a launch");
}

// Returns numbers that a call may lack.
Numbers numbers(const ffi::Dictionary& attrs, std::string_view name) {
  if (!attrs.contains(name)) return {};
  const auto given = attrs.get<Numbers>(name);
  require(given.has_value(), "arrays of 64-bit numbers");
  return *given;
}

std::vector<std::string> split(std::string_view lines) {
  std::vector<std::string> parts;
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    parts.emplace_back(lines.substr(0, end));
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
  return parts;
}

// The words of a step: grid, block, the bytes of shared memory, and the number of the image.
constexpr size_t kWordsOfStep = 8;
// The attributes of a step, if any step has some: the size of a cluster, and if it is cooperative, programmatic,
// spread.
constexpr size_t kAttributesOfStep = 6;

std::vector<std::shared_ptr<gpu::Image>> images_of(ffi::Span<const uint8_t> bytes, Numbers sizes) {
  std::vector<std::shared_ptr<gpu::Image>> images;
  size_t begin = 0;
  for (int64_t size : sizes) {
    require(size > 0 && static_cast<uint64_t>(size) <= bytes.size() - begin, "images of these sizes");
    images.push_back(gpu::Image::of({reinterpret_cast<const char*>(bytes.begin()) + begin, static_cast<size_t>(size)}));
    begin += static_cast<size_t>(size);
  }
  return images;
}

// Reads `N` numbers of 32 bits.
template <size_t N>
std::array<unsigned, N> words_at(Numbers numbers, size_t begin) {
  std::array<unsigned, N> words;
  for (size_t k = 0; k < N; ++k) {
    const int64_t word = numbers[begin + k];
    require(word >= 0 && word <= std::numeric_limits<unsigned>::max(), "a geometry of 32 bits");
    words[k] = static_cast<unsigned>(word);
  }
  return words;
}

std::vector<gpu::Step> steps_of(const ffi::Dictionary& attrs, std::string_view entries,
                                const std::vector<std::shared_ptr<gpu::Image>>& images, Numbers geometry) {
  const std::vector<std::string> names = split(entries);
  const Numbers attributes = numbers(attrs, "attributes"), scratch = numbers(attrs, "scratch");
  require(!names.empty() && geometry.size() == kWordsOfStep * names.size(), "a geometry for each entry");
  require(attributes.size() == 0 || attributes.size() == kAttributesOfStep * names.size(), "attributes for each entry");
  require(scratch.size() == 0 || scratch.size() == 1 + names.size(), "scratch memory for each entry");
  std::vector<gpu::Step> steps;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto words = words_at<kWordsOfStep>(geometry, i * kWordsOfStep);
    require(words[7] < images.size(), "an image for each entry");
    gpu::Step step{
        images[words[7]], names[i], {words[0], words[1], words[2]}, {words[3], words[4], words[5]}, words[6]};
    if (attributes.size() > 0) {
      const auto [x, y, z, cooperative, programmatic, spread] =
          words_at<kAttributesOfStep>(attributes, i * kAttributesOfStep);
      step.attributes = {{x, y, z}, cooperative != 0, programmatic != 0, spread != 0};
      require(step.attributes.cluster_size() > 0, "clusters of at least one block");
    }
    if (scratch.size() > 0) step.scratch = static_cast<size_t>(scratch[1 + i]);
    steps.push_back(std::move(step));
  }
  return steps;
}

gpu::Values values_of(const ffi::Dictionary& attrs) {
  gpu::Values values;
  for (int64_t word : numbers(attrs, "scalars")) values.words.push_back(static_cast<uint64_t>(word));
  const size_t count = values.words.size();
  const auto is_word = [count](int64_t word) { return word >= 0 && static_cast<size_t>(word) < count; };
  for (int64_t start : numbers(attrs, "starts")) {
    require(is_word(start), "values that begin at one of their words");
    values.starts.push_back(static_cast<size_t>(start));
  }
  if (!attrs.contains("starts")) {  // one word for each parameter
    for (size_t i = 0; i < count; ++i) values.starts.push_back(i);
  }
  for (int64_t position : numbers(attrs, "order")) {
    require(position >= 0, "positions of parameters");
    values.order.push_back(static_cast<size_t>(position));
  }
  if (const Numbers scratch = numbers(attrs, "scratch"); scratch.size() > 0) {
    require(is_word(scratch[0]), "a word for the pointer to scratch memory");
    values.scratch = static_cast<size_t>(scratch[0]);
  }
  const Numbers addresses = numbers(attrs, "addresses");
  require(addresses.size() % 2 == 0, "a word and a pointer for each address");
  for (size_t i = 0; i < addresses.size(); i += 2) {
    require(is_word(addresses[i]) && addresses[i + 1] >= 0, "addresses among the values");
    values.addresses.push_back({static_cast<size_t>(addresses[i]), static_cast<size_t>(addresses[i + 1])});
  }
  const Numbers maps = numbers(attrs, "maps");
  require(maps.size() % gpu::TensorMap::kNumbers == 0, "whole tensor maps");
  for (size_t i = 0; i < maps.size(); i += gpu::TensorMap::kNumbers) {
    values.maps.push_back(gpu::TensorMap::of(maps.begin() + i));
    require(values.maps.back().fits(count), "tensor maps of at most 5 dimensions among the values");
  }
  return values;
}

std::vector<size_t> nulls_of(const ffi::Dictionary& attrs) {
  std::vector<size_t> nulls;
  for (int64_t position : numbers(attrs, "nulls")) {
    require(position >= 0 && (nulls.empty() || static_cast<size_t>(position) > nulls.back()),
            "rising positions of nulls");
    nulls.push_back(static_cast<size_t>(position));
  }
  return nulls;
}

ffi::ErrorOr<std::unique_ptr<State>> instantiate(ffi::Dictionary attrs) {
  try {
    const auto who = attrs.get<std::string_view>("who"), entries = attrs.get<std::string_view>("entries");
    const auto bytes = attrs.get<ffi::Span<const uint8_t>>("images");  // the images, one after the other
    const auto sizes = attrs.get<Numbers>("sizes");                    // the bytes of each image
    const auto geometry = attrs.get<Numbers>("geometry");
    require(who.has_value() && entries.has_value() && bytes.has_value() && sizes.has_value() && geometry.has_value(),
            "the attributes who, entries, images, sizes and geometry");
    const auto images = images_of(*bytes, *sizes);
    return std::make_unique<State>(std::string(*who), nulls_of(attrs), attrs.contains("scratch"),
                                   steps_of(attrs, *entries, images, *geometry), values_of(attrs));
  } catch (const std::invalid_argument& error) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(error.what()));
  } catch (const std::exception& error) {  // no memory for the images, say
    return ffi::Unexpected(ffi::Error::Internal(error.what()));
  }
}

// Runs `body`, whose exceptions become the call's error.
template <class Body>
ffi::Error guarded(const State& state, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(state.who + ": " + error.what());
  }
  return ffi::Error::Success();
}

ffi::Error initialize(State* state, int32_t device) {
  return guarded(*state, [&] { state->launch.load(device); });
}

ffi::Error launch(State* state, int32_t device, void* stream, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& rets) {
  return guarded(*state, [&] {
    host_calls.fetch_add(1, std::memory_order_relaxed);
    const std::vector<size_t>& nulls = state->nulls;
    const size_t scratch = state->has_scratch ? 1 : 0;
    if (scratch > rets.size()) throw std::invalid_argument("expected scratch memory as the last result");
    const auto result = [&](size_t i) { return (*rets.get<ffi::AnyBuffer>(i))->untyped_data(); };
    const size_t count = args.size() + rets.size() - scratch + nulls.size();
    if (!nulls.empty() && nulls.back() >= count) throw std::invalid_argument("a null pointer beyond the last one");
    gpu::Pointers buffers(count);
    void** pointers = buffers.data();
    for (size_t position = 0, null = 0, i = 0; position < count; ++position) {
      if (null < nulls.size() && nulls[null] == position) {
        pointers[position] = nullptr;
        ++null;
      } else {
        pointers[position] = i < args.size() ? args.get<ffi::AnyBuffer>(i)->untyped_data() : result(i - args.size());
        ++i;
      }
    }
    state->launch.run(device, reinterpret_cast<gpu::Stream>(stream), pointers, count,
                      scratch > 0 ? result(rets.size() - 1) : nullptr);
  });
}

ffi::Error execute(State* state, int32_t device, void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  return launch(state, device, stream, args, rets);
}

// A CPU has no stream, and no stage before this one. Here a fake driver launches.
ffi::Error execute_on_cpu(State* state, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                          ffi::Dictionary) {
  if (ffi::Error error = guarded(*state, [] { gpu::deactivate(gpu::driver()); }); error.failure()) return error;
  return launch(state, device, nullptr, args, rets);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kInitialize, initialize,
                       ffi::Ffi::BindInitialize().Ctx<ffi::State<State>>().Ctx<ffi::DeviceOrdinal>());
auto execute_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<State>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::PlatformStream<void*>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}
// The trait belongs to the handler, so calls that may be captured have a handler of their own.
XLA_FFI_DEFINE_HANDLER(kExecute, execute, execute_binding());
XLA_FFI_DEFINE_HANDLER(kExecuteCaptured, execute, execute_binding(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kExecuteOnCpu, execute_on_cpu,
    ffi::Ffi::Bind().Ctx<ffi::State<State>>().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attrs());

nanobind::dict bundle(XLA_FFI_Handler* execute) {
  nanobind::dict stages;
  stages["instantiate"] = capsule(kInstantiate);
  stages["initialize"] = capsule(kInitialize);
  stages["execute"] = capsule(execute);
  return stages;
}

}  // namespace

nanobind::dict gpu_launch_targets() {
  nanobind::dict plain, captured, targets;
  plain["CUDA"] = bundle(kExecute);
  captured["CUDA"] = bundle(kExecuteCaptured);
  plain["cpu"] = captured["cpu"] = bundle(kExecuteOnCpu);
  targets["eqxcallback_launch"] = plain;
  targets["eqxcallback_launch_captured"] = captured;
  return targets;
}

nanobind::dict gpu_launch_type() {
  nanobind::dict type;
  type["type_id"] = nanobind::capsule(&State::id);
  type["type_info"] = nanobind::capsule(&State::info);
  return type;
}

}  // namespace eqxcallback
