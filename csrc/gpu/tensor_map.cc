// Tensor maps: read from the numbers of a call, and encoded by the driver.
#include "gpu/tensor_map.h"

#include <cstring>

namespace eqxcallback::gpu {

TensorMap TensorMap::of(const int64_t* numbers) {
  TensorMap made;
  const auto take = [&numbers](auto& field) { field = static_cast<std::decay_t<decltype(field)>>(*numbers++); };
  const auto take_all = [&take](auto& fields) {
    for (auto& field : fields) take(field);
  };
  take(made.word), take(made.pointer), take(made.type), take(made.rank);
  take(made.interleave), take(made.swizzle), take(made.promotion), take(made.fill);
  take_all(made.dims), take_all(made.strides), take_all(made.box), take_all(made.element_strides);
  return made;
}

void TensorMap::encode(const Driver& driver, TensorMapEncodeTiled function, void* address, uint64_t* words) const {
  alignas(128) std::array<uint64_t, kWords> map{};
  if (address != nullptr && rank > 0) {
    check(driver,
          function(map.data(), type, rank, address, dims.data(), strides.data(), box.data(), element_strides.data(),
                   interleave, swizzle, promotion, fill),
          "cuTensorMapEncodeTiled");
  }
  std::memcpy(words, map.data(), sizeof(map));
}

}  // namespace eqxcallback::gpu
