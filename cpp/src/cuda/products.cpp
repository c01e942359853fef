#include "cuda/products.h"

#include "cuda/dispatch.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/Exceptions.h>
#include <c10/cuda/CUDAStream.h>

#include <cublas_v2.h>

namespace lltm::cuda {
namespace {

cudaDataType_t data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return CUDA_R_64F;
    case at::kFloat:
      return CUDA_R_32F;
    case at::kHalf:
      return CUDA_R_16F;
    case at::kBFloat16:
      return CUDA_R_16BF;
    default:
      TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

// What it takes and gives is in columns: our rows of a are its columns.
cublasOperation_t operation(const Operand& operand) {
  return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

void zero(const Result& c) {
  const size_t element = c10::elementSize(c.dtype);
  C10_CUDA_CHECK(cudaMemset2DAsync(
      c.data,
      static_cast<size_t>(c.stride) * element,
      0,
      static_cast<size_t>(c.cols) * element,
      static_cast<size_t>(c.rows),
      c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

// ATen's handle: bound to the current stream and a workspace of that stream,
// which is what makes it right in a captured graph and the same from run to run.
// ATen sets it up anew wherever it uses it, so nothing has to be put back.
Products::Products(at::ScalarType dtype)
    : dtype_(dtype), handle_(at::cuda::getCurrentCUDABlasHandle()) {
  if (dtype_ == at::kHalf || dtype_ == at::kBFloat16) {
    // Partial sums of a split product are added in float32 too.
    TORCH_CUDABLAS_CHECK(cublasSetMathMode(
        static_cast<cublasHandle_t>(handle_),
        static_cast<cublasMath_t>(
            CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  }
}

void Products::multiply(
    const Operand& a, const Operand& b, const Result& c, bool accumulate) const {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(a.rows == c.rows && a.cols == b.rows && b.cols == c.cols);
  if (c.rows == 0 || c.cols == 0 || (a.cols == 0 && accumulate)) return;
  if (a.cols == 0) return zero(c);
  // By columns, c^T = b^T a^T. The scales are of the type of the sums.
  const bool is_double = dtype_ == at::kDouble;
  const double one = 1, zero_or_one = accumulate ? 1 : 0;
  const float one_f32 = 1, zero_or_one_f32 = accumulate ? 1 : 0;
  TORCH_CUDABLAS_CHECK(cublasGemmEx_64(
      static_cast<cublasHandle_t>(handle_),
      operation(b),
      operation(a),
      c.cols,
      c.rows,
      a.cols,
      is_double ? static_cast<const void*>(&one) : &one_f32,
      b.data,
      data_type(dtype_),
      b.stride,
      a.data,
      data_type(dtype_),
      a.stride,
      is_double ? static_cast<const void*>(&zero_or_one) : &zero_or_one_f32,
      c.data,
      data_type(c.dtype),
      c.stride,
      is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
      CUBLAS_GEMM_DEFAULT));
}

}  // namespace lltm::cuda
