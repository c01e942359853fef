#pragma once

#include "cpu/gemm/formats.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace lltm::cpu {

// C (M, N) += A^T B over the rows of all calls, in float32.
class WeightGradientGemm {
 public:
  virtual ~WeightGradientGemm() = default;
  // A (rows, M) is a list of concatenated parts. B is (rows, N), of the format's Unpacked type.
  // False if values are out of range.
  virtual bool add(const std::vector<at::Tensor>& a, const at::Tensor& b) = 0;
  // After the last add(): rows [begin, end) in C, transposed, to `out`, which has contiguous rows.
  // Columns [k * height, (k + 1) * height) become rows [blocks[k] * height, ...).
  virtual void write_transposed(
      int64_t begin, int64_t end, Matrix<float> out, int64_t height, const int* blocks) = 0;
};
std::unique_ptr<WeightGradientGemm> make_weight_gradient_gemm(
    GemmFormat format, int64_t threads, int64_t m, int64_t n, const at::TensorOptions& options);

}  // namespace lltm::cpu
