// What attention does to the logits of a tile: rows are keys, and the queries of a block are along the vector lanes.
#pragma once

#include "cpu/kernels/attention_tiles.h"
#include "cpu/kernels/threefry.h"

namespace eqxcallback::cpu {
namespace {

template <class T>
const T* operand_of(const Operand<T>& operand, int64_t b, int64_t h = 0) {
  return operand.data + operand.at[b] + h * operand.head;
}

// At most kQueryBlock queries of one head, and the keys that any of them may see.
struct QueryBlock {
  int64_t b, h, begin, queries;
  int64_t position;         // of the first query, among the keys
  int64_t first, end;       // of the keys
  int32_t lowest, highest;  // query at p sees key j if p - j is between them
};

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
  return block;
}

// l -> cap tanh(l / cap), where l are powers of two; and what its derivative is, if it is wanted.
void cap_logits(float* tile, float* derivative, int64_t size, float cap) {
  const F factor = Simd::broadcast(2.0f / cap), log_cap = Simd::broadcast(cap * kLog2E), one = Simd::broadcast(1.0f);
  const F lowest = Simd::broadcast(-126.0f), two = Simd::broadcast(2.0f);
  for (int64_t i = 0; i < size; i += kLanes) {
    const F power = Simd::max(lowest, Simd::mul(Simd::load(tile + i), factor));
    const F inverse = Simd::exp2(Simd::max(lowest, Simd::sub(Simd::zero(), power)));
    const F tanh = Simd::sub(Simd::div(two, Simd::add(one, inverse)), one);
    Simd::store(tile + i, Simd::mul(log_cap, tanh));
    if (derivative != nullptr) Simd::store(derivative + i, Simd::sub(one, Simd::mul(tanh, tanh)));
  }
}

// As a power of two. What is finite stays so: only -inf is not seen.
float log2_of_bias(float bias) {
  constexpr float kHighest = -kLowest;
  const float product = bias * kLog2E;
  return __builtin_fabsf(bias) <= kHighest ? larger(kLowest, smaller(kHighest, product)) : bias;
}

// Takes the logits of `keys` keys from `first`, as powers of two and not yet capped, to what the softmax is of.
void apply_options(const AttentionOptions& options, const QueryBlock& block, int64_t kv_length, int64_t first,
                   int64_t keys, float* tile, float* cap_derivative) {
  constexpr float kUnseen = -__builtin_inff();
  const int64_t b = block.b, h = block.h, queries = block.queries, row = block.begin * kv_length + first;
  if (options.soft_cap > 0) cap_logits(tile, cap_derivative, keys * kQueryBlock, options.soft_cap);
  if (options.bias.data != nullptr) {
    with_type(options.bias_element, [&](auto* type) {
      using T = Pointee<decltype(type)>;
      const Operand<T> operand{static_cast<const T*>(options.bias.data), options.bias.at, options.bias.head};
      const T* bias = operand_of(operand, b, h) + row;
      for (int64_t j = 0; j < keys; ++j) {
        for (int64_t i = 0; i < queries; ++i) {
          tile[j * kQueryBlock + i] += log2_of_bias(to_float(bias[i * kv_length + j]));
        }
      }
    });
  }
  if (options.slopes.data != nullptr) {
    const float slope = *operand_of(options.slopes, b, h) * kLog2E;
    for (int64_t j = 0; j < keys; ++j) {
      const auto away = static_cast<int32_t>(block.position - first - j);
      for (int32_t i = 0; i < kQueryBlock; ++i) {
        tile[j * kQueryBlock + i] -= slope * static_cast<float>(away + i < 0 ? -away - i : away + i);
      }
    }
  }
  if (options.mask.data != nullptr) {
    const uint8_t* mask = operand_of(options.mask, b, h) + row;
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t i = 0; i < queries; ++i) {
        float& logit = tile[j * kQueryBlock + i];
        logit = mask[i * kv_length + j] != 0 ? logit : kUnseen;
      }
    }
  }
  if (options.query_segments.data != nullptr) {
    int32_t of_queries[kQueryBlock] = {};
    const int32_t *own = operand_of(options.query_segments, b) + block.begin,
                  *of_keys = operand_of(options.key_segments, b) + first;
    for (int64_t i = 0; i < queries; ++i) of_queries[i] = own[i];
    for (int64_t j = 0; j < keys; ++j) {
      float* line = tile + j * kQueryBlock;
      for (int64_t i = 0; i < kQueryBlock; ++i) line[i] = of_queries[i] == of_keys[j] ? line[i] : kUnseen;
    }
  }
}

// The keys that some of the queries do not see by their place.
void mask_places(const QueryBlock& block, int64_t first, int64_t keys, float* tile) {
  for (int64_t j = 0; j < keys; ++j) {
    const auto away = static_cast<int32_t>(block.position - first - j);
    if (away >= block.lowest && away + block.queries - 1 <= block.highest) continue;
    float* line = tile + j * kQueryBlock;
    for (int32_t i = 0; i < kQueryBlock; ++i) {
      line[i] = (away + i >= block.lowest) & (away + i <= block.highest) ? line[i] : -__builtin_inff();
    }
  }
}

bool has_dropout(const AttentionOptions* options) {
  return options != nullptr && (options->dropout_keys.data != nullptr || options->kept.data != nullptr);
}

// What the weights of a tile have to be multiplied by: 1 / (1 - dropout), or 0.
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
  const uint8_t* given = operand_of(options.kept, block.b, block.h) + block.begin * kv_length + first;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t i = 0; i < kQueryBlock; ++i) {
      factors[j * kQueryBlock + i] = i < block.queries && given[i * kv_length + j] != 0 ? kept : 0.0f;
    }
  }
}

}  // namespace
}  // namespace eqxcallback::cpu
