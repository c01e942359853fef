// The safetensors format (https://github.com/huggingface/safetensors):
//
//     8 bytes   N, the length of the header, little-endian
//     N bytes   a JSON object, which may end in spaces:
//               {"name": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}, ...}
//               and "__metadata__": {"name": "text", ...}
//     the rest  the elements, little-endian, in row-major order; data_offsets
//               count from its first byte and cover all of it, each byte once
//
#pragma once

#include <string>
#include <string_view>

namespace lltm {

// A name from a file for messages: quoted and shortened, with control characters escaped and
// invalid UTF-8 replaced.
std::string name_text(std::string_view name);

}  // namespace lltm
