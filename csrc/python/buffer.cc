// Buffer: its loans, its view in NumPy, and its binding.
#include "python/buffer.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "core/noise.h"
#include "core/packing.h"

namespace eqxcallback {
namespace {

constexpr const char* kReturned =
    "Buffer used after its kernel returned: its memory belongs to XLA again. Copy what has to outlive the call, for "
    "example with np.array(buffer), inside the kernel.";

// Returns the NumPy dtype of a row of kDTypes. References are kept for the life of the process.
PyArray_Descr* descr_of(const DType& dtype) {
  static PyArray_Descr* cache[kNumDTypes] = {};
  PyArray_Descr*& slot = cache[&dtype - kDTypes];
  if (slot == nullptr) {
    nb::object np_dtype = nb::module_::import_("numpy").attr("dtype");
    nb::object ml_dtypes = nb::module_::import_("ml_dtypes");
    nb::object type = nb::getattr(ml_dtypes, dtype.name, nb::str(dtype.name));
    slot = reinterpret_cast<PyArray_Descr*>(np_dtype(type).release().ptr());
  }
  return slot;
}

PyArrayObject* as_array(nb::handle object) { return reinterpret_cast<PyArrayObject*>(object.ptr()); }

const DType& dtype_of(nb::handle np_dtype) {
  nb::object name = nb::str(np_dtype.attr("name"));
  for (const DType& dtype : kDTypes) {
    if (std::string_view(dtype.name) == nb::cast<std::string_view>(name)) return dtype;
  }
  throw nb::type_error(
      ("Buffer: expected an array of a dtype that JAX has; got " + nb::cast<std::string>(name)).c_str());
}

}  // namespace

nb::object descr_object(const DType& dtype) { return nb::borrow(reinterpret_cast<PyObject*>(descr_of(dtype))); }

std::string type_text(nb::handle dtype, nb::handle shape) {
  std::string text = nb::cast<std::string>(nb::str(dtype)) + "[";
  for (nb::handle dim : shape) text += (text.back() == '[' ? "" : ",") + nb::cast<std::string>(nb::str(dim));
  return text + "]";
}

const char* platform_name(Platform platform) { return platform == Platform::kCpu ? "cpu" : "cuda"; }

void import_numpy() {
  if (_import_array() < 0) throw nb::python_error();
}

Buffer::Buffer(nb::object array, nb::object writeable, nb::object order) {
  if (!PyArray_Check(array.ptr())) {
    throw nb::type_error("Buffer: expected a numpy.ndarray. Pass np.ascontiguousarray(value).");
  }
  PyArrayObject* source = as_array(array);
  if (!PyArray_IS_C_CONTIGUOUS(source) || !PyArray_ISNOTSWAPPED(source)) {
    throw nb::value_error(
        "Buffer: expected a C-contiguous array in native byte order. Pass np.ascontiguousarray(array).");
  }
  const bool can_write = PyArray_ISWRITEABLE(source);
  if (truthy(writeable) && !can_write) {
    throw nb::value_error("Buffer: writeable=True, but the array is read-only. Pass a copy of it.");
  }
  const DType& dtype = dtype_of(array.attr("dtype"));
  const npy_intp* dims = PyArray_DIMS(source);
  std::vector<int64_t> shape(dims, dims + PyArray_NDIM(source));
  std::vector<int64_t> axes;
  if (!order.is_none()) {
    for (nb::handle axis : order) {
      if (!nb::try_cast(axis, axes.emplace_back())) throw nb::type_error("Buffer: expected order to have numbers.");
    }
    std::vector<int64_t> all(shape.size());
    std::iota(all.begin(), all.end(), 0);
    if (!std::is_permutation(axes.begin(), axes.end(), all.begin(), all.end())) {
      throw nb::value_error("Buffer: expected order to have each axis of the array once.");
    }
    for (size_t i = 0; i < axes.size(); ++i) shape[static_cast<size_t>(axes[i])] = dims[i];
  }
  lend(PyArray_DATA(source), shape.data(), shape.size(), dtype, writeable.is_none() ? can_write : truthy(writeable),
       {});
  if (!order.is_none()) set_order(axes.data());
  owner_ = array;
  if (dtype.packed()) {
    unpacked_ = array;
  }
}

bool Buffer::lend(void* data, const int64_t* dims, size_t rank, const DType& dtype, bool writeable,
                  const Place& place) {
  data_ = data;
  const bool same_shape = dims_.size() == rank && std::equal(dims, dims + rank, dims_.begin());
  if (!same_shape) {
    dims_.assign(dims, dims + rank);
    shape_ = nb::object();
  }
  const bool same = same_shape && dtype_ == &dtype && place_.platform == place.platform;
  order_.clear();
  dtype_ = &dtype;
  alive_ = true;
  writeable_ = writeable;
  is_gradient_ = false;
  place_ = place;
  return same;
}

void Buffer::set_order(const int64_t* order) {
  if (order == nullptr) return;
  order_.assign(order, order + dims_.size());
  if (std::is_sorted(order_.begin(), order_.end())) order_.clear();
}

void Buffer::move_to(uintptr_t address) {
  check_alive();
  data_ = reinterpret_cast<void*>(address);
}

void Buffer::revoke(bool commit) noexcept {
  if (unpacked_.is_valid()) {
    if (commit && writeable_) {
      const auto* elements = static_cast<const uint8_t*>(PyArray_DATA(as_array(unpacked_)));
      pack(elements, size(), dtype_->bits, static_cast<uint8_t*>(data_));
    }
    unpacked_.reset();
  }
  data_ = nullptr;
  alive_ = false;
}

void Buffer::check_alive() const {
  if (!alive()) throw std::runtime_error(kReturned);
}

void Buffer::check_on_cpu(const char* what) const {
  check_alive();
  if (place_.platform == Platform::kCpu) return;
  throw nb::type_error((std::string(what) + ": this Buffer is in the memory of a " + platform_name(place_.platform) +
                        " device. Use buffer.cupy(), buffer.torch() or buffer.__cuda_array_interface__.")
                           .c_str());
}

const DType& Buffer::dtype() const { return check_alive(), *dtype_; }
size_t Buffer::ndim() const { return check_alive(), dims_.size(); }
bool Buffer::writeable() const { return check_alive(), writeable_; }

size_t Buffer::size() const {
  check_alive();
  size_t size = 1;
  for (const int64_t dim : dims_) size *= static_cast<size_t>(dim);
  return size;
}

size_t Buffer::nbytes() const { return dtype().bytes_for(size()); }

nb::tuple Buffer::shape() {
  check_alive();
  if (!shape_.is_valid()) {
    nb::list dims;
    for (const int64_t dim : dims_) dims.append(dim);
    shape_ = nb::tuple(dims);
  }
  return nb::borrow<nb::tuple>(shape_);
}

nb::tuple Buffer::strides() const {
  const auto itemsize = static_cast<int64_t>(dtype().packed() ? 1 : dtype().bits / 8u);
  nb::list strides;
  for (const int64_t stride : element_strides()) strides.append(stride * itemsize);
  return nb::tuple(strides);
}

std::vector<int64_t> Buffer::element_strides() const {
  std::vector<int64_t> strides(dims_.size());
  int64_t stride = 1;
  for (size_t i = dims_.size(); i-- > 0;) {
    const size_t axis = row_major() ? i : static_cast<size_t>(order_[i]);
    strides[axis] = stride;
    stride *= dims_[axis];
  }
  return strides;
}

nb::object Buffer::numpy_dtype() const { return descr_object(dtype()); }

std::string Buffer::repr() const {
  if (!alive()) return "Buffer(<its kernel has returned>)";
  std::string shape;
  for (const int64_t dim : dims_) shape += (shape.empty() ? "" : ", ") + std::to_string(dim);
  if (dims_.size() == 1) shape += ",";
  return "Buffer(shape=(" + shape + "), dtype=" + dtype_->name + ", platform=" + platform_name(place_.platform) +
         ", writeable=" + (writeable_ ? "True" : "False") + ")";
}

nb::object Buffer::numpy(nb::handle self) {
  check_on_cpu("Buffer.numpy");
  nb::object base = nb::borrow(self);
  void* data = elements();
  if (dtype_->packed()) base = nb::make_tuple(base, unpacked_);
  static char nothing;  // XLA passes a null pointer for an empty array, and NumPy would allocate for it
  const int flags =
      (row_major() ? NPY_ARRAY_C_CONTIGUOUS : 0) | NPY_ARRAY_ALIGNED | (writeable_ ? NPY_ARRAY_WRITEABLE : 0);
  nb::object array = new_array(data != nullptr ? data : &nothing, flags);
  if (PyArray_SetBaseObject(as_array(array), base.release().ptr()) < 0) throw nb::python_error();
  return array;
}

uint8_t* Buffer::elements() {
  if (!dtype().packed()) return static_cast<uint8_t*>(data_);
  if (!unpacked_.is_valid()) {
    unpacked_ = new_array(nullptr, 0);
    unpack(static_cast<const uint8_t*>(data_), size(), dtype_->bits,
           static_cast<uint8_t*>(PyArray_DATA(as_array(unpacked_))));
  }
  return static_cast<uint8_t*>(PyArray_DATA(as_array(unpacked_)));
}

nb::object Buffer::new_array(void* data, int flags) const {
  std::vector<npy_intp> dims(dims_.begin(), dims_.end());  // NumPy's own name for int64_t
  PyArray_Descr* descr = descr_of(*dtype_);
  descr_object(*dtype_).release();  // NewFromDescr takes a reference
  std::vector<npy_intp> strides;
  if (!row_major()) {
    for (const int64_t stride : element_strides()) strides.push_back(stride * PyDataType_ELSIZE(descr));
  }
  PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, static_cast<int>(dims.size()), dims.data(),
                                         row_major() ? nullptr : strides.data(), data, flags, nullptr);
  if (array == nullptr) throw nb::python_error();
  return nb::steal(array);
}

