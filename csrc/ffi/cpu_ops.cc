// Decode, check, call. Batch axes lead; an operand that may be shared by the batch lacks them, or some of the first
// ones.
#include "ffi/cpu_ops.h"

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cpu/isa.h"
#include "ffi/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {
namespace {

namespace ffi = xla::ffi;
using Dims = ffi::Span<const int64_t>;
using Out = ffi::Result<ffi::AnyBuffer>;

std::string text(Dims dims) {
  std::string result = "(";
  for (size_t i = 0; i < dims.size(); ++i) result += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return result + ")";
}

[[noreturn]] void refuse(const char* op, const std::string& expected) {
  throw std::invalid_argument(std::string(op) + "[native]: expected " + expected + ".");
}

// A macro, so that the text is made only where it is needed: making it costs more than a small kernel.
#define REQUIRE(condition, op, expected)    \
  do {                                      \
    if (!(condition)) refuse(op, expected); \
  } while (false)

// The shape of one operand or result: batch axes, and `core` axes that the kernel names.
struct Shape {
  Dims dims;
  size_t core;

  Shape(const char* op, const char* name, const ffi::AnyBuffer& buffer, size_t core)
      : dims(buffer.dimensions()), core(core) {
    REQUIRE(dims.size() >= core, op,
            std::string(name) + " with at least " + std::to_string(core) + " axes; got the shape " + text(dims));
  }

  // Of the core axes.
  int64_t operator[](size_t axis) const { return dims[dims.size() - core + axis]; }
  size_t batch_rank() const { return dims.size() - core; }
  int64_t batch() const {
    int64_t product = 1;
    for (size_t i = 0; i < batch_rank(); ++i) product *= dims[i];
    return product;
  }
  // Whether the batch axes are the last of the other's: then index b of the other is index b % batch() of this.
  bool shared_by(const Shape& other) const {
    if (batch_rank() > other.batch_rank()) return false;
    const size_t skip = other.batch_rank() - batch_rank();
    for (size_t i = 0; i < batch_rank(); ++i) {
      if (dims[i] != other.dims[skip + i]) return false;
    }
    return true;
  }
  bool same_batch(const Shape& other) const { return batch_rank() == other.batch_rank() && shared_by(other); }
};

bool same_shape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const Dims left = a.dimensions(), right = b.dimensions();
  return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
}

cpu::Element element_of(const char* op, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::DataType::F32) return cpu::Element::kF32;
  REQUIRE(buffer.element_type() == ffi::DataType::BF16, op, "arrays of float32 or bfloat16");
  return cpu::Element::kBf16;
}

void require_type(const char* op, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                  const char* type_name) {
  REQUIRE(buffer.element_type() == type, op, std::string(name) + " of " + type_name);
}

// Runs `body`, whose exceptions become the call's error.
template <class Body>
ffi::Error guarded(const Body& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "eqxcallback: a kernel found no memory for its scratch");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

// -- rms_norm: x [*batch, size], weight f32 [size] or none

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, double eps) {
  return guarded([&] {
    constexpr const char* op = "rms_norm";
    REQUIRE((args.size() == 1 || args.size() == 2) && rets.size() == 1, op, "one or two operands and one result");
    const ffi::AnyBuffer x = *args.get<ffi::AnyBuffer>(0), out = **rets.get<ffi::AnyBuffer>(0);
    const Shape shape(op, "x", x, 1);
    REQUIRE(same_shape(x, out) && x.element_type() == out.element_type(), op, "a result of the type of x");
    const float* weight = nullptr;
    if (args.size() == 2) {
      const ffi::AnyBuffer w = *args.get<ffi::AnyBuffer>(1);
      require_type(op, "a weight", w, ffi::DataType::F32, "float32");
      REQUIRE(w.dimensions().size() == 1 && w.dimensions()[0] == shape[0], op,
              "a weight of the shape of the last axis of x, (" + std::to_string(shape[0]) + ",); got " +
                  text(w.dimensions()));
      weight = w.typed_data<float>();
    }
    const cpu::RmsNorm call{out.untyped_data(), x.untyped_data(), weight,
                            shape.batch(),      shape[0],         static_cast<float>(eps)};
    cpu::kernels().rms_norm(element_of(op, x), call, executor_on(pool));
  });
}

// -- rotary_embedding: x [*batch, rows, heads, size], cos and sin f32 [*batch, rows, size / 2]

ffi::Error rotary_embedding(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cos, ffi::AnyBuffer sin, Out out) {
  return guarded([&] {
    constexpr const char* op = "rotary_embedding";
    const Shape shape(op, "x", x, 3), table(op, "cos", cos, 2);
    REQUIRE(same_shape(x, *out) && x.element_type() == out->element_type(), op, "a result of the type of x");
    require_type(op, "cos", cos, ffi::DataType::F32, "float32");
    require_type(op, "sin", sin, ffi::DataType::F32, "float32");
    REQUIRE(same_shape(cos, sin) && table.shared_by(shape) && table[0] == shape[0] && 2 * table[1] == shape[2], op,
            "cos and sin of shape (*batch, rows, head_size / 2), matching x of shape " + text(x.dimensions()) +
                "; got " + text(cos.dimensions()) + " and " + text(sin.dimensions()));
    const cpu::RotaryEmbedding call{out->untyped_data(),
                                    x.untyped_data(),
                                    cos.typed_data<float>(),
                                    sin.typed_data<float>(),
                                    shape.batch() * shape[0],
                                    table.batch() * table[0],
                                    shape[1],
                                    shape[2]};
    cpu::kernels().rotary_embedding(element_of(op, x), call, executor_on(pool));
  });
}

