// The parameters of norms as operands.
#pragma once

#include "ffi/cpu_call.h"

namespace eqxcallback {

// Which ones a handler takes: those that are missing are the last ones. A bias without a weight has a handler of its
// own, for its operand alone says nothing.
struct Parameters {
  bool weight;
  size_t most;
};
inline constexpr Parameters kWeight{true, 1}, kWeightAndBias{true, 2}, kBias{false, 1};

struct Affine {
  const float* weight = nullptr;
  const float* bias = nullptr;

  // From `count` operands, of which args[first] is the first one.
  Affine(const char* op, Parameters parameters, const ffi::RemainingArgs& args, size_t first, size_t count,
         int64_t size) {
    for (size_t i = 0; i < count; ++i) {
      const bool is_weight = parameters.weight && i == 0;
      const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(first + i);
      require_type(op, is_weight ? "a weight" : "a bias", buffer, ffi::DataType::F32, "float32");
      REQUIRE(buffer.dimensions().size() == 1 && buffer.dimensions()[0] == size, op,
              std::string(is_weight ? "a weight" : "a bias") + " of the shape of the last axis of x, (" +
                  std::to_string(size) + ",); got " + text(buffer.dimensions()));
      (is_weight ? weight : bias) = buffer.typed_data<float>();
    }
  }
};

}  // namespace eqxcallback
