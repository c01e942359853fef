#include "api/parameters.h"

#include "api/initial_states.h"
#include "api/layer_checks.h"

#include <vector>

namespace lltm {

using at::Tensor;

std::array<Tensor, 2> biases_and_parameters(
    const CellInfo& cell,
    bool has_bias,
    size_t matrices,
    int64_t hidden_size,
    at::TensorList given) {
  const Tensor zeros =
      has_bias ? Tensor() : given.back().new_zeros(cell.joined_blocks() * hidden_size);
  const auto bias = [&](size_t k, const SlotRange& blocks) {
    return has_bias ? given[matrices + k] : zeros.narrow(0, 0, blocks.count() * hidden_size);
  };
  std::vector<Tensor> appended = {bias(0, cell.x)};
  const at::TensorList own = given.slice(given.size() - cell.parameters);
  appended.insert(appended.end(), own.begin(), own.end());
  return {cat_without_autocast(appended, 0), bias(1, cell.h)};
}

void check_custom_parameters(
    const CellInfo& cell,
    const char* where,
    const Tensor& input,
    bool has_bias,
    int64_t hidden_size,
    at::TensorList given) {
  if (cell.parameters == 0) return;
  const auto check = [&](const char* name, const Tensor& parameter, int64_t blocks) {
    check_shape(where, name, parameter, {c10::SymInt(blocks * hidden_size)});
    check_joined_kind(where, name, parameter, input);
  };
  const size_t first = given.size() - cell.parameters;
  if (has_bias) check("bias_ih", given[first - 2], cell.x.count());
  for (int k = 0; k < cell.parameters; ++k) check(cell.parameter_names[k], given[first + k], 1);
}

}  // namespace lltm
