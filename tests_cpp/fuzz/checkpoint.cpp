// lltm::load_safetensors and load_state_dict: a damaged file is an error, or contains valid
// tensors.
#include "fuzz.h"

#include <lltm/nn.h>
#include <lltm/serialize.h>

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cctype>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace lltm_fuzz {
namespace {

using at::Tensor;
using Tensors = std::map<std::string, Tensor>;

constexpr size_t kLengthBytes = 8;

struct Module : torch::nn::Module {
  Module() {
    register_parameter("weight", at::zeros({2, 3}, at::kDouble));
    register_parameter("scale", at::zeros({4}, at::kHalf));
    register_buffer("steps", at::zeros({}, at::kLong));
    register_buffer("mask", at::zeros({3}, at::kBool));
    register_buffer("none", at::zeros({0, 2}));
    register_module("cell", lltm::LLTMCell(1, 2));
  }
};

// A checkpoint of Module in memory, with data of 0 and 1.
const char* const kHeader =
    R"({"__metadata__":{"format":"pt"},"weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("scale":{"dtype":"F16","shape":[1,4],"data_offsets":[24,32]},)"
    R"("steps":{"dtype":"I64","shape":[],"data_offsets":[32,40]},)"
    R"("mask":{"dtype":"BOOL","shape":[3],"data_offsets":[40,43]},)"
    R"("none":{"dtype":"F64","shape":[0,2],"data_offsets":[43,43]},)"
    R"("cell.weights":{"dtype":"BF16","shape":[6,3],"data_offsets":[43,79]},)"
    R"("cell.bias":{"dtype":"U8","shape":[6],"data_offsets":[79,85]}})";
constexpr size_t kDataBytes = 85;

// Separated by spaces.
const char* const kTokens =
    R"(0 1 2 3 64 -1 1.0 1e400 NaN 007 null true {} [] [ ] { } " \ , : /**/ x F64 F16 I8 BOOL U8 )"
    "4294967296 9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551616 "
    "F8_E4M3 F8_E8M0 F4 C64 U64 U16 dtype shape data_offsets __metadata__ \\u0046 \\ud800 \\u001b[31m \xff \xc3\xb6 "
    "\xc2\x9b "
    "\"new\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[85,85]},";

const std::vector<std::string>& tokens() {
  static const std::vector<std::string>& all = *[] {
    std::istringstream words(kTokens);
    auto* list = new std::vector<std::string>(std::istream_iterator<std::string>(words), {});
    list->insert(
        list->end(), {" ", std::string(1, '\0'), std::string(300, 'n'), std::string(999, '[')});
    return list;
  }();
  return all;
}

// A file in memory that has a path.
class MemoryFile {
 public:
  MemoryFile() : descriptor_(memfd_create("checkpoint", MFD_CLOEXEC)) {}

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }
  void write(std::string_view bytes) const {
    const bool written =
        ftruncate(descriptor_, 0) == 0 &&
        pwrite(descriptor_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
    require(written, "cannot write a file in memory");
  }

 private:
  int descriptor_;
};

// Returns true if `load` succeeds. Otherwise it must throw a ValueError.
bool succeeds(const std::function<void()>& load, size_t file_bytes) {
  const Allocations allocations;
  bool success = true;
  try {
    load();
  } catch (const c10::Error& error) {
    success = false;
    const std::string text = error.what_without_backtrace();
    require(typeid(error) == typeid(c10::ValueError), "expected a ValueError, got: ", text);
    require_message(text, "lltm::load_s");
  }
  // Includes freed memory. An empty tensor needs 50 bytes in the file and 1000 bytes of memory.
  const uint64_t most = (1 << 16) + 64 * static_cast<uint64_t>(file_bytes);
  require(allocations.bytes() <= most, allocations.bytes(), " bytes for a file of ", file_bytes);
  return success;
}

std::string_view bytes_of(const Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

Tensors tensors_of(const Module& module) {
  Tensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace(item.key(), item.value());
  return tensors;
}

}  // namespace

std::string first_input(Random& random) {
  std::string input = std::string(kLengthBytes, '\0') + kHeader;
  repair(input, random);
  for (size_t k = 0; k < kDataBytes; ++k) input.push_back(static_cast<char>(random.below(2)));
  return input;
}

// Replaces a word or a character of the header, or changes the length of the file.
void mutate(std::string& input, Random& random) {
  const size_t end = input.rfind('}') + 1;
  if (end <= kLengthBytes || random.one_in(16)) {
    input.resize(random.below(input.size() + 8));
    return;
  }
  const auto token = [&] {
    const auto is_word = [&](size_t k) {
      return std::isalnum(static_cast<unsigned char>(input[k]));
    };
    size_t begin = kLengthBytes + random.below(end - kLengthBytes);
    size_t size = 1;
    while (begin > kLengthBytes && is_word(begin) && is_word(begin - 1)) --begin;
    while (begin + size < end && is_word(begin) && is_word(begin + size)) ++size;
    return std::pair(begin, size);
  };
  const auto [from, size] = token();
  const std::string text = random.one_in(2) ? input.substr(from, size) : random.one_of(tokens());
  const auto [at, replaced] = token();
  input.replace(at, random.one_in(4) ? 0 : replaced, text);
}

// Corrects the length of the header.
void repair(std::string& input, Random& random) {
  const size_t end = input.rfind('}') + 1;
  if (end <= kLengthBytes || random.one_in(16)) return;
  const uint64_t length = end - kLengthBytes;
  std::memcpy(input.data(), &length, kLengthBytes);
}

void run(std::string_view input) {
  static const MemoryFile file;
  static Module& module = *new Module;
  file.write(input);
  Tensors found;
  const bool valid = succeeds([&] { found = lltm::load_safetensors(file.path()); }, input.size());
  // Together, the tensors are the data, except those of unknown dtypes.
  size_t bytes = 0;
  for (const auto& [name, tensor] : found) {
    require(tensor.is_cpu() && tensor.is_contiguous() && !tensor.requires_grad(), name);
    require(input.find(bytes_of(tensor)) != std::string_view::npos, name, " has other values");
    bytes += tensor.nbytes();
  }
  uint64_t header_bytes = 0;
  if (valid) std::memcpy(&header_bytes, input.data(), kLengthBytes);
  require(!valid || kLengthBytes + header_bytes + bytes <= input.size(), "tensors overlap");

  const Tensors targets = tensors_of(module);
  for (const auto& [name, target] : targets) target.detach().zero_();
  const bool loaded = succeeds([&] { lltm::load_state_dict(module, file.path()); }, input.size());
  require(valid || !loaded, "an invalid file was loaded");
  for (const auto& [name, target] : targets) {
    Tensor expected = at::zeros_like(target);
    if (loaded) expected = found.at(name).to(target.scalar_type()).contiguous();
    require(
        bytes_of(target) == bytes_of(expected), name, loaded ? " has other values" : " changed");
  }
}

}  // namespace lltm_fuzz
