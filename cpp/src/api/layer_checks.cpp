#include "api/layer_checks.h"

#include "common/format.h"

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>

namespace lltm {

using at::Tensor;
using c10::SymInt;

void check_size(const char* where, const char* name, int64_t value, int64_t largest) {
  TORCH_CHECK_VALUE(
      value > 0, "lltm::", where, ": expected ", name, " to be positive, got ", value);
  TORCH_CHECK_VALUE(
      value <= largest,
      "lltm::",
      where,
      ": expected ",
      name,
      " of at most ",
      largest,
      ", got ",
      value);
}

void check_probability(const char* where, const char* name, double value) {
  TORCH_CHECK_VALUE(
      value >= 0 && value <= 1,
      "lltm::",
      where,
      ": expected ",
      name,
      " to be in [0, 1], got ",
      value);
}

void check_tensor(const char* where, const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.defined(),
      "lltm::",
      where,
      ": expected ",
      name,
      " to be a tensor, got an undefined tensor");
  TORCH_CHECK(  // a nested tensor may report the strided layout
      tensor.layout() == at::kStrided && !tensor.is_nested(),
      "lltm::",
      where,
      ": expected ",
      name,
      " of layout Strided, got ",
      tensor.is_nested() ? "a nested tensor" : c10::str(tensor.layout()));
}

void check_shape(
    const char* where,
    const char* name,
    const Tensor& tensor,
    const std::vector<SymInt>& expected) {
  check_tensor(where, name, tensor);
  const c10::SymIntArrayRef sizes = tensor.sym_sizes();
  bool same = sizes.size() == expected.size();
  for (size_t d = 0; same && d < expected.size(); ++d) {
    same = sizes[d].sym_eq(expected[d]).expect_true(__FILE__, __LINE__);
  }
  TORCH_CHECK_VALUE(
      same,
      "lltm::",
      where,
      ": expected ",
      name,
      " of shape ",
      shape_text(c10::SymIntArrayRef(expected)),
      ", got ",
      shape_text(sizes));
}

void check_kind(
    const char* where,
    const char* name,
    const Tensor& tensor,
    const Tensor& other,
    const char* whose,
    bool casts) {
  TORCH_CHECK(
      tensor.device() == other.device(),
      "lltm::",
      where,
      ": expected ",
      name,
      " on device ",
      other.device(),
      ", the device of the ",
      whose,
      ", got ",
      tensor.device());
  TORCH_CHECK_TYPE(
      casts || tensor.scalar_type() == other.scalar_type(),
      "lltm::",
      where,
      ": expected ",
      name,
      " of dtype ",
      dtype_text(other.scalar_type()),
      ", the dtype of the ",
      whose,
      ", got ",
      dtype_text(tensor.scalar_type()));
}

bool autocasts(const Tensor& tensor) {
  const c10::DeviceType device = tensor.device().type();
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
}

void check_kind(const char* where, const Tensor& input, const Tensor& parameter) {
  check_kind(where, "input", input, parameter, "parameters", autocasts(input));
}

void check_kind_of_concatenated(
    const char* where, const char* name, const Tensor& tensor, const Tensor& input) {
  const bool casts = autocasts(input) && at::isFloatingType(tensor.scalar_type());
  check_kind(where, name, tensor, input, "input", casts);
}

}  // namespace lltm
