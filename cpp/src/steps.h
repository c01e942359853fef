// The order in which a sequence is worked through: which rows each step has.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace lltm {

// Rows [offset, offset + rows) of the flattened (N, .) input and output belong
// to one step; they continue the first `rows` rows of the state. So a state of
// (B, H), updated in its first rows only, is right in both directions: a row
// that has ended, or has not begun yet, just stays as it is.
struct Step {
  int64_t offset;
  int64_t rows;
};

// The values of batch_sizes, (T) int64 on the CPU with any stride.
inline std::vector<int64_t> read_batch_sizes(const at::Tensor& batch_sizes) {
  std::vector<int64_t> values(batch_sizes.size(0));
  // A function transform (torch.func.grad) wraps every tensor that it sees, and
  // a wrapper has no storage: item() looks inside.
  const bool wrapped = !batch_sizes.has_storage();
  const int64_t* const data = wrapped ? nullptr : batch_sizes.const_data_ptr<int64_t>();
  for (size_t t = 0; t < values.size(); ++t) {
    const auto index = static_cast<int64_t>(t);
    values[t] = wrapped ? batch_sizes.select(0, index).item<int64_t>()
                        : data[index * batch_sizes.stride(0)];
  }
  return values;
}

// In the order of execution. `input` is (T, B, I), or (N, I) with batch_sizes.
inline std::vector<Step> plan_steps(
    const at::Tensor& input, const std::optional<at::Tensor>& batch_sizes, bool reverse) {
  std::vector<Step> steps;
  if (batch_sizes.has_value() && batch_sizes->defined()) {
    int64_t offset = 0;
    for (const int64_t rows : read_batch_sizes(*batch_sizes)) {
      steps.push_back({offset, rows});
      offset += rows;
    }
  } else {
    const int64_t batch = input.size(1);
    for (int64_t t = 0; t < input.size(0); ++t) steps.push_back({t * batch, batch});
  }
  if (reverse) std::reverse(steps.begin(), steps.end());
  return steps;
}

// Steps [first, last) in the order of execution, and their rows, which lie
// together whichever way the sequence runs.
struct Chunk {
  size_t first, last;
  int64_t begin, rows;
};

// Chunks of as many steps as have `max_rows` rows, or of one.
inline std::vector<Chunk> plan_chunks(const std::vector<Step>& steps, int64_t max_rows) {
  std::vector<Chunk> chunks;
  for (size_t k = 0; k < steps.size(); ++k) {
    const auto [offset, rows] = steps[k];
    if (chunks.empty() || chunks.back().rows + rows > max_rows) {
      chunks.push_back({k, k, offset, 0});
    }
    Chunk& chunk = chunks.back();
    chunk.last = k + 1;
    chunk.begin = std::min(chunk.begin, offset);
    chunk.rows += rows;
  }
  return chunks;
}

// The rows that step k takes over from the step before it in `steps`.
inline int64_t carried_rows(const std::vector<Step>& steps, size_t k) {
  return k == 0 ? 0 : std::min(steps[k].rows, steps[k - 1].rows);
}

// (T, B, .) as (T * B, .); a packed (N, .) is that already. A copy where the
// strides allow no view.
inline at::Tensor flat_rows(const at::Tensor& tensor) {
  return tensor.flatten(0, -2);
}

// How many rows that are.
inline int64_t flat_size(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor.size(0) : tensor.size(0) * tensor.size(1);
}

// Of that, the rows of whole steps, so that no more is copied than these.
inline at::Tensor flat_rows(const at::Tensor& tensor, int64_t begin, int64_t rows) {
  if (tensor.dim() == 2) return tensor.narrow(0, begin, rows);
  const int64_t batch = tensor.size(1);
  return tensor.narrow(0, begin / batch, rows / batch).flatten(0, 1);
}

}  // namespace lltm
