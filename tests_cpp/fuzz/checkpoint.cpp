// lltm::load_safetensors: a damaged file is an error, or contains valid tensors.
#include "fuzz.h"

#include <lltm/serialize.h>

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <iterator>
#include <map>
#include <vector>

namespace lltm_fuzz {
namespace {

constexpr size_t kLengthBytes = 8;

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
    "F8_E4M3 F8_E8M0 F4 C64 U64 U16 dtype shape data_offsets __metadata__ \\u0046 \\ud800 "
    "\\u001b[31m \xff \xc3\xb6 "
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

}  // namespace

// With data of 0 and 1.
std::string first_input(Random& random) {
  std::string input = std::string(kLengthBytes, '\0') + kHeader;
  repair(input, random);
  for (size_t k = 0; k < kDataBytes; ++k) input.push_back(static_cast<char>(random.below(2)));
  return input;
}

// Replaces a word or changes the length of the file.
void mutate(std::string& input, Random& random) {
  if (random.one_in(16)) {
    input.resize(random.below(input.size() + 8));
    return;
  }
  const char* const ends = "{}[]\",:";
  const auto [from, size] = part(input, ends, random);
  const std::string text = random.one_in(2) ? input.substr(from, size) : random.one_of(tokens());
  const auto [at, replaced] = part(input, ends, random);
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
  static const int file = memfd_create("checkpoint", MFD_CLOEXEC);  // in memory
  const bool written = ftruncate(file, 0) == 0 && pwrite(file, input.data(), input.size(), 0) ==
                                                      static_cast<ssize_t>(input.size());
  require(written, "cannot write a file in memory");
  std::map<std::string, at::Tensor> tensors;
  uint64_t used = 0;
  const Allocations allocations;
  try {
    tensors = lltm::load_safetensors("/proc/self/fd/" + std::to_string(file));
    std::memcpy(&used, input.data(), kLengthBytes);
    used += kLengthBytes;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    require(typeid(error) == typeid(c10::ValueError), "expected a ValueError, got: ", text);
    require_message(text, "lltm::load_safetensors: ");
  }
  // Includes freed memory. An empty tensor needs 50 bytes in the file and 1000 bytes of memory.
  const uint64_t most = (1 << 16) + 64 * static_cast<uint64_t>(input.size());
  require(allocations.bytes() <= most, allocations.bytes(), " bytes for a file of ", input.size());
  // Together, the tensors are the data, except those of unknown dtypes.
  for (const auto& [name, tensor] : tensors) {
    require(tensor.is_cpu() && tensor.is_contiguous() && !tensor.requires_grad(), name);
    const auto* const data = static_cast<const char*>(tensor.const_data_ptr());
    const bool found = input.find({data, tensor.nbytes()}) != std::string_view::npos;
    require(found, name, " has other values");
    used += tensor.nbytes();
  }
  require(used <= input.size(), "tensors overlap");
}

}  // namespace lltm_fuzz
