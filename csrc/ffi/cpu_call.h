// What the handlers of the CPU kernels have in common: decode, check, call. Batch axes lead; an operand that may be
// shared by the batch lacks them, or some of the first ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "ffi/cpu_ops.h"
#include "ffi/thread_pool.h"
#include "xla/ffi/api/ffi.h"

namespace eqxcallback {

namespace ffi = xla::ffi;
using Dims = ffi::Span<const int64_t>;
using Out = ffi::Result<ffi::AnyBuffer>;

inline std::string text(Dims dims) {
  std::string result = "(";
  for (size_t i = 0; i < dims.size(); ++i) result += (i > 0 ? ", " : "") + std::to_string(dims[i]);
  return result + ")";
}

[[noreturn]] inline void refuse(const char* op, const std::string& expected) {
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

inline bool same_shape(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  const Dims left = a.dimensions(), right = b.dimensions();
  return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
}

inline cpu::Element element_of(const char* op, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::DataType::F32) return cpu::Element::kF32;
  if (buffer.element_type() == ffi::DataType::BF16) return cpu::Element::kBf16;
  REQUIRE(buffer.element_type() == ffi::DataType::F16, op, "arrays of float32, bfloat16 or float16");
  return cpu::Element::kF16;
}

inline void require_type(const char* op, const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
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

// Of a kernel with operands or results that may be missing.
inline auto variadic() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets(); }

}  // namespace eqxcallback
