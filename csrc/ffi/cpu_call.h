// Tools that the handlers of the CPU kernels share: decode, check, call, and register. Batch axes lead; an operand that
// the batch may share lacks them, or some of the first ones. This file needs no Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "ffi/checked_call.h"
#include "ffi/huge_pages.h"
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

// A macro, so that the text is made only if it is needed: making it costs more than a small kernel.
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

  // The size of a core axis.
  int64_t operator[](size_t axis) const { return dims[dims.size() - core + axis]; }
  size_t batch_rank() const { return dims.size() - core; }
  int64_t batch() const {
    int64_t product = 1;
    for (size_t i = 0; i < batch_rank(); ++i) product *= dims[i];
    return product;
  }
  // True if the batch axes are the last ones of the other's: then index b of the other is index b % batch() of this.
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
inline bool same_type(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b) {
  return same_shape(a, b) && a.element_type() == b.element_type();
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

// A set of flat operands in the form of an attribute: bit i stands for operand i.
struct Mask {
  uint64_t bits;

  Mask(const char* op, const char* attribute, int64_t value, size_t slots) : bits(static_cast<uint64_t>(value)) {
    REQUIRE(
        value >= 0 && bits >> slots == 0, op,
        std::string(attribute) + " to be a mask of " + std::to_string(slots) + " bits; got " + std::to_string(value));
  }

  bool operator[](size_t slot) const { return (bits >> slot & 1) != 0; }
  // The number of operands of the set before `slot`.
  size_t before(size_t slot) const {
    return static_cast<size_t>(__builtin_popcountll(bits & ((uint64_t{1} << slot) - 1)));
  }
  size_t count() const { return static_cast<size_t>(__builtin_popcountll(bits)); }
};

// An operand or a result that may be absent.
using Optional = std::optional<ffi::AnyBuffer>;

inline void* data_of(const Optional& buffer) { return buffer ? buffer->untyped_data() : nullptr; }

// The operands of a kernel. XLA passes the operands in the set `present`, in order, and then `others`: for a backward
// kernel, the results and the cotangents.
class Operands {
 public:
  // `names`: the names of all operands, of which the first `required` have to be there.
  Operands(const char* op, const ffi::RemainingArgs& args, int64_t present, std::initializer_list<const char*> names,
           size_t required, size_t others = 0)
      : args_(args), present_(op, "present", present, names.size()) {
    for (size_t i = 0; i < required; ++i) {
      REQUIRE(present_[i], op,
              std::string(names.begin()[i]) + " to be present; got the mask " + std::to_string(present));
    }
    REQUIRE(args.size() == present_.count() + others, op,
            std::to_string(present_.count() + others) + " operands, " + std::to_string(present_.count()) +
                " of them in the mask `present`; got " + std::to_string(args.size()));
  }

  Optional operator()(size_t slot) const {
    if (!present_[slot]) return std::nullopt;
    return *args_.get<ffi::AnyBuffer>(present_.before(slot));
  }
  // An operand that has to be there.
  ffi::AnyBuffer operator[](size_t slot) const { return *args_.get<ffi::AnyBuffer>(present_.before(slot)); }
  // One of the buffers that follow the operands.
  ffi::AnyBuffer other(size_t index) const { return *args_.get<ffi::AnyBuffer>(present_.count() + index); }

 private:
  const ffi::RemainingArgs& args_;
  Mask present_;
};

// The results of a backward kernel: the gradients of the operands in the set `needs_grad`, in order.
class Gradients {
 public:
  // `integers`: the mask of the operands that have no gradient.
  Gradients(const char* op, const ffi::RemainingRets& rets, int64_t needs_grad, size_t slots, uint64_t integers = 0)
      : op_(op), rets_(rets), needed_(op, "needs_grad", needs_grad, slots) {
    REQUIRE((needed_.bits & integers) == 0, op,
            "needs_grad to be a mask of operands of floating type; got " + std::to_string(needs_grad));
    REQUIRE(rets.size() == needed_.count(), op,
            std::to_string(needed_.count()) + " results, one for each operand in the mask `needs_grad`; got " +
                std::to_string(rets.size()));
  }

  // The gradient of the operand in this slot, if it is needed.
  Optional operator()(size_t slot, const Optional& operand) const {
    if (!needed_[slot]) return std::nullopt;
    const ffi::AnyBuffer result = **rets_.get<ffi::AnyBuffer>(needed_.before(slot));
    REQUIRE(operand, op_, "gradients of operands that are present");
    REQUIRE(same_type(*operand, result), op_,
            "gradients of the types of the operands; got " + text(result.dimensions()) + " for " +
                text(operand->dimensions()));
    return result;
  }

 private:
  const char* op_;
  const ffi::RemainingRets& rets_;
  Mask needed_;
};

// Returns a vector of parameters in f32, or null.
inline const float* vector_of(const char* op, const char* name, const Optional& buffer, int64_t size) {
  if (!buffer) return nullptr;
  require_type(op, name, *buffer, ffi::DataType::F32, "float32");
  REQUIRE(buffer->dimensions().size() == 1 && buffer->dimensions()[0] == size, op,
          std::string(name) + " of shape (" + std::to_string(size) + ",); got " + text(buffer->dimensions()));
  return buffer->typed_data<float>();
}

// The bindings of kernels whose operands may be absent: of one with a result, and of a backward kernel.
inline auto optional_operands() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs(); }
inline auto bind_forward() { return optional_operands().Ret<ffi::AnyBuffer>().Attr<int64_t>("present"); }
inline auto bind_backward() {
  return optional_operands().RemainingRets().Attr<int64_t>("present").Attr<int64_t>("needs_grad");
}

// Adds the target that XLA should call for a symbol to the targets that Python gets. See cpu_targets.cc.
struct CpuRegistration {
  CpuRegistration(const char* symbol, XLA_FFI_Handler* target);
};

// Defines the handler of a CPU kernel and registers it under `symbol`, by which a NativeKernel names it. XLA calls a
// target with a frame and nothing else, so each handler has a target of its own, which knows the symbol.
#define EQXCALLBACK_CPU_KERNEL(symbol, function, binding)                             \
  XLA_FFI_DEFINE_HANDLER(symbol##_handler, function, binding);                        \
  const CpuRegistration symbol##_registration(#symbol, [](XLA_FFI_CallFrame* frame) { \
    prefer_huge_pages(*frame);                                                        \
    return run_checked(#symbol, symbol##_handler, frame);                             \
  })

}  // namespace eqxcallback
