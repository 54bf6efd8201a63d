// The kernels on their own: what each instruction set of this machine computes from numbers that are the same
// everywhere, to stdout as f32, after its name and how many they are. Arrays end where the operands do, which a
// sanitizer notices.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear_kernels.h"

// A gradient: what it is where all are needed, and what it is now.
template <class T>
struct Gradient {
  std::vector<T> all, found;
  bool needed = false;

  void prepare(bool is_needed) { found.assign(all.size(), T{}), needed = is_needed; }
  T* data() { return needed ? found.data() : nullptr; }
  void compare() const {
    for (size_t i = 0; needed && i < all.size(); ++i) {
      const float want = cpu::to_float(all[i]), got = cpu::to_float(found[i]);
      if (std::abs(got - want) <= std::abs(want) * 0x1p-7f + 1e-3f) continue;
      std::fprintf(stderr, "with null gradients, element %zu of another is %g in place of %g\n", i,
                   static_cast<double>(got), static_cast<double>(want));
      std::exit(1);
    }
  }
};
// Calls body with null in place of each gradient, and of all others: those that are left have to be the same.
template <class Body, class... T>
static void some_are_null(const Body& body, Gradient<T>... gradients) {
  constexpr unsigned kAll = (1u << sizeof...(T)) - 1;
  for (unsigned i = 0; i < sizeof...(T); ++i) {
    for (const unsigned needed : {1u << i, kAll ^ 1u << i}) {
      unsigned at = 0;
      (gradients.prepare((needed >> at++ & 1) != 0), ...);
      body(gradients.data()...);
      (gradients.compare(), ...);
    }
  }
}

