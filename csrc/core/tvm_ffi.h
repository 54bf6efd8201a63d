// The structures of a call in the TVM-FFI ABI, and DLPack's tensors, which such calls take. Layouts and numbers are
// those of a stable ABI: tests/tvm_ffi/ compares them with the headers of apache-tvm-ffi.
#pragma once

#include <cstddef>
#include <cstdint>

namespace eqxcallback::tvm_ffi {

struct Device {  // DLDevice
  static constexpr int32_t kCpu = 1, kCuda = 2;
  int32_t type, id;
};

struct DataType {  // DLDataType
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {  // DLTensor
  void* data;
  Device device;
  int32_t rank;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

// TVMFFITypeIndex: the kind of a value. Objects, which count their references, have the last number or a higher one.
enum Type : int32_t {
  kNone = 0,
  kInteger = 1,
  kBool = 2,
  kFloat = 3,
  kPointer = 4,
  kTensor = 7,
  kText = 8,
  kFirstObject = 64
};

struct Value {  // TVMFFIAny
  int32_t type;
  uint32_t padding;  // zero
  union {
    int64_t integer;
    double floating;
    void* pointer;
    const char* text;
  };
};

struct Object {  // TVMFFIObject
  uint64_t references;
  int32_t type;
  uint32_t padding;
  void (*deleter)(void* self, int flags);
};

// Returns zero, or another number if the function has raised an error.
using SafeCall = int (*)(void* handle, const Value* args, int32_t count, Value* result);

struct Function {  // TVMFFIObject, and the beginning of a TVMFFIFunctionCell
  Object header;
  SafeCall call;
};

struct Bytes {  // TVMFFIByteArray
  const char* data;
  size_t size;
};

struct Error {  // TVMFFIObject, and the beginning of a TVMFFIErrorCell
  Object header;
  Bytes kind, message;
};

// Functions of libtvm_ffi.
struct Runtime {
  void (*move_raised)(void** error);                                                    // TVMFFIErrorMoveFromRaised
  int (*release)(void* object);                                                         // TVMFFIObjectDecRef
  int (*set_stream)(int32_t device_type, int32_t device, void* stream, void** before);  // TVMFFIEnvSetStream
};

}  // namespace eqxcallback::tvm_ffi
