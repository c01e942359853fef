#include "checkpoints.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <sstream>
#include <utility>

namespace lltm_fuzz {
namespace {

using nlohmann::json;
using namespace std::string_literals;  // text with null characters

constexpr size_t kLengthBytes = 8;

struct Dtype {
  const char* name;
  at::ScalarType type;
};
constexpr std::array<Dtype, 10> kDtypes = {{
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
}};

const char* name_of(at::ScalarType type) {
  return std::find_if(
             kDtypes.begin(), kDtypes.end(), [&](const Dtype& d) { return d.type == type; })
      ->name;
}

std::string little_endian(uint64_t value) {
  std::string bytes(kLengthBytes, '\0');
  std::memcpy(bytes.data(), &value, kLengthBytes);
  return bytes;
}

std::string space(Random& random) {
  static const std::vector<std::string> spaces = {"", "", "", "", "", " ", "\n", "\t ", "\r\n  "};
  return random.one_of(spaces);
}

std::vector<std::string> words_of(const char* text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

const std::vector<std::string>& numbers() {
  static const std::vector<std::string> texts = words_of(
      "0 1 2 3 4 7 8 16 64 65 255 256 -1 -0 1.0 1e0 1e400 0.5 2147483647 2147483648 "
      "4294967295 4294967296 4294967297 1073741824 3037000500 4611686018427387904 "
      "2305843009213693951 2305843009213693952 1152921504606846976 9223372036854775807 "
      "9223372036854775808 -9223372036854775808 -9223372036854775809 18446744073709551608 "
      "18446744073709551615 18446744073709551616 99999999999999999999999 1099511627776 "
      "007 0x10 +1 NaN");
  return texts;
}

const std::vector<std::string>& strings() {
  static const std::vector<std::string>& texts = *[] {
    auto* all = new std::vector<std::string>(words_of(
        R"("F64" "F32" "F16" "BF16" "I64" "I32" "I16" "I8" "U8" "BOOL" "F8_E4M3" "f32")"
        R"( "dtype" "shape" "data_offsets" "__metadata__" "" "x" "\u0046\u00332" "\ud800")"
        R"( "\ud83d\ude00" "\u0000" "\u001b[31m" "\u009b31m" "\u007f" null true {} [])"
        " \"\xff\" \"\xc3\" \"gr\xc3\xb6\xc3\x9f\" \"\x7f\" \"\xc2\x9b\""));
    all->push_back("\"\n\"");
    all->push_back("\"" + std::string(79, 'n') + "\xc3\xb6\"");
    all->push_back("\"" + std::string(300, 'n') + "\"");
    return all;
  }();
  return texts;
}

struct Token {
  size_t begin, end;
};

// Splits any text into strings, words, numbers and single characters.
std::vector<Token> tokens_of(std::string_view text) {
  const auto is_word = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '+' || c == '.' || c == '_';
  };
  std::vector<Token> tokens;
  for (size_t k = 0; k < text.size();) {
    size_t end = k + 1;
    if (text[k] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (is_word(text[k])) {
      while (end < text.size() && is_word(text[end])) ++end;
    }
    if (text[k] != ' ') tokens.push_back({k, end});
    k = end;
  }
  return tokens;
}

// The key with its value, array or object that starts at a token.
Token span_from(std::string_view text, const std::vector<Token>& tokens, size_t first) {
  size_t last = first;
  const auto is = [&](size_t k, std::string_view characters) {
    return k < tokens.size() && characters.find(text[tokens[k].begin]) != std::string_view::npos;
  };
  if (is(first, "\"") && is(first + 1, ":")) last = first + 2;
  for (int depth = 0; last < tokens.size(); ++last) {
    if (is(last, "{[")) ++depth;
    if (is(last, "}]")) --depth;
    if (depth <= 0) break;
  }
  last = std::min(last, tokens.size() - 1);
  return {tokens[first].begin, std::max(tokens[last].end, tokens[first].end)};
}

void mutate_header(std::string& header, Random& random) {
  const std::vector<Token> tokens = tokens_of(header);
  if (tokens.empty()) {
    header = "{}";
    return;
  }
  const auto text_of = [&](const Token& token) {
    return header.substr(token.begin, token.end - token.begin);
  };
  const auto pick = [&](std::string_view kind) {
    const size_t start = random.below(tokens.size());
    for (size_t k = 0; k < tokens.size(); ++k) {
      const size_t at = (start + k) % tokens.size();
      if (kind.find(header[tokens[at].begin]) != std::string_view::npos) return at;
    }
    return start;
  };
  const auto replace = [&](const Token& token, const std::string& text) {
    header.replace(token.begin, token.end - token.begin, text);
  };
  switch (random.below(10)) {
    case 0:
      replace(tokens[pick("0123456789-")], random.one_of(numbers()));
      break;
    case 1: {  // changes a number, or copies another
      const Token token = tokens[pick("0123456789")];
      const uint64_t number = std::strtoull(text_of(token).c_str(), nullptr, 10);
      const std::string other = text_of(tokens[pick("0123456789")]);
      replace(token, random.one_in(3) ? other : std::to_string(number + random.below(5) - 2));
      break;
    }
    case 2:
      replace(tokens[pick("\"")], random.one_of(strings()));
      break;
    case 3:
      replace(tokens[pick("\"")], text_of(tokens[pick("\"")]));
      break;
    case 4: {  // repeats a span
      const Token span = span_from(header, tokens, pick(random.one_in(3) ? "{[" : "\""));
      header.insert(span.end, "," + text_of(span));
      break;
    }
    case 5: {  // deletes a span and its comma
      Token span = span_from(header, tokens, random.below(tokens.size()));
      if (span.end < header.size() && header[span.end] == ',') ++span.end;
      replace(span, "");
      break;
    }
    case 6: {  // replaces a span with another
      const Token to = span_from(header, tokens, random.below(tokens.size()));
      const Token from = span_from(header, tokens, random.below(tokens.size()));
      replace(to, text_of(from));
      break;
    }
    case 7: {  // nests a span
      static const std::vector<std::string> brackets = {"[", "{\"x\":", "{\"shape\":", "[1,"};
      const size_t at = tokens[random.below(tokens.size())].begin;
      std::string deep;
      const std::string& bracket = random.one_of(brackets);
      for (size_t k = random.one_in(8) ? 1000 : 1 + random.below(70); k > 0; --k) deep += bracket;
      header.insert(at, deep);
      break;
    }
    case 8: {  // adds a tensor of any size without data
      std::string shape;
      for (size_t k = 1 + random.below(3); k > 0; --k) shape += random.one_of(numbers()) + ",";
      shape.pop_back();
      const std::string end = text_of(tokens[pick("0123456789")]);
      header.insert(
          header.find('{') + 1,
          R"("new":{"dtype":")"s + random.one_of(kDtypes).name + R"(","shape":[)" + shape +
              R"(],"data_offsets":[)" + end + "," + end + "]}" + (tokens.size() > 2 ? "," : ""));
      break;
    }
    default:
      static const std::vector<std::string> characters = {
          " ", "\n", "\0"s, ",", ":", "{", "}", "[", "]", "\"", "\\", "/**/", "\xef\xbb\xbf"};
      header.insert(tokens[random.below(tokens.size())].begin, random.one_of(characters));
      break;
  }
}

// Returns the end of the header, if it can be determined.
size_t header_end(const std::string& file) {
  if (file.size() < kLengthBytes) return file.size();
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length <= file.size() - kLengthBytes) return kLengthBytes + length;
  return std::max(file.rfind('}') + 1, kLengthBytes);
}

// The shape, if the format and PyTorch allow it.
std::optional<std::vector<int64_t>> read_shape(const json& sizes, size_t element_bytes) {
  constexpr size_t kMaxDims = 64;
  constexpr auto kMost = static_cast<unsigned __int128>(INT64_MAX);
  if (!sizes.is_array() || sizes.size() > kMaxDims) return std::nullopt;
  std::vector<int64_t> shape;
  unsigned __int128 extent = element_bytes;
  for (const json& size : sizes) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > INT64_MAX) return std::nullopt;
    shape.push_back(size.get<int64_t>());
    extent *= static_cast<uint64_t>(std::max<int64_t>(shape.back(), 1));
    if (extent > kMost) return std::nullopt;
  }
  return shape;
}

}  // namespace

