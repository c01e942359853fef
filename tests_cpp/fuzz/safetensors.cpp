// lltm::load_safetensors: reads well-formed files correctly and rejects others.
#include "checkpoints.h"

#include <lltm/serialize.h>

#include <c10/util/Exception.h>

#include <cstring>

namespace lltm_fuzz {
namespace {

using Loaded = std::map<std::string, at::Tensor>;

std::optional<Loaded> load(const MemoryFile& file, size_t size) {
  const Allocations allocations;
  std::optional<Loaded> tensors;
  try {
    tensors = lltm::load_safetensors(file.path());
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    require(typeid(error) == typeid(c10::ValueError), "expected a ValueError, got: ", text);
    require_message(text, "lltm::load_safetensors: " + file.path() + ": ");
  }
  require(
      allocations.bytes() <= allocation_limit(size),
      allocations.bytes(),
      " bytes were allocated for a file of ",
      size);
  return tensors;
}

void require_same(const Loaded& loaded, const ExpectedTensors& expected) {
  require(loaded.size() == expected.size(), "got ", loaded.size(), " tensors");
  for (const auto& [name, tensor] : loaded) {
    const auto found = expected.find(name);
    require(found != expected.end(), "unexpected tensor ", name);
    const Expected& e = found->second;
    const bool same =
        tensor.scalar_type() == e.dtype && tensor.sizes() == e.shape && tensor.is_cpu() &&
        tensor.is_contiguous() && !tensor.requires_grad() && tensor.nbytes() == e.data.size() &&
        (e.data.empty() || std::memcmp(tensor.const_data_ptr(), e.data.data(), e.data.size()) == 0);
    require(same, "tensor ", name, " is not that of the file");
  }
}

}  // namespace

std::string first_input(Random& random) {
  static const std::vector<std::string> names = {
      "weights",
      "bias",
      "",
      "a",
      "b",
      "größe",
      "dtype",
      "quote \" \\",
      "\x1b[31m",
      std::string(200, 'n')};
  std::map<std::string, Entry> entries;
  for (size_t count = random.below(6); count > 0; --count) {
    Entry entry = {random.one_of(names), random_dtype(random), {}};
    for (size_t dims = random.below(4); dims > 0; --dims) {
      entry.shape.push_back(static_cast<int64_t>(random.below(4)));
    }
    entries.insert_or_assign(entry.name, entry);
  }
  std::vector<Entry> list;
  for (const auto& [name, entry] : entries) list.push_back(entry);
  return checkpoint_of(list, random);
}

void mutate(std::string& input, Random& random) {
  mutate_checkpoint(input, random);
}

void repair(std::string& input, Random& random) {
  repair_checkpoint(input, random);
}

void run(std::string_view input) {
  static const MemoryFile file;
  file.write(input);
  const auto expected = read_checkpoint(input);
  const auto loaded = load(file, input.size());
  require(loaded.has_value() || !expected.has_value(), "a well-formed file was refused");
  require(!loaded.has_value() || expected.has_value(), "a malformed file was taken");
  if (loaded.has_value()) require_same(*loaded, *expected);
  ++(loaded.has_value() ? taken : refused);
}

}  // namespace lltm_fuzz
