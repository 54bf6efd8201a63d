// Buffer: XLA's memory for one operand or result, lent to a Python kernel for the length of one call.
//
// Contract: between lend() and revoke() the memory is valid and belongs to XLA; afterwards every access raises. A
// Buffer that a user makes from a NumPy array instead owns a reference to the array, and is never revoked.
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
  // A Buffer over a C-contiguous NumPy array, for calling a kernel from Python. With `order`, the axes of the array are
  // those of the Buffer as they lie in memory, from major to minor.
  Buffer(nb::object array, nb::object writeable, nb::object order);

  // Returns true if shape, dtype and platform are the same as in the loan before.
  bool lend(void* data, const int64_t* dims, size_t rank, const DType& dtype, bool writeable, const Place& place);
  // Says how the axes lie in memory, from major to minor: `rank` numbers, or null for row-major. To be called after
  // lend().
  void set_order(const int64_t* order);
  // Puts the Buffer over other memory of the same size, for as long as it is lent.
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
  // Strides in elements: for sub-byte types, those of the unpacked array.
  std::vector<int64_t> element_strides() const;
  bool row_major() const { return order_.empty(); }
  nb::object numpy_dtype() const;
  std::string repr() const;

  // Returns a NumPy array over this memory, read-only for an input. Sub-byte elements are unpacked, one byte each, and
  // packed again at the end of the call.
  nb::object numpy(nb::handle self);
  // The address of XLA's memory, in which sub-byte elements are packed.
  uintptr_t address() const;
  nb::object array(nb::handle self, nb::handle dtype, nb::handle copy);
  // Fills an output in a CPU's memory with the noise of core/noise.h: the elements of the NumPy array over it, in which
  // elements of less than a byte have a byte each.
  void fill(uint64_t seed);
  bool is_left(uint64_t seed);
  // Returns a NumPy array that has, for each element in the order of memory, whether its noise is left; and whether it
  // is sure that chance does not explain that.
  nb::tuple left(uint64_t seed);

  // True for an output of a backward kernel: write() then sums over the axes that the primal lacks.
  bool is_gradient() const { return is_gradient_; }
  void set_is_gradient(bool value) { is_gradient_ = value; }
  nb::object get_item(nb::handle self, nb::handle index);
  // Both take values of the Buffer's own shape and dtype.
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
  // Returns the array of NumPy or CuPy over this memory, and the array's module.
  nb::object device_array(nb::handle self, const char* who);
  nb::object device_value(nb::handle value, const char* who) const;
  nb::object summed(const nb::object& value);
  // Makes a DLPack capsule. Only the versioned form can say that memory is read-only.
  nb::object capsule(void* data, nb::handle owner, bool read_only, nb::handle max_version) const;
  // DLPack's number of the kind of device: kDLCPU or kDLCUDA.
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
  nb::object unpacked_;  // for a sub-byte type: one byte for each element, made on first use
  nb::object owner_;     // the array behind a Buffer made in Python
};

// True if Python takes `value` for true; None is not true.
inline bool truthy(nb::handle value) {
  const int result = PyObject_IsTrue(value.ptr());
  if (result < 0) throw nb::python_error();
  return result != 0;
}

// Returns the Buffer of a Python object, and raises if a subclass has forgotten to call its __init__.
Buffer& lent(nb::handle self);

// The NumPy dtype of an element type.
nb::object descr_object(const DType& dtype);
// A type as JAX prints it: float32[3,4].
std::string type_text(nb::handle dtype, nb::handle shape);

// Loads NumPy's C API. To be called once, before any Buffer is made.
void import_numpy();
void bind_buffer(nb::module_& m);
// Binds `buffer[...]`, `write`, and errors for whatever else arrays can do.
void bind_items(nb::class_<Buffer>& type);

}  // namespace eqxcallback
