// How error messages show shapes and dtypes.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <sstream>
#include <string>

namespace lltm {

// (16, 128), as Python prints it. Sizes are numbers or symbolic.
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

// float32, as Python names it.
inline std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "float64";
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kChar:
      return "int8";
    case at::kQInt8:
      return "qint8";
    case at::kQUInt8:
      return "quint8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace lltm