at::ScalarType random_dtype(Random& random) {
  return random.one_of(kDtypes).type;
}

std::string checkpoint_of(std::vector<Entry> entries, Random& random) {
  for (size_t k = entries.size(); k > 1; --k) {
    std::swap(entries[k - 1], entries[random.below(k)]);
  }
  std::vector<std::string> members;
  std::string data;
  for (const Entry& entry : entries) {
    size_t bytes = c10::elementSize(entry.dtype);
    for (const int64_t size : entry.shape) bytes *= static_cast<size_t>(size);
    const size_t begin = data.size();
    for (size_t k = 0; k < bytes; ++k) {
      const bool boolean = entry.dtype == at::kBool;
      data.push_back(static_cast<char>(boolean ? random.below(2) : random.next()));
    }
    std::vector<std::string> fields = {
        "\"dtype\":" + space(random) + "\"" + name_of(entry.dtype) + "\"",
        "\"shape\":" + space(random) + json(entry.shape).dump(),
        "\"data_offsets\":" + json({begin, data.size()}).dump()};
    std::swap(fields[2], fields[random.below(3)]);
    std::swap(fields[1], fields[random.below(2)]);
    members.push_back(
        json(entry.name).dump() + space(random) + ":{" + fields[0] + "," + fields[1] + "," +
        space(random) + fields[2] + "}");
  }
  if (random.one_in(3)) {
    members.push_back(
        random.one_in(2) ? R"("__metadata__":{"format":"pt"})" : R"("__metadata__":{})");
  }
  for (size_t k = members.size(); k > 1; --k) {
    std::swap(members[k - 1], members[random.below(k)]);
  }
  std::string header = "{";
  for (const std::string& member : members) {
    header += (header.size() == 1 ? "" : ",") + space(random) + member;
  }
  header += space(random) + "}" + std::string(random.below(8), ' ');
  return little_endian(header.size()) + header + data;
}

