// The safetensors format (https://github.com/huggingface/safetensors):
//
//     8 bytes   N, the length of the header, little-endian
//     N bytes   a JSON object:
//               {"name": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}, ...}
//               and "__metadata__": {"name": "text", ...}
//     the rest  the elements, little-endian, in row-major order; data_offsets
//               count from its first byte and cover all of it, each byte once
//
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <string_view>

namespace lltm {

// As load_safetensors, but tensors of dtypes that PyTorch lacks are undefined, not left out.
std::map<std::string, at::Tensor> read_safetensors(const std::string& path);

// A name from a file for messages: quoted and shortened, with control characters escaped and
// invalid UTF-8 replaced.
std::string name_text(std::string_view name);

}  // namespace lltm
