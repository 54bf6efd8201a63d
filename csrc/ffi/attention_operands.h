// Optional operands of attention: decodes and checks them. They have the batch axes of q, where 1 stands for any
// number, and may lack the first of these axes.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "ffi/cpu_call.h"

namespace eqxcallback {

// Returns where the part of each example begins in an operand, in elements.
inline std::vector<int64_t> places(const char* op, const char* name, const Shape& shape, const Shape& query) {
  const size_t rank = shape.batch_rank(), all = query.batch_rank();
  bool fits = rank <= all;
  for (size_t i = 0; fits && i < rank; ++i) {
    fits = shape.dims[i] == 1 || shape.dims[i] == query.dims[all - rank + i];
  }
  REQUIRE(fits, op,
          std::string(name) + " with the batch axes of q, or 1; got " + text(query.dims) + " and " + text(shape.dims));
  int64_t size = 1;
  for (size_t i = 0; i < shape.core; ++i) size *= shape[i];
  std::vector<int64_t> offsets;
  offsets.reserve(static_cast<size_t>(query.batch()));
  for (int64_t b = 0; b < query.batch(); ++b) {
    int64_t index = 0, rest = b, step = 1;
    for (size_t i = rank; i-- > 0;) {
      const int64_t whole = query.dims[all - rank + i];
      if (shape.dims[i] != 1) index += rest % whole * step;
      step *= shape.dims[i];
      rest /= whole;
    }
    offsets.push_back(index * size);
  }
  return offsets;
}

// The operands of an op by their slots, which the bits of `present` and `needs_grad` count.
enum AttentionSlot : size_t {
  kQ,
  kK,
  kV,
  kBias,
  kMask,
  kSlopes,
  kQuerySegments,
  kKeySegments,
  kLengths,
  kOffset,
  kDropoutKeys,
  kKept,
  kAttentionSlots,
};

struct AttentionSettings {
  int64_t window;
  double soft_cap, dropout;
};

// Keeps the places that the options point to.
class AttentionOperands {
 public:
  cpu::AttentionOptions options{};

  AttentionOperands(const char* op, const Operands& operands, const Shape& query, int64_t keys,
                    const AttentionSettings& settings)
      : op_(op), operands_(operands), query_(query) {
    REQUIRE(settings.window >= 0 && settings.window <= std::numeric_limits<int32_t>::max() / 2, op,
            "a window of 0 or more, below 2^30");
    REQUIRE(settings.soft_cap >= 0 && settings.dropout >= 0 && settings.dropout < 1, op,
            "a soft_cap of 0 or more, and dropout from 0 up to 1");
    options.window = settings.window;
    options.soft_cap = static_cast<float>(settings.soft_cap);
    options.keep = static_cast<float>(1 - settings.dropout);
    any_ = settings.window != 0 || settings.soft_cap != 0;
    const int64_t queries = query[0], heads = query[1];
    constexpr auto kInt = ffi::DataType::S32;
    places_.reserve(kAttentionSlots);  // options point to them
    if (const Optional bias = operands(kBias)) options.bias_element = element_of(op, *bias);
    take(options.bias, kBias, "bias", {kHeadsOrOne, kQueriesOrOne, keys});
    take(options.mask, kMask, "mask", {kHeadsOrOne, kQueriesOrOne, keys}, ffi::DataType::PRED);
    take(options.slopes, kSlopes, "alibi_slopes", {heads}, ffi::DataType::F32, 1);
    take(options.query_segments, kQuerySegments, "query_segments", {queries}, kInt);
    take(options.key_segments, kKeySegments, "key_segments", {keys}, kInt);
    take(options.lengths, kLengths, "lengths", {}, kInt);
    take(options.offset, kOffset, "offset", {}, kInt);
    take(options.dropout_keys, kDropoutKeys, "dropout_keys", {heads, 2}, ffi::DataType::U32, 2);
    take(options.kept, kKept, "kept", {kHeadsOrOne, queries, keys}, ffi::DataType::PRED);
    REQUIRE((options.query_segments.data == nullptr) == (options.key_segments.data == nullptr), op,
            "segments of queries and of keys, or none");
  }
  AttentionOperands(const AttentionOperands&) = delete;
  AttentionOperands& operator=(const AttentionOperands&) = delete;

  // Returns null if no option says anything, as a call without options is faster.
  const cpu::AttentionOptions* any() const { return any_ ? &options : nullptr; }

 private:
  static constexpr int64_t kHeadsOrOne = -1, kQueriesOrOne = -2;

  // `head`: elements from one head to the next, of operands that say nothing of pairs.
  template <class T>
  void take(cpu::Operand<T>& to, AttentionSlot slot, const char* name, std::initializer_list<int64_t> core,
            ffi::DataType type = ffi::DataType::INVALID, int64_t head = 0) {
    const Optional x = operands_(slot);
    if (!x) return;
    any_ = true;
    REQUIRE(type == ffi::DataType::INVALID || x->element_type() == type, op_,
            std::string(name) + " of its dtype: bool, float32, int32 or uint32");
    const Shape shape(op_, name, *x, core.size());
    bool fits = true;
    for (size_t i = 0; i < core.size(); ++i) {
      const int64_t size = core.begin()[i];
      const bool is_one = size < 0 && shape[i] == 1;
      fits = fits && (is_one || shape[i] == (size == kHeadsOrOne     ? query_[1]
                                             : size == kQueriesOrOne ? query_[0]
                                                                     : size));
    }
    REQUIRE(fits, op_, std::string(name) + " that fits queries, heads and keys; got " + text(x->dimensions()));
    places_.push_back(places(op_, name, shape, query_));
    int64_t query = 0;
    if (core.size() == 3 && shape[0] > 1) head = shape[1] * shape[2];
    if (core.size() == 3 && shape[1] == query_[0]) query = shape[2];
    to = {static_cast<const T*>(x->untyped_data()), places_.back().data(), head, query};
  }

  const char* op_;
  const Operands& operands_;
  const Shape& query_;
  bool any_ = false;
  std::vector<std::vector<int64_t>> places_;
};

}  // namespace eqxcallback