void mutate_checkpoint(std::string& file, Random& random) {
  if (file.size() < kLengthBytes) file.resize(kLengthBytes);
  const size_t end = header_end(file);
  std::string header = file.substr(kLengthBytes, end - kLengthBytes);
  std::string data = file.substr(end);
  if (!random.one_in(6)) {
    mutate_header(header, random);
  } else if (random.one_in(2)) {
    // Data sizes that the header may request.
    std::vector<size_t> sizes = {0, data.size() + 1, data.size() + 8, data.size() / 2};
    for (const Token& token : tokens_of(header)) {
      const std::string text = header.substr(token.begin, token.end - token.begin);
      const size_t size = std::strtoull(text.c_str(), nullptr, 10);
      if (size > 0 && size < 4096) sizes.push_back(size);
    }
    data.resize(random.one_of(sizes));
  } else {
    data.insert(
        random.below(data.size() + 1), 1 + random.below(8), static_cast<char>(random.next()));
  }
  file = little_endian(header.size()) + header + data;
}

void repair_checkpoint(std::string& file, Random& random) {
  if (file.size() < kLengthBytes || random.one_in(16)) return;
  uint64_t length = 0;
  std::memcpy(&length, file.data(), kLengthBytes);
  const size_t closing = file.rfind('}');
  const bool fits =
      length <= file.size() - kLengthBytes && length > 0 &&
      (file[kLengthBytes + length - 1] == '}' || file[kLengthBytes + length - 1] == ' ');
  if (!fits && closing != std::string::npos && closing >= kLengthBytes) {
    length = closing + 1 - kLengthBytes;
  }
  if (random.one_in(32)) {
    const std::array<uint64_t, 10> lengths = {
        0,
        1,
        length - 1,
        length + 1,
        file.size() - kLengthBytes,
        file.size(),
        100'000'001,
        uint64_t{1} << 63,
        UINT64_MAX,
        UINT64_MAX - 7};
    length = random.one_of(lengths);
  }
  file.replace(0, kLengthBytes, little_endian(length));
}

