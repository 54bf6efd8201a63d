// Buffer: XLA's memory for one operand or result, lent to a Python kernel for the length of one call.
//
// Contract: between lend() and revoke() the memory is valid and belongs to XLA; afterwards every access raises. A
// Buffer that a user makes from a NumPy array owns a reference to that array instead, and is never revoked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace eqxcallback {

namespace nb = nanobind;

enum class Platform : uint8_t { kCpu, kCuda };

// The device a call runs on, and XLA's stream there (0 on a CPU).
struct Place {
  Platform platform = Platform::kCpu;
  int32_t ordinal = 0;
  uintptr_t stream = 0;
};

const char* platform_name(Platform platform);

class Buffer {
 public:
  Buffer() = default;
  // Over a C-contiguous NumPy array, for calling a kernel from Python. With `order`, that array is the memory, and its
  // axes are those of the Buffer from major to minor.
  Buffer(nb::object array, nb::object writeable, nb::object order);

  // Returns whether shape, dtype and platform are those of the loan before.
  bool lend(void* data, const int64_t* dims, size_t rank, const DType& dtype, bool writeable, const Place& place);
  // How the axes lie in memory, from major to minor: `rank` of them, or null for row-major. To be said after lend().
  void set_order(const int64_t* order);
  // The same Buffer over other memory of that size, for as long as it is lent.
  void move_to(uintptr_t address);
  // Ends the loan. With `commit`, what was written to a sub-byte output is packed into XLA's memory.
  void revoke(bool commit) noexcept;

  bool alive() const { return alive_; }
  const DType& dtype() const;
  size_t ndim() const;
  size_t size() const;
  size_t nbytes() const;
  bool writeable() const;
  const Place& place() const { return place_; }
  const std::vector<int64_t>& dims() const { return dims_; }
  nb::tuple shape();
  nb::tuple strides() const;
  // In elements; of an unpacked array for sub-byte types.
  std::vector<int64_t> element_strides() const;
  bool row_major() const { return order_.empty(); }
  nb::object numpy_dtype() const;
  std::string repr() const;

  // A NumPy array over this memory; read-only for an input. Sub-byte elements are unpacked: one byte each, and
  // packed again at the end of the call.
  nb::object numpy(nb::handle self);
  // Where XLA's memory is; for a sub-byte type, that of the packed elements.
  uintptr_t address() const;
  nb::object array(nb::handle self, nb::handle dtype, nb::handle copy);
  // Fills an output in a CPU's memory with noise (core/noise.h), or finds elements that hold it still: the elements of
  // an array over it, so that those of less than a byte have one each.
  void fill(uint64_t seed);
  bool is_left(uint64_t seed);
  // A NumPy array that has for each element, as they lie in memory, whether it is left; and whether chance explains
  // none of it.
  nb::tuple left(uint64_t seed);

  // Whether this is an output of a backward kernel: write() then sums over axes that the primal lacks.
  bool is_gradient() const { return is_gradient_; }
  void set_is_gradient(bool value) { is_gradient_ = value; }
  nb::object get_item(nb::handle self, nb::handle index);
  // Both take values of the very shape and dtype.
  void set_item(nb::handle self, nb::handle index, nb::handle value);
  void write(nb::handle self, nb::handle value);

  nb::dict cuda_array_interface();
  nb::tuple dlpack_device() const;
  nb::object dlpack(nb::handle self, nb::kwargs kwargs);
  nb::object cupy(nb::handle self);
  nb::object torch(nb::handle self);

 private:
  void check_alive() const;
  uint8_t* elements();
  nb::object new_array(void* data, int flags) const;
  void check_on_cpu(const char* what) const;
  void assign(nb::handle self, nb::handle index, nb::handle value, const char* who);
  // The array over this memory, of NumPy or CuPy, and the module of that.
  nb::object device_array(nb::handle self, const char* who);
  nb::object device_value(nb::handle value, const char* who) const;
  nb::object summed(const nb::object& value);
  // A DLPack capsule. Only the versioned form can say that memory is read-only.
  nb::object capsule(void* data, nb::handle owner, bool read_only, nb::handle max_version) const;
  // How DLPack numbers the place's kind of device: kDLCPU or kDLCUDA.
  int32_t dlpack_device_type() const;

  void* data_ = nullptr;
  std::vector<int64_t> dims_;
  std::vector<int64_t> order_;  // empty for row-major
  const DType* dtype_ = nullptr;
  Place place_;
  bool alive_ = false;
  bool writeable_ = false;
  bool is_gradient_ = false;
  nb::object shape_;     // cached tuple of dims_
  nb::object unpacked_;  // of a sub-byte type: one byte an element, made on first use
  nb::object owner_;     // the array behind a Buffer made in Python
};

// Whether Python takes `value` for true; None is not.
inline bool truthy(nb::handle value) {
  const int result = PyObject_IsTrue(value.ptr());
  if (result < 0) throw nb::python_error();
  return result != 0;
}

// The Buffer of a Python object. Subclasses may forget to call its __init__.
Buffer& lent(nb::handle self);

// The NumPy dtype of an element type.
nb::object descr_object(const DType& dtype);
// As JAX prints types: float32[3,4].
std::string type_text(nb::handle dtype, nb::handle shape);

// NumPy's C API; to be called once, before any Buffer is made.
void import_numpy();
void bind_buffer(nb::module_& m);
// `buffer[...]`, `write`, and errors of all else that arrays can do.
void bind_items(nb::class_<Buffer>& type);

}  // namespace eqxcallback
