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

constexpr const char* kMetadata = "__metadata__";
constexpr uint64_t kLengthBytes = sizeof(uint64_t);
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // same as in the reference implementation
constexpr uint64_t kMaxBytes = std::numeric_limits<int64_t>::max();
constexpr size_t kMaxDims = 64;  // maximum for PyTorch's operations

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

struct Entry {
  std::string name;
  std::string dtype_name;
  std::vector<int64_t> shape;
  std::vector<uint64_t> offsets;  // begin, end
  at::ScalarType dtype = at::kFloat;

  uint64_t bytes() const { return offsets[1] - offsets[0]; }
  std::string text() const { return "tensor " + name_text(name); }
};

void find_dtype(Entry& entry) {
  const auto found = std::ranges::find(kDtypes, entry.dtype_name, &Dtype::name);
  if (found == kDtypes.end()) {
    std::vector<std::string_view> known;
    for (const Dtype& dtype : kDtypes) known.push_back(dtype.name);
    const std::string expected = str("a dtype of ", c10::Join(", ", known), " for ", entry.text());
    refuse(expected, name_text(entry.dtype_name));
  }
  entry.dtype = found->type;
}

void check_sizes(const Entry& entry) {
  const std::vector<uint64_t>& offsets = entry.offsets;
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    refuse("data_offsets [begin, end] of " + entry.text(), str("[", c10::Join(", ", offsets), "]"));
  }
  // PyTorch computes strides as if no dimension were 0; they must not overflow either.
  uint64_t extent = c10::elementSize(entry.dtype);
  bool overflows = false;
  for (const int64_t size : entry.shape) {
    overflows |= c10::mul_overflows(extent, std::max<uint64_t>(size, 1), &extent);
  }
  const auto shape = [&] { return shape_text<int64_t>(entry.shape); };
  if (overflows || extent > kMaxBytes) {
    refuse("a shape of less than 2^63 bytes of " + entry.text(), shape());
  }
  const bool empty = std::ranges::count(entry.shape, 0) > 0;
  const uint64_t bytes = empty ? 0 : extent;
  if (entry.bytes() != bytes) {
    const std::string of = entry.text() + ", " + entry.dtype_name + " of shape " + shape();
    refuse(str(bytes, " bytes of ", of), str("data_offsets of ", entry.bytes()));
  }
}

// Accepts only valid headers and stores only entries: length and nesting of the text do not matter.
// Throws Malformed.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  std::vector<Entry> entries() && { return std::move(entries_); }

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override {
    unexpected("the number " + name_text(text));
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShape) {
      std::vector<int64_t>& shape = entries_.back().shape;
      if (value > kMaxBytes) refuse("a shape below 2^63 of " + where(), str(value));
      if (shape.size() == kMaxDims) {
        refuse(str("at most ", kMaxDims, " dimensions of ", where()), "more");
      }
      shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::kOffsets) {
      std::vector<uint64_t>& offsets = entries_.back().offsets;
      if (offsets.size() == 2) refuse("two data_offsets of " + where(), "more");
      offsets.push_back(value);
    } else {
      unexpected(str("the number ", value));
    }
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::kTensor && field_ == "dtype") {
      entries_.back().dtype_name = std::move(text);
    } else if (place_ != Place::kMetadata) {
      unexpected("the string " + name_text(text));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kHeader;
    } else if (place_ == Place::kHeader && name_ == kMetadata) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kHeader) {
      place_ = Place::kTensor;
      entries_.emplace_back().name = name_;
    } else {
      unexpected("an object");
    }
    fields_.clear();
    return true;
  }

  bool key(string_t& key) override {
    const bool outermost = place_ == Place::kHeader;
    if (!(outermost ? names_ : fields_).insert(key).second) {
      const std::string in = outermost ? "the header" : where();
      refuse("different names in " + in, name_text(key) + " twice");
    }
    (outermost ? name_ : field_) = key;
    if (place_ == Place::kTensor && key != "dtype" && key != "shape" && key != "data_offsets") {
      refuse("dtype, shape and data_offsets in " + where(), name_text(key));
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (fields_.count(field) == 0) refuse(str(field, " in ", where()), "none");
      }
      find_dtype(entries_.back());
      check_sizes(entries_.back());
    }
    place_ = place_ == Place::kHeader ? Place::kEnd : Place::kHeader;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kTensor && field_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && field_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  // The parser's message may repeat 100 MB of the file.
  bool parse_error(
      size_t position, const std::string&, const nlohmann::detail::exception&) override {
    refuse("a JSON header", str("invalid JSON at byte ", position));
  }

 private:
  enum class Place { kStart, kHeader, kMetadata, kTensor, kShape, kOffsets, kEnd };

  [[noreturn]] void unexpected(const std::string& got) const {
    refuse(str(expected(), " in ", where()), got);
  }

  std::string where() const {
    if (place_ == Place::kStart || place_ == Place::kEnd) return "the header";
    return name_ == kMetadata ? kMetadata : "tensor " + name_text(name_);
  }

  const char* expected() const {
    switch (place_) {
      case Place::kShape:
      case Place::kOffsets:
        return "non-negative integers";
      case Place::kMetadata:
        return "strings";
      case Place::kTensor:
        if (field_ == "dtype") return "a string as dtype";
        return field_ == "shape" ? "an array as shape" : "an array as data_offsets";
      default:
        return "an object";
    }
  }

  Place place_ = Place::kStart;
  std::string name_;              // of the current value in the header
  std::string field_;             // of the current value inside it
  std::set<std::string> names_;   // seen in the header
  std::set<std::string> fields_;  // seen in the current value
  std::vector<Entry> entries_;
};

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
  // The parser skips other white space and treats a zero byte as the end.
  const size_t closing = header.find_last_not_of(' ');
  if (closing == std::string::npos || header.front() != '{' || header[closing] != '}' ||
      header.find('\0') != std::string::npos) {
    refuse("a safetensors file, with a header from { to } and spaces", "another header");
  }
  return header;
}

// In data order. Each data byte must belong to exactly one entry.
std::vector<Entry> read_header(std::ifstream& file, uint64_t file_bytes) {
  const std::string header = read_header_text(file, file_bytes);
  HeaderReader reader;
  json::sax_parse(header, &reader);
  std::vector<Entry> entries = std::move(reader).entries();
  std::ranges::sort(entries, {}, &Entry::offsets);
  uint64_t position = 0;
  for (const Entry& entry : entries) {
    if (entry.offsets[0] != position) {
      refuse(
          str("data_offsets of ", entry.text(), " from ", position, ", without gaps or overlaps"),
          str(entry.offsets[0]));
    }
    position = entry.offsets[1];
  }
  const uint64_t data_bytes = file_bytes - kLengthBytes - header.size();
  if (position != data_bytes) {
    refuse(str(position, " bytes after the header"), str(data_bytes));
  }
  return entries;
}

Tensor read_tensor(std::ifstream& file, const Entry& entry) {
  const bool boolean = entry.dtype == at::kBool;
  const Tensor tensor =
      at::empty(entry.shape, at::TensorOptions(at::kCPU).dtype(boolean ? at::kByte : entry.dtype));
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
  const auto found = std::ranges::find(kDtypes, tensor.scalar_type(), &Dtype::type);
  TORCH_CHECK_TYPE(
      found != kDtypes.end(),
      expected(
          kSave,
          str("tensor ", name_text(name), " of a floating-point, integer or bool dtype"),
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

std::map<std::string, Tensor> load_safetensors(const std::string& path) try {
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
