// Checkpoints in the safetensors format, shared with Python:
//     safetensors.torch.save_file(module.state_dict(), path)   in Python
//     lltm::load_state_dict(module, path)                      in C++
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace torch::nn {
class Module;
}

namespace lltm {

/// Reads every tensor of a safetensors file, on the CPU. Throws c10::Error,
/// naming the file, if it cannot be read or is not well-formed; nothing is
/// allocated before the sizes it claims have been checked against its length.
LLTM_API std::map<std::string, at::Tensor> load_safetensors(const std::string& path);

/// Writes tensors (any device, any strides) as a safetensors file.
LLTM_API void save_safetensors(
    const std::map<std::string, at::Tensor>& tensors, const std::string& path);

/// Copies a checkpoint into a module's parameters and buffers, converting
/// device and dtype. All names and shapes are compared before anything is
/// copied; what is missing, unexpected or of another shape is named in the
/// error. A bias saved as (1, 3H) is taken for one of shape (3H).
LLTM_API void load_state_dict(torch::nn::Module& module, const std::string& path);

/// Writes a module's parameters and buffers under their state_dict names.
LLTM_API void save_state_dict(const torch::nn::Module& module, const std::string& path);

}  // namespace lltm
