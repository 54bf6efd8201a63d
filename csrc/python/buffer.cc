#include "python/buffer.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <stdexcept>

#include "core/packing.h"

namespace eqxcallback {
namespace {

constexpr const char* kReturned =
    "Buffer used after its kernel returned: its memory belongs to XLA again. Copy what has to outlive the call, for "
    "example with np.array(buffer), inside the kernel.";

// The NumPy dtype of each row of kDTypes; references are kept for the life of the process.
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

nb::object descr_object(const DType& dtype) { return nb::borrow(reinterpret_cast<PyObject*>(descr_of(dtype))); }

PyArrayObject* as_array(nb::handle object) { return reinterpret_cast<PyArrayObject*>(object.ptr()); }

const DType& dtype_of(nb::handle np_dtype) {
  nb::object name = nb::str(np_dtype.attr("name"));
  for (const DType& dtype : kDTypes) {
    if (std::string_view(dtype.name) == nb::cast<std::string_view>(name)) return dtype;
  }
  throw nb::type_error(
      ("Buffer: expected an array of a dtype that JAX has; got " + nb::cast<std::string>(name)).c_str());
}

// `dims` in NumPy's own integer type, which is int64_t under another name.
std::vector<npy_intp> npy_dims(const std::vector<int64_t>& dims) { return {dims.begin(), dims.end()}; }

// As JAX prints types: float32[3,4].
std::string type_text(nb::handle dtype, nb::handle shape) {
  std::string text = nb::cast<std::string>(nb::str(dtype)) + "[";
  for (nb::handle dim : shape) text += (text.back() == '[' ? "" : ",") + nb::cast<std::string>(nb::str(dim));
  return text + "]";
}

bool truthy(nb::handle value) { return !value.is_none() && nb::cast<bool>(value); }

}  // namespace

const char* platform_name(Platform platform) { return platform == Platform::kCpu ? "cpu" : "cuda"; }

void import_numpy() {
  if (_import_array() < 0) throw nb::python_error();
}

Buffer::Buffer(nb::object array, nb::object writeable) {
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
  const std::vector<int64_t> shape(dims, dims + PyArray_NDIM(source));
  lend(PyArray_DATA(source), shape.data(), shape.size(), dtype, writeable.is_none() ? can_write : truthy(writeable),
       {});
  owner_ = array;
  if (dtype.packed()) {
    unpacked_ = array.attr("view")();
    if (!writeable_) PyArray_CLEARFLAGS(as_array(unpacked_), NPY_ARRAY_WRITEABLE);
  }
}

void Buffer::lend(void* data, const int64_t* dims, size_t rank, const DType& dtype, bool writeable,
                  const Place& place) {
  data_ = data;
  if (dims_.size() != rank || !std::equal(dims, dims + rank, dims_.begin())) {
    dims_.assign(dims, dims + rank);
    shape_ = nb::object();
  }
  dtype_ = &dtype;
  writeable_ = writeable;
  place_ = place;
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
  dtype_ = nullptr;
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
const Place& Buffer::place() const { return check_alive(), place_; }
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
  const size_t itemsize = dtype().packed() ? 1 : dtype().bits / 8u;
  nb::list strides;
  int64_t stride = static_cast<int64_t>(itemsize);
  for (size_t axis = dims_.size(); axis-- > 0;) {
    strides.insert(0, stride);
    stride *= dims_[axis];
  }
  return nb::tuple(strides);
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
  const int write_flag = writeable_ ? NPY_ARRAY_WRITEABLE : 0;
  std::vector<npy_intp> dims = npy_dims(dims_);
  const int rank = static_cast<int>(dims.size());
  if (dtype_->packed()) {
    if (!unpacked_.is_valid()) {
      PyArray_Descr* descr = descr_of(*dtype_);
      Py_INCREF(descr);  // NewFromDescr takes it
      PyObject* array = PyArray_NewFromDescr(&PyArray_Type, descr, rank, dims.data(), nullptr, nullptr, 0, nullptr);
      if (array == nullptr) throw nb::python_error();
      unpacked_ = nb::steal(array);
      unpack(static_cast<const uint8_t*>(data_), size(), dtype_->bits,
             static_cast<uint8_t*>(PyArray_DATA(as_array(unpacked_))));
      if (!writeable_) PyArray_CLEARFLAGS(as_array(unpacked_), NPY_ARRAY_WRITEABLE);
    }
    return unpacked_;
  }
  static char nothing;  // NumPy would allocate for a null pointer, which is what XLA passes for an empty array
  PyArray_Descr* descr = descr_of(*dtype_);
  Py_INCREF(descr);
  PyObject* array =
      PyArray_NewFromDescr(&PyArray_Type, descr, rank, dims.data(), nullptr, data_ != nullptr ? data_ : &nothing,
                           NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | write_flag, nullptr);
  if (array == nullptr) throw nb::python_error();
  nb::object result = nb::steal(array);
  if (PyArray_SetBaseObject(as_array(result), self.inc_ref().ptr()) < 0) throw nb::python_error();
  return result;
}

nb::object Buffer::array(nb::handle self, nb::handle dtype, nb::handle copy) {
  nb::object view = numpy(self);
  if (!dtype.is_none()) {
    nb::object wanted = nb::module_::import_("numpy").attr("dtype")(dtype);
    if (!wanted.equal(descr_object(*dtype_))) {
      if (!copy.is_none() && !nb::cast<bool>(copy)) {
        throw nb::value_error("Buffer.__array__: a change of dtype needs a copy, but copy=False was given.");
      }
      return view.attr("astype")(wanted);
    }
  }
  return truthy(copy) ? view.attr("copy")() : view;
}

void Buffer::write(nb::handle self, nb::handle value) {
  check_on_cpu("Buffer.write");
  if (!writeable_) throw nb::value_error("Buffer.write: this Buffer is an input, which is read-only. Write to `out`.");
  nb::object source = nb::module_::import_("numpy").attr("asarray")(value);
  nb::object target = numpy(self);
  nb::object given_shape = source.attr("shape"), given_dtype = source.attr("dtype");
  if (!given_shape.equal(shape()) || !given_dtype.equal(numpy_dtype())) {
    throw nb::value_error(("Buffer.write: expected " + type_text(numpy_dtype(), shape()) + "; got " +
                           type_text(given_dtype, given_shape) +
                           ". Reshape or cast it first: write() never broadcasts or casts.")
                              .c_str());
  }
  if (PyArray_CopyInto(as_array(target), as_array(source)) < 0) throw nb::python_error();
}

nb::dict Buffer::cuda_array_interface() const {
  check_alive();
  if (place_.platform == Platform::kCpu) {
    throw nb::attribute_error("__cuda_array_interface__: this Buffer is in the memory of a CPU. Use buffer.numpy().");
  }
  if (dtype_->packed()) {
    throw nb::attribute_error((std::string("__cuda_array_interface__ cannot describe packed ") + dtype_->name).c_str());
  }
  nb::dict interface;
  nb::list dims;
  for (const int64_t dim : dims_) dims.append(dim);
  interface["shape"] = nb::tuple(dims);
  interface["typestr"] = numpy_dtype().attr("str");
  interface["data"] = nb::make_tuple(reinterpret_cast<uintptr_t>(data_), !writeable_);
  interface["strides"] = nb::none();
  interface["version"] = 3;
  // 0 is not allowed: the interface calls the legacy default stream 1.
  interface["stream"] = place_.stream == 0 ? uintptr_t{1} : place_.stream;
  return interface;
}

int32_t Buffer::dlpack_device_type() const {
  return place_.platform == Platform::kCpu ? nb::device::cpu::value : nb::device::cuda::value;
}

nb::tuple Buffer::dlpack_device() const {
  check_alive();
  // There is one CPU in DLPack, however many CPU devices XLA makes of it.
  return nb::make_tuple(dlpack_device_type(), place_.platform == Platform::kCpu ? 0 : place_.ordinal);
}

nb::object Buffer::dlpack(nb::handle self, nb::kwargs kwargs) {
  check_alive();
  nb::object stream = nb::none(), max_version = nb::none(), dl_device = nb::none(), copy = nb::none();
  for (auto [key, value] : kwargs) {
    const std::string_view name = nb::cast<std::string_view>(key);
    if (name == "stream")
      stream = nb::borrow(value);
    else if (name == "max_version")
      max_version = nb::borrow(value);
    else if (name == "dl_device")
      dl_device = nb::borrow(value);
    else if (name == "copy")
      copy = nb::borrow(value);
    else
      throw nb::type_error(("__dlpack__: unexpected keyword argument " + std::string(name)).c_str());
  }
  if (dtype_->packed()) {
    throw nb::buffer_error(
        (std::string("__dlpack__: packed ") + dtype_->name + " has no DLPack form. Use buffer.numpy().").c_str());
  }
  if (!dl_device.is_none() && !nb::tuple(dl_device).equal(dlpack_device())) {
    throw nb::buffer_error("__dlpack__: dl_device is another device than this Buffer's. Copy it there afterwards.");
  }
  if (place_.platform != Platform::kCpu && !stream.is_none()) {
    // 1 is the consumer's name for the legacy default stream, -1 its promise to order the work itself.
    const auto wanted = nb::cast<int64_t>(stream);
    const auto ours = static_cast<int64_t>(place_.stream);
    if (wanted != -1 && wanted != ours && !(wanted == 1 && ours == 0)) {
      throw nb::buffer_error(
          "__dlpack__: the consumer works on another stream than XLA. Enter XLA's stream first, for "
          "example `with torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream)):`.");
    }
  }
  nb::object owner = nb::borrow(self);
  void* data = data_;
  bool read_only = !writeable_;
  if (truthy(copy)) {
    if (place_.platform != Platform::kCpu) {
      throw nb::buffer_error("__dlpack__: copy=True would allocate device memory. Copy with the consuming library.");
    }
    owner = numpy(self).attr("copy")();
    data = PyArray_DATA(as_array(owner));
    read_only = false;
  }
  std::vector<size_t> dims(dims_.begin(), dims_.end());
  nb::dlpack::dtype type;
  type.code = static_cast<uint8_t>(dtype_->dlpack);
  type.bits = dtype_->bits;
  type.lanes = 1;
  const int32_t kind = dlpack_device_type();
  const int32_t ordinal = place_.platform == Platform::kCpu ? 0 : place_.ordinal;
  nb::object exporter;
  if (read_only) {
    exporter = nb::cast(
        nb::ndarray<nb::array_api, nb::ro>(data, dims.size(), dims.data(), owner, nullptr, type, kind, ordinal));
  } else {
    exporter =
        nb::cast(nb::ndarray<nb::array_api>(data, dims.size(), dims.data(), owner, nullptr, type, kind, ordinal));
  }
  return exporter.attr("__dlpack__")(nb::arg("max_version") = max_version);
}

nb::object Buffer::cupy(nb::handle self) const {
  check_alive();
  if (place_.platform == Platform::kCpu) {
    throw nb::type_error("Buffer.cupy: this Buffer is in the memory of a CPU. Use buffer.numpy().");
  }
  nb::module_ cupy = nb::module_::import_("cupy");
  nb::object cuda = cupy.attr("cuda");
  nb::object memory = cuda.attr("UnownedMemory")(reinterpret_cast<uintptr_t>(data_), nbytes(), self, place_.ordinal);
  nb::object pointer = cuda.attr("MemoryPointer")(memory, 0);
  nb::list dims;
  for (const int64_t dim : dims_) dims.append(dim);
  return cupy.attr("ndarray")(nb::tuple(dims), numpy_dtype(), pointer);
}

nb::object Buffer::torch(nb::handle self) const {
  check_alive();
  return nb::module_::import_("torch").attr("from_dlpack")(self);
}

namespace {

Buffer& get(nb::handle self) { return *nb::inst_ptr<Buffer>(self); }

}  // namespace

void bind_buffer(nb::module_& m) {
  using Self = nb::handle_t<Buffer>;
  nb::class_<Buffer>(m, "Buffer",
                     "XLA's memory for one operand or result, lent to a kernel for the length of one call.")
      .def(nb::init<nb::object, nb::object>(), nb::arg("array"), nb::kw_only(), nb::arg("writeable") = nb::none())
      .def_prop_ro("shape", &Buffer::shape)
      .def_prop_ro("dtype", &Buffer::numpy_dtype)
      .def_prop_ro("ndim", &Buffer::ndim)
      .def_prop_ro("size", &Buffer::size)
      .def_prop_ro("nbytes", &Buffer::nbytes)
      .def_prop_ro("strides", &Buffer::strides)
      .def_prop_ro("writeable", &Buffer::writeable)
      .def("__repr__", &Buffer::repr)
      .def(
          "write", [](Self self, nb::handle value) { get(self).write(self, value); }, nb::arg("value"))
      .def("numpy", [](Self self) { return get(self).numpy(self); })
      .def("cupy", [](Self self) { return get(self).cupy(self); })
      .def("torch", [](Self self) { return get(self).torch(self); })
      .def(
          "__array__", [](Self self, nb::handle dtype, nb::handle copy) { return get(self).array(self, dtype, copy); },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none())
      .def("__dlpack__", [](Self self, nb::kwargs kwargs) { return get(self).dlpack(self, std::move(kwargs)); })
      .def("__dlpack_device__", &Buffer::dlpack_device)
      .def_prop_ro("__cuda_array_interface__", &Buffer::cuda_array_interface);
}

}  // namespace eqxcallback
