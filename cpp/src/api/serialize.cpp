// Checkpoint files: tensors by name in the safetensors format, a module's parameters and buffers.
#include "api/serialize.h"

#include "common/safetensors.h"
#include "op/argument_checks.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace lltm {
namespace {

namespace fs = std::filesystem;

using at::Tensor;
using c10::str;
using nlohmann::json;
using safetensors::Entry;
using safetensors::kLengthBytes;
using safetensors::kMaxHeaderBytes;
using safetensors::kMetadata;
using safetensors::Malformed;
using safetensors::name_text;

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

constexpr const char* kLoad = "load_safetensors";
constexpr const char* kSave = "save_safetensors";

[[noreturn]] void unreadable(const std::string& path, const std::string& why) {
  C10_THROW_ERROR(Error, str("lltm::", kLoad, ": cannot read ", path, ": ", why));
}
[[noreturn]] void unwritable(const std::string& path, const std::string& why) {
  C10_THROW_ERROR(Error, str("lltm::", kSave, ": cannot write ", path, ": ", why));
}

std::string last_error() {
  return errno != 0 ? std::strerror(errno) : "unknown error";
}

// ---- reading ----------------------------------------------------------------

void read_bytes(std::ifstream& file, char* to, uint64_t bytes) {
  if (bytes > 0 && !file.read(to, static_cast<std::streamsize>(bytes))) {
    throw Malformed("a truncated file");
  }
}

std::string read_text(std::ifstream& file, uint64_t bytes) {
  std::string text(bytes, '\0');
  read_bytes(file, text.data(), bytes);
  return text;
}

// Undefined if the dtype is unknown.
Tensor read_tensor(std::ifstream& file, const Entry& entry) {
  const auto* const dtype = std::ranges::find(kDtypes, entry.dtype, &Dtype::name);
  if (dtype == std::end(kDtypes)) {
    file.seekg(static_cast<std::streamoff>(entry.bytes()), std::ios::cur);
    return {};
  }
  safetensors::check_bytes(entry, c10::elementSize(dtype->type));
  const std::vector<int64_t> shape(entry.shape.begin(), entry.shape.end());
  const Tensor tensor = at::empty(shape, dtype->type);
  char* const data = static_cast<char*>(tensor.mutable_data_ptr());
  read_bytes(file, data, entry.bytes());
  // A bool with another value is undefined behavior.
  const auto is_bool = [](char byte) { return byte == 0 || byte == 1; };
  if (dtype->type == at::kBool && !std::all_of(data, data + entry.bytes(), is_bool)) {
    throw Malformed("BOOL tensor " + name_text(entry.name) + " with bytes other than 0 and 1");
  }
  return tensor;
}

// As load_safetensors, but tensors of dtypes that PyTorch lacks are undefined, not left out.
std::map<std::string, Tensor> read_safetensors(const std::string& path) try {
  std::error_code error;
  const bool is_regular = fs::is_regular_file(path, error);
  const uint64_t file_bytes = is_regular ? fs::file_size(path, error) : 0;
  if (error) unreadable(path, error.message());
  if (!is_regular) unreadable(path, "it is not a regular file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) unreadable(path, last_error());
  const std::string start = read_text(file, std::min(file_bytes, kLengthBytes));
  const std::string header = read_text(file, safetensors::header_bytes(start, file_bytes));
  const uint64_t data_bytes = file_bytes - start.size() - header.size();
  std::map<std::string, Tensor> tensors;
  for (const Entry& entry : safetensors::parse_header(header, data_bytes).entries) {
    tensors.emplace(entry.name, read_tensor(file, entry));
  }
  return tensors;
} catch (const Malformed& error) {
  C10_THROW_ERROR(ValueError, expected(str(kLoad, ": ", path), "a safetensors file", error.what()));
}

// ---- writing ----------------------------------------------------------------

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
  const std::string text = "tensor " + name_text(name);
  TORCH_CHECK_VALUE(
      name != kMetadata,
      expected(kSave, "tensor names", name_text(name) + ", which the format reserves"));
  check_tensor(kSave, text.c_str(), tensor);
  TORCH_CHECK(!tensor.is_meta(), expected(kSave, text + " with elements", "a meta tensor"));
}

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Padded to a multiple of eight bytes.
std::string header_of(
    const NamedTensors& tensors, const Metadata& metadata, const std::string& path) {
  nlohmann::ordered_json header = {{kMetadata, metadata}};
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

// ---- modules ----------------------------------------------------------------

std::map<std::string, Tensor> state_dict(const torch::nn::Module& module) {
  std::map<std::string, Tensor> tensors;
  for (const auto& parameter : module.named_parameters()) {
    tensors.emplace(parameter.key(), parameter.value());
  }
  for (const auto& buffer : module.named_buffers()) {
    tensors.emplace(buffer.key(), buffer.value());
  }
  return tensors;
}

bool fits(const Tensor& saved, const Tensor& target) {
  return saved.sizes() == target.sizes() || (target.dim() == 1 && saved.dim() == 2 &&
                                             saved.size(0) == 1 && saved.size(1) == target.size(0));
}

}  // namespace

std::map<std::string, Tensor> load_safetensors(const std::string& path) {
  std::map<std::string, Tensor> tensors = read_safetensors(path);
  std::erase_if(tensors, [](const auto& named) { return !named.second.defined(); });
  return tensors;
}

void save_safetensors(const std::map<std::string, Tensor>& tensors, const std::string& path) {
  save_safetensors(tensors, {}, path);
}

void save_safetensors(
    const std::map<std::string, Tensor>& tensors, Metadata metadata, const std::string& path) {
  metadata.emplace("format", "pt");  // some Python readers reject files without it
  // Larger elements first, after the padded header: each tensor is aligned to its element size.
  NamedTensors ordered;
  for (const auto& [name, tensor] : tensors) {
    check_writable(name, tensor);
    ordered.emplace_back(name, tensor);
  }
  std::ranges::stable_sort(
      ordered, std::greater(), [](const auto& named) { return named.second.element_size(); });
  const std::string header = header_of(ordered, metadata, path);
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
    if (!file) unwritable(path, last_error());
  };
  write(&header_bytes, kLengthBytes);
  write(header.data(), header_bytes);
  for (const auto& [name, tensor] : ordered) {
    const Tensor elements = tensor.detach().to(at::kCPU).contiguous().resolve_neg();
    write(elements.const_data_ptr(), elements.nbytes());
  }
  file.close();
  if (!file) unwritable(path, last_error());
  fs::rename(temporary, path, error);
  if (error) unwritable(path, error.message());
}

