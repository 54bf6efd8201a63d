// The CPU kernels: they take pointers and sizes, and need no XLA, nanobind or Python. Arrays are row-major and
// contiguous.
//
// Shape letters: B batch, S queries, T keys, H query heads, K key/value heads (H a multiple of K), D head size.
// bf16 and f16 arrays are computed in f32 and rounded once, at the end.
#pragma once

#include <cstdint>

#include "cpu/executor.h"
#include "cpu/types.h"

namespace eqxcallback::cpu {

// What of prefetches depends on the processor: see processor.h.
struct Prefetching {
  bool into_first_cache = false;  // what is read once, weights, keys and values: else into the second one
  int64_t longest_row = 16384;    // bytes of a row of weights, up to which all passes over a tile share its prefetches
  bool of_one_stream = false;     // of what is read in one stream, too: else the processor sees it coming by itself
};

// out[r, i] = (x[r, i] - mean) / sqrt(variance + eps) * weight[i] + bias[i] over the elements of row r. Not centred,
// the mean is 0 and the variance that of the squares.
struct Norm {
  void* out;
  const void* x;
  const float *weight, *bias;  // [size]; null: 1, 0
  int64_t rows, size;
  float eps;
  bool center;
};
struct NormBackward {
  void* dx;                // null, as any gradient in this file, if it is not needed
  float *dweight, *dbias;  // [size]
  const void* x;
  const float* weight;  // null: 1
  const void* dout;
  int64_t rows, size;
  float eps;
  bool center;
};

// The norm over groups of neighbouring channels, of `size` elements each.
struct GroupNorm {
  void* out;
  const void* x;               // [batch, channels, size]
  const float *weight, *bias;  // [channels]; null: 1, 0
  int64_t batch, channels, size, groups;
  float eps;
};
struct GroupNormBackward {
  void* dx;
  float *dweight, *dbias;  // [channels]
  GroupNorm forward;       // its result and bias are not read
  const void* dout;
};

// sum = x + residual, perhaps in the memory of residual, and the RMS norm of the rounded sum.
struct AddRmsNorm {
  void *out, *sum;
  const void *x, *residual;
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

// Rotates the queries of `qkv` into q and its keys into k_cache, and copies its values into v_cache. The keys and
// values of example e begin at position[e % positions], clamped to 0 .. length - count.
struct RotaryAppend {
  void *q, *k_cache, *v_cache;  // [examples * count, heads, head_size], [examples, length, kv_heads, head_size]
  const void* qkv;              // [examples * count, heads + 2 * kv_heads, head_size]
  const float *cos, *sin;       // [table_rows, head_size / 2]
  const int32_t* position;      // [positions]
  int64_t examples, count, table_rows, heads, kv_heads, head_size, length, positions;
};

struct RotaryEmbeddingBackward {
  void* dx;
  float *dcos, *dsin;  // of the shape of the table, whose rows are those of cos and sin
  const void* x;
  const float *cos, *sin;
  const void* dout;
  int64_t rows, table_rows, heads, head_size;
};

// out[r, i] = activation(gate[r, i]) * up[r, i]
enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh };
struct Glu {
  void* out;  // [rows, size]
  const void *gate, *up;
  int64_t rows, size;
  int64_t stride;  // between rows of gate, and of up
  Activation activation;
};
struct GluBackward {
  void *dgate, *dup;  // with the stride of gate and up
  const void *gate, *up, *dout;
  int64_t rows, size, stride;
  Activation activation;
};

// out[i] = activation(x[i])
struct Gelu {
  void* out;  // [size]
  const void* x;
  int64_t size;
  Activation activation;
};
struct GeluBackward {
  void* dx;
  const void *x, *dout;
  int64_t size;
  Activation activation;
};

// loss[r] = (1 - s) (l - z[label]) + s (l - mean z) + z_loss l^2 of row z of the logits, where l = log(sum(exp(z))) and
// s the smoothing. A negative label counts from the end, and one that is out of range gives NaN.
struct CrossEntropy {
  float* loss;  // [rows]
  const void* logits;
  const int32_t* labels;
  int64_t rows, size;
  float label_smoothing, z_loss;
  bool has_ignore_index;  // the label of rows whose loss and gradient are 0
  int64_t ignore_index;
  Prefetching prefetching = {};
};
struct CrossEntropyBackward {
  void* dlogits;
  CrossEntropy forward;  // its loss is read
  const float* dloss;
};

// The elements of rows that take part: bytes that are 0 or 1. Null: all. Row r has row r % rows of the mask.
struct RowMask {
  const void* data;  // [rows, size]
  int64_t rows;
};

// out[r, i] = exp(scale * x[r, i]) / sum(exp(scale * x[r])) over the elements that take part, and 0 elsewhere.
struct Softmax {
  void* out;  // [rows, size]
  const void* x;
  RowMask mask;
  int64_t rows, size;
  float scale;
};
struct SoftmaxBackward {
  void* dx;
  Softmax forward;  // x is not read
  const void* dout;
};

// new_cell = sigmoid(f) cell + sigmoid(i) tanh(g), hidden = sigmoid(o) tanh(new_cell) of the gates i, f, g, o.
struct LstmGates {
  void *hidden, *new_cell;  // [rows, size]
  const void *gates, *cell;
  int64_t rows, size;
};
struct LstmGatesBackward {
  void *dgates, *dcell;
  LstmGates forward;  // its results are not read
  const void *dhidden, *dnew_cell;
};

// With the parts r, z, n of both gates and h = hidden: new = tanh(n_in + sigmoid(r_in + r_h) (n_h + bias)), and
// out = new + sigmoid(z_in + z_h) (h - new).
struct GruGates {
  void* out;  // [rows, size]
  const void *input_gates, *hidden_gates, *hidden;
  const float* bias;  // [size]; null: 0
  int64_t rows, size;
};
struct GruGatesBackward {
  void *dinput_gates, *dhidden_gates, *dhidden;
  float* dbias;
  GruGates forward;  // its result is not read
  const void* dout;
};

// An operand that examples may share: the part of example b begins `at[b]` elements after `data`, and that of head h
// another h * head elements later. Of an operand of pairs, the row of query s is another s * query elements later,
// where `query` is 0 if queries share one row. `data` is null if the operand is absent.
template <class T>
struct Operand {
  const T* data;
  const int64_t* at;
  int64_t head, query;
};

// The keys that attention sees, and what it adds to the logits. Query s is at position p = offset + s among the keys.
struct AttentionOptions {
  int64_t window;         // 0: none. Causal: it sees keys above p - window, else keys nearer than window
  float soft_cap;         // 0: none. The logits l become soft_cap * tanh(l / soft_cap)
  Operand<void> bias;     // [S or 1, T], added to the logits
  Element bias_element;   // the type of the bias
  Operand<uint8_t> mask;  // [S or 1, T]: 0 is not seen
  Operand<float> slopes;  // one for each head: slope * |p - key| is subtracted from the logits
  Operand<int32_t> query_segments, key_segments;  // [S], [T]: seen where they are equal
  Operand<int32_t> lengths;                       // keys below the length are seen
  Operand<int32_t> offset;                        // by default T - S
  float keep;                                     // the probability with which dropout lets a weight stay
  Operand<uint32_t> dropout_keys;                 // two for each head: Threefry's keys, or else
  Operand<uint8_t> kept;                          // [S, T]: 0 is dropped
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
  const AttentionOptions* options;  // null: none
  float* lse = nullptr;             // [B, S, H], the log of the sums of exp(logits); null if it is not needed
};

// The gradients of sum(cotangent * out), and of sum(lse_cotangent * lse) if `lse_cotangent` is not null.
struct AttentionBackward {
  Attention call;  // its result is read
  const void* cotangent;
  void *dq, *dk, *dv;
  void* dbias;  // the gradient of the whole bias
  float* dslopes;
  int64_t bias_size, slopes_size;  // the elements of dbias and dslopes
  const float* lse_cotangent = nullptr;
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
  // Options as in AttentionOptions. The query is at the last of the `length` keys.
  int64_t window;
  float soft_cap;
  Operand<float> slopes;
  Operand<float> k_scale, v_scale;  // [T, K], for k and v in int8. Null: k and v have the type of q
  Prefetching prefetching = {};
};

// out[r, o] = sum_i x[r, i] W[o, i], W in blocks that are decoded in registers, or a few rows at a time in cache.
struct QuantizedLinear {
  void* out;              // [rows, out_features]
  const void* x;          // [rows, in_features]
  const uint8_t* blocks;  // [out_features, in_features / 32, bytes of a block]
  int64_t rows, out_features, in_features;
  Encoding encoding;
  bool quantized_activations;  // x is quantised to int8, in blocks of 32
  Prefetching prefetching = {};
};

// out[r, o] = sum_i x[r, i] W[o, i] + bias[o]. Each row of W is read once for all rows of x, which are few.
struct Linear {
  void* out;           // [rows, out_features]
  const void* x;       // [rows, in_features]
  const void* weight;  // [out_features, in_features], of the type of x
  const float* bias;   // [out_features]; null: 0
  int64_t rows, out_features, in_features;
  Prefetching prefetching = {};
};

// A processor waits for the memory of weights if rows are fewer, and for its products if there are so many.
inline constexpr int64_t kSeveralRows = 4;

// out[e, r, c] = sum_i a[e, r, i] b[e, c, i] + bias[c]. A factor that has columns is [examples, size, rows or columns].
struct MatrixProduct {
  void* out;  // [examples, rows, columns]
  const void *a, *b;
  Element element;  // of both factors, kF32 or kBf16
  int64_t examples, rows, columns, size;
  bool a_has_columns, b_has_columns;
  void* packed;                 // `product_bytes` of this
  const float* bias = nullptr;  // [columns]
};

// out[r, o] = scale[o] sum_i x[r, i] W[o, i]
struct Int8Linear {
  void* out;             // [rows, out_features]
  const void* x;         // [rows, in_features]
  const int8_t* weight;  // [out_features, in_features]
  const float* scale;    // [out_features]
  int64_t rows, out_features, in_features;
  bool quantized_activations;  // x is quantised to int8, each row as one block
  Prefetching prefetching = {};
};

// The same kernels, compiled for one instruction set.
struct Kernels {
  void (*norm)(Element, const Norm&, const Executor&);
  void (*norm_backward)(Element, const NormBackward&, const Executor&);
  void (*group_norm)(Element, const GroupNorm&, const Executor&);
  void (*group_norm_backward)(Element, const GroupNormBackward&, const Executor&);
  void (*add_rms_norm)(Element, const AddRmsNorm&, const Executor&);
  void (*rotary_embedding)(Element, const RotaryEmbedding&, const Executor&);
  void (*rotary_embedding_backward)(Element, const RotaryEmbeddingBackward&, const Executor&);
  void (*rotary_append)(Element, const RotaryAppend&, const Executor&);
  void (*glu)(Element, const Glu&, const Executor&);
  void (*glu_backward)(Element, const GluBackward&, const Executor&);
  void (*gelu)(Element, const Gelu&, const Executor&);
  void (*gelu_backward)(Element, const GeluBackward&, const Executor&);
  void (*cross_entropy)(Element, const CrossEntropy&, const Executor&);
  void (*cross_entropy_backward)(Element, const CrossEntropyBackward&, const Executor&);
  void (*softmax)(Element, const Softmax&, const Executor&);
  void (*softmax_backward)(Element, const SoftmaxBackward&, const Executor&);
  void (*lstm_gates)(Element, const LstmGates&, const Executor&);
  void (*lstm_gates_backward)(Element, const LstmGatesBackward&, const Executor&);
  void (*gru_gates)(Element, const GruGates&, const Executor&);
  void (*gru_gates_backward)(Element, const GruGatesBackward&, const Executor&);
  void (*attention)(Element, const Attention&, const Executor&);
  void (*attention_backward)(Element, const AttentionBackward&, const Executor&);
  void (*decode_attention)(Element, const DecodeAttention&, const Executor&);
  void (*linear)(Element, const Linear&, const Executor&);
  void (*linear_rows)(Element, const Linear&, const Executor&);  // the same, from kSeveralRows on
  void (*matrix_product)(Element of_out, const MatrixProduct&, const Executor&);
  int64_t (*product_bytes)(const MatrixProduct&);  // of memory that it needs beside its operands
  void (*quantized_linear)(Element, const QuantizedLinear&, const Executor&);
  void (*int8_linear)(Element, const Int8Linear&, const Executor&);
  // Multiplies and adds f32, in registers alone, and returns how many operations it did.
  int64_t (*multiply_adds)(int64_t steps);
};

extern const Kernels kAvx512AmxKernels, kAvx512Bf16Kernels, kAvx512Kernels, kAvx2Kernels;
extern const Kernels kNeonBf16Kernels, kNeonDotKernels, kNeonKernels;
extern const Kernels kPortableKernels;

}  // namespace eqxcallback::cpu
