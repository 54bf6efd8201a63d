// Indexing of Buffers, `write`, and the errors for whatever else arrays can do and a Buffer cannot.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "python/buffer.h"
#include "python/context.h"

namespace eqxcallback {
namespace {

constexpr const char* kAnArray = "Take the array over its memory first: numpy.asarray(x) or x[...].";

nb::object import_numpy_module() { return nb::module_::import_("numpy"); }

bool is_whole(nb::handle index) {
  if (index.ptr() == Py_Ellipsis) return true;
  return PyTuple_Check(index.ptr()) && PyTuple_Size(index.ptr()) == 1 && PyTuple_GetItem(index.ptr(), 0) == Py_Ellipsis;
}

nb::object item(const nb::object& array, nb::handle index) {
  PyObject* result = PyObject_GetItem(array.ptr(), index.ptr());
  if (result == nullptr) throw nb::python_error();
  return nb::steal(result);
}

// True if a number of Python, which has no dtype, may become an element of `dtype`: that holds numbers of its kind.
bool is_number_for(const DType& dtype, nb::handle value) {
  PyObject* number = value.ptr();
  switch (dtype.dlpack) {
    case DLCode::kBool:
      return PyBool_Check(number);
    case DLCode::kInt:
    case DLCode::kUInt:
      return PyLong_CheckExact(number);
    case DLCode::kComplex:
      return PyLong_CheckExact(number) || PyFloat_CheckExact(number) || PyComplex_CheckExact(number);
    default:
      return PyLong_CheckExact(number) || PyFloat_CheckExact(number);
  }
}

}  // namespace

nb::object Buffer::device_array(nb::handle self, const char* who) {
  check_alive();
  if (place_.platform == Platform::kCpu) return self.attr("numpy")();  // a method that checked mode replaces
  nb::object current = import_cupy(who).attr("cuda").attr("get_current_stream")().attr("ptr");
  if (nb::cast<uintptr_t>(current) != place_.stream) {
    throw nb::value_error(
        (std::string(who) + ": CuPy works on another stream than XLA. Do it inside of `with ctx:`.").c_str());
  }
  return self.attr("cupy")();
}

nb::object Buffer::device_value(nb::handle value, const char* who) const {
  if (place_.platform == Platform::kCpu) return import_numpy_module().attr("asarray")(value);
  if (nb::isinstance<Buffer>(value)) return value.attr("cupy")();
  if (!nb::hasattr(value, "__cuda_array_interface__")) {
    throw nb::type_error(
        (std::string(who) +
         ": expected an array in the memory of the GPU, where this Buffer is. A copy from the host would "
         "wait for the device; if that is meant, pass cupy.asarray(value).")
            .c_str());
  }
  return import_cupy(who).attr("asarray")(value);
}

// Sums over the axes along which the primal of this gradient was broadcast: leading axes that it lacks, and axes of
// size 1.
nb::object Buffer::summed(const nb::object& value) {
  const nb::tuple given = nb::cast<nb::tuple>(value.attr("shape"));
  if (given.size() < dims_.size()) return value;
  const size_t more = given.size() - dims_.size();
  nb::list axes;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto size = nb::cast<int64_t>(given[i]);
    if (i < more || (dims_[i - more] == 1 && size != 1)) {
      axes.append(i);
    } else if (dims_[i - more] != size) {
      return value;
    }
  }
  if (axes.size() == 0) return value;
  nb::object dtype = value.attr("dtype");
  // Sums of few bits are rounded once.
  nb::object wide = dtype_->bits < 32 ? import_numpy_module().attr("dtype")("float32") : dtype;
  nb::object sum = value.attr("sum")(nb::arg("axis") = nb::tuple(axes), nb::arg("dtype") = wide);
  return sum.attr("reshape")(shape()).attr("astype")(dtype);
}

nb::object Buffer::get_item(nb::handle self, nb::handle index) {
  return item(device_array(self, "Buffer.__getitem__"), index);
}

