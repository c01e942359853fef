// Checkpoint files: a module's parameters and buffers by name, in the safetensors format.
#include "api/safetensors.h"
#include "common/format.h"

#include <lltm/serialize.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace lltm {
namespace {

using at::Tensor;
using c10::str;

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