// -- swiglu: gate and up [*batch, size]; or both in one operand [*batch, 2 size], the gate first

ffi::Error swiglu(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return guarded([&] {
    constexpr const char* op = "swiglu";
    REQUIRE((args.size() == 1 || args.size() == 2) && rets.size() == 1, op, "one or two operands and one result");
    const ffi::AnyBuffer gate = *args.get<ffi::AnyBuffer>(0), out = **rets.get<ffi::AnyBuffer>(0);
    const Shape in(op, "gate", gate, 1), result(op, "the result", out, 1);
    const bool packed = args.size() == 1;
    REQUIRE(in[0] == (packed ? 2 : 1) * result[0] && in.same_batch(result) && gate.element_type() == out.element_type(),
            op,
            "a result that matches the operands; got " + text(out.dimensions()) + " for " + text(gate.dimensions()));
    const cpu::Element element = element_of(op, gate);
    const char* up = static_cast<const char*>(gate.untyped_data());
    if (packed) {
      up += result[0] * (element == cpu::Element::kF32 ? 4 : 2);
    } else {
      const ffi::AnyBuffer second = *args.get<ffi::AnyBuffer>(1);
      REQUIRE(
          same_shape(gate, second) && gate.element_type() == second.element_type(), op,
          "gate and up of one shape and dtype; got " + text(gate.dimensions()) + " and " + text(second.dimensions()));
      up = static_cast<const char*>(second.untyped_data());
    }
    const cpu::SwiGlu call{out.untyped_data(), gate.untyped_data(), up, result.batch(), result[0], in[0]};
    cpu::kernels().swiglu(element, call, executor_on(pool));
  });
}

// -- attention: q [*batch, S, H, D], k and v [*batch, T, K, D]

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

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Out out, bool causal,
                     double scale) {
  return guarded([&] {
    constexpr const char* op = "attention";
    const Shape query(op, "q", q, 3), key(op, "k", k, 3);
    REQUIRE(same_shape(q, *out) && q.element_type() == out->element_type() && q.element_type() == k.element_type(), op,
            "q, k and the result of one dtype, and a result of the shape of q");
    require_heads(op, query[1], query[2], key, k, v);
    REQUIRE(key.shared_by(query), op,
            "k and v with the batch axes of q; got " + text(q.dimensions()) + " and " + text(k.dimensions()));
    const cpu::Attention call{out->untyped_data(),
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
                              causal};
    cpu::kernels().attention(element_of(op, q), call, executor_on(pool));
  });
}

// -- decode_attention: q [*batch, H, D], k and v [*batch, T, K, D], length s32 [*batch]

ffi::Error decode_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                            ffi::AnyBuffer length, Out out, double scale) {
  return guarded([&] {
    constexpr const char* op = "decode_attention";
    const Shape query(op, "q", q, 2), key(op, "k", k, 3), lengths(op, "length", length, 0);
    REQUIRE(same_shape(q, *out) && q.element_type() == out->element_type() && q.element_type() == k.element_type(), op,
            "q, k and the result of one dtype, and a result of the shape of q");
    require_heads(op, query[0], query[1], key, k, v);
    require_type(op, "length", length, ffi::DataType::S32, "int32");
    REQUIRE(key.shared_by(query) && lengths.shared_by(query), op,
            "k, v and length with the batch axes of q; got " + text(q.dimensions()) + ", " + text(k.dimensions()) +
                " and " + text(length.dimensions()));
    const cpu::DecodeAttention call{out->untyped_data(),
                                    q.untyped_data(),
                                    k.untyped_data(),
                                    v.untyped_data(),
                                    length.typed_data<int32_t>(),
                                    query.batch(),
                                    key.batch(),
                                    lengths.batch(),
                                    key[0],
                                    query[0],
                                    key[1],
                                    query[1],
                                    static_cast<float>(scale)};
    cpu::kernels().decode_attention(element_of(op, q), call, executor_on(pool));
  });
}

// -- cache_append: cache [*batch, length, *row] in place, rows [*batch, count, *row], position s32 [*batch]

