// What a call of matrix_product needs beside its result.
#pragma once

#include <cstdint>

namespace eqxcallback {

// The bytes of its second result.
int64_t matrix_product_bytes(bool is_f32, int64_t rows, int64_t columns, int64_t size, bool a_has_columns,
                             bool b_has_columns);

}  // namespace eqxcallback