template <class T>
static void norms_and_gates(cpu::Element element, int64_t rows, int64_t size) {
  const cpu::Kernels& kernels = cpu::kernels();
  const int64_t all = rows * size;
  const auto x = numbers<T>(all), y = numbers<T>(all), z = numbers<T>(all);
  const auto weight = numbers<float>(size), bias = numbers<float>(size);
  std::vector<T> a(x.size()), b(x.size());
  std::vector<float> da(weight.size()), db(weight.size());
  for (const bool center : {true, false}) {
    kernels.norm(element, {a.data(), x.data(), weight.data(), bias.data(), rows, size, 1e-2f, center}, kExecutor);
    show(a);
    kernels.norm_backward(
        element, {a.data(), da.data(), db.data(), x.data(), weight.data(), y.data(), rows, size, 1e-2f, center},
        kExecutor);
    show(a, da, db);
    some_are_null(
        [&](T* dx, float* dweight, float* dbias) {
          kernels.norm_backward(
              element, {dx, dweight, dbias, x.data(), weight.data(), y.data(), rows, size, 1e-2f, center}, kExecutor);
        },
        Gradient<T>{a, {}}, Gradient<float>{da, {}}, Gradient<float>{db, {}});
  }
  kernels.add_rms_norm(element, {a.data(), b.data(), x.data(), y.data(), weight.data(), rows, size, 1e-2f}, kExecutor);
  show(a, b);
  for (const auto activation : {cpu::Activation::kSilu, cpu::Activation::kGelu, cpu::Activation::kGeluTanh}) {
    kernels.glu(element, {a.data(), x.data(), y.data(), rows, size, size, activation}, kExecutor);
    show(a);
    kernels.glu_backward(element, {a.data(), b.data(), x.data(), y.data(), z.data(), rows, size, size, activation},
                         kExecutor);
    show(a, b);
    some_are_null(
        [&](T* dgate, T* dup) {
          kernels.glu_backward(element, {dgate, dup, x.data(), y.data(), z.data(), rows, size, size, activation},
                               kExecutor);
        },
        Gradient<T>{a, {}}, Gradient<T>{b, {}});
    kernels.gelu(element, {a.data(), x.data(), rows * size, activation}, kExecutor);
    kernels.gelu_backward(element, {b.data(), x.data(), z.data(), rows * size, activation}, kExecutor);
    show(a, b);
  }
  std::vector<int32_t> labels(static_cast<size_t>(rows));
  for (int32_t& label : labels) label = static_cast<int32_t>(next() >> 8) % static_cast<int32_t>(size);
  std::vector<float> loss(labels.size());
  const auto upstream = numbers<float>(rows);
  cpu::CrossEntropy entropy{loss.data(), x.data(), labels.data(), rows, size, 0.1f, 0.01f, false, 0};
  for (const bool prefetches : {false, true}) {
    entropy.prefetching.of_one_stream = prefetches;
    kernels.cross_entropy(element, entropy, kExecutor);
    kernels.cross_entropy_backward(element, {a.data(), entropy, upstream.data()}, kExecutor);
    show(loss, a);
  }

  // One mask for all rows, some of which may be hidden whole; and none.
  auto mask = bytes(size);
  for (uint8_t& byte : mask) byte &= 1;
  for (const cpu::RowMask& rows_taking : {cpu::RowMask{mask.data(), 1}, cpu::RowMask{nullptr, 1}}) {
    const cpu::Softmax softmax{a.data(), x.data(), rows_taking, rows, size, -0.5f};
    kernels.softmax(element, softmax, kExecutor);
    kernels.softmax_backward(element, {b.data(), softmax, y.data()}, kExecutor);
    show(a, b);
  }

  const auto four = numbers<T>(4 * all), three = numbers<T>(3 * all), others = numbers<T>(3 * all);
  kernels.lstm_gates(element, {a.data(), b.data(), four.data(), x.data(), rows, size}, kExecutor);
  show(a, b);
  const cpu::GruGates gru{a.data(), three.data(), others.data(), x.data(), bias.data(), rows, size};
  kernels.gru_gates(element, gru, kExecutor);
  show(a);
  std::vector<T> dfour(four.size()), dthree(three.size()), dothers(others.size());
  const auto lstm_backward = [&](T* dgates, T* dcell) {
    kernels.lstm_gates_backward(
        element, {dgates, dcell, {nullptr, nullptr, four.data(), x.data(), rows, size}, y.data(), z.data()}, kExecutor);
  };
  lstm_backward(dfour.data(), a.data());
  show(dfour, a);
  some_are_null(lstm_backward, Gradient<T>{dfour, {}}, Gradient<T>{a, {}});
  const auto gru_backward = [&](T* dinput, T* dof_hidden, T* dhidden, float* dbias) {
    kernels.gru_gates_backward(element, {dinput, dof_hidden, dhidden, dbias, gru, y.data()}, kExecutor);
  };
  gru_backward(dthree.data(), dothers.data(), b.data(), db.data());
  show(dthree, dothers, b, db);
  some_are_null(gru_backward, Gradient<T>{dthree, {}}, Gradient<T>{dothers, {}}, Gradient<T>{b, {}},
                Gradient<float>{db, {}});
  // Groups of two channels.
  const auto images = numbers<T>(4 * size);
  std::vector<T> normalized(images.size());
  const std::vector<float> channels = numbers<float>(4), shifts = numbers<float>(4);
  const cpu::GroupNorm groups{normalized.data(), images.data(), channels.data(), shifts.data(), 1, 4, size, 2, 1e-2f};
  kernels.group_norm(element, groups, kExecutor);
  show(normalized);
  const auto upstreams = numbers<T>(4 * size);
  std::vector<float> dchannels(4), dshifts(4);
  const auto group_backward = [&](T* dx, float* dweight, float* dbias) {
    kernels.group_norm_backward(element, {dx, dweight, dbias, groups, upstreams.data()}, kExecutor);
  };
  group_backward(normalized.data(), dchannels.data(), dshifts.data());
  show(normalized, dchannels, dshifts);
  some_are_null(group_backward, Gradient<T>{normalized, {}}, Gradient<float>{dchannels, {}},
                Gradient<float>{dshifts, {}});
}

