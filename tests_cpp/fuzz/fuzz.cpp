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
  for (size_t k = 0; k < message.size();) {
    const auto byte = [&](size_t at) -> unsigned {
      return at < message.size() ? static_cast<unsigned char>(message[at]) : 0;
    };
    const unsigned first = byte(k);
    const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    unsigned code = length == 1 ? first : first & (0xff >> (length + 1));
    bool valid = first < 0x80 || (first >= 0xc2 && first < 0xf5);
    for (size_t j = 1; j < length; ++j) {
      valid = valid && (byte(k + j) & 0xc0) == 0x80;
      code = code << 6 | (byte(k + j) & 0x3f);
    }
    require(valid, "an error that is not UTF-8 at byte ", k, ": ", message);
    const bool control = (code < 0x20 && code != '\n') || (code >= 0x7f && code < 0xa0);
    require(!control, "an error with control character ", code, ": ", message);
    k += length;
  }
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
