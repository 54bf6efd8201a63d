// Handle: its calls, their frames of Buffers, and the hooks that Python sets.
#include "python/handle.h"

#include <nanobind/stl/string.h>

#include <random>
#include <stdexcept>
#include <utility>

#include "core/noise.h"
#include "core/registry.h"

namespace eqxcallback {
namespace {

// The registry is never destroyed: executables may outlive the module at exit.
Registry<Handle>& handles() {
  static auto* registry = new Registry<Handle>();
  return *registry;
}

nb::object& failure_hook() {
  static auto* hook = new nb::object();
  return *hook;
}

nb::object& unknown_key_hook() {
  static auto* hook = new nb::object();
  return *hook;
}

nb::object& unwritten_hook() {
  static auto* hook = new nb::object();
  return *hook;
}

// While it is set, `checked_call(body, direct, ctx, outputs, inputs)` is called in place of the body.
nb::object& checked_call() {
  static auto* hook = new nb::object();
  return *hook;
}

// Replaces `object` by a fresh one unless we are its only owner, so that no other owner sees it change.
template <typename T>
T& exclusive(nb::object& object) {
  if (!object.is_valid() || Py_REFCNT(object.ptr()) != 1) object = nb::cast(T());
  return *nb::inst_ptr<T>(object);
}

int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
  Py_VISIT(Py_TYPE(self));
  if (nb::inst_ready(self)) {
    Py_VISIT(nb::inst_ptr<Handle>(self)->body().ptr());
    Py_VISIT(nb::inst_ptr<Handle>(self)->owner().ptr());
  }
  return 0;
}

int clear(PyObject* self) noexcept {
  if (nb::inst_ready(self)) {
    nb::inst_ptr<Handle>(self)->body().reset();
    nb::inst_ptr<Handle>(self)->owner().reset();
  }
  return 0;
}

PyType_Slot kSlots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

}  // namespace

Frame::Frame(size_t num_outputs, size_t num_inputs) : num_outputs_(num_outputs), buffers_(num_outputs + num_inputs) {}

Frame::Frame(nb::object context, nb::tuple outputs, nb::tuple inputs)
    : num_outputs_(outputs.size()), context_(std::move(context)) {
  for (const nb::tuple& buffers : {outputs, inputs}) {
    for (nb::handle buffer : buffers) {
      nb::cast<Buffer&>(buffer);  // raises if it is not a Buffer
      buffers_.push_back(nb::borrow(buffer));
    }
  }
}

Buffer& Frame::buffer(size_t i) { return exclusive<Buffer>(buffers_[i]); }
ExecutionContext& Frame::context() { return exclusive<ExecutionContext>(context_); }

nb::tuple Frame::slice(size_t begin, size_t end) const {
  nb::object result = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(end - begin)));
  for (size_t i = begin; i < end; ++i) {
    PyTuple_SetItem(result.ptr(), static_cast<Py_ssize_t>(i - begin), buffers_[i].inc_ref().ptr());
  }
  return nb::borrow<nb::tuple>(result);
}

void Frame::release(bool commit) noexcept {
  for (nb::object& object : buffers_) {
    if (object.is_valid()) nb::inst_ptr<Buffer>(object)->revoke(commit);
  }
}

uint64_t Frame::types() const {
  uint64_t hash = num_outputs_;
  for (size_t i = 0; i < size(); ++i) {
    hash = mixed(hash ^ static_cast<uint64_t>(lent(i).place().platform));
    hash = mixed(hash ^ static_cast<uint64_t>(lent(i).dtype().xla));
    hash = mixed(hash ^ lent(i).ndim());
    for (const int64_t dim : lent(i).dims()) hash = mixed(hash ^ static_cast<uint64_t>(dim));
  }
  return hash;
}

bool Frame::is_watched(size_t output) const {
  const Buffer& buffer = lent(output);
  if (buffer.place().platform != Platform::kCpu || buffer.size() == 0) return false;
  for (size_t i = num_outputs_; i < size(); ++i) {
    if (lent(i).address() == buffer.address()) return false;
  }
  return true;
}

uint64_t Frame::watched() const {
  uint64_t hash = 0;
  for (size_t i = 0; i < num_outputs_; ++i) {
    if (is_watched(i)) hash = mixed(hash ^ (i + 1));
  }
  return hash;
}

Handle::Handle(uint64_t key, nb::object body, nb::object owner, bool direct)
    : key_(key), body_(std::move(body)), owner_(std::move(owner)), direct_(direct) {
  if (!handles().add(key, *this)) throw std::invalid_argument("the key belongs to another Handle");
}

Handle::~Handle() { handles().remove(key_, *this); }

nb::object Handle::find(uint64_t key) {
  return handles().find(key, [](Handle& handle) -> nb::object { return nb::find(handle); });
}

std::unique_ptr<Frame> Handle::take_frame(size_t num_outputs, size_t num_inputs) {
  if (!idle_.empty()) {
    std::unique_ptr<Frame> frame = std::move(idle_.back());
    idle_.pop_back();
    if (frame->num_outputs() == num_outputs && frame->size() == num_outputs + num_inputs) return frame;
  }
  return std::make_unique<Frame>(num_outputs, num_inputs);
}

void Handle::give_back(std::unique_ptr<Frame> frame) { idle_.push_back(std::move(frame)); }

