// What the C++ core does on its own, without Python: the registry that programs find kernels in, element types,
// packing, and how a failing kernel becomes an error. Built with sanitizers; says "ok".
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.h"
#include "core/host_calls.h"
#include "core/packing.h"
#include "core/registry.h"
#include "ffi/cpu_call.h"

using eqxcallback::DType;
using eqxcallback::Registry;
namespace ffi = xla::ffi;

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) {                                                     \
      std::fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
      std::exit(1);                                                         \
    }                                                                       \
  } while (false)

namespace {

// A kernel that has its place in a registry for as long as anybody owns it, as a Handle has.
class Kernel : public std::enable_shared_from_this<Kernel> {
 public:
  static std::shared_ptr<Kernel> make(Registry<Kernel>& registry, uint64_t key) {
    auto kernel = std::make_shared<Kernel>(registry, key);
    if (!registry.add(key, *kernel)) return nullptr;
    kernel->added_ = true;
    return kernel;
  }

  Kernel(Registry<Kernel>& registry, uint64_t key) : registry_(registry), key_(key), value_(key * 3) { ++alive; }
  ~Kernel() {
    if (added_) registry_.remove(key_, *this);
    value_ = 0;
    --alive;
  }

  uint64_t call() const { return value_; }

  static inline std::atomic<int> alive{0};

