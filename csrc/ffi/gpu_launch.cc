// Three stages: a call's attributes are read and checked when a program is compiled, its kernels are loaded before the
// program runs, and are launched when it does. There is no Python in any of them.
#include "ffi/gpu_launch.h"

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

  State(std::string who, std::vector<size_t> nulls, std::vector<gpu::Step> steps, std::vector<uint64_t> scalars)
      : who(std::move(who)), nulls(std::move(nulls)), launch(std::move(steps), std::move(scalars)) {}

  const std::string who;            // to begin an error
  const std::vector<size_t> nulls;  // the positions of null pointers among the pointers, rising
  gpu::Launch launch;
};
ffi::TypeId State::id = {};
ffi::TypeInfo State::info = ffi::MakeTypeInfo<State>();

std::vector<std::string> split(std::string_view lines) {
  std::vector<std::string> found;
  while (!lines.empty()) {
    const size_t end = std::min(lines.find('\n'), lines.size());
    found.emplace_back(lines.substr(0, end));
    lines.remove_prefix(std::min(end + 1, lines.size()));
  }
  return found;
}

// Of each step: grid, block, the bytes of shared memory, and the number of its image.
constexpr size_t kWordsOfStep = 8;

ffi::ErrorOr<std::unique_ptr<State>> instantiate(ffi::Dictionary attrs) {
  const auto invalid = [](const std::string& expected) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("eqxcallback: expected " + expected + " in a launch"));
  };
  const auto who = attrs.get<std::string_view>("who"), entries = attrs.get<std::string_view>("entries");
  const auto bytes = attrs.get<ffi::Span<const uint8_t>>("images");  // one after the other
  const auto sizes = attrs.get<ffi::Span<const int64_t>>("sizes");   // of each in bytes
  const auto geometry = attrs.get<ffi::Span<const int64_t>>("geometry");
  if (who.has_error() || entries.has_error() || bytes.has_error() || sizes.has_error() || geometry.has_error()) {
    return invalid("the attributes who, entries, images, sizes and geometry");
  }
  std::vector<std::shared_ptr<gpu::Image>> images;
  size_t begin = 0;
  for (int64_t size : *sizes) {
    if (size <= 0 || static_cast<uint64_t>(size) > bytes->size() - begin) return invalid("images of these sizes");
    images.push_back(
        gpu::Image::of({reinterpret_cast<const char*>(bytes->begin()) + begin, static_cast<size_t>(size)}));
    begin += static_cast<size_t>(size);
  }
  const std::vector<std::string> names = split(*entries);
  if (names.empty() || geometry->size() != kWordsOfStep * names.size()) return invalid("a geometry for each entry");
  std::vector<gpu::Step> steps;
  for (size_t i = 0; i < names.size(); ++i) {
    std::array<unsigned, kWordsOfStep> words;
    for (size_t k = 0; k < kWordsOfStep; ++k) {
      const int64_t word = (*geometry)[i * kWordsOfStep + k];
      if (word < 0 || word > std::numeric_limits<unsigned>::max()) return invalid("a geometry of 32 bits");
      words[k] = static_cast<unsigned>(word);
    }
    if (words[7] >= images.size()) return invalid("an image for each entry");
    steps.push_back(
        {images[words[7]], names[i], {words[0], words[1], words[2]}, {words[3], words[4], words[5]}, words[6]});
  }
  std::vector<uint64_t> scalars;
  if (attrs.contains("scalars")) {
    const auto given = attrs.get<ffi::Span<const int64_t>>("scalars");
    if (given.has_error()) return invalid("scalars as words");
    for (int64_t word : *given) scalars.push_back(static_cast<uint64_t>(word));
  }
  std::vector<size_t> nulls;
  if (attrs.contains("nulls")) {
    const auto given = attrs.get<ffi::Span<const int64_t>>("nulls");
    if (given.has_error()) return invalid("nulls as positions");
    for (int64_t position : *given) {
      if (position < 0 || (!nulls.empty() && static_cast<size_t>(position) <= nulls.back())) {
        return invalid("rising positions of nulls");
      }
      nulls.push_back(static_cast<size_t>(position));
    }
  }
  return std::make_unique<State>(std::string(*who), std::move(nulls), std::move(steps), std::move(scalars));
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
    const size_t given = args.size() + rets.size(), count = given + nulls.size();
    if (!nulls.empty() && nulls.back() >= count) throw std::invalid_argument("a null pointer beyond the last one");
    gpu::Pointers buffers(count);
    void** pointers = buffers.data();
    for (size_t position = 0, null = 0, i = 0; position < count; ++position) {
      if (null < nulls.size() && nulls[null] == position) {
        pointers[position] = nullptr;
        ++null;
      } else {
        pointers[position] = i < args.size() ? args.get<ffi::AnyBuffer>(i)->untyped_data()
                                             : (*rets.get<ffi::AnyBuffer>(i - args.size()))->untyped_data();
        ++i;
      }
    }
    state->launch.run(device, reinterpret_cast<gpu::Stream>(stream), pointers, count);
  });
}

ffi::Error execute(State* state, int32_t device, void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  return launch(state, device, stream, args, rets);
}

// A CPU has no stream, and no stage before this one. What is launched is a fake driver's affair.
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
// The trait belongs to the handler: hence one for those that may be captured.
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
