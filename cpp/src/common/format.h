#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <sstream>
#include <string>

namespace lltm {

// For example (16, 128).
template <typename Size>
std::string shape_text(c10::ArrayRef<Size> shape) {
  std::ostringstream text;
  text << '(';
  for (size_t d = 0; d < shape.size(); ++d) {
    text << (d == 0 ? "" : ", ") << shape[d];
  }
  text << (shape.size() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string dtype_text(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace lltm
