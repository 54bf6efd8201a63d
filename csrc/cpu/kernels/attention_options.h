// Options of attention, applied to the logits of a tile: rows are keys, and queries of a block are along the vector
// lanes.
#pragma once

#include "cpu/kernels/attention_threefry.h"
#include "cpu/kernels/attention_tiles.h"
#include "cpu/kernels/math.h"

namespace eqxcallback::cpu {
namespace {

template <class T>
const T* operand_of(const Operand<T>& operand, int64_t b, int64_t h = 0) {
  return operand.data + operand.at[b] + h * operand.head;
}

// At most kQueryBlock queries of one head, and the keys that any of them may see.
struct QueryBlock {
  int64_t b, h, begin, queries;
  int64_t position;         // the first query's position among the keys
  int64_t first, end;       // the range of the keys
  int32_t lowest, highest;  // query at p sees key j if p - j is between them
};

// The rows of a block's queries in an operand of pairs.
template <class T>
const T* rows_of(const Operand<T>& operand, const QueryBlock& block) {
  return operand_of(operand, block.b, block.h) + block.begin * operand.query;
}

// Tell if one query sees any of these keys, by its row of the mask; and if it misses any.
bool sees_any(const uint8_t* mask, int64_t keys) {
  uint8_t any = 0;
  for (int64_t j = 0; j < keys; ++j) any = static_cast<uint8_t>(any | mask[j]);
  return any != 0;
}
bool misses_any(const uint8_t* mask, int64_t keys) {
  uint8_t missed = 0;
  for (int64_t j = 0; j < keys; ++j) missed = static_cast<uint8_t>(missed | (mask[j] == 0));
  return missed != 0;
}

// Leaves out the keys before and after all that the mask lets a query of the block see: of a causal mask that is an
// array, half of the keys.
void trim_to_mask(const uint8_t* rows, int64_t stride, QueryBlock& block) {
  int64_t first = block.end, end = block.first;
  for (int64_t i = block.queries - 1; i >= 0; --i) {
    const uint8_t* row = rows + i * stride;
    if (end < block.end && sees_any(row + end, block.end - end)) {
      for (end = block.end; row[end - 1] == 0;) --end;
    }
    if (first > block.first && sees_any(row + block.first, first - block.first)) {
      for (first = block.first; row[first] == 0;) ++first;
    }
  }
  block.first = smaller(first, end), block.end = end;
}

// Tell if one of these keys is of a segment between the two.
bool any_between(const int32_t* segments, int64_t keys, int32_t least, int32_t highest) {
  int32_t any = 0;
  for (int64_t j = 0; j < keys; ++j) any |= static_cast<int32_t>((segments[j] >= least) & (segments[j] <= highest));
  return any != 0;
}

// Leaves out the keys before and after all whose segment is between the least and the highest of the queries': of
// documents one after the other, those of other documents.
void trim_to_segments(const int32_t* of_queries, const int32_t* of_keys, QueryBlock& block) {
  constexpr int64_t kAtOnce = 64;
  int32_t least = of_queries[0], highest = of_queries[0];
  for (int64_t i = 1; i < block.queries; ++i) {
    least = smaller(least, of_queries[i]), highest = larger(highest, of_queries[i]);
  }
  for (int64_t step = kAtOnce; step > 0; step /= kAtOnce) {  // then one by one
    while (block.first + step <= block.end && !any_between(of_keys + block.first, step, least, highest)) {
      block.first += step;
    }
    while (block.end - step >= block.first && !any_between(of_keys + block.end - step, step, least, highest)) {
      block.end -= step;
    }
  }
}

QueryBlock query_block(const Attention& args, int64_t b, int64_t h, int64_t begin) {
  constexpr int32_t kFar = 0x7fffffff;
  const AttentionOptions* options = args.options;
  QueryBlock block{b,     h,   begin, smaller<int64_t>(kQueryBlock, args.q_length - begin), 0, 0, args.kv_length,
                   -kFar, kFar};
  const bool given = options != nullptr && options->offset.data != nullptr;
  block.position = begin + (given ? *operand_of(options->offset, b) : args.kv_length - args.q_length);
  if (args.causal) block.lowest = 0;
  if (options != nullptr && options->window > 0) {
    block.highest = static_cast<int32_t>(options->window - 1);
    if (!args.causal) block.lowest = -block.highest;
  }
  if (options != nullptr && options->lengths.data != nullptr) {
    block.end = smaller<int64_t>(block.end, *operand_of(options->lengths, b));
  }
  block.end = smaller(block.end, block.position + block.queries - block.lowest);
  block.first = larger<int64_t>(0, block.position - block.highest);
  block.end = larger(block.end, block.first);
  if (options != nullptr && options->mask.data != nullptr) {
    trim_to_mask(rows_of(options->mask, block), options->mask.query, block);
  }
  if (options != nullptr && options->query_segments.data != nullptr) {
    trim_to_segments(operand_of(options->query_segments, b) + begin, operand_of(options->key_segments, b), block);
  }
  return block;
}

// Replaces l by cap tanh(l / cap), where l are powers of two. Stores the derivative too, if it is wanted.
void cap_logits(float* tile, float* derivative, int64_t size, float cap) {
  const F factor = Simd::broadcast(kLn2 / cap), log_cap = Simd::broadcast(cap * kLog2E), one = Simd::broadcast(1.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    const F share = tanh(Simd::mul(Simd::load(tile + i), factor));
    Simd::store(tile + i, Simd::mul(log_cap, share));
    if (derivative != nullptr) Simd::store(derivative + i, Simd::sub(one, Simd::mul(share, share)));
  }
}

// Returns the bias as powers of two. A finite bias stays finite, as only -inf is not seen.
F log2_of_bias(F bias) {
  const F lowest = Simd::broadcast(kLowest), highest = Simd::broadcast(-kLowest);
  const F product = Simd::max(lowest, Simd::min(highest, Simd::mul(bias, Simd::broadcast(kLog2E))));
  return Simd::select_less(highest, Simd::abs(bias), bias, product);
}

// Takes `yes` in lanes whose byte is not 0.
F select_bytes(F bytes, F yes, F no) { return Simd::select_less(Simd::zero(), Simd::abs(bytes), yes, no); }

// The distances of queries from keys.
class Distances {
 public:
  Distances() {
    for (int i = 0; i < kQueryBlock; ++i) numbers_[i] = static_cast<float>(i);
  }
  // The distances of queries i, i + 1 and so on from a key that is `away` from the first query of the block.
  F operator()(int64_t away, int i) const {
    return Simd::abs(Simd::add(Simd::broadcast(static_cast<float>(away)), Simd::load(numbers_ + i)));
  }

