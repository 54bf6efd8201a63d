// The handlers of linear layers over quantised weights.
#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "cpu/processor.h"
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// True if x is first quantised to int8.
bool quantizes(const char* op, std::string_view activations) {
  REQUIRE(activations == "exact" || activations == "int8", op,
          "the activations exact or int8; got " + std::string(activations));
  return activations == "int8";
}

constexpr std::pair<std::string_view, cpu::Encoding> kEncodings[] = {
    {"Q4_0", cpu::Encoding::kQ4_0},        {"Q4_1", cpu::Encoding::kQ4_1}, {"Q5_0", cpu::Encoding::kQ5_0},
    {"Q5_1", cpu::Encoding::kQ5_1},        {"Q8_0", cpu::Encoding::kQ8_0}, {"Q4_K", cpu::Encoding::kQ4_K},
    {"Q5_K", cpu::Encoding::kQ5_K},        {"Q6_K", cpu::Encoding::kQ6_K}, {"Q4_1_R16", cpu::Encoding::kQ4_1_R16},
    {"Q8_0_R16", cpu::Encoding::kQ8_0_R16}};

// -- quantized_linear: x [*batch, in_features], blocks u8 [out_features, bytes of a row]

ffi::Error quantized_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer blocks, Out out,
                            std::string_view encoding_name, std::string_view activations) {
  return guarded([&] {
    constexpr const char* op = "quantized_linear";
    const auto* known = std::find_if(std::begin(kEncodings), std::end(kEncodings),
                                     [&](const auto& entry) { return entry.first == encoding_name; });
    REQUIRE(known != std::end(kEncodings), op,
            "an encoding of GGUF's, Q4_1_R16 or Q8_0_R16; got " + std::string(encoding_name));
    const cpu::Encoding encoding = known->second;
    const int64_t block = cpu::weights_of_block(encoding);
    const Shape in(op, "x", x, 1), result(op, "the result", *out, 1);
    require_type(op, "blocks", blocks, ffi::DataType::U8, "uint8");
    const Dims weights = blocks.dimensions();
    REQUIRE(in[0] % block == 0 && weights.size() == 2 && weights[1] == in[0] / block * cpu::block_bytes(encoding), op,
            "blocks of shape (out_features, bytes of " + std::to_string(in[0]) + " weights in blocks of " +
                std::to_string(block) + "); got " + text(weights));
    REQUIRE(!cpu::is_interleaved(encoding) || weights[0] % cpu::kGroupRows == 0, op,
            "a multiple of 16 rows of blocks (" + std::string(encoding_name) + "); got " + text(weights));
    REQUIRE(result[0] == weights[0] && in.same_batch(result) && x.element_type() == out->element_type(), op,
            "a result of shape (*batch, out_features); got " + text(out->dimensions()));
    const cpu::QuantizedLinear call{out->untyped_data(),
                                    x.untyped_data(),
                                    blocks.typed_data<uint8_t>(),
                                    in.batch(),
                                    weights[0],
                                    in[0],
                                    encoding,
                                    quantizes(op, activations),
                                    cpu::prefetching()};
    cpu::kernels().quantized_linear(element_of(op, x), call, executor_on(pool));
  });
}

// -- int8_linear: x [*batch, in_features], weight s8 [out_features, in_features], scale f32 [out_features]

ffi::Error int8_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer scale, Out out,
                       std::string_view activations) {
  return guarded([&] {
    constexpr const char* op = "int8_linear";
    const Shape in(op, "x", x, 1), result(op, "the result", *out, 1), factors(op, "scale", scale, 1);
    require_type(op, "weight", weight, ffi::DataType::S8, "int8");
    require_type(op, "scale", scale, ffi::DataType::F32, "float32");
    const Dims weights = weight.dimensions();
    REQUIRE(weights.size() == 2 && weights[1] == in[0], op,
            "weight of shape (out_features, " + std::to_string(in[0]) + "); got " + text(weights));
    REQUIRE(factors.batch_rank() == 0 && factors[0] == weights[0], op,
            "scale of shape (" + std::to_string(weights[0]) + ",); got " + text(scale.dimensions()));
    REQUIRE(result[0] == weights[0] && in.same_batch(result) && x.element_type() == out->element_type(), op,
            "a result of shape (*batch, out_features); got " + text(out->dimensions()));
    const cpu::Int8Linear call{out->untyped_data(),
                               x.untyped_data(),
                               weight.typed_data<int8_t>(),
                               scale.typed_data<float>(),
                               in.batch(),
                               weights[0],
                               in[0],
                               quantizes(op, activations),
                               cpu::prefetching()};
    cpu::kernels().int8_linear(element_of(op, x), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(quantized_linear, quantized_linear,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // blocks
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("encoding")
                           .Attr<std::string_view>("activations"));
EQXCALLBACK_CPU_KERNEL(int8_linear, int8_linear,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // weight
                           .Arg<ffi::AnyBuffer>()  // scale
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("activations"));

}  // namespace
}  // namespace eqxcallback
