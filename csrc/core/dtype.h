// The element types of XLA: NumPy name, width, DLPack code. This file needs no Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace eqxcallback {

// DLPack's type codes (DLDataTypeCode): numbers of a stable ABI.
enum class DLCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E3M4 = 7,
  kFloat8E4M3 = 8,
  kFloat8E4M3B11FNUZ = 9,
  kFloat8E4M3FN = 10,
  kFloat8E4M3FNUZ = 11,
  kFloat8E5M2 = 12,
  kFloat8E5M2FNUZ = 13,
  kFloat8E8M0FNU = 14,
  kFloat4E2M1FN = 17,
};

struct DType {
  XLA_FFI_DataType xla;
  const char* name;  // as NumPy, or else ml_dtypes, spells it
  uint8_t bits;      // of one element in XLA's memory
  DLCode dlpack;

  // Several elements share a byte; NumPy and ml_dtypes give each a byte of its own.
  constexpr bool packed() const { return bits < 8; }
  constexpr size_t bytes_for(size_t elements) const {
    return packed() ? (elements + 8 / bits - 1) / (8 / bits) : elements * (bits / 8);
  }
};

inline constexpr DType kDTypes[] = {
    {XLA_FFI_DataType_PRED, "bool", 8, DLCode::kBool},
    {XLA_FFI_DataType_S1, "int1", 1, DLCode::kInt},
    {XLA_FFI_DataType_S2, "int2", 2, DLCode::kInt},
    {XLA_FFI_DataType_S4, "int4", 4, DLCode::kInt},
    {XLA_FFI_DataType_S8, "int8", 8, DLCode::kInt},
    {XLA_FFI_DataType_S16, "int16", 16, DLCode::kInt},
    {XLA_FFI_DataType_S32, "int32", 32, DLCode::kInt},
    {XLA_FFI_DataType_S64, "int64", 64, DLCode::kInt},
    {XLA_FFI_DataType_U1, "uint1", 1, DLCode::kUInt},
    {XLA_FFI_DataType_U2, "uint2", 2, DLCode::kUInt},
    {XLA_FFI_DataType_U4, "uint4", 4, DLCode::kUInt},
    {XLA_FFI_DataType_U8, "uint8", 8, DLCode::kUInt},
    {XLA_FFI_DataType_U16, "uint16", 16, DLCode::kUInt},
    {XLA_FFI_DataType_U32, "uint32", 32, DLCode::kUInt},
    {XLA_FFI_DataType_U64, "uint64", 64, DLCode::kUInt},
    {XLA_FFI_DataType_F16, "float16", 16, DLCode::kFloat},
    {XLA_FFI_DataType_F32, "float32", 32, DLCode::kFloat},
    {XLA_FFI_DataType_F64, "float64", 64, DLCode::kFloat},
    {XLA_FFI_DataType_BF16, "bfloat16", 16, DLCode::kBfloat},
    {XLA_FFI_DataType_C64, "complex64", 64, DLCode::kComplex},
    {XLA_FFI_DataType_C128, "complex128", 128, DLCode::kComplex},
    {XLA_FFI_DataType_F8E3M4, "float8_e3m4", 8, DLCode::kFloat8E3M4},
    {XLA_FFI_DataType_F8E4M3, "float8_e4m3", 8, DLCode::kFloat8E4M3},
    {XLA_FFI_DataType_F8E4M3B11FNUZ, "float8_e4m3b11fnuz", 8, DLCode::kFloat8E4M3B11FNUZ},
    {XLA_FFI_DataType_F8E4M3FN, "float8_e4m3fn", 8, DLCode::kFloat8E4M3FN},
    {XLA_FFI_DataType_F8E4M3FNUZ, "float8_e4m3fnuz", 8, DLCode::kFloat8E4M3FNUZ},
    {XLA_FFI_DataType_F8E5M2, "float8_e5m2", 8, DLCode::kFloat8E5M2},
    {XLA_FFI_DataType_F8E5M2FNUZ, "float8_e5m2fnuz", 8, DLCode::kFloat8E5M2FNUZ},
    {XLA_FFI_DataType_F8E8M0FNU, "float8_e8m0fnu", 8, DLCode::kFloat8E8M0FNU},
    {XLA_FFI_DataType_F4E2M1FN, "float4_e2m1fn", 4, DLCode::kFloat4E2M1FN},
};
inline constexpr size_t kNumDTypes = sizeof(kDTypes) / sizeof(kDTypes[0]);

// Returns null for a type that no array has, such as a token, and for one that a newer XLA has added.
constexpr const DType* find_dtype(XLA_FFI_DataType type) {
  for (const DType& dtype : kDTypes) {
    if (dtype.xla == type) return &dtype;
  }
  return nullptr;
}

inline size_t elements_of(const int64_t* dims, int64_t rank) {
  size_t elements = 1;
  for (int64_t i = 0; i < rank; ++i) elements *= static_cast<size_t>(dims[i]);
  return elements;
}

// The bytes of an array; 0 for a type that no array has.
inline size_t bytes_of(const XLA_FFI_Buffer& buffer) {
  const DType* dtype = find_dtype(buffer.dtype);
  return dtype == nullptr ? 0 : dtype->bytes_for(elements_of(buffer.dims, buffer.rank));
}

}  // namespace eqxcallback