void Handle::call(Frame& frame) {
  if (checked_call().is_valid()) return run(frame);  // which watches all calls
  const uint64_t watched = frame.watched();
  if (frame.is_proven(watched)) return run(frame);
  const uint64_t types = mixed(frame.types() ^ watched);
  if (proven_.count(types) != 0) {
    run(frame);
  } else if (run_watched(frame)) {
    proven_.insert(types);
  } else {
    return;
  }
  frame.set_proven(watched);
}

namespace {

// Returns a new seed for each output and call, so that a kernel that writes a value of the noise by chance does not do
// so again. Needs the GIL.
uint64_t next_seed() {
  static uint64_t last = std::random_device{}();
  return last = mixed(last);
}

}  // namespace

// Returns true if the kernel has written all outputs. If not, raises, unless the body has dealt with that.
bool Handle::run_watched(const Frame& frame) {
  std::vector<std::pair<size_t, uint64_t>> watched;
  for (size_t i = 0; i < frame.num_outputs(); ++i) {
    if (!frame.is_watched(i)) continue;
    watched.emplace_back(i, next_seed());
    frame.lent(i).fill(watched.back().second);
  }
  run(frame);
  nb::list unwritten;
  for (const auto& [i, seed] : watched) {
    if (frame.lent(i).is_left(seed)) unwritten.append(nb::make_tuple(i, seed));
  }
  if (unwritten.size() == 0 || !unwritten_hook().is_valid()) return true;
  nb::object error = unwritten_hook()(body_, frame.outputs(), frame.inputs(), unwritten);
  if (error.is_none()) return false;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

void Handle::run(const Frame& frame) {
  nb::object result;
  if (checked_call().is_valid()) {
    nb::object hook = checked_call();
    result = hook(body_, direct_, frame.context_object(), frame.outputs(), frame.inputs());
  } else if (direct_) {
    constexpr size_t kInline = 16;
    const size_t count = frame.size() + 1;
    PyObject* few[kInline];
    std::vector<PyObject*> many(count > kInline ? count : 0);
    PyObject** argv = count > kInline ? many.data() : few;
    argv[0] = frame.context_object().ptr();
    for (size_t i = 0; i < frame.size(); ++i) argv[i + 1] = frame.buffer_object(i).ptr();
    result = nb::steal(PyObject_Vectorcall(body_.ptr(), argv, count, nullptr));
  } else {
    const nb::tuple outputs = frame.outputs(), inputs = frame.inputs();
    PyObject* argv[] = {frame.context_object().ptr(), outputs.ptr(), inputs.ptr()};
    result = nb::steal(PyObject_Vectorcall(body_.ptr(), argv, 3, nullptr));
  }
  if (!result.is_valid()) throw nb::python_error();
  if (!result.is_none()) {
    PyErr_Format(PyExc_ValueError,
                 "a buffer callback must return None, because its results are what it writes to `out`; got %R. "
                 "Write with out.write(value) and return nothing.",
                 result.type().ptr());
    throw nb::python_error();
  }
}

std::string report_failure(nb::handle kernel, nb::python_error& error, const Frame& frame,
                           const std::string& name_stack) {
  try {
    if (!failure_hook().is_valid()) return error.what();
    return nb::cast<std::string>(failure_hook()(error.value(), kernel, frame.outputs(), frame.inputs(), name_stack));
  } catch (nb::python_error& second) {
    return std::string("eqxcallback could not describe a failure: ") + second.what();
  }
}

std::string import_portable(uint64_t key, const std::string& text) {
  if (!unknown_key_hook().is_valid()) return "eqxcallback: Python is exiting";
  try {
    unknown_key_hook()(key, text);
    return "";
  } catch (nb::python_error& error) {
    return error.what();
  }
}

void bind_handle(nb::module_& m) {
  nb::class_<Handle>(m, "Handle", nb::is_weak_referenceable(), nb::type_slots(kSlots))
      .def(nb::init<uint64_t, nb::object, nb::object, bool>(), nb::arg("key"), nb::arg("body"),
           nb::arg("owner") = nb::none(), nb::kw_only(), nb::arg("direct"))
      .def_prop_ro("owner", [](Handle& handle) { return handle.owner(); })
      .def_prop_ro("key", &Handle::key)
      .def(
          "run",
          [](Handle& handle, nb::object context, nb::tuple outputs, nb::tuple inputs) {
            Frame frame(std::move(context), std::move(outputs), std::move(inputs));
            handle.call(frame);
          },
          nb::arg("context"), nb::arg("outputs"), nb::arg("inputs"))
      .def_static("exists", [](uint64_t key) { return handles().has(key); }, nb::arg("key"));

  m.def("on_unknown_key", [](nb::object hook) { unknown_key_hook() = std::move(hook); }, nb::arg("hook"));

  m.def("on_unwritten", [](nb::object hook) { unwritten_hook() = std::move(hook); }, nb::arg("hook"));

  m.def("on_failure", [](nb::object hook) { failure_hook() = std::move(hook); }, nb::arg("hook"));

  m.def(
      "set_checked_call", [](nb::object hook) { checked_call() = hook.is_none() ? nb::object() : std::move(hook); },
      nb::arg("hook").none());

  // Python functions must not be touched once the interpreter has gone.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
    failure_hook().reset();
    unknown_key_hook().reset();
    unwritten_hook().reset();
    checked_call().reset();
  }));
}

}  // namespace eqxcallback
