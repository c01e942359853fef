// The parameters of a direction as modules hold them, and as the operators take them.
#pragma once

#include "cell/cell.h"
#include "common/operator_args.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace lltm {

// The parameters of one direction as the operators take them. weight_ih may be joined weights, or
// prepacked ones; one that is absent is undefined. Those that a cell has of its own stand behind
// bias_ih; zeros stand for biases that there are not.
class OperatorParameters {
 public:
  OperatorParameters(
      const CellInfo& cell,
      bool has_bias,
      bool prepacked,
      int64_t hidden_size,
      at::TensorList given)
      : matrices_(cell.joined || prepacked ? 1 : 2),
        arranged_(arrange(cell, has_bias, hidden_size, given)),
        weight_ih(given[0]),
        weight_hh(matrices_ == 2 ? given[1] : none()),
        bias_ih(
            cell.parameters > 0 ? arranged_[0]
            : has_bias          ? given[matrices_]
                                : none()),
        bias_hh(
            cell.parameters > 0        ? arranged_[1]
            : has_bias && !cell.joined ? given[matrices_ + 1]
                                       : none()),
        weight_hr(given.back()) {}
  OperatorParameters(const OperatorParameters&) = delete;
  OperatorParameters& operator=(const OperatorParameters&) = delete;

  static int64_t count(const CellInfo& cell, bool has_bias, bool prepacked) {
    const int64_t matrices = cell.joined || prepacked ? 1 : 2;
    return matrices + (!has_bias ? 0 : cell.joined ? 1 : 2) + cell.parameters;
  }

 private:
  const size_t matrices_;
  const std::array<at::Tensor, 2> arranged_;

 public:
  const at::Tensor &weight_ih, &weight_hh, &bias_ih, &bias_hh;
  const at::Tensor& weight_hr;  // of an LSTM with a projection

 private:
  static const at::Tensor& none() { return or_undefined(std::nullopt); }

  std::array<at::Tensor, 2> arrange(
      const CellInfo& cell, bool has_bias, int64_t hidden_size, at::TensorList given) const;
};

// Throws if a bias or a parameter that is concatenated has another shape, dtype or device.
void check_own_parameters(
    const CellInfo& cell,
    const char* where,
    const at::Tensor& input,
    bool has_bias,
    int64_t hidden_size,
    at::TensorList given);

}  // namespace lltm
