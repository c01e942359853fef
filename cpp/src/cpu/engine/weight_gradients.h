// The GEMM of the gradients of weights and bias, over the rows of all steps.
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
  // A (rows, M) is given in parts side by side; B is (rows, N). All are of the format's
  // Source. False where values are out of range of the format.
  virtual bool add(const std::vector<at::Tensor>& a, const at::Tensor& b) = 0;
  // Writes the transpose of rows [begin, end) of C to `out`, its rows contiguous: of every `height`
  // columns of C, the k-th of them, to its rows [blocks[k] * height, ...). Nothing may be added
  // after it.
  virtual void write_transposed(
      int64_t begin, int64_t end, Matrix<float> out, int64_t height, const int* blocks) = 0;
};
std::unique_ptr<WeightGradientGemm> make_weight_gradient_gemm(
    GemmFormat format, int64_t m, int64_t n, const at::TensorOptions& options);

}  // namespace lltm::cpu