std::optional<ExpectedTensors> read_checkpoint(std::string_view file) {
  uint64_t length = 0;
  if (file.size() < kLengthBytes) return std::nullopt;
  std::memcpy(&length, file.data(), kLengthBytes);
  if (length > 100'000'000 || length > file.size() - kLengthBytes) return std::nullopt;
  std::string_view text = file.substr(kLengthBytes, length);
  const std::string_view data = file.substr(kLengthBytes + length);
  while (text.ends_with(' ')) text.remove_suffix(1);
  if (!text.starts_with('{') || !text.ends_with('}')) return std::nullopt;
  if (text.find('\0') != std::string_view::npos) return std::nullopt;

  bool repeated = false;
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int, json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      repeated |= !keys.back().insert(parsed.get<std::string>()).second;
    }
    return true;
  };
  const json header = json::parse(text, watch, /*allow_exceptions=*/false);
  if (header.is_discarded() || repeated || !header.is_object()) return std::nullopt;

  ExpectedTensors tensors;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, value] : header.items()) {
    if (!value.is_object()) return std::nullopt;
    if (name == "__metadata__") {
      for (const json& text_value : value) {
        if (!text_value.is_string()) return std::nullopt;
      }
      continue;
    }
    if (value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets") || !value["dtype"].is_string()) {
      return std::nullopt;
    }
    const auto dtype =
        std::find_if(kDtypes.begin(), kDtypes.end(), [&value = value](const Dtype& candidate) {
          return value["dtype"].get<std::string>() == candidate.name;
        });
    if (dtype == kDtypes.end()) return std::nullopt;
    const auto shape = read_shape(value["shape"], c10::elementSize(dtype->type));
    const json& offsets = value["data_offsets"];
    if (!shape || !offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      return std::nullopt;
    }
    uint64_t bytes = c10::elementSize(dtype->type);
    for (const int64_t size : *shape) bytes *= static_cast<uint64_t>(size);
    const auto begin = offsets[0].get<uint64_t>();
    const auto end = offsets[1].get<uint64_t>();
    if (begin > end || end > data.size() || end - begin != bytes) return std::nullopt;
    ranges.emplace_back(begin, end);
    const std::string_view own = data.substr(begin, bytes);
    if (dtype->type == at::kBool &&
        std::any_of(own.begin(), own.end(), [](char c) { return c != 0 && c != 1; })) {
      return std::nullopt;
    }
    tensors.emplace(name, Expected{dtype->type, *shape, own});
  }
  std::sort(ranges.begin(), ranges.end());
  uint64_t position = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != position) return std::nullopt;
    position = end;
  }
  if (position != data.size()) return std::nullopt;
  return tensors;
}

MemoryFile::MemoryFile() : descriptor_(memfd_create("checkpoint", MFD_CLOEXEC)) {
  require(descriptor_ >= 0, "memfd_create: ", std::strerror(errno));
  path_ = "/proc/self/fd/" + std::to_string(descriptor_);
}

void MemoryFile::write(std::string_view bytes) const {
  const bool written =
      ftruncate(descriptor_, 0) == 0 &&
      pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  require(written, "cannot write a file in memory: ", std::strerror(errno));
}

}  // namespace lltm_fuzz
