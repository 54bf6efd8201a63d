// What the fake driver, which includes this in its middle, has for GPUs since Hopper: launches with attributes, and
// tensor maps. It refuses what CUDA's driver refuses, and its tensor maps say what they were made of.
#pragma once

namespace {

// As in cuda.h, but for the parts of the union that are not used.
struct Attribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    unsigned dims[3];
    int number;
  };
};
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "the sizes in cuda.h");

// Of a tensor map, in its first 8 bytes; and the address that it is made for in the next 8.
constexpr uint64_t kMap = 0x70616d2061206d61;
constexpr int kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
constexpr unsigned kSwizzled[] = {~0u, 32, 64, 128, 128, 128, 128};

// 0 if the blocks may be scheduled in such clusters.
int refused(const Function& function, const unsigned (&grid)[3], const unsigned (&cluster)[3]) {
  const unsigned size = cluster[0] * cluster[1] * cluster[2];
  if (size == 0 || size > (function.large_clusters ? 16 : 8)) return kInvalidClusterSize;
  for (int i = 0; i < 3; ++i) {
    if (grid[i] % cluster[i] != 0) return kInvalidValue;
  }
  return 0;
}

}  // namespace

API int cuLaunchKernelEx(const Config* config, Function* function, void** parameters, void**) {
  CALLED("cuLaunchKernelEx");
  std::map<int, std::string> found;
  bool cooperative = false;
  for (unsigned i = 0; i < config->count; ++i) {
    const Attribute& attribute = config->attributes[i];
    char text[64];
    switch (attribute.id) {
      case 2:
        cooperative = attribute.number != 0;
        std::snprintf(text, sizeof(text), " cooperative=%d", attribute.number);
        break;
      case 4:
        if (const int code = refused(*function, config->grid, attribute.dims); code != 0) return code;
        std::snprintf(text, sizeof(text), " cluster=(%u,%u,%u)", attribute.dims[0], attribute.dims[1],
                      attribute.dims[2]);
        break;
      case 5:
        std::snprintf(text, sizeof(text), " policy=%d", attribute.number);
        break;
      case 6:
        std::snprintf(text, sizeof(text), " programmatic=%d", attribute.number);
        break;
      default:
        return kInvalidValue;
    }
    if (!found.emplace(attribute.id, text).second) return kInvalidValue;
  }
  std::string attributes;
  for (const auto& [id, text] : found) attributes += text;
  return launch("cuLaunchKernelEx", function, config->grid, config->block, config->shared_bytes, config->stream,
                parameters, attributes, cooperative);
}

API int cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* address, const uint64_t* dims,
                               const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                               int interleave, int swizzle, int promotion, int fill) {
  CALLED("cuTensorMapEncodeTiled");
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0 || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    return kInvalidValue;
  }
  if (type < 0 || type > 12 || rank < 1 || rank > 5 || swizzle < 0 || swizzle > 6) return kInvalidValue;
  const auto bytes = static_cast<unsigned>(kElementBytes[type]);
  if (box[0] * bytes % 16 != 0 || box[0] * bytes > kSwizzled[swizzle]) return kInvalidValue;
  std::string text = "type=" + std::to_string(type) + " dims=";
  for (unsigned i = 0; i < rank; ++i) {
    if (dims[i] == 0 || dims[i] > (uint64_t{1} << 32) || box[i] == 0 || box[i] > 256) return kInvalidValue;
    if (element_strides[i] == 0 || element_strides[i] > 8) return kInvalidValue;
    text += std::to_string(dims[i]) + ",";
  }
  text += " strides=";
  for (unsigned i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40) return kInvalidValue;
    text += std::to_string(strides[i]) + ",";
  }
  text += " box=";
  for (unsigned i = 0; i < rank; ++i) text += std::to_string(box[i]) + ",";
  text += " element_strides=";
  for (unsigned i = 0; i < rank; ++i) text += std::to_string(element_strides[i]) + ",";
  record("cuTensorMapEncodeTiled %s interleave=%d swizzle=%d promotion=%d fill=%d", text.c_str(), interleave, swizzle,
         promotion, fill);
  std::memset(map, 0, 128);
  map[0] = kMap;
  map[1] = reinterpret_cast<uintptr_t>(address);
  return 0;
}
