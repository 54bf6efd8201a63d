// The handlers of attention.
#include "ffi/attention_operands.h"

namespace eqxcallback {
namespace {

// -- attention: q [*batch, S, H, D], k and v [*batch, T, K, D], and the operands of attention_operands.h

void require_heads(const char* op, int64_t heads, int64_t q_size, const Shape& k, const ffi::AnyBuffer& keys,
                   const ffi::AnyBuffer& values) {
  REQUIRE(same_shape(keys, values) && keys.element_type() == values.element_type(), op,
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
  REQUIRE(same_shape(q, out) && q.element_type() == out.element_type() && q.element_type() == k.element_type(), op,
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

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Out out, bool causal,
                     double scale) {
  return guarded([&] {
    constexpr const char* op = "attention";
    const cpu::Attention call = attention_call(op, q, k, v, *out, causal, scale);
    cpu::kernels().attention(element_of(op, q), call, executor_on(pool));
  });
}

ffi::Error masked_attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool causal,
                            double scale, int64_t window, double soft_cap, double dropout, std::string_view operands) {
  return guarded([&] {
    constexpr const char* op = "masked_attention";
    REQUIRE(args.size() >= 3 && rets.size() == 1, op, "q, k, v and those that `operands` names, and one result");
    const ffi::AnyBuffer q = *args.get<ffi::AnyBuffer>(0), k = *args.get<ffi::AnyBuffer>(1);
    cpu::Attention call =
        attention_call(op, q, k, *args.get<ffi::AnyBuffer>(2), **rets.get<ffi::AnyBuffer>(0), causal, scale);
    const Shape query(op, "q", q, 3);
    const AttentionOperands more(op, args, 3, query, call.kv_length, {window, soft_cap, dropout, operands});
    REQUIRE(more.end == args.size(), op, "as many operands as there are names");
    call.options = &more.options;
    cpu::kernels().attention(element_of(op, q), call, executor_on(pool));
  });
}

// -- the gradients: operands, result and its cotangent; results are the gradients of q, k, v, the bias and the slopes

void run_backward(const char* op, ffi::ThreadPool pool, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  bool causal, double scale, const AttentionSettings* settings) {
  REQUIRE(args.size() >= 5 && rets.size() >= 3, op, "q, k, v, the result and its cotangent, and three gradients");
  const ffi::AnyBuffer q = *args.get<ffi::AnyBuffer>(0), k = *args.get<ffi::AnyBuffer>(1);
  const ffi::AnyBuffer v = *args.get<ffi::AnyBuffer>(2), out = *args.get<ffi::AnyBuffer>(args.size() - 2);
  const ffi::AnyBuffer cotangent = *args.get<ffi::AnyBuffer>(args.size() - 1);
  cpu::AttentionBackward backward{};
  backward.call = attention_call(op, q, k, v, out, causal, scale);
  REQUIRE(same_shape(q, cotangent) && cotangent.element_type() == q.element_type(), op, "a cotangent of the type of q");
  const Shape query(op, "q", q, 3);
  const AttentionSettings none{};
  const AttentionOperands more(op, args, 3, query, backward.call.kv_length, settings == nullptr ? none : *settings);
  REQUIRE(more.end + 2 == args.size(), op, "as many operands as there are names, the result and its cotangent");
  if (settings != nullptr) backward.call.options = &more.options;
  backward.cotangent = cotangent.untyped_data();
  size_t next = 0;
  const auto gradient = [&](size_t operand) {
    REQUIRE(next < rets.size(), op, "a gradient of each operand of a floating dtype");
    const ffi::AnyBuffer of = *args.get<ffi::AnyBuffer>(operand), result = **rets.get<ffi::AnyBuffer>(next++);
    REQUIRE(
        same_shape(of, result) && of.element_type() == result.element_type(), op,
        "gradients of the types of the operands; got " + text(result.dimensions()) + " for " + text(of.dimensions()));
    return result;
  };
  backward.dq = gradient(0).untyped_data();
  backward.dk = gradient(1).untyped_data();
  backward.dv = gradient(2).untyped_data();
  if (more.bias_index > 0) {
    const ffi::AnyBuffer result = gradient(more.bias_index);
    backward.dbias = result.untyped_data(), backward.bias_size = static_cast<int64_t>(result.element_count());
  }
  if (more.slopes_index > 0) {
    const ffi::AnyBuffer result = gradient(more.slopes_index);
    backward.dslopes = result.typed_data<float>();
    backward.slopes_size = static_cast<int64_t>(result.element_count());
  }
  REQUIRE(next == rets.size(), op, "no other results than gradients");
  cpu::kernels().attention_backward(element_of(op, q), backward, executor_on(pool));
}

ffi::Error attention_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool causal,
                              double scale) {
  return guarded([&] { run_backward("attention_backward", pool, args, rets, causal, scale, nullptr); });
}

ffi::Error masked_attention_backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                     bool causal, double scale, int64_t window, double soft_cap, double dropout,
                                     std::string_view operands) {
  return guarded([&] {
    const AttentionSettings settings{window, soft_cap, dropout, operands};
    run_backward("masked_attention_backward", pool, args, rets, causal, scale, &settings);
  });
}

// -- decode_attention: q [*batch, H, D], k and v [*batch, T, K, D], length s32 [*batch]

cpu::DecodeAttention decode_call(const char* op, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k,
                                 const ffi::AnyBuffer& v, const ffi::AnyBuffer& length, const ffi::AnyBuffer& out,
                                 double scale) {
  const Shape query(op, "q", q, 2), key(op, "k", k, 3), lengths(op, "length", length, 0);
  REQUIRE(same_shape(q, out) && q.element_type() == out.element_type(), op, "a result of the shape and dtype of q");
  require_heads(op, query[0], query[1], key, k, v);
  require_type(op, "length", length, ffi::DataType::S32, "int32");
  REQUIRE(key.shared_by(query) && lengths.shared_by(query), op,
          "k, v and length with the batch axes of q; got " + text(q.dimensions()) + ", " + text(k.dimensions()) +
              " and " + text(length.dimensions()));
  cpu::DecodeAttention call{};
  call.out = out.untyped_data(), call.q = q.untyped_data();
  call.k = k.untyped_data(), call.v = v.untyped_data();
  call.length = length.typed_data<int32_t>();
  call.batch = query.batch(), call.kv_batch = key.batch(), call.length_batch = lengths.batch();
  call.kv_length = key[0], call.heads = query[0], call.kv_heads = key[1], call.head_size = query[1];
  call.scale = static_cast<float>(scale);
  return call;
}

void require_one_type(const char* op, const ffi::AnyBuffer& q, const ffi::AnyBuffer& k) {
  REQUIRE(q.element_type() == k.element_type(), op, "q and k of one dtype");
}

ffi::Error decode_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer length, Out out, double scale) {
  return guarded([&] {
    constexpr const char* op = "decode_attention";
    require_one_type(op, q, k);
    const cpu::DecodeAttention call = decode_call(op, q, k, v, length, *out, scale);
    cpu::kernels().decode_attention(element_of(op, q), call, executor_on(pool));
  });
}

