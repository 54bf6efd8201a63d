// Recording: makes the Buffers of the recorded call, and calls the kernel under a capture.
#include "python/recording.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace eqxcallback {
namespace {

// The byte of a NaN in every floating dtype, so that no tolerance takes it for a result.
constexpr uint8_t kNoise = 0xFF;

// Makes a Buffer over the same memory, in another place.
nb::object lend_again(nb::handle object, const Place& place) {
  Buffer& given = nb::cast<Buffer&>(object);
  const nb::tuple shape = given.shape();
  std::vector<int64_t> dims;
  for (nb::handle dim : shape) dims.push_back(nb::cast<int64_t>(dim));
  nb::object made = nb::cast(Buffer());
  Buffer& buffer = *nb::inst_ptr<Buffer>(made);
  buffer.lend(reinterpret_cast<void*>(given.address()), dims.data(), dims.size(), given.dtype(), given.writeable(),
              place);
  const std::vector<int64_t> strides = given.element_strides();
  std::vector<int64_t> order(dims.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return strides[static_cast<size_t>(a)] > strides[static_cast<size_t>(b)];
  });
  if (!given.row_major()) buffer.set_order(order.data());
  return made;
}

// Ends the loans when the call ends.
class Loans {
 public:
  Loans() = default;
  ~Loans() {
    for (nb::object& object : objects_) nb::inst_ptr<Buffer>(object)->revoke(false);
  }
  Loans(const Loans&) = delete;
  Loans& operator=(const Loans&) = delete;

  nb::tuple over(const nb::tuple& given, const Place& place) {
    nb::list made;
    for (nb::handle buffer : given) {
      objects_.push_back(lend_again(buffer, place));
      made.append(objects_.back());
    }
    return nb::tuple(made);
  }

 private:
  std::vector<nb::object> objects_;
};

}  // namespace

Recording::Recording(nb::object body, bool direct, const ExecutionContext& ctx, nb::tuple outputs, nb::tuple inputs)
    : stream_(reinterpret_cast<gpu::Stream>(ctx.place.stream)), capture_(ctx.place.ordinal) {
  // The place is a CUDA device also for a call on a CPU, which a fake driver serves: the recorded kernel is for CUDA.
  const Place place{Platform::kCuda, ctx.place.ordinal, reinterpret_cast<uintptr_t>(capture_.stream())};
  Loans loans;
  nb::object inner = nb::cast(ExecutionContext{ctx.stage, place});
  const nb::tuple outs = loans.over(outputs, place), ins = loans.over(inputs, place);
  try {
    if (direct) {
      body(inner, *outs, *ins);
    } else {
      body(inner, outs, ins);
    }
  } catch (nb::python_error& error) {
    error_ = nb::borrow(error.value());
  }
  try {
    capture_.end();
  } catch (const gpu::DriverError& error) {
    code_ = error.code;
    message_ = error.what();
  }
}

nb::dict Recording::nodes() const {
  nb::dict counts;
  for (const auto& [kind, count] : capture_.nodes()) counts[nb::cast(kind)] = count;
  return counts;
}

void Recording::replay(nb::tuple unwritten) const {
  {
    nb::gil_scoped_release released;  // the work that we wait for may need Python
    capture_.wait();
  }
  for (nb::handle object : unwritten) {
    Buffer& buffer = nb::cast<Buffer&>(object);
    capture_.fill(buffer.address(), buffer.nbytes(), kNoise, stream_);
  }
  capture_.replay(stream_);
}

void bind_recording(nb::module_& m) {
  nb::class_<Recording>(m, "Recording")
      .def(nb::init<nb::object, bool, const ExecutionContext&, nb::tuple, nb::tuple>(), nb::arg("body"),
           nb::arg("direct"), nb::arg("ctx"), nb::arg("outputs"), nb::arg("inputs"))
      .def("take_error", &Recording::take_error)
      .def_prop_ro("code", &Recording::code)
      .def_prop_ro("message", &Recording::message)
      .def_prop_ro("nodes", &Recording::nodes)
      .def("replay", &Recording::replay, nb::arg("unwritten"));
}

}  // namespace eqxcallback
