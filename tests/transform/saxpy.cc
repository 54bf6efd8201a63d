// Handlers as a user would write them, and some that no user should.
#include <cstdio>
#include <cstring>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using F32Result = ffi::ResultBuffer<ffi::F32>;

static ffi::Error saxpy(F32 x, F32 y, F32Result out, double a) {
  for (size_t i = 0; i < x.element_count(); ++i) {
    out->typed_data()[i] = static_cast<float>(a) * x.typed_data()[i] + y.typed_data()[i];
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Saxpy, saxpy, ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Attr<double>("a"));

// out = x * w, where w may lack the outermost axes of x; with `shared` it has one axis.
static ffi::Error scale_rows(F32 x, F32 w, F32Result out, bool shared) {
  const auto rank = w.dimensions().size();
  if (shared && rank != 1) return ffi::Error::InvalidArgument("ScaleRows got a batch of shared operands");
  for (size_t i = 0; i < rank; ++i) {
    if (w.dimensions()[i] != x.dimensions()[x.dimensions().size() - rank + i]) {
      return ffi::Error::InvalidArgument("ScaleRows got operands that do not fit");
    }
  }
  for (size_t i = 0; i < x.element_count(); ++i) {
    out->typed_data()[i] = x.typed_data()[i] * w.typed_data()[i % w.element_count()];
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(ScaleRows, scale_rows,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Attr<bool>("shared"));

// The sum and the difference.
static ffi::Error sum_and_difference(F32 x, F32 y, F32Result sum, F32Result difference) {
  for (size_t i = 0; i < x.element_count(); ++i) {
    sum->typed_data()[i] = x.typed_data()[i] + y.typed_data()[i];
    difference->typed_data()[i] = x.typed_data()[i] - y.typed_data()[i];
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(SumAndDifference, sum_and_difference,
                              ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>().Ret<F32>());

// x += y
static ffi::Error add_in_place(F32 x, F32 y, F32Result out) {
  if (x.untyped_data() != out->untyped_data()) return ffi::Error::Internal("AddInPlace got two arrays");
  for (size_t i = 0; i < x.element_count(); ++i) out->typed_data()[i] += y.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(AddInPlace, add_in_place, ffi::Ffi::Bind().Arg<F32>().Arg<F32>().Ret<F32>());

// Writes the type and value of the attribute `value` as text.
static ffi::Error describe(ffi::Dictionary attributes, ffi::ResultBuffer<ffi::U8> out) {
  std::string text = "unknown";
  if (auto flag = attributes.get<bool>("value"); flag.has_value()) text = *flag ? "bool true" : "bool false";
  if (auto number = attributes.get<int64_t>("value"); number.has_value()) text = "int64 " + std::to_string(*number);
  if (auto number = attributes.get<double>("value"); number.has_value()) {
    char digits[40];
    std::snprintf(digits, sizeof(digits), "double %.17g", *number);
    text = digits;
  }
  if (auto name = attributes.get<std::string_view>("value"); name.has_value()) text = "string " + std::string(*name);
  if (auto items = attributes.get<ffi::Span<const int64_t>>("value"); items.has_value()) {
    text = "span";
    for (int64_t item : *items) text += " " + std::to_string(item);
  }
  if (auto items = attributes.get<ffi::Span<const double>>("value"); items.has_value()) {
    text = "doubles";
    for (double item : *items) text += " " + std::to_string(item);
  }
  if (auto named = attributes.get<ffi::Dictionary>("value"); named.has_value()) {
    const auto count = named->get<int64_t>("count");
    const auto factors = named->get<ffi::Span<const double>>("factors");
    text = "dictionary " + std::to_string(named->size());
    if (count.has_value()) text += " count " + std::to_string(*count);
    if (factors.has_value()) text += " factors " + std::to_string(factors->size());
  }
  if (text.size() > out->element_count()) return ffi::Error::Internal("no room");
  std::memset(out->untyped_data(), 0, out->size_bytes());
  std::memcpy(out->untyped_data(), text.data(), text.size());
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Describe, describe, ffi::Ffi::Bind().Attrs().Ret<ffi::Buffer<ffi::U8>>());

static ffi::Error fail(F32, F32Result) { return ffi::Error::Internal("this kernel always fails"); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(Fail, fail, ffi::Ffi::Bind().Arg<F32>().Ret<F32>());

// Leaves its result as it finds it.
static ffi::Error leave(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(Leave, leave, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

// Saxpy, were it built with the headers of a later XLA.
static XLA_FFI_Error* of_version(XLA_FFI_CallFrame* frame, int major, int minor) {
  XLA_FFI_Error* error = Saxpy(frame);
  // Versions of JAX differ in the name of the base.
  auto* extension = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
  if (extension != nullptr && extension->extension_base.type == XLA_FFI_Extension_Metadata) {
    extension->metadata->api_version.major_version += major;
    extension->metadata->api_version.minor_version += minor;
  }
  return error;
}
extern "C" XLA_FFI_Error* NewerMinor(XLA_FFI_CallFrame* frame) { return of_version(frame, 0, 1000); }
extern "C" XLA_FFI_Error* NewerMajor(XLA_FFI_CallFrame* frame) { return of_version(frame, 1, 0); }

extern "C" int NotAHandler(void*) { return 0; }
