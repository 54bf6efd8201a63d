// The CPU kernels: pointers and sizes in, nothing of XLA, nanobind or Python. Arrays are row-major and contiguous.
//
// Shape letters: B batch, S queries, T keys, H query heads, K key/value heads (H a multiple of K), D head size.
// bf16 arrays are computed in f32 and rounded once, at the end.
#pragma once

#include <cstdint>

#include "cpu/executor.h"
#include "cpu/types.h"

namespace eqxcallback::cpu {

// out[r, i] = x[r, i] / sqrt(mean_j x[r, j]^2 + eps) * weight[i]
struct RmsNorm {
  void* out;
  const void* x;
  const float* weight;  // null: 1
  int64_t rows, size;
  float eps;
};

// Rotates the halves of each head by an angle: out[s, h, i] = x[s, h, i] cos[s, i] - x[s, h, D/2 + i] sin[s, i], and
// out[s, h, D/2 + i] = x[s, h, D/2 + i] cos[s, i] + x[s, h, i] sin[s, i].
struct RotaryEmbedding {
  void* out;               // [rows, heads, head_size]
  const void* x;           // the same
  const float *cos, *sin;  // [table_rows, head_size / 2]; row r of x has row r % table_rows
  int64_t rows, table_rows, heads, head_size;
};

// out[r, i] = gate[r, i] * sigmoid(gate[r, i]) * up[r, i]
struct SwiGlu {
  void* out;  // [rows, size]
  const void *gate, *up;
  int64_t rows, size;
  int64_t stride;  // between rows of gate, and of up
};

// softmax(scale * q k^T) v, by the online softmax of FlashAttention (https://arxiv.org/abs/2205.14135): no S x T array.
// With `causal`, query s sees the keys up to s + T - S. A query that sees no key gives zeros.
struct Attention {
  void* out;      // [B, S, H, D]
  const void* q;  // [B, S, H, D]
  const void* k;  // [KB, T, K, D]; batch b has keys b % KB
  const void* v;
  int64_t batch, kv_batch, q_length, kv_length, heads, kv_heads, head_size;
  float scale;
  bool causal;
};

// The attention of one query for each head over the first `length` keys.
struct DecodeAttention {
  void* out;      // [B, H, D]
  const void* q;  // [B, H, D]
  const void* k;  // [KB, T, K, D]; batch b has keys b % KB
  const void* v;
  const int32_t* length;  // [LB]; batch b has length b % LB. Clamped to 0..T
  int64_t batch, kv_batch, length_batch, kv_length, heads, kv_heads, head_size;
  float scale;
};

// out[r, o] = sum_i x[r, i] W[o, i], W in blocks that are decoded in registers, or a few rows at a time in cache.
struct QuantizedLinear {
  void* out;              // [rows, out_features]
  const void* x;          // [rows, in_features]
  const uint8_t* blocks;  // [out_features, in_features / 32, bytes of a block]
  int64_t rows, out_features, in_features;
  Encoding encoding;
};

// The same kernels, compiled for one instruction set.
struct Kernels {
  void (*rms_norm)(Element, const RmsNorm&, const Executor&);
  void (*rotary_embedding)(Element, const RotaryEmbedding&, const Executor&);
  void (*swiglu)(Element, const SwiGlu&, const Executor&);
  void (*attention)(Element, const Attention&, const Executor&);
  void (*decode_attention)(Element, const DecodeAttention&, const Executor&);
  void (*quantized_linear)(Element, const QuantizedLinear&, const Executor&);
};

extern const Kernels kAvx512Kernels, kAvx2Kernels, kPortableKernels;

}  // namespace eqxcallback::cpu
