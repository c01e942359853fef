// The safetensors format (https://github.com/huggingface/safetensors):
//
//     8 bytes   N, the length of the header, little-endian
//     N bytes   a JSON object:
//               {"name": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}, ...}
//               and "__metadata__": {"name": "text", ...}
//     the rest  the elements, little-endian, in row-major order; data_offsets
//               count from its first byte and cover all of it, each byte once
//
// No PyTorch header.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace lltm::safetensors {

constexpr const char* kMetadata = "__metadata__";
constexpr uint64_t kLengthBytes = sizeof(uint64_t);
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // same as in the reference implementation

struct Entry {
  std::string name, dtype;
  std::vector<uint64_t> shape;
  uint64_t begin, end;

  uint64_t bytes() const { return end - begin; }
};

struct Header {
  std::vector<Entry> entries;  // in data order
  std::map<std::string, std::string> metadata;
};

// The message describes the file instead of a safetensors file. It is short and in ASCII.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns N. `start` is the first 8 bytes, or the entire file if it is shorter.
uint64_t header_bytes(std::string_view start, uint64_t file_bytes);

// Reads the N bytes. `data_bytes` is the size of the rest.
Header parse_header(std::string_view text, uint64_t data_bytes);

// Compares dtype and shape with the entry's bytes. parse_header accepts any dtype.
void check_bytes(const Entry& entry, uint64_t element_bytes);

// A name from a file for messages: quoted, shortened and in ASCII.
std::string name_text(std::string_view name);

}  // namespace lltm::safetensors