void Buffer::set_item(nb::handle self, nb::handle index, nb::handle value) {
  assign(self, index, value, "Buffer.__setitem__");
}

void Buffer::write(nb::handle self, nb::handle value) { assign(self, nb::ellipsis(), value, "Buffer.write"); }

void Buffer::assign(nb::handle self, nb::handle index, nb::handle value, const char* who) {
  check_alive();
  if (!writeable_) {
    throw nb::value_error(
        (std::string(who) + ": this Buffer is an input, which is read-only. Write to `out`.").c_str());
  }
  nb::object array = place_.platform == Platform::kCpu ? numpy(self) : device_array(self, who);
  const bool whole = is_whole(index);
  nb::object target = whole ? array : item(array, index);
  nb::object shape = target.attr("shape");
  nb::object source;
  if (nb::len(shape) == 0 && is_number_for(*dtype_, value)) {
    source = import_numpy_module().attr("asarray")(value, numpy_dtype());
    // The integers of less than a byte, which are ml_dtypes', wrap around.
    const bool is_integer = dtype_->dlpack == DLCode::kInt || dtype_->dlpack == DLCode::kUInt;
    if (is_integer && !source.equal(value)) {
      throw std::overflow_error(std::string(who) + ": Python integer " + nb::cast<std::string>(nb::str(value)) +
                                " out of bounds for " + dtype_->name);
    }
    if (place_.platform != Platform::kCpu) source = import_cupy(who).attr("asarray")(source);
  } else {
    source = device_value(value, who);
  }
  nb::object given_shape = source.attr("shape"), given_dtype = source.attr("dtype");
  if (is_gradient_ && whole && !given_shape.equal(shape)) source = summed(source);
  if (!source.attr("shape").equal(shape) || !given_dtype.equal(numpy_dtype())) {
    const bool is_one = nb::len(given_shape) == 0 && nb::len(shape) > 0 && place_.platform == Platform::kCpu;
    const std::string more = is_one ? " The array over its memory broadcasts: numpy.asarray(x)[...] = value." : "";
    throw nb::value_error((std::string(who) + ": expected " + type_text(numpy_dtype(), shape) + "; got " +
                           type_text(given_dtype, given_shape) +
                           ". Reshape or cast it first: a Buffer is written without broadcasts and casts." + more)
                              .c_str());
  }
  if (PyObject_SetItem(array.ptr(), index.ptr(), source.ptr()) < 0) throw nb::python_error();
}

