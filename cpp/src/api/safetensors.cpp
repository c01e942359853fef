#include "api/safetensors.h"

#include "op/argument_checks.h"

#include <lltm/serialize.h>

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/safe_numerics.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace lltm {
namespace {

namespace fs = std::filesystem;

using at::Tensor;
using c10::str;
using nlohmann::json;

static_assert(
    std::endian::native == std::endian::little,
    "the elements of a safetensors file are little-endian and are read in place");

struct Dtype {
  std::string_view name;
  at::ScalarType type;
};

constexpr Dtype kDtypes[] = {
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
    {"F8_E8M0", at::kFloat8_e8m0fnu},
    {"C64", at::kComplexFloat},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U64", at::kUInt64},
    {"U32", at::kUInt32},
    {"U16", at::kUInt16},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
};

constexpr const char* kMetadata = "__metadata__";
constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};
constexpr uint64_t kLengthBytes = sizeof(uint64_t);
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // same as in the reference implementation
constexpr uint64_t kMaxBytes = std::numeric_limits<int64_t>::max();
constexpr size_t kMaxDims = 64;  // maximum for PyTorch's operations
constexpr int kMaxDepth = 128;   // same as in the reference implementation

std::string system_error() {
  return errno != 0 ? std::strerror(errno) : "unknown error";
}

// ---- reading: errors --------------------------------------------------------

// load_safetensors adds the path.
struct Malformed {
  std::string expected, got;
};
struct Unreadable {
  std::string why;
};

[[noreturn]] void refuse(const std::string& expected, const std::string& got) {
  throw Malformed{expected, got};
}

// ---- reading: the header ----------------------------------------------------

std::string tensor_text(const std::string& name) {
  return "tensor " + name_text(name);
}

struct Entry {
  std::string name;
  const Dtype* dtype;  // null if unknown
  std::vector<uint64_t> shape;
  uint64_t begin, end;

  uint64_t bytes() const { return end - begin; }
  std::string text() const { return tensor_text(name); }
};

void check_sizes(const Entry& entry) {
  if (entry.begin > entry.end) {
    const std::string got = str("[", entry.begin, ", ", entry.end, "]");
    refuse("data_offsets [begin, end] of " + entry.text(), got);
  }
  if (entry.dtype == nullptr) return;
  // PyTorch computes strides as if no dimension were 0; they must not overflow either.
  uint64_t extent = c10::elementSize(entry.dtype->type);
  bool overflows = false;
  for (const uint64_t size : entry.shape) {
    overflows |= c10::mul_overflows(extent, std::max<uint64_t>(size, 1), &extent);
  }
  const auto shape = [&] { return shape_text<uint64_t>(entry.shape); };
  if (overflows || extent > kMaxBytes) {
    refuse("a shape of less than 2^63 bytes of " + entry.text(), shape());
  }
  const uint64_t bytes = std::ranges::count(entry.shape, 0) > 0 ? 0 : extent;
  if (entry.bytes() != bytes) {
    refuse(
        str(bytes, " bytes of ", entry.text(), ", ", entry.dtype->name, " of shape ", shape()),
        str("data_offsets of ", entry.bytes()));
  }
}

// Limits memory to a multiple of the text. Leaves out unknown fields of tensors.
json parse_header(const std::string& text) {
  using Event = json::parse_event_t;
  std::set<std::string> names, fields;  // seen in the header and in its current value
  std::string name;                     // of the current value
  const auto in = [&] { return name == kMetadata ? name : tensor_text(name); };
  size_t values = 0;  // since the last name
  bool skips = false;
  const auto keep = [&](int depth, Event event, const json& value) {
    if (event == Event::key) {
      values = 0;
      const auto& key = value.get_ref<const std::string&>();
      if (depth == 1) {
        fields.clear();
        name = key;
      }
      if (depth <= 2 && !(depth == 1 ? names : fields).insert(key).second) {
        const std::string of = depth == 1 ? "the header" : in();
        refuse("different names in " + of, name_text(key) + " twice");
      }
      if (depth <= 2) {
        skips = depth == 2 && name != kMetadata && std::ranges::count(kFields, key) == 0;
      }
      return !skips;
    }
    const bool ends = event == Event::array_end || event == Event::object_end;
    if (!ends && !skips && ++values > kMaxDims + 1) {
      refuse(str("at most ", kMaxDims, " dimensions of ", in()), "more");
    }
    if (depth > kMaxDepth) refuse(str("at most ", kMaxDepth, " levels in ", in()), "more");
    return true;
  };
  try {
    return json::parse(text, keep);
  } catch (const json::parse_error& error) {
    refuse("a JSON header", str("invalid JSON at byte ", error.byte));
  } catch (const json::exception&) {
    refuse("a JSON header", "a number out of range");
  }
}

std::string text_of(const json& value) {
  return value.is_number() ? value.dump() : str("a JSON ", value.type_name());
}

Entry read_entry(const std::string& name, const json& value) {
  const auto in = [&] { return " in " + tensor_text(name); };
  const auto expect = [&](bool right, const std::string& what, const json& got) {
    if (!right) refuse(what + in(), text_of(got));
  };
  expect(value.is_object(), "an object", value);
  const auto field = [&](const std::string& key) -> const json& {
    const auto found = value.find(key);
    if (found == value.end()) refuse(key + in(), "none");
    return *found;
  };
  const auto numbers = [&](const std::string& key) {
    const json& array = field(key);
    expect(array.is_array(), "an array as " + key, array);
    for (const json& number : array) {
      expect(number.is_number_unsigned(), "non-negative integers", number);
    }
    return array.get<std::vector<uint64_t>>();
  };
  const json& dtype = field("dtype");
  expect(dtype.is_string(), "a string as dtype", dtype);
  const auto* const known =
      std::ranges::find(kDtypes, dtype.get_ref<const std::string&>(), &Dtype::name);
  const std::vector<uint64_t> offsets = numbers("data_offsets");
  if (offsets.size() != 2) refuse("two data_offsets" + in(), str(offsets.size()));
  Entry entry = {
      name, known == std::end(kDtypes) ? nullptr : known, numbers("shape"), offsets[0], offsets[1]};
  check_sizes(entry);
  return entry;
}

// ---- reading: the file ------------------------------------------------------

// The most common wrong input: a zip archive or, before PyTorch 1.6, a pickle of protocol 2.
void refuse_torch_save(std::string_view start) {
  const bool zip = start.starts_with("PK\x03\x04");
  const bool pickle = start.starts_with("\x80\x02\x8a\nl\xfc\x9c");
  if (zip || pickle) {
    refuse(
        "a safetensors file",
        str(zip ? "a zip archive" : "a pickle",
            " as torch.save writes it; save it in Python with "
            "safetensors.torch.save_file(module.state_dict(), path)"));
  }
}

std::string read_header_text(std::ifstream& file, uint64_t file_bytes) {
  std::array<char, kLengthBytes> start = {};
  file.read(start.data(), static_cast<std::streamsize>(std::min(file_bytes, kLengthBytes)));
  const uint64_t header_bytes = std::bit_cast<uint64_t>(start);
  const bool too_short = file_bytes < kLengthBytes;
  const uint64_t most = too_short ? 0 : std::min(kMaxHeaderBytes, file_bytes - kLengthBytes);
  if (too_short || header_bytes > most) {
    refuse_torch_save({start.data(), start.size()});
    const std::string size = too_short ? "" : str(" with a header of ", header_bytes, " bytes");
    refuse("a safetensors file", str("a file of ", file_bytes, " bytes", size));
  }
  std::string header(header_bytes, ' ');
  if (!file.read(header.data(), static_cast<std::streamsize>(header_bytes))) {
    throw Unreadable{"it is truncated"};
  }
  // The parser treats a zero byte as the end.
  const size_t zero = header.find('\0');
  if (zero != std::string::npos) refuse("a JSON header", str("a zero at byte ", zero));
  return header;
}

// In data order. Each data byte must belong to exactly one entry.
std::vector<Entry> read_header(std::ifstream& file, uint64_t file_bytes) {
  const std::string header = read_header_text(file, file_bytes);
  const json parsed = parse_header(header);
  if (!parsed.is_object()) refuse("an object as header", text_of(parsed));
  std::vector<Entry> entries;
  for (const auto& [name, value] : parsed.items()) {
    if (name != kMetadata) {
      entries.push_back(read_entry(name, value));
    } else if (!value.is_null()) {
      if (!value.is_object()) refuse(str("an object as ", kMetadata), text_of(value));
      for (const json& text : value) {
        if (!text.is_string()) refuse(str("strings in ", kMetadata), text_of(text));
      }
    }
  }
  std::ranges::sort(
      entries, {}, [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
  uint64_t position = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != position) {
      refuse(
          str("data_offsets of ", entry.text(), " from ", position, ", without gaps or overlaps"),
          str(entry.begin));
    }
    position = entry.end;
  }
  const uint64_t data_bytes = file_bytes - kLengthBytes - header.size();
  if (position != data_bytes) {
    refuse(str(position, " bytes after the header"), str(data_bytes));
  }
  return entries;
}

// Undefined if the dtype is unknown.
Tensor read_tensor(std::ifstream& file, const Entry& entry) {
  if (entry.dtype == nullptr) {
    file.seekg(static_cast<std::streamoff>(entry.bytes()), std::ios::cur);
    return {};
  }
  const bool boolean = entry.dtype->type == at::kBool;
  const std::vector<int64_t> shape(entry.shape.begin(), entry.shape.end());
  const Tensor tensor = at::empty(shape, boolean ? at::kByte : entry.dtype->type);
  char* const data = static_cast<char*>(tensor.mutable_data_ptr());
  if (entry.bytes() > 0 && !file.read(data, static_cast<std::streamsize>(entry.bytes()))) {
    throw Unreadable{"it is truncated"};
  }
  if (!boolean) return tensor;
  // A bool with another value is undefined behavior.
  const int largest = tensor.numel() > 0 ? tensor.max().item<uint8_t>() : 0;
  if (largest > 1) refuse("bytes of 0 and 1 in BOOL " + entry.text(), str(largest));
  return tensor.to(at::kBool);
}

// ---- writing ----------------------------------------------------------------

[[noreturn]] void unwritable(const std::string& path, const std::string& why) {
  C10_THROW_ERROR(Error, str("lltm::save_safetensors: cannot write ", path, ": ", why));
}

constexpr const char* kSave = "save_safetensors";

std::string_view dtype_name(const std::string& name, const Tensor& tensor) {
  const auto* const found = std::ranges::find(kDtypes, tensor.scalar_type(), &Dtype::type);
  TORCH_CHECK_TYPE(
      found != std::end(kDtypes),
      expected(
          kSave,
          str("tensor ", name_text(name), " of a dtype that the format has"),
          tensor.scalar_type()));
  return found->name;
}

void check_writable(const std::string& name, const Tensor& tensor) {
  const std::string quoted = name_text(name);
  TORCH_CHECK_VALUE(
      name != kMetadata, expected(kSave, "tensor names", quoted + ", which the format reserves"));
  TORCH_CHECK_TYPE(
      tensor.defined(),
      expected(kSave, str("tensor ", quoted, " to be defined"), "an undefined tensor"));
  TORCH_CHECK(
      tensor.layout() == at::kStrided && !tensor.is_meta(),
      expected(
          kSave,
          str("tensor ", quoted, " to have strides and elements"),
          str("layout ", tensor.layout(), " on device ", tensor.device())));
}

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Padded to a multiple of eight bytes.
std::string header_of(const NamedTensors& tensors, const std::string& path) {
  // Some Python readers reject files without this entry.
  nlohmann::ordered_json header = {{kMetadata, {{"format", "pt"}}}};
  uint64_t position = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t end = position + tensor.nbytes();
    header[name] = {
        {"dtype", dtype_name(name, tensor)},
        {"shape", tensor.sizes().vec()},
        {"data_offsets", nlohmann::ordered_json::array({position, end})}};
    position = end;
  }
  const std::string where = str(kSave, ": ", path);
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    TORCH_CHECK_VALUE(false, expected(where, "names in UTF-8", "other bytes"));
  }
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  TORCH_CHECK_VALUE(
      text.size() <= kMaxHeaderBytes,
      expected(where, str("names and shapes of at most ", kMaxHeaderBytes, " bytes"), text.size()));
  return text;
}

}  // namespace