uintptr_t Buffer::address() const { return check_alive(), reinterpret_cast<uintptr_t>(data_); }

nb::object Buffer::array(nb::handle self, nb::handle dtype, nb::handle copy) {
  nb::object view = numpy(self);
  if (!dtype.is_none()) {
    nb::object wanted = nb::module_::import_("numpy").attr("dtype")(dtype);
    if (!wanted.equal(descr_object(*dtype_))) {
      if (!copy.is_none() && !truthy(copy)) {
        throw nb::value_error("Buffer.__array__: a change of dtype needs a copy, but copy=False was given.");
      }
      return view.attr("astype")(wanted);
    }
  }
  return truthy(copy) ? view.attr("copy")() : view;
}

void Buffer::fill(uint64_t seed) { Noise(dtype(), seed).fill(elements(), size()); }

bool Buffer::is_left(uint64_t seed) {
  const Noise noise(dtype(), seed);
  return noise.sure(noise.left(elements(), size()));
}

nb::tuple Buffer::left(uint64_t seed) {
  const Noise noise(dtype(), seed);
  npy_intp count = static_cast<npy_intp>(size());
  nb::object mask = nb::steal(PyArray_SimpleNew(1, &count, NPY_BOOL));
  if (!mask.is_valid()) throw nb::python_error();
  const Noise::Left left = noise.left(elements(), size(), static_cast<uint8_t*>(PyArray_DATA(as_array(mask))));
  return nb::make_tuple(mask, noise.sure(left));
}