// The last operand is slopes [*batch, H], or there are none.
void run_masked_decode(const char* op, ffi::ThreadPool pool, const ffi::RemainingArgs& args, size_t count,
                       cpu::DecodeAttention call, int64_t window, double soft_cap) {
  REQUIRE(window >= 0 && soft_cap >= 0, op, "a window and a soft_cap of 0 or more");
  const ffi::AnyBuffer q = *args.get<ffi::AnyBuffer>(0);
  call.window = window, call.soft_cap = static_cast<float>(soft_cap);
  std::vector<int64_t> at;
  if (args.size() > count) {
    const ffi::AnyBuffer slopes = *args.get<ffi::AnyBuffer>(count);
    require_type(op, "slopes", slopes, ffi::DataType::F32, "float32");
    const Shape shape(op, "slopes", slopes, 1), query(op, "q", q, 2);
    REQUIRE(shape[0] == query[0], op, "a slope for each head; got the shape " + text(slopes.dimensions()));
    at = places(op, "slopes", shape, query);
    call.slopes = {slopes.typed_data<float>(), at.data(), 1};
  }
  cpu::kernels().decode_attention(element_of(op, q), call, executor_on(pool));
}

ffi::Error masked_decode_attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double scale,
                                   int64_t window, double soft_cap) {
  return guarded([&] {
    constexpr const char* op = "masked_decode_attention";
    REQUIRE((args.size() == 4 || args.size() == 5) && rets.size() == 1, op,
            "q, k, v, length and perhaps slopes, and one result");
    const ffi::AnyBuffer q = *args.get<ffi::AnyBuffer>(0), k = *args.get<ffi::AnyBuffer>(1);
    require_one_type(op, q, k);
    const cpu::DecodeAttention call = decode_call(op, q, k, *args.get<ffi::AnyBuffer>(2), *args.get<ffi::AnyBuffer>(3),
                                                  **rets.get<ffi::AnyBuffer>(0), scale);
    run_masked_decode(op, pool, args, 4, call, window, soft_cap);
  });
}