std::string name_text(std::string_view name) {
  constexpr size_t kLongest = 80;
  std::string text(name.substr(0, kLongest));
  if (name.size() > kLongest) {
    text += "...";
  }
  text = json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
  // JSON does not escape U+007F to U+009F (UTF-8: 7F, C2 80 to C2 9F); U+009B begins a terminal
  // command.
  std::string escaped;
  for (size_t k = 0; k < text.size(); ++k) {
    const bool two = text[k] == '\xc2' && static_cast<unsigned char>(text[k + 1]) < 0xa0;
    if (two || text[k] == '\x7f') {
      const char* const digits = "0123456789abcdef";
      const auto code = static_cast<unsigned char>(text[two ? ++k : k]);
      escaped += "\\u00";
      escaped += {digits[code / 16], digits[code % 16]};
    } else {
      escaped += text[k];
    }
  }
  return escaped;
}

std::map<std::string, Tensor> load_safetensors(const std::string& path) {
  std::map<std::string, Tensor> tensors = read_safetensors(path);
  std::erase_if(tensors, [](const auto& named) { return !named.second.defined(); });
  return tensors;
}

std::map<std::string, Tensor> read_safetensors(const std::string& path) try {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::is_regular_file(status)) {
    throw Unreadable{fs::exists(status) ? "it is not a regular file" : error.message()};
  }
  const uint64_t file_bytes = fs::file_size(path, error);
  if (error) throw Unreadable{error.message()};
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Unreadable{system_error()};
  std::map<std::string, Tensor> tensors;
  for (const Entry& entry : read_header(file, file_bytes)) {
    tensors.emplace(entry.name, read_tensor(file, entry));
  }
  return tensors;
} catch (const Malformed& error) {
  C10_THROW_ERROR(ValueError, expected("load_safetensors: " + path, error.expected, error.got));
} catch (const Unreadable& error) {
  C10_THROW_ERROR(Error, str("lltm::load_safetensors: cannot read ", path, ": ", error.why));
}

