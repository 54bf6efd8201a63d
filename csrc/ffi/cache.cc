// The handler that appends to a cache.
#include <cstring>

#include "core/dtype.h"
#include "ffi/cpu_call.h"

namespace eqxcallback {
namespace {

// -- cache_append: cache [*batch, length, *row] in place, rows [*batch, count, *row], position s32 [*batch]

ffi::Error cache_append(ffi::AnyBuffer cache, ffi::AnyBuffer rows, ffi::AnyBuffer position, Out out, int64_t row_rank) {
  return guarded([&] {
    constexpr const char* op = "cache_append";
    REQUIRE(row_rank >= 0, op, "row_rank of 0 or more");
    const auto core = static_cast<size_t>(row_rank) + 1;
    const Shape to(op, "cache", cache, core), from(op, "rows", rows, core), start(op, "position", position, 0);
    REQUIRE(same_shape(cache, *out) && cache.element_type() == out->element_type(), op,
            "a result of the type of cache");
    REQUIRE(cache.element_type() == rows.element_type() && from.same_batch(to) &&
                std::equal(to.dims.end() - row_rank, to.dims.end(), from.dims.end() - row_rank) && from[0] <= to[0],
            op,
            "rows that fit into the cache of shape " + text(cache.dimensions()) + "; got " + text(rows.dimensions()));
    require_type(op, "position", position, ffi::DataType::S32, "int32");
    REQUIRE(start.shared_by(to), op, "a position for each cache; got the shape " + text(position.dimensions()));
    if (out->element_count() == 0) return;
    const DType* dtype = find_dtype(static_cast<XLA_FFI_DataType>(cache.element_type()));
    REQUIRE(dtype != nullptr && !dtype->packed(), op, "elements of whole bytes");
    // XLA has put the operand where the result is, and copied it first if anything else still needs it.
    REQUIRE(cache.untyped_data() == out->untyped_data(), op, "the result in the memory of the cache");
    const int64_t row_bytes = static_cast<int64_t>(cache.size_bytes()) / (to.batch() * to[0]);
    const auto bytes = static_cast<size_t>(from[0] * row_bytes);
    for (int64_t b = 0; b < to.batch(); ++b) {
      const int64_t wanted = position.typed_data<int32_t>()[b % start.batch()];
      const int64_t first = std::min(std::max<int64_t>(wanted, 0), to[0] - from[0]);
      std::memcpy(static_cast<char*>(out->untyped_data()) + (b * to[0] + first) * row_bytes,
                  static_cast<const char*>(rows.untyped_data()) + b * from[0] * row_bytes, bytes);
    }
  });
}

EQXCALLBACK_CPU_KERNEL(cache_append, cache_append,
                       ffi::Ffi::Bind()
                           .Arg<ffi::AnyBuffer>()  // cache
                           .Arg<ffi::AnyBuffer>()  // rows
                           .Arg<ffi::AnyBuffer>()  // position
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("row_rank"));

}  // namespace
}  // namespace eqxcallback