ffi::Error cache_append(ffi::AnyBuffer cache, ffi::AnyBuffer rows, ffi::AnyBuffer position, Out out, int64_t row_rank) {
  return guarded([&] {
    constexpr const char* op = "cache_append";
    REQUIRE(row_rank >= 0, op, "row_rank of 0 or more");
    const auto core = static_cast<size_t>(row_rank) + 1;
    const Shape to(op, "cache", cache, core), from(op, "rows", rows, core), start(op, "position", position, 0);
    REQUIRE(same_shape(cache, *out) && cache.element_type() == out->element_type(), op,
            "a result of the type of cache");
    REQUIRE(cache.element_type() == rows.element_type() && from.same_batch(to) &&
                std::equal(to.dims.end() - row_rank, to.dims.end(), from.dims.end() - row_rank) && from[0] <= to[0],
            op,
            "rows that fit into the cache of shape " + text(cache.dimensions()) + "; got " + text(rows.dimensions()));
    require_type(op, "position", position, ffi::DataType::S32, "int32");
    REQUIRE(start.shared_by(to), op, "a position for each cache; got the shape " + text(position.dimensions()));
    if (out->element_count() == 0) return;
    REQUIRE(out->size_bytes() > 0, op, "elements of whole bytes");
    // XLA has put the operand where the result is, and made a copy if anybody else still needs it.
    REQUIRE(cache.untyped_data() == out->untyped_data(), op, "the result in the memory of the cache");
    const int64_t row_bytes = static_cast<int64_t>(cache.size_bytes()) / (to.batch() * to[0]);
    const auto bytes = static_cast<size_t>(from[0] * row_bytes);
    for (int64_t b = 0; b < to.batch(); ++b) {
      const int64_t wanted = position.typed_data<int32_t>()[b % start.batch()];
      const int64_t first = std::min(std::max<int64_t>(wanted, 0), to[0] - from[0]);
      std::memcpy(static_cast<char*>(out->untyped_data()) + (b * to[0] + first) * row_bytes,
                  static_cast<const char*>(rows.untyped_data()) + b * from[0] * row_bytes, bytes);
    }
  });
}

// -- quantized_linear: x [*batch, in_features], blocks u8 [out_features, bytes of a row]

ffi::Error quantized_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer blocks, Out out,
                            std::string_view encoding_name) {
  return guarded([&] {
    constexpr const char* op = "quantized_linear";
    REQUIRE(encoding_name == "Q4_1" || encoding_name == "Q8_0", op,
            "the encoding Q4_1 or Q8_0; got " + std::string(encoding_name));
    const cpu::Encoding encoding = encoding_name == "Q4_1" ? cpu::Encoding::kQ4_1 : cpu::Encoding::kQ8_0;
    const Shape in(op, "x", x, 1), result(op, "the result", *out, 1);
    require_type(op, "blocks", blocks, ffi::DataType::U8, "uint8");
    const Dims weights = blocks.dimensions();
    REQUIRE(in[0] % cpu::kBlockSize == 0 && weights.size() == 2 &&
                weights[1] == in[0] / cpu::kBlockSize * cpu::block_bytes(encoding),
            op,
            "blocks of shape (out_features, bytes of " + std::to_string(in[0]) + " weights in blocks of 32); got " +
                text(weights));
    REQUIRE(result[0] == weights[0] && in.same_batch(result) && x.element_type() == out->element_type(), op,
            "a result of shape (*batch, out_features); got " + text(out->dimensions()));
    const cpu::QuantizedLinear call{
        out->untyped_data(), x.untyped_data(), blocks.typed_data<uint8_t>(), in.batch(), weights[0], in[0], encoding};
    cpu::kernels().quantized_linear(element_of(op, x), call, executor_on(pool));
  });
}

auto variadic() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets(); }

XLA_FFI_DEFINE_HANDLER(kRmsNorm, rms_norm, variadic().Attr<double>("eps"));
XLA_FFI_DEFINE_HANDLER(kSwiglu, swiglu, variadic());
XLA_FFI_DEFINE_HANDLER(kRotaryEmbedding, rotary_embedding,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // cos
                           .Arg<ffi::AnyBuffer>()  // sin
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kAttention, attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Ret<ffi::AnyBuffer>()
                           .Attr<bool>("causal")
                           .Attr<double>("scale"));
XLA_FFI_DEFINE_HANDLER(kDecodeAttention, decode_attention,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // q
                           .Arg<ffi::AnyBuffer>()  // k
                           .Arg<ffi::AnyBuffer>()  // v
                           .Arg<ffi::AnyBuffer>()  // length
                           .Ret<ffi::AnyBuffer>()
                           .Attr<double>("scale"));
XLA_FFI_DEFINE_HANDLER(kCacheAppend, cache_append,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // cache
                           .Arg<ffi::AnyBuffer>()  // rows
                           .Arg<ffi::AnyBuffer>()  // position
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("row_rank"));
XLA_FFI_DEFINE_HANDLER(kQuantizedLinear, quantized_linear,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // blocks
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("encoding"));

}  // namespace

nanobind::dict cpu_ops() {
  nanobind::dict symbols;
  const auto add = [&](const char* symbol, XLA_FFI_Handler* handler) {
    symbols[symbol] = nanobind::capsule(reinterpret_cast<void*>(handler));
  };
  add("rms_norm", kRmsNorm);
  add("swiglu", kSwiglu);
  add("rotary_embedding", kRotaryEmbedding);
  add("attention", kAttention);
  add("decode_attention", kDecodeAttention);
  add("cache_append", kCacheAppend);
  add("quantized_linear", kQuantizedLinear);
  return symbols;
}

}  // namespace eqxcallback
