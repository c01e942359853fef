// Generates, mutates and reads safetensors files, with a reader independent of the library's.
#pragma once

#include "fuzz.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lltm_fuzz {

// A file in memory that has a path.
class MemoryFile {
 public:
  MemoryFile();
  void write(std::string_view bytes) const;
  const std::string& path() const { return path_; }

 private:
  int descriptor_;
  std::string path_;
};

struct Entry {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

// Well-formed, in random order, with random values.
std::string checkpoint_of(std::vector<Entry> entries, Random& random);

void mutate_checkpoint(std::string& file, Random& random);

// Usually corrects the header length.
void repair_checkpoint(std::string& file, Random& random);

at::ScalarType random_dtype(Random& random);

struct Expected {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  std::string_view data;
};
using ExpectedTensors = std::map<std::string, Expected>;

// Nothing if the file is malformed.
std::optional<ExpectedTensors> read_checkpoint(std::string_view file);

// Maximum bytes that reading may allocate in total, including freed memory. An empty tensor needs
// 50 bytes in the header and 1000 bytes of memory.
constexpr uint64_t allocation_limit(size_t file_bytes) {
  return (1 << 16) + 64 * static_cast<uint64_t>(file_bytes);
}

}  // namespace lltm_fuzz