namespace {

// True for arrays, which compute with Buffers as with other arrays: Python asks their operator next.
bool computes(nb::handle other) {
  return nb::hasattr(other, "__array_ufunc__") || nb::hasattr(other, "__array_interface__");  // NumPy's scalars
}

void bind_refusals(nb::class_<Buffer>& type) {
  constexpr std::pair<const char*, const char*> binary[] = {
      {"add", "+"},       {"sub", "-"}, {"mul", "*"},  {"matmul", "@"},  {"truediv", "/"},
      {"floordiv", "//"}, {"mod", "%"}, {"pow", "**"}, {"lshift", "<<"}, {"rshift", ">>"},
      {"and", "&"},       {"or", "|"},  {"xor", "^"}};
  constexpr std::pair<const char*, const char*> comparisons[] = {{"lt", "<"},  {"le", "<="}, {"gt", ">"},
                                                                 {"ge", ">="}, {"eq", "=="}, {"ne", "!="}};
  constexpr std::pair<const char*, const char*> unary[] = {
      {"neg", "-x"}, {"pos", "+x"}, {"abs", "abs(x)"}, {"invert", "~x"}};
  const auto dunder = [](const std::string& name) { return "__" + name + "__"; };
  const auto refuse = [&type, &dunder](const std::string& name, const std::string& sign) {
    const std::string text = "`" + sign + "`: a Buffer is memory and computes nothing. " + kAnArray;
    const auto operation = [text](nb::handle, nb::handle other) {
      if (computes(other)) return nb::borrow(Py_NotImplemented);
      throw nb::type_error(text.c_str());
    };
    type.def(dunder(name).c_str(), operation, nb::arg("other").none());
  };
  for (const auto& [name, sign] : binary) {
    refuse(name, std::string("x ") + sign + " y");
    refuse(std::string("r") + name, std::string("y ") + sign + " x");
    const std::string text = std::string("`x ") + sign +
                             "= y`: a Buffer is memory and computes nothing. Write to it: `x[...] " + sign + "= y`.";
    type.def(
        dunder(std::string("i") + name).c_str(),
        [text](nb::handle, nb::handle) -> nb::object { throw nb::type_error(text.c_str()); }, nb::arg("other").none());
  }
  for (const auto& [name, sign] : comparisons) refuse(name, std::string("x ") + sign + " y");
  for (const auto& [name, sign] : unary) {
    const std::string text = std::string("`") + sign + "`: a Buffer is memory and computes nothing. " + kAnArray;
    type.def(dunder(name).c_str(), [text](nb::handle) -> nb::object { throw nb::type_error(text.c_str()); });
  }
  type.def("__bool__", [](nb::handle) -> bool {
    throw nb::type_error("A Buffer is neither true nor false. Ask `x is None`, or the array over it, x[...].");
  });
  type.def("__iter__", [](nb::handle) -> nb::object {
    throw nb::type_error("A Buffer has no elements to iterate over. Iterate over the array over it, x[...].");
  });
}

// Numbers of Python, of a Buffer without axes: what it has is then used as an index, or by Python's own functions.
void bind_conversions(nb::class_<Buffer>& type) {
  constexpr std::pair<const char*, const char*> conversions[] = {
      {"__int__", "int"}, {"__index__", "int"}, {"__float__", "float"}, {"__complex__", "complex"}};
  for (const auto& [name, function] : conversions) {
    const bool is_index = std::string(name) == "__index__";
    type.def(name, [function = function, is_index](nb::handle_t<Buffer> self) {
      Buffer& buffer = lent(self);
      const std::string call = std::string(is_index ? "an index" : function) + ": ";
      if (buffer.ndim() != 0) {
        throw nb::type_error((call + "expected a Buffer without axes; got " +
                              type_text(buffer.numpy_dtype(), buffer.shape()) + ". " + kAnArray)
                                 .c_str());
      }
      nb::object number = buffer.numpy(self).attr("item")();
      if (is_index && !PyLong_Check(number.ptr())) {
        throw nb::type_error((call + "expected a Buffer of integers; got " +
                              type_text(buffer.numpy_dtype(), buffer.shape()) + ". Convert it: int(x).")
                                 .c_str());
      }
      return nb::module_::import_("builtins").attr(function)(number);
    });
  }
  type.def("__len__", [](nb::handle_t<Buffer> self) {
    const Buffer& buffer = lent(self);
    if (buffer.ndim() == 0) throw nb::type_error("len: a Buffer without axes has no length.");
    return buffer.dims()[0];
  });
  type.def("__getattr__", [](nb::handle self, const std::string& name) -> nb::object {
    std::string text = "'" + nb::cast<std::string>(self.type().attr("__name__")) + "' object has no attribute '" + name;
    text += nb::hasattr(import_numpy_module().attr("ndarray"), name.c_str()) ? std::string("'. ") + kAnArray : "'";
    throw nb::attribute_error(text.c_str());
  });
}

}  // namespace

void bind_items(nb::class_<Buffer>& type) {
  using Self = nb::handle_t<Buffer>;
  type.def(
          "__getitem__", [](Self self, nb::handle index) { return lent(self).get_item(self, index); },
          nb::arg("index").none())
      .def(
          "__setitem__", [](Self self, nb::handle index, nb::handle value) { lent(self).set_item(self, index, value); },
          nb::arg("index").none(), nb::arg("value").none())
      .def("write", [](Self self, nb::handle value) { lent(self).write(self, value); }, nb::arg("value").none());
  bind_refusals(type);
  bind_conversions(type);
}

}  // namespace eqxcallback
