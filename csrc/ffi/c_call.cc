// The handler of plain C functions. Their parameters are an attribute of the call: four numbers for each, which Python
// has made of names.
#include "ffi/c_call.h"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/plain_call.h"
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

thread_local const void* called_function = nullptr;

// Kinds of parameters, as backends/_c.py writes them.
enum Kind : int64_t { kPointer = 0, kInteger = 1, kFloat = 2 };

struct Parameter {
  int64_t kind;
  int64_t buffer;  // of a pointer: the number of its operand or result, the results after the operands; -1 for null
  int64_t by_row;  // of a pointer: the bytes of a row, zero if all rows share it; of a number: whether it counts rows
  int64_t value;   // of a number: its bits, or what it is for each row
};
constexpr size_t kNumbers = 4;

Parameter parameter_at(ffi::Span<const int64_t> numbers, size_t i) {
  return {numbers[i * kNumbers], numbers[i * kNumbers + 1], numbers[i * kNumbers + 2], numbers[i * kNumbers + 3]};
}

// Returns the text of a status from lines such as `3=the matrix is singular`.
std::string text_of_status(std::string_view texts, int status) {
  const std::string name = std::to_string(status) + "=";
  while (!texts.empty()) {
    const std::string_view line = texts.substr(0, texts.find('\n'));
    if (line.substr(0, name.size()) == name) return ": " + std::string(line.substr(name.size()));
    texts.remove_prefix(std::min(line.size() + 1, texts.size()));
  }
  return "";
}

// Functions in the code that programs bring along, by the number of the code: backends/_object_code.py loads them.
class LoadedCode {
 public:
  void set(int64_t number, const void* function) {
    const std::unique_lock lock(mutex_);
    functions_[number] = function;
  }
  // Returns the function, or null.
  const void* get(int64_t number) {
    thread_local int64_t last = 0;
    thread_local const void* function = nullptr;
    if (last != number || function == nullptr) {
      const std::shared_lock lock(mutex_);
      const auto place = functions_.find(number);
      function = place == functions_.end() ? nullptr : place->second;
      last = number;
    }
    return function;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<int64_t, const void*> functions_;
};

LoadedCode& loaded_code() {
  static auto* code = new LoadedCode();
  return *code;
}

const void* function_of_call(int64_t address, int64_t process, bool is_code) {
  if (address == 0) return called_function;
  if (is_code) {
    const void* function = loaded_code().get(address);
    if (function == nullptr) {
      throw std::invalid_argument(
          "this process has not loaded the program's code; call eqxcallback.load of the program");
    }
    return function;
  }
  if (process != this_process()) {
    throw std::invalid_argument(
        "the program has the address of a function of another process; make it again in this one");
  }
  return reinterpret_cast<const void*>(address);
}

// Calls a C function. `address`, if it is not zero, is the function's address in the process `process`, or if the
// program brings `code` along, the number of the code.
ffi::Error c_call(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Span<const int64_t> parameters, int64_t rows, bool returns_status, std::string_view statuses,
                  int64_t address, int64_t process, std::string_view code) {
  return guarded([&] {
    const void* const function = function_of_call(address, process, !code.empty());
    if (function == nullptr || parameters.size() % kNumbers != 0) {
      throw std::invalid_argument("expected to be called by eqxcallback");
    }
    const auto count = static_cast<int64_t>(args.size() + rets.size());
    const auto data = [&](int64_t buffer) -> char* {
      if (buffer >= count) throw std::invalid_argument("expected as many operands and results as parameters name");
      const auto i = static_cast<size_t>(buffer);
      return static_cast<char*>(i < args.size() ? args.get<ffi::AnyBuffer>(i)->untyped_data()
                                                : (*rets.get<ffi::AnyBuffer>(i - args.size()))->untyped_data());
    };
    const auto call = [&](int64_t begin, int64_t end) {
      PlainCall plain;
      for (size_t i = 0; i < parameters.size() / kNumbers; ++i) {
        const Parameter p = parameter_at(parameters, i);
        if (p.kind == kPointer) {
          plain.add_pointer(p.buffer < 0 ? nullptr : data(p.buffer) + begin * p.by_row);
        } else if (p.kind == kFloat) {
          plain.add_float(static_cast<uint64_t>(p.value));
        } else {
          plain.add_integer(static_cast<uint64_t>(p.by_row != 0 ? p.value * (end - begin) : p.value));
        }
      }
      if (const int status = plain(function); returns_status && status != 0) {
        throw std::runtime_error("it returned " + std::to_string(status) + text_of_status(statuses, status));
      }
    };
    if (rows < 0) {
      call(0, 0);
      return;
    }
    const cpu::Executor executor = executor_on(pool);
    const int64_t ranges = std::min(rows, std::max<int64_t>(executor.threads(executor.pool), 1));
    if (ranges <= 1) {
      if (rows > 0) call(0, rows);
      return;
    }
    struct State {
      const decltype(call)& range;
      int64_t rows, ranges;
    } state{call, rows, ranges};
    executor.run(
        executor.pool, ranges,
        [](void* of, int64_t i) {
          const State& s = *static_cast<State*>(of);
          s.range(i * s.rows / s.ranges, (i + 1) * s.rows / s.ranges);
        },
        &state);
  });
}

XLA_FFI_DEFINE_HANDLER(kHandler, c_call,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<ffi::Span<const int64_t>>("parameters")
                           .Attr<int64_t>("rows")
                           .Attr<bool>("returns_status")
                           .Attr<std::string_view>("statuses")
                           .Attr<int64_t>("address")
                           .Attr<int64_t>("process")
                           .Attr<std::string_view>("eqxcallback_code"));

}  // namespace

CalledFunction::CalledFunction(const void* function) : before_(called_function) { called_function = function; }
CalledFunction::~CalledFunction() { called_function = before_; }
const void* CalledFunction::get() { return called_function; }

int64_t this_process() {
  static const int64_t number = [] {
    std::random_device source;
    return static_cast<int64_t>((uint64_t{source()} << 31 ^ source()) & INT64_MAX);
  }();
  return number;
}

void bind_c_call(nanobind::module_& m) {
  m.def("c_call_handler", [] { return reinterpret_cast<uintptr_t>(static_cast<XLA_FFI_Handler*>(kHandler)); });
  m.attr("c_call_process") = this_process();
  m.def("set_loaded_code",
        [](int64_t number, uintptr_t function) { loaded_code().set(number, reinterpret_cast<const void*>(function)); });
  m.attr("registers_and_stack") = nanobind::make_tuple(PlainCall::kIntegers, PlainCall::kFloats,
                                                       PlainCall::kIsKnown ? static_cast<int>(PlainCall::kStack) : -1);
}

}  // namespace eqxcallback
