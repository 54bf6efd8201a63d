// The memory of a Buffer as other array libraries see it: the CUDA array interface, DLPack, CuPy and PyTorch.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>
#include <vector>

#include "python/buffer.h"
#include "python/context.h"

namespace eqxcallback {
namespace {

// The major version of DLPack that the consumer knows, or 0 for those that do not say.
int major_version(nb::handle max_version) {
  if (max_version.is_none()) return 0;
  int version = 0;
  const bool is_pair = PyTuple_Check(max_version.ptr()) && PyTuple_Size(max_version.ptr()) > 0;
  if (!is_pair || !nb::try_cast(max_version[0], version)) {
    throw nb::type_error("__dlpack__: expected `max_version` to be (major, minor).");
  }
  return version;
}

}  // namespace

nb::dict Buffer::cuda_array_interface() {
  check_alive();
  if (place_.platform == Platform::kCpu) {
    throw nb::attribute_error("__cuda_array_interface__: this Buffer is in the memory of a CPU. Use buffer.numpy().");
  }
  if (dtype_->packed()) {
    throw nb::attribute_error((std::string("__cuda_array_interface__ cannot describe packed ") + dtype_->name).c_str());
  }
  nb::dict interface;
  interface["shape"] = shape();
  interface["typestr"] = numpy_dtype().attr("str");
  interface["data"] = nb::make_tuple(reinterpret_cast<uintptr_t>(data_), !writeable_);
  interface["strides"] = row_major() ? nb::object(nb::none()) : nb::object(strides());
  interface["version"] = 3;
  // Nobody has to wait: a callback enqueues on XLA's stream, behind what computes this. CuPy waits on the host for a
  // stream that stands here, in each call of `cupy.asarray`, and while XLA records a command buffer that is an error.
  interface["stream"] = nb::none();
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
  if (place_.platform != Platform::kCpu) {
    // A consumer means the legacy default stream by 1 and by None, and by -1 promises to order the work itself.
    int64_t wanted = 1;
    if (!stream.is_none() && !nb::try_cast(stream, wanted)) {
      throw nb::type_error("__dlpack__: expected `stream` to be a number or None.");
    }
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
    owner = numpy(self).attr("copy")(nb::arg("order") = "K");  // which `capsule` describes, with the strides of this
    data = reinterpret_cast<void*>(nb::cast<uintptr_t>(owner.attr("ctypes").attr("data")));
    read_only = false;
  }
  const bool versioned = major_version(max_version) >= 1;
  if (read_only && !versioned) {
    const std::string other = place_.platform == Platform::kCpu ? " or copy=True." : ".";
    throw nb::buffer_error(("__dlpack__: this Buffer is read-only, which DLPack can say from version 1.0 on. Pass "
                            "max_version=(1, 0)" +
                            other)
                               .c_str());
  }
  return capsule(data, owner, read_only, max_version);
}

nb::object Buffer::capsule(void* data, nb::handle owner, bool read_only, nb::handle max_version) const {
  std::vector<size_t> dims(dims_.begin(), dims_.end());
  const std::vector<int64_t> strides = element_strides();
  nb::dlpack::dtype type;
  type.code = static_cast<uint8_t>(dtype_->dlpack);
  type.bits = dtype_->bits;
  type.lanes = 1;
  const int32_t kind = dlpack_device_type();
  const int32_t ordinal = place_.platform == Platform::kCpu ? 0 : place_.ordinal;
  nb::object exporter;
  if (read_only) {
    exporter = nb::cast(
        nb::ndarray<nb::array_api, nb::ro>(data, dims.size(), dims.data(), owner, strides.data(), type, kind, ordinal));
  } else {
    exporter = nb::cast(
        nb::ndarray<nb::array_api>(data, dims.size(), dims.data(), owner, strides.data(), type, kind, ordinal));
  }
  return exporter.attr("__dlpack__")(nb::arg("max_version") = max_version);
}

nb::object Buffer::cupy(nb::handle self) {
  check_alive();
  if (place_.platform == Platform::kCpu) {
    throw nb::type_error("Buffer.cupy: this Buffer is in the memory of a CPU. Use buffer.numpy().");
  }
  if (dtype_->packed()) {
    throw nb::buffer_error((std::string("Buffer.cupy: packed ") + dtype_->name + " has no form in CuPy.").c_str());
  }
  nb::module_ cupy = import_cupy("Buffer.cupy");
  nb::object cuda = cupy.attr("cuda");
  // Not through __cuda_array_interface__, which has no name for bfloat16: CuPy would make bytes of it. The memory owns
  // this Buffer, so that an array which outlives the call is seen to hold it.
  nb::object memory = cuda.attr("UnownedMemory")(reinterpret_cast<uintptr_t>(data_), nbytes(), self, place_.ordinal);
  nb::object pointer = cuda.attr("MemoryPointer")(memory, 0);
  return cupy.attr("ndarray")(shape(), numpy_dtype(), pointer, strides());
}

nb::object Buffer::torch(nb::handle self) {
  check_alive();
  if (dtype_->packed()) {
    throw nb::buffer_error((std::string("Buffer.torch: packed ") + dtype_->name + " has no DLPack form.").c_str());
  }
  nb::module_ torch = nb::module_::import_("torch");
  if (place_.platform != Platform::kCpu) {
    nb::object stream = torch.attr("cuda").attr("current_stream")(place_.ordinal).attr("cuda_stream");
    if (nb::cast<uintptr_t>(stream) != place_.stream) {
      throw nb::buffer_error(
          "Buffer.torch: PyTorch works on another stream than XLA. Enter XLA's stream first: "
          "`with torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream)):`.");
    }
  }
  // PyTorch has no read-only tensors, and some versions of it refuse memory that says that it is read-only.
  return torch.attr("from_dlpack")(capsule(data_, self, false, nb::none()));
}

}  // namespace eqxcallback
