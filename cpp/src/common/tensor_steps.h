// The steps of tensors (T, B, .), or packed (N, .).
#pragma once

#include "common/steps.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

namespace lltm {

// batch_sizes is (T) int64 on the CPU, with any stride.
inline std::vector<int64_t> read_batch_sizes(const at::Tensor& batch_sizes) {
  std::vector<int64_t> values(batch_sizes.size(0));
  // A transform's wrapper (torch.func.grad) has no storage; item() unwraps it.
  const bool wrapped = !batch_sizes.has_storage();
  const int64_t* const data = wrapped ? nullptr : batch_sizes.const_data_ptr<int64_t>();
  for (size_t t = 0; t < values.size(); ++t) {
    const auto index = static_cast<int64_t>(t);
    values[t] = wrapped ? batch_sizes.select(0, index).item<int64_t>()
                        : data[index * batch_sizes.stride(0)];
  }
  return values;
}

// `input` is (T, B, I), (N, I) with batch_sizes or, for a step, (B, I).
inline std::vector<Step> plan_steps(
    const at::Tensor& input, const at::Tensor& batch_sizes, bool reverse) {
  std::vector<Step> steps;
  if (batch_sizes.defined()) {
    int64_t offset = 0;
    for (const int64_t rows : read_batch_sizes(batch_sizes)) {
      steps.push_back({offset, rows});
      offset += rows;
    }
  } else if (input.dim() == 2) {
    steps.push_back({0, input.size(0)});
  } else {
    const int64_t batch = input.size(1);
    steps.reserve(input.size(0));
    for (int64_t t = 0; t < input.size(0); ++t) steps.push_back({t * batch, batch});
  }
  if (reverse) std::reverse(steps.begin(), steps.end());
  return steps;
}

// (T, B, .) as (T * B, .); packed (N, .) is unchanged. Copies if strides allow no view.
inline at::Tensor flat_rows(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.flatten(0, -2);
}

inline std::vector<int64_t> output_sizes(const at::Tensor& input, int64_t hidden) {
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.back() = hidden;
  return sizes;
}

inline int64_t flat_size(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor.size(0) : tensor.size(0) * tensor.size(1);
}

// Rows [begin, begin + rows) of flat_rows(tensor), complete steps. Copies at most these rows.
inline at::Tensor flat_rows(const at::Tensor& tensor, int64_t begin, int64_t rows) {
  if (tensor.dim() == 2) return tensor.narrow(0, begin, rows);
  const int64_t batch = tensor.size(1);
  return tensor.narrow(0, begin / batch, rows / batch).flatten(0, 1);
}

}  // namespace lltm