Buffer& lent(nb::handle self) {
  if (!nb::inst_ready(self)) throw nb::type_error("Buffer: __init__ was not called. Call super().__init__(array).");
  return *nb::inst_ptr<Buffer>(self);
}

void bind_buffer(nb::module_& m) {
  using Self = nb::handle_t<Buffer>;
  nb::class_<Buffer> type(m, "Buffer",
                          "XLA's memory for one operand or result, lent to a kernel for the length of one call.");
  type.def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("array"), nb::kw_only(),
           nb::arg("writeable") = nb::none(), nb::arg("order") = nb::none())
      .def_prop_ro("shape", &Buffer::shape)
      .def_prop_ro("dtype", &Buffer::numpy_dtype)
      .def_prop_ro("ndim", &Buffer::ndim)
      .def_prop_ro("size", &Buffer::size)
      .def_prop_ro("nbytes", &Buffer::nbytes)
      .def_prop_ro("strides", &Buffer::strides)
      .def_prop_ro("writeable", &Buffer::writeable)
      .def_prop_rw("_address", &Buffer::address, &Buffer::move_to)
      .def_prop_ro("_packed", [](const Buffer& buffer) { return buffer.dtype().packed(); })
      .def_prop_rw("_is_gradient", &Buffer::is_gradient, &Buffer::set_is_gradient)
      .def("_revoke", [](Buffer& buffer) { buffer.revoke(false); })
      .def("_fill", &Buffer::fill, nb::arg("seed"))
      .def("_left", &Buffer::left, nb::arg("seed"))
      .def("__repr__", &Buffer::repr)
      .def("numpy", [](Self self) { return lent(self).numpy(self); })
      .def("cupy", [](Self self) { return lent(self).cupy(self); })
      .def("torch", [](Self self) { return lent(self).torch(self); })
      .def(
          "__array__", [](Self self, nb::handle dtype, nb::handle copy) { return lent(self).array(self, dtype, copy); },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def("__dlpack__", [](Self self, nb::kwargs kwargs) { return lent(self).dlpack(self, std::move(kwargs)); })
      .def("__dlpack_device__", &Buffer::dlpack_device)
      .def_prop_ro("__cuda_array_interface__", &Buffer::cuda_array_interface);
  bind_items(type);
}

}  // namespace eqxcallback
