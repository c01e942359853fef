// Checkpoint files in the safetensors format, which Python and C++ share:
//     safetensors.torch.save_file(module.state_dict(), path)   in Python
//     lltm::load_state_dict(module, path)                      in C++
//
// Supported dtypes: floating-point with 8 to 64 bits, integers, bool and complex64.
#pragma once

#include <lltm/export.h>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lltm {

/// Reads all tensors from a safetensors file, onto the CPU.
///
/// The file may come from an untrusted source: sizes are compared with the file's length before a
/// tensor is allocated. Throws c10::Error if the file cannot be read, and c10::ValueError if its
/// format is wrong. The message names the file. Leaves out tensors of dtypes that PyTorch lacks.
///
/// @param path the file
/// @returns the tensors by name
LLTM_API std::map<std::string, at::Tensor> load_safetensors(const std::string& path);

/// Writes tensors to a safetensors file.
///
/// Replaces an existing file only after the new file is complete; on failure the old file is
/// unchanged. The new file has the default owner and mode. Replaces a symbolic link, not its
/// target. Throws c10::Error, which names the file, if it cannot be written. Throws c10::ValueError
/// or c10::TypeError if the format does not support a name or a tensor.
///
/// @param tensors the tensors by name, on any device, with any strides
/// @param path the file
LLTM_API void save_safetensors(
    const std::map<std::string, at::Tensor>& tensors, const std::string& path);

/// Loads a checkpoint file into a module's parameters and buffers, in place. Converts values to
/// their device and dtype. Compares all names and shapes before it copies. Throws c10::ValueError
/// if a tensor is missing, unexpected or has a different shape, and the errors of load_safetensors.
///
/// @param module the module. Its names and shapes must match the file; a tensor of shape (1, n) in
///     the file matches (n), because some modules save a bias of shape (3H) as (1, 3H).
/// @param path a safetensors file
LLTM_API void load_state_dict(torch::nn::Module& module, const std::string& path);

/// Saves a module's parameters and buffers under their state_dict names.
///
/// @param module the module
/// @param path the file, written as by save_safetensors, with the same errors
LLTM_API void save_state_dict(const torch::nn::Module& module, const std::string& path);

/// Writes layers for lltm::realtime::Layer, in float32. RecurrentLayer::save_realtime calls it.
///
/// Throws c10::ValueError for a cell with products, means, gates in the input or other outputs than
/// h, and for parameters that do not fit, and the errors of save_safetensors.
///
/// @param cell a built-in cell's name, or a serialized cell
/// @param parameters of one direction, by layer, in the order of RecurrentLayer::all_weights
/// @param bias whether they contain biases
/// @param num_layers L
/// @param hidden_size H
/// @param path the file
LLTM_API void save_realtime(
    const std::string& cell,
    const std::vector<at::Tensor>& parameters,
    bool bias,
    int64_t num_layers,
    int64_t hidden_size,
    const std::string& path);

/// Overload for module holders, such as lltm::LLTM, and pointers to modules.
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
