// The optional operands of attention, which an attribute names: decoded and checked. They have the batch axes of q,
// where 1 stands for any number, and may lack the first ones.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/cpu_call.h"

namespace eqxcallback {

// Where the part of each example begins in an operand, in elements.
inline std::vector<int64_t> places(const char* op, const std::string& name, const Shape& shape, const Shape& query) {
  const size_t rank = shape.batch_rank(), all = query.batch_rank();
  bool fits = rank <= all;
  for (size_t i = 0; fits && i < rank; ++i) {
    fits = shape.dims[i] == 1 || shape.dims[i] == query.dims[all - rank + i];
  }
  REQUIRE(fits, op, name + " with the batch axes of q, or 1; got " + text(query.dims) + " and " + text(shape.dims));
  int64_t size = 1;
  for (size_t i = 0; i < shape.core; ++i) size *= shape[i];
  std::vector<int64_t> found;
  found.reserve(static_cast<size_t>(query.batch()));
  for (int64_t b = 0; b < query.batch(); ++b) {
    int64_t index = 0, rest = b, step = 1;
    for (size_t i = rank; i-- > 0;) {
      const int64_t whole = query.dims[all - rank + i];
      if (shape.dims[i] != 1) index += rest % whole * step;
      step *= shape.dims[i];
      rest /= whole;
    }
    found.push_back(index * size);
  }
  return found;
}

struct AttentionSettings {
  int64_t window;
  double soft_cap, dropout;
  std::string_view operands;
};

// Keeps the places that the options point to.
class AttentionOperands {
 public:
  cpu::AttentionOptions options{};
  size_t bias_index = 0, slopes_index = 0;  // among all operands; 0: none

  AttentionOperands(const char* op, const ffi::RemainingArgs& args, size_t first, const Shape& query, int64_t keys,
                    const AttentionSettings& settings)
      : op_(op), query_(query) {
    REQUIRE(settings.window >= 0 && settings.window <= std::numeric_limits<int32_t>::max() / 2, op,
            "a window of 0 or more, below 2^30");
    REQUIRE(settings.soft_cap >= 0 && settings.dropout >= 0 && settings.dropout < 1, op,
            "a soft_cap of 0 or more, and dropout from 0 up to 1");
    options.window = settings.window;
    options.soft_cap = static_cast<float>(settings.soft_cap);
    options.keep = static_cast<float>(1 - settings.dropout);
    const int64_t queries = query[0];
    constexpr auto kInt = ffi::DataType::S32;
    size_t index = first;
    std::string_view rest = settings.operands;
    places_.reserve(static_cast<size_t>(std::count(rest.begin(), rest.end(), ',')) + 1);
    while (!rest.empty()) {
      const size_t comma = smaller(rest.find(','), rest.size());
      const std::string name(rest.substr(0, comma));
      rest.remove_prefix(smaller(comma + 1, rest.size()));
      REQUIRE(index < args.size(), op, "an operand for each name; got none for " + name);
      const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(index);
      if (name == "bias") {
        options.bias_element = element_of(op, x);
        take(options.bias, name, x, {-1, queries, keys});
        bias_index = index;
      } else if (name == "mask") {
        take(options.mask, name, x, {-1, queries, keys}, ffi::DataType::PRED);
      } else if (name == "alibi_slopes") {
        take(options.slopes, name, x, {query[1]}, ffi::DataType::F32);
        options.slopes.head = 1;
        slopes_index = index;
      } else if (name == "query_segments") {
        take(options.query_segments, name, x, {queries}, kInt);
      } else if (name == "key_segments") {
        take(options.key_segments, name, x, {keys}, kInt);
      } else if (name == "lengths") {
        take(options.lengths, name, x, {}, kInt);
      } else if (name == "offset") {
        take(options.offset, name, x, {}, kInt);
      } else if (name == "dropout_keys") {
        take(options.dropout_keys, name, x, {query[1], 2}, ffi::DataType::U32);
        options.dropout_keys.head = 2;
      } else if (name == "kept") {
        take(options.kept, name, x, {-1, queries, keys}, ffi::DataType::PRED);
      } else {
        refuse(op, "known names of operands; got " + name);
      }
      ++index;
    }
    end = index;
    REQUIRE((options.query_segments.data == nullptr) == (options.key_segments.data == nullptr), op,
            "segments of queries and of keys, or none");
  }
  AttentionOperands(const AttentionOperands&) = delete;
  AttentionOperands& operator=(const AttentionOperands&) = delete;

  size_t end = 0;  // the index of the first operand that is none of these

 private:
  static size_t smaller(size_t a, size_t b) { return b < a ? b : a; }

  // `core`: -1 is all heads, or 1.
  template <class T>
  void take(cpu::Operand<T>& to, const std::string& name, const ffi::AnyBuffer& x, const std::vector<int64_t>& core) {
    const Shape shape(op_, name.c_str(), x, core.size());
    bool fits = true;
    for (size_t i = 0; i < core.size(); ++i) {
      fits = fits && (core[i] < 0 ? shape[i] == 1 || shape[i] == query_[1] : shape[i] == core[i]);
    }
    REQUIRE(fits, op_, name + " that fits queries, heads and keys; got " + text(x.dimensions()));
    places_.push_back(places(op_, name, shape, query_));
    const bool per_head = core.size() == 3 && shape[0] > 1;
    to = {static_cast<const T*>(x.untyped_data()), places_.back().data(), per_head ? shape[1] * shape[2] : 0};
  }
  template <class T>
  void take(cpu::Operand<T>& to, const std::string& name, const ffi::AnyBuffer& x, const std::vector<int64_t>& core,
            ffi::DataType type) {
    REQUIRE(x.element_type() == type, op_, name + " of its dtype: bool, float32, int32 or uint32");
    take(to, name, x, core);
  }

  const char* op_;
  const Shape& query_;
  std::vector<std::vector<int64_t>> places_;
};

}  // namespace eqxcallback
