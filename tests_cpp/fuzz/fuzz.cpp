// libFuzzer entry points and code shared by the targets.
#include "fuzz.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>

extern "C" {
// From the address sanitizer, if linked.
__attribute__((weak)) int __sanitizer_install_malloc_and_free_hooks(
    void (*allocated)(const volatile void*, size_t), void (*freed)(const volatile void*));

// Ignores leaks, because libtorch never frees its registries. The other options save time: rerun an
// input with the defaults for allocation stacks. The quarantine still outlasts an input.
const char* __asan_default_options() {
  return "detect_leaks=0:malloc_context_size=1:quarantine_size_mb=2";
}
const char* __ubsan_default_options() {
  return "print_stacktrace=1";
}
}

namespace lltm_fuzz {
namespace {

uint64_t allocated_bytes = 0;

}  // namespace

uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

std::pair<size_t, size_t> part(const std::string& input, const char* ends, Random& random) {
  const size_t at = input.find_last_of(ends, random.below(input.size() + 1));
  const size_t begin = at == std::string::npos ? 0 : at + 1;
  return {begin, std::min(input.find_first_of(ends, begin), input.size()) - begin};
}

void fail(const std::string& reason) {
  std::cerr << "FAILED: " << reason << std::endl;
  std::abort();
}

Allocations::Allocations() : before_(allocated_bytes) {}

uint64_t Allocations::bytes() const {
  return allocated_bytes - before_;
}

void require_message(std::string_view message, std::string_view start) {
  constexpr size_t kLongest = 10'000;
  require(message.starts_with(start), "expected an error '", start, "...', got: ", message);
  require(message.size() <= kLongest, "an error of ", message.size(), " bytes: ", message);
  const auto is_text = [](char c) { return c == '\n' || (c >= ' ' && c <= '~'); };
  require(std::ranges::all_of(message, is_text), "an error that is not ASCII: ", message);
}

}  // namespace lltm_fuzz

int LLVMFuzzerInitialize(int*, char***) {
  at::set_num_threads(1);
  if (__sanitizer_install_malloc_and_free_hooks != nullptr) {
    __sanitizer_install_malloc_and_free_hooks(
        [](const volatile void*, size_t bytes) { lltm_fuzz::allocated_bytes += bytes; },
        [](const volatile void*) {});
  }
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  lltm_fuzz::run({reinterpret_cast<const char*>(data), size});
  return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
  lltm_fuzz::Random random(seed);
  std::string input(reinterpret_cast<const char*>(data), size);
  // libFuzzer starts with a single byte or none.
  if (size <= 1 || random.one_in(50)) {
    input = lltm_fuzz::first_input(random);
  } else {
    for (size_t changes = 1 + random.below(3); changes > 0; --changes) {
      if (random.one_in(3)) {
        input.resize(std::max(input.size(), max_size));
        size_t changed = std::min(size, max_size);
        changed = LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(input.data()), changed, max_size);
        input.resize(changed);
      } else {
        lltm_fuzz::mutate(input, random);
      }
      size = input.size();
    }
    lltm_fuzz::repair(input, random);
  }
  input.resize(std::min(input.size(), max_size));
  std::memcpy(data, input.data(), input.size());
  return input.size();
}
