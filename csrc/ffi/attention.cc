// The handlers of attention.
#include "cpu/processor.h"
#include "ffi/attention_operands.h"

namespace eqxcallback {
namespace {

// -- attention: q [*batch, S, H, D], k and v [*batch, T, K, D], and what attention_operands.h has

void require_heads(const char* op, int64_t heads, int64_t q_size, const Shape& k, const ffi::AnyBuffer& keys,
                   const ffi::AnyBuffer& values) {
  REQUIRE(same_type(keys, values), op,
          "k and v of one shape and dtype; got " + text(keys.dimensions()) + " and " + text(values.dimensions()));
  REQUIRE(k[2] == q_size, op,
          "heads of one size in q and k; got " + std::to_string(q_size) + " and " + std::to_string(k[2]));
  REQUIRE(k[1] > 0 && heads % k[1] == 0, op,
          "a number of query heads that is a multiple of the key/value heads; got " + std::to_string(heads) + " and " +
              std::to_string(k[1]));
}

cpu::Attention attention_call(const char* op, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
                              const ffi::AnyBuffer& out, bool causal, double scale) {
  const Shape query(op, "q", q, 3), key(op, "k", k, 3);
  REQUIRE(same_type(q, out) && q.element_type() == k.element_type(), op,
          "q, k and the result of one dtype, and a result of the shape of q");
  require_heads(op, query[1], query[2], key, k, v);
  REQUIRE(key.shared_by(query), op,
          "k and v with the batch axes of q; got " + text(q.dimensions()) + " and " + text(k.dimensions()));
  return {out.untyped_data(),
          q.untyped_data(),
          k.untyped_data(),
          v.untyped_data(),
          query.batch(),
          key.batch(),
          query[0],
          key[0],
          query[1],
          key[1],
          query[2],
          static_cast<float>(scale),
          causal,
          nullptr};
}

Operands attention_operands(const char* op, const ffi::RemainingArgs& args, int64_t present, size_t others) {
  return Operands(op, args, present,
                  {"q", "k", "v", "bias", "mask", "alibi_slopes", "query_segments", "key_segments", "lengths", "offset",
                   "dropout_keys", "kept"},
                  3, others);
}

// Checks the log-sum-exps of the queries, or their cotangents: f32 [*batch, S, H].
float* lse_of(const char* op, const ffi::AnyBuffer& lse, const ffi::AnyBuffer& q) {
  const Dims dims = lse.dimensions(), query = q.dimensions();
  REQUIRE(lse.element_type() == ffi::DataType::F32 && dims.size() + 1 == query.size() &&
              std::equal(dims.begin(), dims.end(), query.begin()),
          op, "log-sum-exps in float32 of the shape of q without its last axis; got " + text(dims));
  return reinterpret_cast<float*>(lse.untyped_data());
}

// Results: the attention, of the type of q, and if there is a second result the log-sum-exps of the logits.
ffi::Error attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                     bool causal, double scale, int64_t window, double soft_cap, double dropout) {
  return guarded([&] {
    constexpr const char* op = "attention";
    const Operands operands = attention_operands(op, args, present, 0);
    const ffi::AnyBuffer q = operands[kQ];
    REQUIRE(rets.size() == 1 || rets.size() == 2, op, "one of the results, or two; got " + std::to_string(rets.size()));
    const ffi::AnyBuffer out = **rets.get<ffi::AnyBuffer>(0);
    cpu::Attention call = attention_call(op, q, operands[kK], operands[kV], out, causal, scale);
    if (rets.size() == 2) call.lse = lse_of(op, **rets.get<ffi::AnyBuffer>(1), q);
    const Shape query(op, "q", q, 3);
    const AttentionOperands more(op, operands, query, call.kv_length, {window, soft_cap, dropout});
    call.options = more.any();
    cpu::kernels().attention(element_of(op, q), call, executor_on(pool));
  });
}

// -- attention_backward: operands, results and their cotangents; results are gradients of q, k, v, the bias and the
// slopes

ffi::Error attention_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t present,
                              int64_t needs_grad, bool causal, double scale, int64_t window, double soft_cap,
                              double dropout) {
  return guarded([&] {
    constexpr const char* op = "attention_backward";
    constexpr uint64_t kFloating = 1u << kQ | 1u << kK | 1u << kV | 1u << kBias | 1u << kSlopes;
    const bool has_lse = args.size() == Mask(op, "present", present, kAttentionSlots).count() + 4;
    const Operands operands = attention_operands(op, args, present, has_lse ? 4 : 2);
    const Gradients gradients(op, rets, needs_grad, kAttentionSlots, ~kFloating);
    const ffi::AnyBuffer q = operands[kQ], k = operands[kK], v = operands[kV],
                         cotangent = operands.other(has_lse ? 2 : 1);
    cpu::AttentionBackward backward{};
    backward.call = attention_call(op, q, k, v, operands.other(0), causal, scale);
    REQUIRE(same_type(q, cotangent), op, "a cotangent of the type of q");
    const Shape query(op, "q", q, 3);
    const AttentionOperands more(op, operands, query, backward.call.kv_length, {window, soft_cap, dropout});
    backward.call.options = more.any();
    backward.cotangent = cotangent.untyped_data();
    if (has_lse) backward.lse_cotangent = lse_of(op, operands.other(3), q);
    backward.dq = data_of(gradients(kQ, q));
    backward.dk = data_of(gradients(kK, k));
    backward.dv = data_of(gradients(kV, v));
    if (const Optional dbias = gradients(kBias, operands(kBias))) {
      backward.dbias = dbias->untyped_data(), backward.bias_size = static_cast<int64_t>(dbias->element_count());
    }
    if (const Optional dslopes = gradients(kSlopes, operands(kSlopes))) {
      backward.dslopes = dslopes->typed_data<float>();
      backward.slopes_size = static_cast<int64_t>(dslopes->element_count());
    }
    cpu::kernels().attention_backward(element_of(op, q), backward, executor_on(pool));
  });
}

