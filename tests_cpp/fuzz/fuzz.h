// Fuzz tests of the parsers. Each target is a program with libFuzzer's entry points (fuzz.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>

namespace lltm_fuzz {

// SplitMix64: a seed produces the same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next();
  size_t below(size_t limit) { return next() % limit; }
  bool one_in(size_t n) { return below(n) == 0; }
  template <typename Choices>
  const auto& one_of(const Choices& choices) {
    return *(std::begin(choices) + below(std::size(choices)));
  }

 private:
  uint64_t state_;
};

std::string first_input(Random& random);

// libFuzzer also mutates bytes.
void mutate(std::string& input, Random& random);

// Begin and size of a random part of the input without the characters `ends`.
std::pair<size_t, size_t> part(const std::string& input, const char* ends, Random& random);

// Usually repairs fields whose errors would hide other mutations.
void repair(std::string& input, Random& random);

// Ends the process on an error.
void run(std::string_view input);

[[noreturn]] void fail(const std::string& reason);

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream reason;
  (reason << ... << parts);
  fail(reason.str());
}

// Bytes allocated since construction, including freed memory. 0 without the address sanitizer.
class Allocations {
 public:
  Allocations();
  uint64_t bytes() const;

 private:
  uint64_t before_;
};

// Requires a short message from the library in ASCII, without control characters.
void require_message(std::string_view message, std::string_view start);

}  // namespace lltm_fuzz

extern "C" {
int LLVMFuzzerInitialize(int* argc, char*** argv);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed);
// Defined by libFuzzer.
size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
}