void load_state_dict(torch::nn::Module& module, const std::string& path) {
  const std::map<std::string, Tensor> saved = read_safetensors(path);
  const std::map<std::string, Tensor> targets = state_dict(module);
  std::vector<std::string> differences;
  for (const auto& [name, target] : targets) {
    const auto found = saved.find(name);
    const std::string of =
        str("expected ", name_text(name), " of shape ", shape_text(target.sizes()));
    if (found == saved.end()) {
      differences.push_back(of + ", got nothing");
    } else if (!found->second.defined()) {
      differences.push_back(of + ", got a dtype that PyTorch lacks");
    } else if (target.is_meta()) {
      differences.push_back(
          str("expected ", name_text(name), " on a device with memory, got meta"));
    } else if (!fits(found->second, target)) {
      differences.push_back(str(of, ", got ", shape_text(found->second.sizes())));
    }
  }
  for (const auto& [name, tensor] : saved) {
    if (tensor.defined() && targets.count(name) == 0) {
      const std::string shape = shape_text(tensor.sizes());
      differences.push_back(str("expected no ", name_text(name), ", got shape ", shape));
    }
  }
  constexpr size_t kShown = 20;  // a file of another model may contain thousands of names
  if (differences.size() > kShown) {
    differences.resize(kShown);
    differences.emplace_back("and more");
  }
  TORCH_CHECK_VALUE(
      differences.empty(),
      "lltm::load_state_dict: ",
      path,
      " does not fit module ",
      module.name(),
      ":\n  ",
      c10::Join("\n  ", differences));

  const at::NoGradGuard no_grad;
  for (const auto& [name, target] : targets) {
    target.copy_(saved.at(name).view(target.sizes()));
  }
}

void save_state_dict(const torch::nn::Module& module, const std::string& path) {
  save_safetensors(state_dict(module), path);
}

}  // namespace lltm