void save_safetensors(const std::map<std::string, Tensor>& tensors, const std::string& path) {
  // Larger elements first, after the padded header: each tensor is aligned to its element size.
  NamedTensors ordered;
  for (const auto& [name, tensor] : tensors) {
    check_writable(name, tensor);
    ordered.emplace_back(name, tensor);
  }
  std::ranges::stable_sort(
      ordered, std::greater(), [](const auto& named) { return named.second.element_size(); });
  const std::string header = header_of(ordered, path);
  const uint64_t header_bytes = header.size();

  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status) && !fs::is_symlink(status)) {
    unwritable(path, "it is not a regular file");
  }
  std::random_device random;
  const std::string temporary = str(path, ".", random(), random(), ".tmp");
  const auto remove = c10::make_scope_exit([&] {  // unless it was renamed
    std::error_code ignored;
    fs::remove(temporary, ignored);
  });
  errno = 0;
  std::ofstream file(temporary, std::ios::binary);
  const auto write = [&](const void* data, uint64_t bytes) {
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    if (!file) unwritable(path, system_error());
  };
  write(&header_bytes, kLengthBytes);
  write(header.data(), header_bytes);
  for (const auto& [name, tensor] : ordered) {
    const Tensor elements = tensor.detach().to(at::kCPU).contiguous().resolve_neg();
    write(elements.const_data_ptr(), elements.nbytes());
  }
  file.close();
  if (!file) unwritable(path, system_error());
  fs::rename(temporary, path, error);
  if (error) unwritable(path, error.message());
}

}  // namespace lltm
