// Handle: a Python callable that compiled programs can call, under a key that their text carries.
//
// Contract: a key belongs to one living Handle. Programs own the Handle (JAX keeps it with the executable), so a key is
// free again only when no program that has it can run. Everything in this file needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "python/buffer.h"
#include "python/context.h"

namespace eqxcallback {

// The Python objects of one call. A Handle keeps idle frames: objects that no one else holds are lent again next time.
class Frame {
 public:
  Frame(size_t num_outputs, size_t num_inputs);
  // A frame of Buffers that a caller in Python has.
  Frame(nb::object context, nb::tuple outputs, nb::tuple inputs);

  // The Buffer of slot i, to be lent: outputs first, then inputs. A fresh one if anyone else holds the old one. Valid
  // until release().
  Buffer& buffer(size_t i);
  // The Buffer of slot i as it was lent.
  Buffer& lent(size_t i) const { return *nb::inst_ptr<Buffer>(buffers_[i]); }
  ExecutionContext& context();

  size_t num_outputs() const { return num_outputs_; }
  size_t size() const { return buffers_.size(); }
  nb::handle context_object() const { return context_; }
  nb::handle buffer_object(size_t i) const { return buffers_[i]; }
  nb::tuple outputs() const { return slice(0, num_outputs_); }
  nb::tuple inputs() const { return slice(num_outputs_, size()); }

  void release(bool commit) noexcept;

  // True for an output that only the kernel writes: an output that overwrites an input holds the input. On a CPU alone:
  // on a GPU a comparison would wait for the device, which is not allowed while a command buffer is recorded.
  bool is_watched(size_t output) const;
  // A hash of the outputs that are watched.
  uint64_t watched() const;
  // A hash of all shapes and dtypes, and of the platform.
  uint64_t types() const;
  // True if a call on these types has written all outputs that were watched. Decided anew when a type changes.
  bool is_proven(uint64_t watched) const { return proven_ == watched; }
  void set_proven(std::optional<uint64_t> watched) { proven_ = watched; }

 private:
  nb::tuple slice(size_t begin, size_t end) const;

  std::optional<uint64_t> proven_;
  size_t num_outputs_;
  nb::object context_;
  std::vector<nb::object> buffers_;
};

class Handle {
 public:
  // `body(ctx, outputs, inputs)` gets two tuples of Buffers. With `direct`, there is one output and the call is
  // `body(ctx, output, *inputs)`, which spares the tuples. `owner` is any object that should live as long as the
  // Handle.
  Handle(uint64_t key, nb::object body, nb::object owner, bool direct);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Returns the Python object that has the key, to be held while it runs; invalid if there is none.
  static nb::object find(uint64_t key);

  uint64_t key() const { return key_; }
  nb::object& body() { return body_; }
  nb::object& owner() { return owner_; }

  // Takes a frame with so many slots, to be given back by release().
  std::unique_ptr<Frame> take_frame(size_t num_outputs, size_t num_inputs);
  void give_back(std::unique_ptr<Frame> frame);

  // Calls the body. Raises nb::python_error if the body raises, and if the first call on given types leaves elements of
  // an output unwritten.
  void call(Frame& frame);

 private:
  void run(const Frame& frame);
  bool run_watched(const Frame& frame);

  uint64_t key_;
  nb::object body_;
  nb::object owner_;
  bool direct_;
  std::vector<std::unique_ptr<Frame>> idle_;
  std::unordered_set<uint64_t> proven_;  // types on which a call has written all outputs that were watched
};

// Calls the Python function that was set with `_ext.on_failure`, which records the exception and returns the text for
// XLA. `kernel` is the body of a Handle, or the name of a native kernel.
std::string report_failure(nb::handle kernel, nb::python_error& error, const Frame& frame,
                           const std::string& name_stack);

// Calls the Python function that was set with `_ext.on_unknown_key`, which makes a Handle with the key from the text of
// an exported program. Returns what went wrong, or an empty text.
std::string import_portable(uint64_t key, const std::string& text);

// Binds the hooks that Python sets: `_ext.on_failure`, `_ext.on_unknown_key`, `_ext.on_unwritten`, which returns what
// to raise for a call that left elements unwritten, if anything, and `_ext.set_checked_call`, through which calls go in
// checked mode.
void bind_handle(nb::module_& m);

}  // namespace eqxcallback
