// The measurement, and the file that remembers it. The file is in EQXCALLBACK_CACHE_DIR, or in `eqxcallback` among the
// user's caches, as backends/_cache.py has it. Its name has the processor and this package's version. It has a line for
// each family: the name, the table, and the microseconds of both. A process that cannot write it measures each time.
#include "cpu/measured.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace eqxcallback::cpu {
namespace {

using Families = decltype(Mixed::families);

// The sizes fit into the first cache, as tables do not differ in how they read memory.
constexpr int64_t kQueries = 64, kKeys = 256, kSize = 64;

struct Arrays {
  std::vector<Bf16> a, b, c, d, e, f, g;
  std::vector<float> lse;

  Arrays() : lse(kQueries) {
    for (auto* operand : {&a, &b, &c, &d, &e, &f, &g}) {
      operand->resize(kKeys * kSize);
      for (size_t i = 0; i < operand->size(); ++i)
        from_float(static_cast<float>(i * 37 % 101) / 101 - 0.5f, (*operand)[i]);
    }
  }

  Attention attention() {
    Attention call{};
    call.out = a.data(), call.q = b.data(), call.k = c.data(), call.v = d.data(), call.lse = lse.data();
    call.batch = call.kv_batch = call.heads = call.kv_heads = 1;
    call.q_length = kQueries, call.kv_length = kKeys, call.head_size = kSize, call.scale = 0.125f;
    return call;
  }
};

const Executor kAlone = {nullptr, [](void*) { return int64_t{1}; },
                         [](void*, int64_t tasks, Executor::Task task, void* state) {
                           for (int64_t i = 0; i < tasks; ++i) task(state, i);
                         }};

struct Family {
  const char* name;
  void (*call)(const Kernels&, Arrays&);
  void (*take)(Kernels& to, const Kernels& from);
};

constexpr Family kFamilies[] = {
    {"attention", [](const Kernels& kernels, Arrays& x) { kernels.attention(Element::kBf16, x.attention(), kAlone); },
     [](Kernels& to, const Kernels& from) { to.attention = from.attention; }},
    {"attention_backward",
     [](const Kernels& kernels, Arrays& x) {
       AttentionBackward call{};
       call.call = x.attention();
       call.cotangent = x.b.data(), call.dq = x.e.data(), call.dk = x.f.data(), call.dv = x.g.data();
       kernels.attention_backward(Element::kBf16, call, kAlone);
     },
     [](Kernels& to, const Kernels& from) { to.attention_backward = from.attention_backward; }},
    {"linear",
     [](const Kernels& kernels, Arrays& x) {
       const Linear call{x.a.data(), x.b.data(), x.c.data(), nullptr, 1, kKeys, kSize};
       for (int i = 0; i < 8; ++i) kernels.linear(Element::kBf16, call, kAlone);
     },
     [](Kernels& to, const Kernels& from) { to.linear = from.linear, to.decode_attention = from.decode_attention; }},
    // Also says whether XLA multiplies matrices of bf16 by these instructions: see xla/calls/_product.py.
    {"linear_rows",
     [](const Kernels& kernels, Arrays& x) {
       kernels.linear_rows(Element::kBf16, {x.a.data(), x.b.data(), x.c.data(), nullptr, 16, kKeys, kSize}, kAlone);
     },
     [](Kernels& to, const Kernels& from) {
       to.linear_rows = from.linear_rows;
       to.matrix_product = from.matrix_product, to.product_bytes = from.product_bytes;
     }},
};

// Returns the microseconds of a family in each table.
std::vector<double> measured(const Family& family, const std::vector<Table>& tables) {
  Arrays arrays;
  std::vector<double> best(tables.size(), 1e9);
  for (int i = 0; i < 9; ++i) {
    for (size_t t = 0; t < tables.size(); ++t) {
      const auto start = std::chrono::steady_clock::now();
      family.call(*tables[t].kernels, arrays);
      const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
      best[t] = std::min(best[t], took.count());
    }
  }
  return best;
}

std::string processor() {
#if defined(__APPLE__)
  char name[256] = {};
  size_t size = sizeof(name) - 1;
  return sysctlbyname("machdep.cpu.brand_string", name, &size, nullptr, 0) == 0 ? name : "";
#else
  std::ifstream file("/proc/cpuinfo");
  std::string line, values;
  // Lines of the first processor: names on x86, numbers on ARM.
  while (std::getline(file, line) && !line.empty()) {
    for (const char* key : {"vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part"}) {
      if (line.rfind(key, 0) == 0) values += line.substr(std::min(line.find(':'), line.size() - 1) + 1);
    }
  }
  return values;
#endif
}

std::filesystem::path cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  if (const auto chosen = variable("EQXCALLBACK_CACHE_DIR"); !chosen.empty()) return chosen;
  if (const auto caches = variable("XDG_CACHE_HOME"); !caches.empty()) return caches / "eqxcallback";
  const auto home = variable("HOME");
  return home.empty() ? home : home / ".cache" / "eqxcallback";
}

