// The launcher from many threads at once, on several devices of a fake driver, in plain C++.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "gpu/launch.h"

using namespace eqxcallback::gpu;

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

std::shared_ptr<Launch> make(const std::string& image, unsigned grid = 2, unsigned shared_bytes = 64 << 10) {
  std::vector<Step> steps;
  for (const char* entry : {"first", "second"}) {
    steps.push_back({Image::of(image), entry, {grid, 1, 1}, {32, 1, 1}, shared_bytes});
  }
  return std::make_shared<Launch>(std::move(steps), Values{{7, 8}, {0, 1}});
}

// With attributes, and with values that depend on addresses: each run has its own.
std::shared_ptr<Launch> make_for_hopper() {
  std::vector<Step> steps;
  for (const size_t scratch : {0, 128}) {
    steps.push_back(
        {Image::of("image 42 hopper"), "entry", {16, 1, 1}, {32, 1, 1}, 0, {{16, 1, 1}, true, true, true}, scratch});
  }
  TensorMap map{2, 39, 7, 2, 0, 0, 0, 0, {64, 8, 1, 1, 1}, {256, 1, 1, 1}, {32, 8, 1, 1, 1}, {1, 1, 1, 1, 1}};
  return std::make_shared<Launch>(std::move(steps),
                                  Values{std::vector<uint64_t>(20), {0, 1}, {}, {{18, 39}}, {map}, 1});
}

void launch_on(int device, Launch& launch) {
  deactivate(driver());
  alignas(16) char array[32];
  void* pointers[40] = {};
  pointers[39] = array;
  launch.run(device, nullptr, pointers, 40, array + 16);
}

}  // namespace

int main(int, char** arguments) {
  set_driver(arguments[1]);
  require(driver_version() == 13000, "the version of the fake driver");
  {
    // Whoever is loaded last, the one with more shared memory still has it.
    const auto one = make("image 42 one"), other = make("image 42 one", 2, 96 << 10), hopper = make_for_hopper();
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        for (int k = 0; k < 50; ++k) {
          launch_on((i + k) % 4, k % 2 == 0 ? *one : *other);
          launch_on((i + k) % 4, *hopper);
          launch_on(i % 4, *make("image 42 of thread " + std::to_string(i)));  // loaded and unloaded each time
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  {
    const auto empty = make("image 42 empty", 0);
    launch_on(0, *empty);
  }
  try {
    launch_on(99, *make("image 42 no device"));
    require(false, "an error for a device that is not there");
  } catch (const DriverError& error) {
    require(std::string(error.what()).find("cuDevicePrimaryCtxRetain") != std::string::npos, "its text");
  }
  set_driver("/nowhere.so");
  try {
    driver();
    require(false, "an error without a driver");
  } catch (const std::runtime_error& error) {
    require(std::string(error.what()).find("there is no CUDA driver") == 0, "its text");
  }
  std::puts("ok");
}