template <class T>
static void attention(cpu::Element element, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {
  const cpu::Kernels& kernels = cpu::kernels();
  const int64_t prompt = tokens * heads * size, keys = tokens * kv_heads * size;
  const auto q = numbers<T>(prompt), k = numbers<T>(keys), v = numbers<T>(keys), cotangent = numbers<T>(prompt);
  std::vector<T> out(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
  if (size % 2 == 0) {
    const int64_t table = tokens * size / 2;
    const auto cos = numbers<float>(table), sin = numbers<float>(table);
    std::vector<float> dcos(cos.size()), dsin(cos.size());
    kernels.rotary_embedding(element, {out.data(), q.data(), cos.data(), sin.data(), tokens, tokens, heads, size},
                             kExecutor);
    kernels.rotary_embedding_backward(element,
                                      {dq.data(), dcos.data(), dsin.data(), q.data(), cos.data(), sin.data(),
                                       cotangent.data(), tokens, tokens, heads, size},
                                      kExecutor);
    show(out, dq, dcos, dsin);
    const auto qkv = numbers<T>(tokens * (heads + 2 * kv_heads) * size);
    std::vector<T> k_cache(k.size() + static_cast<size_t>(kv_heads * size)), v_cache(k_cache.size());
    const int32_t position = 1;
    kernels.rotary_append(element,
                          {out.data(), k_cache.data(), v_cache.data(), qkv.data(), cos.data(), sin.data(), &position, 1,
                           tokens, tokens, heads, kv_heads, size, tokens + 1, 1},
                          kExecutor);
    show(out, k_cache, v_cache);
    some_are_null(
        [&](T* dx, float* of_cos, float* of_sin) {
          kernels.rotary_embedding_backward(
              element,
              {dx, of_cos, of_sin, q.data(), cos.data(), sin.data(), cotangent.data(), tokens, tokens, heads, size},
              kExecutor);
        },
        Gradient<T>{dq, {}}, Gradient<float>{dcos, {}}, Gradient<float>{dsin, {}});
  }
  for (const bool causal : {false, true}) {
    const cpu::Attention call{out.data(), q.data(), k.data(), v.data(), 1,    1,      tokens,
                              tokens,     heads,    kv_heads, size,     0.4f, causal, nullptr};
    kernels.attention(element, call, kExecutor);
    kernels.attention_backward(
        element, {call, cotangent.data(), dq.data(), dk.data(), dv.data(), nullptr, nullptr, 0, 0}, kExecutor);
    show(out, dq, dk, dv);
    some_are_null(
        [&](T* of_q, T* of_k, T* of_v) {
          kernels.attention_backward(element, {call, cotangent.data(), of_q, of_k, of_v, nullptr, nullptr, 0, 0},
                                     kExecutor);
        },
        Gradient<T>{dq, {}}, Gradient<T>{dk, {}}, Gradient<T>{dv, {}});
    const auto lse_cotangent = numbers<float>(tokens * heads);
    std::vector<float> lse(lse_cotangent.size());
    cpu::Attention with_lse = call;
    with_lse.lse = lse.data();
    kernels.attention(element, with_lse, kExecutor);
    kernels.attention_backward(
        element,
        {with_lse, cotangent.data(), dq.data(), dk.data(), dv.data(), nullptr, nullptr, 0, 0, lse_cotangent.data()},
        kExecutor);
    show(out, lse, dq, dk, dv);
  }
  // With a bias and slopes: of each head, and then one bias for all heads.
  const int64_t pairs = tokens * tokens;
  const auto bias = numbers<float>(heads * pairs), slopes = numbers<float>(heads);
  const int64_t begin = 0;
  for (const int64_t biases : {heads, int64_t{1}}) {
    cpu::AttentionOptions options{};
    options.bias = {bias.data(), &begin, biases > 1 ? pairs : 0, tokens}, options.bias_element = cpu::Element::kF32;
    options.slopes = {slopes.data(), &begin, 1, 0};
    options.keep = 1;
    const cpu::Attention call{out.data(), q.data(), k.data(), v.data(), 1,    1,     tokens,
                              tokens,     heads,    kv_heads, size,     0.4f, false, &options};
    std::vector<float> dbias(static_cast<size_t>(biases * pairs)), dslopes(slopes.size());
    const auto backward = [&](T* of_q, T* of_k, T* of_v, float* of_bias, float* of_slopes) {
      kernels.attention_backward(element,
                                 {call, cotangent.data(), of_q, of_k, of_v, of_bias, of_slopes,
                                  of_bias == nullptr ? 0 : biases * pairs, of_slopes == nullptr ? 0 : heads},
                                 kExecutor);
    };
    kernels.attention(element, call, kExecutor);
    backward(dq.data(), dk.data(), dv.data(), dbias.data(), dslopes.data());
    show(out, dq, dk, dv, dbias, dslopes);
    some_are_null(backward, Gradient<T>{dq, {}}, Gradient<T>{dk, {}}, Gradient<T>{dv, {}}, Gradient<float>{dbias, {}},
                  Gradient<float>{dslopes, {}});
  }
}

// One query over keys, with all options, and over keys in int8.
template <class T>
static void decode_attention(cpu::Element element, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size) {
  const cpu::Kernels& kernels = cpu::kernels();
  const int64_t keys = tokens * kv_heads * size, begin = 0;
  const auto q = numbers<T>(heads * size), k = numbers<T>(keys), v = numbers<T>(keys);
  const auto slopes = numbers<float>(heads);
  const int32_t length = static_cast<int32_t>(tokens);
  std::vector<T> out(q.size());
  cpu::DecodeAttention call{};
  call.out = out.data(), call.q = q.data(), call.k = k.data(), call.v = v.data(), call.length = &length;
  call.batch = call.kv_batch = call.length_batch = 1;
  call.kv_length = tokens, call.heads = heads, call.kv_heads = kv_heads;
  call.head_size = size, call.scale = 0.4f;
  kernels.decode_attention(element, call, kExecutor);
  show(out);
  const auto small_k = bytes(keys), small_v = bytes(keys);
  const std::vector<float> scales(static_cast<size_t>(tokens * kv_heads), 0.01f);
  cpu::DecodeAttention small = call;
  small.k = small_k.data(), small.v = small_v.data();
  small.k_scale = small.v_scale = {scales.data(), &begin, 1, 0};
  kernels.decode_attention(element, small, kExecutor);
  show(out);
  call.window = tokens - 1, call.soft_cap = 2.0f, call.slopes = {slopes.data(), &begin, 1, 0};
  call.prefetching.into_first_cache = true;
  kernels.decode_attention(element, call, kExecutor);
  show(out);
}

// Factors of N with rows and with columns, of one result of each type, with a bias and without.
template <class T, class N>
static void matrix_product(cpu::Element of_out, int64_t rows, int64_t columns, int64_t size) {
  constexpr cpu::Element kFactors = std::is_same_v<N, float> ? cpu::Element::kF32 : cpu::Element::kBf16;
  constexpr int64_t examples = 2;
  const auto a = numbers<N>(examples * rows * size), b = numbers<N>(examples * columns * size);
  const auto bias = numbers<float>(columns);
  std::vector<T> out(static_cast<size_t>(examples * rows * columns));
  for (const bool a_has_columns : {false, true}) {
    for (const bool b_has_columns : {false, true}) {
      cpu::MatrixProduct call{out.data(), a.data(), b.data(),      kFactors,      examples, rows,
                              columns,    size,     a_has_columns, b_has_columns, nullptr};
      std::vector<float> packed(static_cast<size_t>(cpu::kernels().product_bytes(call)) / sizeof(float));
      call.packed = packed.data(), call.bias = a_has_columns ? bias.data() : nullptr;
      cpu::kernels().matrix_product(of_out, call, kExecutor);
      show(out);
    }
  }
}

template <class T, class N>
static void matrix_products(cpu::Element element) {
  const int64_t sizes[][3] = {{3, 5, 7}, {1, 40, 0}, {37, 70, 65}, {70, 33, 320}, {300, 290, 32}};
  for (const auto& size : sizes) matrix_product<T, N>(element, size[0], size[1], size[2]);
}

template <class T>
static void of_type(cpu::Element element) {
  for (const int64_t size : {1, 7, 16, 37, 64, 100}) norms_and_gates<T>(element, 3, size);
  for (const int64_t size : {1, 6, 33, 64}) attention<T>(element, 5, 2, 2, size);
  attention<T>(element, 70, 3, 1, 16), attention<T>(element, 19, 4, 2, 40);
  for (const int64_t size : {1, 6, 33, 64}) decode_attention<T>(element, 5, 2, 2, size);
  decode_attention<T>(element, 70, 12, 12, 64);
  decode_attention<T>(element, 150, 5, 1, 24);  // several parts, and more queries of a head than are taken together
  attention<T>(element, 150, 2, 1, 32);         // more than a block of keys, and of queries
  matrix_products<T, cpu::Bf16>(element);
  matrix_product<T, cpu::Bf16>(element, 3, 2, 2080);  // so many numbers that they are summed in stages
  if constexpr (std::is_same_v<T, float>) {
    matrix_products<T, float>(element);
    matrix_product<T, float>(element, 3, 2, 2080);
  }
  for (const int64_t rows : {1, 3, 5, 18, 40}) {
    for (const int64_t in : {7, 64, 160, 512}) linear<T>(element, rows, in, in == 64 ? 9 : 20);
  }
  for (const int64_t rows : {1, 5, 8, 14}) {
    for (const int64_t in : {37, 600, 5003}) linear_however_it_prefetches<T>(element, rows, in);
  }
}

int main() {
  for (const std::string& name : cpu::available_isas()) {
    cpu::set_isa(name);
    state = 1, shown.clear();
    of_type<float>(cpu::Element::kF32);
    of_type<cpu::Bf16>(cpu::Element::kBf16);
    of_type<cpu::F16>(cpu::Element::kF16);
    std::printf("%s %zu\n", name.c_str(), shown.size());
    std::fwrite(shown.data(), sizeof(float), shown.size(), stdout);
  }
}