 private:
  Registry<Kernel>& registry_;
  const uint64_t key_;
  uint64_t value_;
  bool added_ = false;
};

// Empty if the kernel is just going.
std::shared_ptr<Kernel> find(const Registry<Kernel>& registry, uint64_t key) {
  return registry.find(key, [](Kernel& kernel) { return kernel.weak_from_this().lock(); });
}

void a_key_belongs_to_one() {
  Registry<Kernel> registry;
  CHECK(!registry.has(7) && find(registry, 7) == nullptr);
  auto first = Kernel::make(registry, 7);
  CHECK(registry.has(7) && find(registry, 7) == first);
  CHECK(Kernel::make(registry, 7) == nullptr);
  CHECK(find(registry, 7) == first);  // the one that was refused has taken nothing with it
  auto second = Kernel::make(registry, uint64_t{1} << 63);
  CHECK(find(registry, uint64_t{1} << 63) == second && find(registry, 8) == nullptr);
  registry.remove(7, *second);  // another one's
  registry.remove(9, *first);
  CHECK(registry.has(7));
  first.reset();
  CHECK(!registry.has(7) && Kernel::make(registry, 7) != nullptr);
}

void a_call_keeps_its_kernel() {
  Registry<Kernel> registry;
  auto kernel = Kernel::make(registry, 5);
  auto called = find(registry, 5);
  kernel.reset();  // the last owner but the call
  CHECK(registry.has(5) && called->call() == 15);
  called.reset();
  CHECK(!registry.has(5) && Kernel::alive == 0);
}

// Kernels come and go while others call them, under few keys: what is found is alive, and is the kernel of its key.
void many_threads() {
  constexpr uint64_t keys = 4;
  Registry<Kernel> registry;
  std::atomic<int64_t> calls{0}, steps{0};
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 8; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(id);
      std::vector<std::shared_ptr<Kernel>> owned(keys);
      // However threads take turns, those that make kernels go on until those that call them have done enough.
      for (; calls < 5000; ++steps) {
        const uint64_t key = random() % keys;
        if (id % 2 == 0) {
          owned[key] = owned[key] != nullptr ? nullptr : Kernel::make(registry, key);
        } else if (auto kernel = find(registry, key)) {
          CHECK(kernel->call() == 3 * key);
          ++calls;
        }
        eqxcallback::host_calls.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(Kernel::alive == 0);
  CHECK(eqxcallback::host_calls == static_cast<uint64_t>(steps));
  for (uint64_t key = 0; key < keys; ++key) CHECK(!registry.has(key));
}

void dtypes() {
  for (const DType& dtype : eqxcallback::kDTypes) {
    CHECK(eqxcallback::find_dtype(dtype.xla) == &dtype);
    for (const DType& other : eqxcallback::kDTypes) {
      CHECK(&dtype == &other || std::strcmp(dtype.name, other.name) != 0);
    }
    CHECK(dtype.bytes_for(0) == 0 && dtype.bytes_for(1) >= 1);
    CHECK(dtype.bytes_for(9) == (9u * dtype.bits + 7) / 8);
  }
  CHECK(eqxcallback::find_dtype(XLA_FFI_DataType_TOKEN) == nullptr);
  CHECK(eqxcallback::find_dtype(static_cast<XLA_FFI_DataType>(-1)) == nullptr);
}

void packing() {
  for (const uint8_t bits : {uint8_t{1}, uint8_t{2}, uint8_t{4}}) {
    for (size_t size = 0; size < 20; ++size) {
      const size_t bytes = (size * bits + 7) / 8;
      // On the heap and of that very size: a sanitizer sees the byte after.
      std::vector<uint8_t> elements(size), packed(bytes, 0xFF), again(size);
      for (size_t i = 0; i < size; ++i) elements[i] = static_cast<uint8_t>((i * 7 + 3) & ((1u << bits) - 1));
      eqxcallback::pack(elements.data(), size, bits, packed.data());
      eqxcallback::unpack(packed.data(), size, bits, again.data());
      for (size_t i = 0; i < size; ++i) CHECK((again[i] & ((1u << bits) - 1)) == elements[i]);
    }
  }
}

template <class Body>
void fails_with(const Body& body, ffi::ErrorCode code, const std::string& text) {
  const ffi::Error error = eqxcallback::guarded(body);
  CHECK(error.failure() && error.errc() == code && error.message() == text);
}

void errors() {
  CHECK(eqxcallback::guarded([] {}).success());
  using eqxcallback::refuse;
  fails_with([] { REQUIRE(false, "op", "x with " + std::to_string(2) + " axes"); }, ffi::ErrorCode::kInvalidArgument,
             "op[native]: expected x with 2 axes.");
  fails_with([] { throw std::bad_alloc(); }, ffi::ErrorCode::kResourceExhausted,
             "eqxcallback: a kernel found no memory for its scratch");
  fails_with([] { throw std::runtime_error("why"); }, ffi::ErrorCode::kInternal, "why");
}

void shapes() {
  const auto with = [](std::vector<int64_t>& dims, size_t core, const auto& body) {
    XLA_FFI_Buffer raw{XLA_FFI_Buffer_STRUCT_SIZE,        nullptr,    XLA_FFI_DataType_F32, nullptr,
                       static_cast<int64_t>(dims.size()), dims.data()};
    body(eqxcallback::Shape("op", "x", ffi::AnyBuffer(&raw), core));
  };
  std::vector<int64_t> dims{5, 2, 3}, tail{2, 3}, other{4, 3}, none{3};
  with(dims, 1, [&](const eqxcallback::Shape& shape) {
    CHECK(shape.batch() == 10 && shape[0] == 3);
    with(tail, 1, [&](const eqxcallback::Shape& t) { CHECK(t.shared_by(shape) && !shape.shared_by(t)); });
    with(other, 1, [&](const eqxcallback::Shape& o) { CHECK(!o.shared_by(shape)); });
    with(none, 1, [&](const eqxcallback::Shape& n) { CHECK(n.shared_by(shape) && !n.same_batch(shape)); });
  });
  fails_with([&] { with(none, 2, [](const eqxcallback::Shape&) {}); }, ffi::ErrorCode::kInvalidArgument,
             "op[native]: expected x with at least 2 axes; got the shape (3).");
}

}  // namespace

int main() {
  a_key_belongs_to_one();
  a_call_keeps_its_kernel();
  many_threads();
  dtypes();
  packing();
  errors();
  shapes();
  std::puts("ok");
}
