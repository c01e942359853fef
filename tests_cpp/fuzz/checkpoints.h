// safetensors files: made, changed, and read a second time by another reader.
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

// A well-formed file of these tensors, in any order, with any values.
std::string checkpoint_of(std::vector<Entry> entries, Random& random);

// Changes numbers, texts, members and brackets of the header, and the data.
void mutate_checkpoint(std::string& file, Random& random);

// Gives the header the length that it has, most of the time.
void repair_checkpoint(std::string& file, Random& random);

at::ScalarType random_dtype(Random& random);

// What the format says of a file, read without hurry and without the library.
struct Expected {
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  std::string_view data;
};
using ExpectedTensors = std::map<std::string, Expected>;

// Nothing if the file is not well-formed.
std::optional<ExpectedTensors> read_checkpoint(std::string_view file);

// What reading a file may allocate in all, freed or not. A tensor without elements
// takes fifty bytes of a header and a thousand of memory.
constexpr uint64_t allocation_limit(size_t file_bytes) {
  return (1 << 16) + 64 * static_cast<uint64_t>(file_bytes);
}

}  // namespace lltm_fuzz
