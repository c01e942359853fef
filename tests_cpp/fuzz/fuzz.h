// Fuzzing of what reads bytes. Each target is a program of its own with the entry
// points of libFuzzer (fuzz.cpp), which drives it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <typeinfo>

namespace lltm_fuzz {

// SplitMix64: a seed gives the same numbers everywhere.
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

// ---- what a target defines --------------------------------------------------

// An input to begin with.
std::string first_input(Random& random);

// Changes an input as its format suggests; changes of single bytes come on top.
void mutate(std::string& input, Random& random);

// Makes right again what would hide all other changes, most of the time.
void repair(std::string& input, Random& random);

// Runs the library on an input. Whatever is wrong ends the process.
void run(std::string_view input);

// ---- what targets share -----------------------------------------------------

// Inputs that the library has taken, and has refused.
inline uint64_t taken = 0;
inline uint64_t refused = 0;

// Exit status of a target that this CPU has nothing for; libFuzzer's own is 77.
constexpr int kSkipped = 90;

[[noreturn]] void fail(const std::string& reason);

template <typename... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream reason;
  (reason << ... << parts);
  fail(reason.str());
}

// The bytes that have been allocated since, whether or not they were freed. Only
// the address sanitizer counts them: 0 without it.
class Allocations {
 public:
  Allocations();
  uint64_t bytes() const;

 private:
  uint64_t before_;
};

// A message is one of ours, and fit for a terminal: not long, in UTF-8, without
// control characters.
void require_message(std::string_view message, std::string_view start);

}  // namespace lltm_fuzz

extern "C" {
int LLVMFuzzerInitialize(int* argc, char*** argv);
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed);
// libFuzzer's: changes single bytes.
size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);
}
