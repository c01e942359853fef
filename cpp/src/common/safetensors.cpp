#include "common/safetensors.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

namespace lltm::safetensors {
namespace {

using nlohmann::json;

static_assert(
    std::endian::native == std::endian::little,
    "the numbers of a safetensors file are little-endian and are read in place");

constexpr uint64_t kMaxBytes = std::numeric_limits<int64_t>::max();
constexpr size_t kMaxDims = 64;  // maximum for PyTorch's operations
constexpr int kMaxDepth = 128;   // same as in the reference implementation

Malformed invalid_entry(const std::string& name) {
  return Malformed("a header with an invalid entry " + name_text(name));
}

// Memory is at most a multiple of the text.
json parse(std::string_view text) {
  std::set<std::string> names, fields;  // of the header, of the current tensor
  const auto check = [&](int depth, json::parse_event_t event, const json& value) {
    if (depth > kMaxDepth) throw Malformed("a header of too many levels");
    if (event == json::parse_event_t::key && depth <= 2) {
      const auto& name = value.get_ref<const std::string&>();
      if (depth == 1) fields.clear();
      if (!(depth == 1 ? names : fields).insert(name).second) {
        throw Malformed("a header with " + name_text(name) + " twice");
      }
    }
    return true;
  };
  json header = json::parse(text, check, /*allow_exceptions=*/false);
  // The parser treats a zero byte as the end.
  if (!header.is_object() || text.find('\0') != std::string_view::npos) {
    throw Malformed("a header that is not a JSON object");
  }
  return header;
}

std::vector<uint64_t> numbers_of(const json& array) {
  std::vector<uint64_t> numbers;
  for (const json& number : array.get_ref<const json::array_t&>()) {
    numbers.push_back(number.get_ref<const json::number_unsigned_t&>());
  }
  return numbers;
}

Entry entry_of(const std::string& name, const json& value) {
  const std::vector<uint64_t> offsets = numbers_of(value.at("data_offsets"));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) throw invalid_entry(name);
  return {
      name,
      value.at("dtype").get_ref<const std::string&>(),
      numbers_of(value.at("shape")),
      offsets[0],
      offsets[1]};
}

}  // namespace

uint64_t header_bytes(std::string_view start, uint64_t file_bytes) {
  uint64_t bytes = 0;
  std::memcpy(&bytes, start.data(), std::min<uint64_t>(start.size(), kLengthBytes));
  if (file_bytes >= kLengthBytes && bytes <= std::min(kMaxHeaderBytes, file_bytes - kLengthBytes)) {
    return bytes;
  }
  // The most common wrong input: a zip archive or, before PyTorch 1.6, a pickle of protocol 2.
  if (start.starts_with("PK\x03\x04") || start.starts_with("\x80\x02\x8a\nl\xfc\x9c")) {
    throw Malformed(
        "a file as torch.save writes it; save it in Python with "
        "safetensors.torch.save_file(module.state_dict(), path)");
  }
  throw Malformed(
      "a file of " + std::to_string(file_bytes) + " bytes with a header of " +
      std::to_string(bytes) + " bytes");
}

Header parse_header(std::string_view text, uint64_t data_bytes) {
  Header header;
  const json parsed = parse(text);
  for (const auto& [name, value] : parsed.items()) {
    try {
      if (name != kMetadata) {
        header.entries.push_back(entry_of(name, value));
      } else if (!value.is_null()) {
        value.get_to(header.metadata);
      }
    } catch (const json::exception&) {
      throw invalid_entry(name);
    }
  }
  std::ranges::sort(
      header.entries, {}, [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
  uint64_t position = 0;
  for (const Entry& entry : header.entries) {
    if (entry.begin != position) {
      throw Malformed("data_offsets with a gap or overlap before tensor " + name_text(entry.name));
    }
    position = entry.end;
  }
  if (position != data_bytes) {
    throw Malformed(
        "tensors of " + std::to_string(position) + " bytes, but " + std::to_string(data_bytes) +
        " bytes after the header");
  }
  return header;
}

void check_bytes(const Entry& entry, uint64_t element_bytes) {
  // PyTorch computes strides as if no dimension were 0; they must not overflow either.
  uint64_t extent = element_bytes, bytes = element_bytes;
  bool fits = entry.shape.size() <= kMaxDims;
  for (const uint64_t size : entry.shape) {
    fits = fits && size <= kMaxBytes / extent;
    if (!fits) break;
    extent *= std::max<uint64_t>(size, 1);
    bytes *= size;
  }
  if (!fits || bytes != entry.bytes()) {
    throw Malformed(
        "tensor " + name_text(entry.name) + " with data_offsets that do not match its shape");
  }
}

std::string name_text(std::string_view name) {
  constexpr size_t kLongest = 80;
  const std::string text =
      std::string(name.substr(0, kLongest)) + (name.size() > kLongest ? "..." : "");
  return json(text).dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
}

}  // namespace lltm::safetensors