std::filesystem::path file_of(const std::vector<Table>& tables) {
  std::string name = "bf16-";
  for (const Table& table : tables) name += table.name + "-";
  name += EQXCALLBACK_VERSION "-" + processor();
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '_') c = '-';
  }
  const auto folder = cache_folder();
  return folder.empty() ? folder : folder / name;
}

const Table* find(const std::vector<Table>& tables, const std::string& name) {
  const auto found = std::find_if(tables.begin(), tables.end(), [&](const Table& table) { return table.name == name; });
  return found == tables.end() ? nullptr : &*found;
}

// Returns nothing unless the file has all families in order, each with one of these tables.
std::optional<Families> remembered(const std::filesystem::path& path, const std::vector<Table>& tables) {
  std::ifstream file(path);
  Families families;
  for (std::string line; std::getline(file, line);) {
    std::string family, table;
    if (!(std::istringstream(line) >> family >> table)) return std::nullopt;
    if (families.size() == std::size(kFamilies) || family != kFamilies[families.size()].name) return std::nullopt;
    if (find(tables, table) == nullptr) return std::nullopt;
    families.emplace_back(family, table);
  }
  return families.size() == std::size(kFamilies) ? std::optional(families) : std::nullopt;
}

// Writes the file so that other processes see it whole or not at all.
void remember(const std::filesystem::path& path, const std::string& text) {
  std::error_code failed;
  std::filesystem::create_directories(path.parent_path(), failed);
  const std::filesystem::path unfinished = path.string() + ".new-" + std::to_string(getpid());
  if (std::ofstream(unfinished) << text) std::filesystem::rename(unfinished, path, failed);
}

}  // namespace

Mixed fastest_of(const std::vector<Table>& tables) {
  const auto path = file_of(tables);
  auto families = remembered(path, tables);
  if (!families) {
    families.emplace();
    std::ostringstream text;
    for (const Family& family : kFamilies) {
      const std::vector<double> took = measured(family, tables);
      size_t chosen = 0;
      for (size_t i = 1; i < tables.size(); ++i) {
        // Times differ by a few percent by chance.
        if (took[i] < 0.95 * took[chosen]) chosen = i;
      }
      families->emplace_back(family.name, tables[chosen].name);
      text << family.name << ' ' << tables[chosen].name;
      for (const double microseconds : took) text << ' ' << microseconds;
      text << '\n';
    }
    if (!path.empty()) remember(path, text.str());
  }
  Mixed mixed{*tables[0].kernels, *families, path.string()};
  for (size_t i = 0; i < families->size(); ++i) {
    kFamilies[i].take(mixed.kernels, *find(tables, (*families)[i].second)->kernels);
  }
  return mixed;
}

}  // namespace eqxcallback::cpu