 private:
  float numbers_[kQueryBlock];
};

// Applies the options to the logits of `keys` keys from `first` on: powers of two, not yet capped. The softmax is of
// the result.
void apply_options(const AttentionOptions& options, const QueryBlock& block, int64_t first, int64_t keys, float* tile,
                   float* cap_derivative) {
  constexpr float kUnseen = -__builtin_inff();
  const int64_t b = block.b, h = block.h, queries = block.queries;
  if (options.soft_cap > 0) cap_logits(tile, cap_derivative, keys * kQueryBlock, options.soft_cap);
  if (options.bias.data != nullptr) {
    with_type(options.bias_element, [&](auto* type) {
      using T = Pointee<decltype(type)>;
      const Operand<void>& any = options.bias;
      const Operand<T> bias{static_cast<const T*>(any.data), any.at, any.head, any.query};
      for_columns(rows_of(bias, block) + first, bias.query, queries, keys, [&](int64_t j, int64_t i, F column) {
        float* line = tile + j * kQueryBlock + i;
        Simd::store(line, Simd::add(Simd::load(line), log2_of_bias(column)));
      });
    });
  }
  if (options.slopes.data != nullptr) {
    const float slope = *operand_of(options.slopes, b, h) * kLog2E;
    const Distances distances;
    for (int64_t j = 0; j < keys; ++j) {
      for (int i = 0; i < kQueryBlock; i += kLanes) {
        float* line = tile + j * kQueryBlock + i;
        const F penalty = Simd::mul(Simd::broadcast(slope), distances(block.position - first - j, i));
        Simd::store(line, Simd::sub(Simd::load(line), penalty));
      }
    }
  }
  if (options.mask.data != nullptr) {
    const uint8_t* mask = rows_of(options.mask, block) + first;
    const int64_t stride = options.mask.query;
    bool is_needed = false;
    for (int64_t i = 0; i < queries && !is_needed; ++i) is_needed = misses_any(mask + i * stride, keys);
    const int64_t masked = is_needed ? keys : 0;
    for_columns(reinterpret_cast<const int8_t*>(mask), stride, queries, masked, [&](int64_t j, int64_t i, F column) {
      float* line = tile + j * kQueryBlock + i;
      Simd::store(line, select_bytes(column, Simd::load(line), Simd::broadcast(kUnseen)));
    });
  }
  if (options.query_segments.data != nullptr) {
    int32_t of_queries[kQueryBlock] = {};
    const int32_t *segments = operand_of(options.query_segments, b) + block.begin,
                  *of_keys = operand_of(options.key_segments, b) + first;
    for (int64_t i = 0; i < queries; ++i) of_queries[i] = segments[i];
    for (int64_t j = 0; j < keys; ++j) {
      float* line = tile + j * kQueryBlock;
      for (int64_t i = 0; i < kQueryBlock; ++i) line[i] = of_queries[i] == of_keys[j] ? line[i] : kUnseen;
    }
  }
}

// Masks the keys that some of the queries do not see for their place.
void mask_places(const QueryBlock& block, int64_t first, int64_t keys, float* tile) {
  for (int64_t j = 0; j < keys; ++j) {
    const auto away = static_cast<int32_t>(block.position - first - j);
    if (away >= block.lowest && away + block.queries - 1 <= block.highest) continue;
    float* line = tile + j * kQueryBlock;
    for (int32_t i = 0; i < kQueryBlock; ++i) {
      line[i] = ((away + i >= block.lowest) & (away + i <= block.highest)) ? line[i] : -__builtin_inff();
    }
  }
}

bool has_dropout(const AttentionOptions* options) {
  return options != nullptr && (options->dropout_keys.data != nullptr || options->kept.data != nullptr);
}

// Computes the factors of the weights of a tile: 1 / (1 - dropout), or 0.
void dropout_factors(const AttentionOptions& options, const QueryBlock& block, int64_t kv_length, int64_t first,
                     int64_t keys, float* factors) {
  const float kept = 1.0f / options.keep;
  if (options.dropout_keys.data != nullptr) {
    const uint32_t* key = operand_of(options.dropout_keys, block.b, block.h);
    const auto rows = static_cast<uint64_t>(block.begin), columns = static_cast<uint64_t>(kv_length);
    threefry_factors<kQueryBlock>(key, rows * columns + static_cast<uint64_t>(first), columns, keys, options.keep, kept,
                                  factors);
    return;
  }
  const uint8_t* given = rows_of(options.kept, block) + first;
  std::memset(factors, 0, static_cast<size_t>(keys * kQueryBlock) * sizeof(float));
  for_columns(reinterpret_cast<const int8_t*>(given), kv_length, block.queries, keys,
              [&](int64_t j, int64_t i, F column) {
                Simd::store(factors + j * kQueryBlock + i, select_bytes(column, Simd::broadcast(kept), Simd::zero()));
              });
}

}  // namespace
}  // namespace eqxcallback::cpu
