// Checkpoints in the safetensors format, shared with Python:
//     safetensors.torch.save_file(module.state_dict(), path)   in Python
//     lltm::load_state_dict(module, path)                      in C++
//
// dtypes: float64, float32, float16, bfloat16, int64, int32, int16, int8,
// uint8 and bool.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <map>
#include <string>

namespace torch::nn {
class Module;
}

namespace lltm {

/// Reads every tensor of a safetensors file, on the CPU. Throws c10::Error if
/// the file cannot be read and c10::ValueError if it is not well-formed, naming
/// the file. The file need not be trusted: the sizes that it states are checked
/// against its length before anything is allocated for a tensor.
LLTM_API std::map<std::string, at::Tensor> load_safetensors(const std::string& path);

/// Writes tensors (any device, any strides) as a safetensors file. An existing
/// file is replaced when the new one is complete, and stays unchanged if that
/// fails. The new one has its mode and, where that is permitted, its owner; a
/// symbolic link is followed and stays. Throws c10::Error, naming the file, if
/// it cannot be written, c10::ValueError or c10::TypeError for a name or a
/// tensor that the format cannot hold.
LLTM_API void save_safetensors(
    const std::map<std::string, at::Tensor>& tensors, const std::string& path);

/// Copies a checkpoint into a module's parameters and buffers in place; values
/// are converted to their device and dtype. All names and shapes are compared
/// before anything is copied: a c10::ValueError names what is missing,
/// unexpected or of another shape. A tensor saved as (1, n) is accepted for shape
/// (n), since some modules save a bias of (3H) as (1, 3H).
LLTM_API void load_state_dict(torch::nn::Module& module, const std::string& path);

/// Writes a module's parameters and buffers under their state_dict names.
LLTM_API void save_state_dict(const torch::nn::Module& module, const std::string& path);

/// The same for a pointer to a module: `lltm::LLTM layer(...)`, a shared_ptr.
template <typename Pointer>
  requires requires(const Pointer& pointer) {
    { *pointer } -> std::convertible_to<const torch::nn::Module&>;
  }
void load_state_dict(Pointer&& module, const std::string& path) {
  torch::nn::Module& pointed_to = *module;
  load_state_dict(pointed_to, path);
}

template <typename Pointer>
  requires requires(const Pointer& pointer) {
    { *pointer } -> std::convertible_to<const torch::nn::Module&>;
  }
void save_state_dict(const Pointer& module, const std::string& path) {
  const torch::nn::Module& pointed_to = *module;
  save_state_dict(pointed_to, path);
}

}  // namespace lltm
