// lltm::load_state_dict: loads a checkpoint file completely or not at all.
#include "checkpoints.h"

#include <lltm/nn.h>
#include <lltm/serialize.h>

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace lltm_fuzz {
namespace {

using at::Tensor;

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

using Tensors = std::map<std::string, Tensor>;

Tensors tensors_of(const Module& module) {
  Tensors tensors;
  for (const auto& item : module.named_parameters()) tensors.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) tensors.emplace(item.key(), item.value());
  return tensors;
}

std::string bytes_of(const Tensors& tensors) {
  std::string bytes;
  for (const auto& [name, tensor] : tensors) {
    bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return bytes;
}

void set_bytes(const Tensors& tensors, const std::string& bytes) {
  size_t position = 0;
  for (const auto& [name, tensor] : tensors) {
    bytes.copy(static_cast<char*>(tensor.mutable_data_ptr()), tensor.nbytes(), position);
    position += tensor.nbytes();
  }
}

// The expected bytes after loading, or nothing if the checkpoint file does not match.
std::optional<std::string> loaded_bytes(
    const std::optional<ExpectedTensors>& saved, const Tensors& targets) {
  if (!saved.has_value() || saved->size() != targets.size()) return std::nullopt;
  std::string bytes;
  for (const auto& [name, target] : targets) {
    const auto found = saved->find(name);
    if (found == saved->end()) return std::nullopt;
    const Expected& e = found->second;
    std::vector<int64_t> row = target.sizes().vec();
    row.insert(row.begin(), 1);
    if (target.sizes() != e.shape && (target.dim() != 1 || row != e.shape)) return std::nullopt;
    const Tensor tensor = at::zeros(e.shape, e.dtype);
    e.data.copy(static_cast<char*>(tensor.mutable_data_ptr()), e.data.size());
    const Tensor converted = tensor.to(target.scalar_type());
    bytes.append(static_cast<const char*>(converted.const_data_ptr()), converted.nbytes());
  }
  return bytes;
}

bool load(Module& module, const MemoryFile& file, size_t size) {
  const Allocations allocations;
  bool loaded = true;
  try {
    lltm::load_state_dict(module, file.path());
  } catch (const c10::Error& error) {
    loaded = false;
    const std::string text = error.what_without_backtrace();
    require(typeid(error) == typeid(c10::ValueError), "expected a ValueError, got: ", text);
    const bool reading = text.starts_with("lltm::load_safetensors: ");
    require_message(
        text,
        reading ? "lltm::load_safetensors: " + file.path() + ": "
                : "lltm::load_state_dict: " + file.path() + " does not fit module ");
  }
  require(
      allocations.bytes() <= allocation_limit(size),
      allocations.bytes(),
      " bytes were allocated for a file of ",
      size);
  return loaded;
}

}  // namespace

std::string first_input(Random& random) {
  static const Tensors& targets = *new Tensors(tensors_of(Module()));
  std::vector<Entry> entries;
  for (const auto& [name, target] : targets) {
    Entry entry = {name, random.one_in(2) ? target.scalar_type() : random_dtype(random), {}};
    entry.shape = target.sizes().vec();
    if (target.dim() == 1 && random.one_in(4)) entry.shape.insert(entry.shape.begin(), 1);
    // Another shape of the same size, another name, or no entry.
    if (random.one_in(60)) entry.shape.push_back(1);
    if (random.one_in(60)) entry.name += ".weight";
    if (!random.one_in(60)) entries.push_back(entry);
  }
  return checkpoint_of(entries, random);
}

void mutate(std::string& input, Random& random) {
  mutate_checkpoint(input, random);
}

void repair(std::string& input, Random& random) {
  repair_checkpoint(input, random);
}

void run(std::string_view input) {
  static const MemoryFile file;
  static Module& module = *new Module;
  static const Tensors& tensors = *new Tensors(tensors_of(module));
  static const std::string before(bytes_of(tensors).size(), '\x01');
  set_bytes(tensors, before);
  file.write(input);
  const auto expected = loaded_bytes(read_checkpoint(input), tensors);
  const bool loaded = load(module, file, input.size());
  require(loaded || !expected.has_value(), "a checkpoint that fits was refused");
  require(!loaded || expected.has_value(), "a checkpoint that does not fit was taken");
  require(
      bytes_of(tensors) == expected.value_or(before),
      loaded ? "the module has other values than the file"
             : "the module was changed by a checkpoint that was refused");
  for (const auto& [name, tensor] : loaded ? tensors_of(module) : Tensors()) {
    require(tensors.at(name).is_same(tensor), name, " is another tensor");
  }
  ++(loaded ? taken : refused);
}

}  // namespace lltm_fuzz
