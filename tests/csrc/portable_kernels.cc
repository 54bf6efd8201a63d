// The portable kernels on their own: what they compute from numbers that are the same everywhere, to stdout as f32. A
// test compares two processors.
#include "cpu/isa_portable.cc"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace cpu = eqxcallback::cpu;

namespace eqxcallback::cpu {
void throw_bad_alloc() { std::abort(); }
}  // namespace eqxcallback::cpu

static const cpu::Executor kExecutor{nullptr, [](void*) -> int64_t { return 2; },
                                     [](void*, int64_t tasks, cpu::Executor::Task task, void* state) {
                                       for (int64_t i = 0; i < tasks; ++i) task(state, i);
                                     }};

static uint32_t state = 1;
static uint32_t next() { return state = state * 1664525u + 1013904223u; }
static float number() { return static_cast<float>(static_cast<int32_t>(next() >> 8) - (1 << 23)) * 0x1p-22f; }

template <class T>
static std::vector<T> numbers(int64_t count) {
  std::vector<T> found(static_cast<size_t>(count));
  for (T& x : found) cpu::from_float(number(), x);
  return found;
}
static std::vector<uint8_t> bytes(int64_t count) {
  std::vector<uint8_t> found(static_cast<size_t>(count));
  for (uint8_t& x : found) x = static_cast<uint8_t>(next() >> 24);
  return found;
}

template <class T>
static void show(const std::vector<T>& out) {
  for (const T& x : out) {
    const float value = cpu::to_float(x);
    std::fwrite(&value, sizeof(value), 1, stdout);
  }
}

template <class T>
static void of_type(cpu::Element element) {
  const cpu::Kernels& kernels = cpu::kPortableKernels;
  constexpr int64_t kRows = 3, kSize = 37, kAll = kRows * kSize;
  const auto x = numbers<T>(kAll), y = numbers<T>(kAll), z = numbers<T>(kAll);
  const auto weight = numbers<float>(kSize), bias = numbers<float>(kSize);
  std::vector<T> a(kAll), b(kAll);
  std::vector<float> da(kSize), db(kSize);
  for (const bool center : {true, false}) {
    kernels.norm(element, {a.data(), x.data(), weight.data(), bias.data(), kRows, kSize, 1e-5f, center}, kExecutor);
    show(a);
    kernels.norm_backward(
        element, {a.data(), da.data(), db.data(), x.data(), weight.data(), y.data(), kRows, kSize, 1e-5f, center},
        kExecutor);
    show(a), show(da), show(db);
  }
  kernels.add_rms_norm(element, {a.data(), b.data(), x.data(), y.data(), weight.data(), kRows, kSize, 1e-5f},
                       kExecutor);
  show(a), show(b);
  for (const auto activation : {cpu::Activation::kSilu, cpu::Activation::kGelu, cpu::Activation::kGeluTanh}) {
    kernels.glu(element, {a.data(), x.data(), y.data(), kRows, kSize, kSize, activation}, kExecutor);
    show(a);
    kernels.glu_backward(element, {a.data(), b.data(), x.data(), y.data(), z.data(), kRows, kSize, kSize, activation},
                         kExecutor);
    show(a), show(b);
  }
  const std::vector<int32_t> labels = {5, -1, 36};
  std::vector<float> loss(kRows);
  const cpu::CrossEntropy entropy{loss.data(), x.data(), labels.data(), kRows, kSize, 0.1f, 0.01f, false, 0};
  kernels.cross_entropy(element, entropy, kExecutor);
  show(loss);
  kernels.cross_entropy_backward(element, {a.data(), entropy, weight.data()}, kExecutor);
  show(a);

  constexpr int64_t kHeads = 2, kHead = 6, kTokens = 5, kHidden = kHeads * kHead, kPrompt = kTokens * kHidden;
  const auto q = numbers<T>(kPrompt), k = numbers<T>(kPrompt), v = numbers<T>(kPrompt), g = numbers<T>(kPrompt);
  const auto cos = numbers<float>(kTokens * kHead / 2), sin = numbers<float>(kTokens * kHead / 2);
  std::vector<T> out(kPrompt), dq(kPrompt), dk(kPrompt), dv(kPrompt);
  kernels.rotary_embedding(element, {out.data(), q.data(), cos.data(), sin.data(), kTokens, kTokens, kHeads, kHead},
                           kExecutor);
  show(out);
  for (const bool causal : {false, true}) {
    const cpu::Attention attention{out.data(), q.data(), k.data(), v.data(), 1,    1,      kTokens,
                                   kTokens,    kHeads,   kHeads,   kHead,    0.4f, causal, nullptr};
    kernels.attention(element, attention, kExecutor);
    show(out);
    kernels.attention_backward(element, {attention, g.data(), dq.data(), dk.data(), dv.data(), nullptr, nullptr, 0, 0},
                               kExecutor);
    show(dq), show(dk), show(dv);
  }
  const int32_t length = 4;
  cpu::DecodeAttention decode{};
  decode.out = out.data(), decode.q = q.data(), decode.k = k.data(), decode.v = v.data(), decode.length = &length;
  decode.batch = decode.kv_batch = decode.length_batch = 1;
  decode.kv_length = kTokens, decode.heads = decode.kv_heads = kHeads, decode.head_size = kHead, decode.scale = 0.4f;
  kernels.decode_attention(element, decode, kExecutor);
  show(out);

  constexpr int64_t kIn = 64, kOut = 9;
  const auto input = numbers<T>(kRows * kIn), matrix = numbers<T>(kOut * kIn);
  std::vector<T> product(kRows * kOut);
  if (element != cpu::Element::kF32) {
    kernels.linear(element, {product.data(), input.data(), matrix.data(), weight.data(), kRows, kOut, kIn}, kExecutor);
    show(product);
  }
  const auto integers = bytes(kOut * kIn);
  for (const bool rounded : {false, true}) {
    kernels.int8_linear(element,
                        {product.data(), input.data(), reinterpret_cast<const int8_t*>(integers.data()), weight.data(),
                         kRows, kOut, kIn, rounded},
                        kExecutor);
    show(product);
    for (const auto encoding : {cpu::Encoding::kQ4_1, cpu::Encoding::kQ8_0}) {
      const int64_t block = cpu::block_bytes(encoding);
      auto blocks = bytes(kOut * kIn / cpu::kBlockSize * block);
      for (size_t i = 0; i < blocks.size(); i += static_cast<size_t>(block)) {
        cpu::F16 halves[2];
        cpu::from_float(number(), halves[0]), cpu::from_float(number(), halves[1]);
        std::memcpy(&blocks[i], halves, encoding == cpu::Encoding::kQ4_1 ? 4 : 2);
      }
      for (const int64_t rows : {int64_t{1}, kRows}) {
        kernels.quantized_linear(
            element, {product.data(), input.data(), blocks.data(), rows, kOut, kIn, encoding, rounded}, kExecutor);
        show(product);
      }
    }
  }
}

int main() {
  of_type<float>(cpu::Element::kF32);
  of_type<cpu::Bf16>(cpu::Element::kBf16);
  of_type<cpu::F16>(cpu::Element::kF16);
}