// -- decode_attention: q [*batch, H, D], k and v [*batch, T, K, D], length s32 [*batch], slopes f32 [*batch, H], and
// scales f32 [*batch, T, K] of k and v in int8

ffi::Error decode_attention(ffi::ThreadPool pool, ffi::RemainingArgs args, Out out, int64_t present, double scale,
                            int64_t window, double soft_cap) {
  return guarded([&] {
    constexpr const char* op = "decode_attention";
    const Operands operands(op, args, present, {"q", "k", "v", "length", "alibi_slopes", "k_scale", "v_scale"}, 4);
    const ffi::AnyBuffer q = operands[0], k = operands[1], v = operands[2], length = operands[3];
    const Shape query(op, "q", q, 2), key(op, "k", k, 3), lengths(op, "length", length, 0);
    REQUIRE(same_type(q, *out), op, "a result of the shape and dtype of q");
    require_heads(op, query[0], query[1], key, k, v);
    require_type(op, "length", length, ffi::DataType::S32, "int32");
    REQUIRE(key.shared_by(query) && lengths.shared_by(query), op,
            "k, v and length with the batch axes of q; got " + text(q.dimensions()) + ", " + text(k.dimensions()) +
                " and " + text(length.dimensions()));
    REQUIRE(window >= 0 && soft_cap >= 0, op, "a window and a soft_cap of 0 or more");
    cpu::DecodeAttention call{};
    call.out = out->untyped_data(), call.q = q.untyped_data();
    call.k = k.untyped_data(), call.v = v.untyped_data();
    call.length = length.typed_data<int32_t>();
    call.batch = query.batch(), call.kv_batch = key.batch(), call.length_batch = lengths.batch();
    call.kv_length = key[0], call.heads = query[0], call.kv_heads = key[1], call.head_size = query[1];
    call.scale = static_cast<float>(scale), call.window = window, call.soft_cap = static_cast<float>(soft_cap);
    std::vector<int64_t> slopes_at, k_scale_at, v_scale_at;
    const auto take = [&](cpu::Operand<float>& to, const char* name, const Optional& x, std::vector<int64_t>& at,
                          size_t core) {
      if (!x) return;
      require_type(op, name, *x, ffi::DataType::F32, "float32");
      const Shape shape(op, name, *x, core);
      REQUIRE(core == 1 ? shape[0] == query[0] : shape[0] == key[0] && shape[1] == key[1], op,
              (core == 1 ? "a slope for each head; got the shape "
                         : "scales of the shape of k without its last axis; got ") +
                  text(x->dimensions()));
      at = places(op, name, shape, query);
      to = {x->typed_data<float>(), at.data(), 1, 0};
    };
    take(call.slopes, "slopes", operands(4), slopes_at, 1);
    const Optional k_scale = operands(5), v_scale = operands(6);
    REQUIRE(k_scale.has_value() == v_scale.has_value(), op, "scales of k and of v, or none");
    if (k_scale) {
      require_type(op, "k", k, ffi::DataType::S8, "int8");
    } else {
      REQUIRE(q.element_type() == k.element_type(), op, "q and k of one dtype");
    }
    take(call.k_scale, "k_scale", k_scale, k_scale_at, 2);
    take(call.v_scale, "v_scale", v_scale, v_scale_at, 2);
    call.prefetching = cpu::prefetching();
    cpu::kernels().decode_attention(element_of(op, q), call, executor_on(pool));
  });
}

EQXCALLBACK_CPU_KERNEL(attention, attention,
                       optional_operands()
                           .RemainingRets()
                           .Attr<int64_t>("present")
                           .Attr<bool>("causal")
                           .Attr<double>("scale")
                           .Attr<int64_t>("window")
                           .Attr<double>("soft_cap")
                           .Attr<double>("dropout"));
EQXCALLBACK_CPU_KERNEL(attention_backward, attention_backward,
                       bind_backward()
                           .Attr<bool>("causal")
                           .Attr<double>("scale")
                           .Attr<int64_t>("window")
                           .Attr<double>("soft_cap")
                           .Attr<double>("dropout"));
EQXCALLBACK_CPU_KERNEL(decode_attention, decode_attention,
                       bind_forward().Attr<double>("scale").Attr<int64_t>("window").Attr<double>("soft_cap"));

}  // namespace
}  // namespace eqxcallback
