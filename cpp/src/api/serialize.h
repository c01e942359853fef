#pragma once

#include <lltm/serialize.h>

#include <map>
#include <string>

namespace lltm {

using Metadata = std::map<std::string, std::string>;

// With texts in the file's header.
void save_safetensors(
    const std::map<std::string, at::Tensor>& tensors, Metadata metadata, const std::string& path);

}  // namespace lltm