// k and v in int8, and a scale for each of their heads: f32 [*batch, T, K].
ffi::Error int8_decode_attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double scale,
                                 int64_t window, double soft_cap) {
  return guarded([&] {
    constexpr const char* op = "int8_decode_attention";
    REQUIRE((args.size() == 6 || args.size() == 7) && rets.size() == 1, op,
            "q, k, v, their scales, length and perhaps slopes, and one result");
    const ffi::AnyBuffer k = *args.get<ffi::AnyBuffer>(1);
    const ffi::AnyBuffer k_scale = *args.get<ffi::AnyBuffer>(3), v_scale = *args.get<ffi::AnyBuffer>(4);
    require_type(op, "k", k, ffi::DataType::S8, "int8");
    require_type(op, "k_scale", k_scale, ffi::DataType::F32, "float32");
    require_type(op, "v_scale", v_scale, ffi::DataType::F32, "float32");
    const Dims keys = k.dimensions(), scales = k_scale.dimensions();
    REQUIRE(same_shape(k_scale, v_scale) && scales.size() + 1 == keys.size() &&
                std::equal(scales.begin(), scales.end(), keys.begin()),
            op, "scales of the shape of k without its last axis; got " + text(scales) + " for " + text(keys));
    cpu::DecodeAttention call = decode_call(op, *args.get<ffi::AnyBuffer>(0), k, *args.get<ffi::AnyBuffer>(2),
                                            *args.get<ffi::AnyBuffer>(5), **rets.get<ffi::AnyBuffer>(0), scale);
    call.k_scale = k_scale.typed_data<float>(), call.v_scale = v_scale.typed_data<float>();
    run_masked_decode(op, pool, args, 6, call, window, soft_cap);
  });
}

XLA_FFI_DEFINE_HANDLER(kAttention, attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Ret<ffi::AnyBuffer>()
                           .Attr<bool>("causal")
                           .Attr<double>("scale"));

auto with_settings() {
  return variadic()
      .Attr<bool>("causal")
      .Attr<double>("scale")
      .Attr<int64_t>("window")
      .Attr<double>("soft_cap")
      .Attr<double>("dropout")
      .Attr<std::string_view>("operands");
}
XLA_FFI_DEFINE_HANDLER(kMaskedAttention, masked_attention, with_settings());
XLA_FFI_DEFINE_HANDLER(kAttentionBackward, attention_backward, variadic().Attr<bool>("causal").Attr<double>("scale"));
XLA_FFI_DEFINE_HANDLER(kMaskedAttentionBackward, masked_attention_backward, with_settings());
XLA_FFI_DEFINE_HANDLER(kDecodeAttention, decode_attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Arg<ffi::AnyBuffer>()  // length
                           .Ret<ffi::AnyBuffer>()
                           .Attr<double>("scale"));
auto with_window() { return variadic().Attr<double>("scale").Attr<int64_t>("window").Attr<double>("soft_cap"); }
XLA_FFI_DEFINE_HANDLER(kMaskedDecodeAttention, masked_decode_attention, with_window());
XLA_FFI_DEFINE_HANDLER(kInt8DecodeAttention, int8_decode_attention, with_window());

}  // namespace

CpuOps attention_ops() {
  return {{"attention", kAttention},
          {"attention_backward", kAttentionBackward},
          {"masked_attention", kMaskedAttention},
          {"masked_attention_backward", kMaskedAttentionBackward},
          {"decode_attention", kDecodeAttention},
          {"masked_decode_attention", kMaskedDecodeAttention},
          {"int8_decode_attention", kInt8DecodeAttention}};
}

}  // namespace eqxcallback
